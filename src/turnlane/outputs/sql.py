"""Output ``sql``: events as rows of a table in PostgreSQL, MySQL, MariaDB or SQLite."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from turnlane.errors import RetryLater
from turnlane.events import Block
from turnlane.outputs.api import OnceSettings, Output, OutputSettings
from turnlane.outputs.http_connections import ClientTls
from turnlane.outputs.pool import Pool
from turnlane.outputs.sql_database import Database, Target
from turnlane.outputs.sql_rows import Rows, rows_of
from turnlane.runtime import revealed
from turnlane.units import Duration
from turnlane.validation import Contradiction, Problem


class _Driver(NamedTuple):
    module: str
    name: str
    extra: str | None
    """What to install it with."""


_DRIVERS: Final = {
    "postgresql": _Driver("turnlane.outputs.sql_postgres", "Postgres", "postgres"),
    "mysql": _Driver("turnlane.outputs.sql_mysql", "MySql", "mysql"),
    "sqlite": _Driver("turnlane.outputs.sql_sqlite", "Sqlite", None),
}
_SAME: Final = {"postgres": "postgresql", "mariadb": "mysql"}
_EXAMPLES: Final = ["postgresql://user@host/db", "mysql://user@host/db", "sqlite:///file.db"]


def _database(url: str) -> str:
    scheme = urlsplit(url).scheme
    return _SAME.get(scheme, scheme)


def _checked_url(url: str) -> str:
    if _database(url) not in _DRIVERS:
        raise ValueError(f"is none of {', '.join(_EXAMPLES)}")
    parts = urlsplit(url)
    if parts.password:
        raise ValueError("holds a password; name it with password_env or password_file")
    if parts.scheme == "sqlite" and not url.startswith("sqlite:///"):
        raise ValueError("sqlite:///file.db, and sqlite:////tmp/file.db from the root on")
    return url


Name = Annotated[str, Field(pattern=r"^\w[\w$ -]*$")]
TableName = Annotated[str, Field(pattern=r"^\w[\w$ -]*(\.\w[\w$ -]*)?$")]


class SqlSettings(OnceSettings, OutputSettings):
    """The settings of an SQL output."""

    url: Annotated[str, AfterValidator(_checked_url)] = Field(
        description="The database, without a password.", examples=_EXAMPLES
    )
    password_env: str | None = Field(
        default=None, description="The environment variable that has the password."
    )
    password_file: Path | None = Field(default=None, description="The file that has the password.")
    tls: ClientTls | None = Field(
        default=None, description="Insist on TLS: whom to trust, and what to show."
    )
    table: TableName = Field(description="The table, which has to be there.")
    columns: dict[Name, str] = Field(
        min_length=1,
        description="The table's columns, each with where it comes from: a column of the events, "
        "a path such as `headers.team` or `value.user.id` (into JSON), or `event_id`.",
    )
    key: tuple[Name, ...] = Field(
        default=(),
        description="Columns that have a unique index: a row replaces the one with the same key.",
    )
    connect_timeout: Duration = Field(
        default=10.0, gt=0, description="How long it may take to connect."
    )
    timeout: Duration = Field(
        default=20.0, gt=0, description="How long a statement, or waiting for a lock, may take."
    )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        problems = [
            Problem("key", f"{name} is none of the columns")
            for name in self.key
            if name not in self.columns
        ]
        problems += self.once_problems()
        if self.tls is not None and _database(self.url) == "sqlite":
            problems.append(Problem("tls", "means nothing for a file"))
        if problems:
            raise Contradiction(problems)
        return self


class SqlOutput(Output):
    """Writes each block in a transaction."""

    settings_type = SqlSettings
    settings: SqlSettings

    def __init__(self, settings: SqlSettings) -> None:
        super().__init__(settings)
        self._databases: Pool[Database] = Pool(self._connect)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """The block's events as rows of the table."""
        return rows_of(block, self.settings.columns, places=self.settings.exactly_once)

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        rows: Rows = prepared
        with self._databases.borrowed() as database:
            database.write(rows)

    def check(self) -> None:
        """Connect, which looks at the table and its columns."""
        with self._databases.borrowed():
            pass

    def cancel(self) -> None:
        self._databases.cancel()

    def close(self) -> None:
        self._databases.close()

    def _connect(self) -> Database:
        settings = self.settings
        driver = _DRIVERS[_database(settings.url)]
        try:
            kind: type[Database] = getattr(importlib.import_module(driver.module), driver.name)
        except ImportError as error:
            hint = f"pip install 'turnlane[{driver.extra}]'"
            raise RetryLater(f"{error}; install it: {hint}") from error
        return kind(self._target())

    def _target(self) -> Target:
        settings = self.settings
        return Target(
            url=settings.url,
            password=revealed("password", settings.password_env, settings.password_file),
            tls=settings.tls,
            table=settings.table,
            columns=tuple(settings.columns),
            key=settings.key,
            delivered_as=settings.noted_as(settings.table),
            connect_timeout=settings.connect_timeout,
            timeout=settings.timeout,
        )
