"""Starts real databases for a run, and removes them afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.effort import Effort
from tests.table.servers import MariadbServer, PostgresServer


@contextlib.contextmanager
def start_databases(effort: Effort) -> Iterator[dict[str, str]]:
    """Start the databases; yields their addresses by name. MariaDB only if it is installed."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(effort.place())
        for above in (place, *place.parents[:1]):
            above.chmod(0o755)  # The servers run as other users.
        found = {}
        for name in ("postgres", "mariadb"):
            (place / name).mkdir(mode=0o755)
        postgres = stack.enter_context(contextlib.closing(PostgresServer(place / "postgres")))
        found["PostgreSQL"] = postgres.url
        if MariadbServer.available():
            mariadb = stack.enter_context(contextlib.closing(MariadbServer(place / "mariadb")))
            with mariadb.connect() as connection:
                connection.cursor().execute("CREATE DATABASE turnlane")
            found["MariaDB"] = mariadb.url.replace("/mysql", "/turnlane")
        found["SQLite"] = f"sqlite:///{place}/bench.db"
        yield found
