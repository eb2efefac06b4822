"""Output ``sql``: events as rows of a table in PostgreSQL, MySQL, MariaDB or SQLite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator

from turnlane.databases import (
    ConnectOptions,
    check_url_setting,
    get_dialect_name,
    load_dialect,
)
from turnlane.errors import Never, RetryLater
from turnlane.events import Block
from turnlane.outputs.api import ExactlyOnceSettings, Output, OutputSettings
from turnlane.outputs.connections import ClientTls, ConnectionPool
from turnlane.outputs.sql_rows import TableRows, build_rows
from turnlane.outputs.sql_writers import WRITERS, TableWriter, Target
from turnlane.runtime import read_secret
from turnlane.units import Duration
from turnlane.validation import ConfigIssue, ContradictorySettings

_EXAMPLES: Final = ["postgresql://user@host/db", "mysql://user@host/db", "sqlite:///file.db"]


def _check_url(url: str) -> str:
    if get_dialect_name(url) is None:
        raise ValueError(f"is none of {', '.join(_EXAMPLES)}")
    if get_dialect_name(url) == "sqlite" and not url.startswith("sqlite:///"):
        raise ValueError("write sqlite:///file.db, or sqlite:////tmp/file.db for an absolute path")
    return check_url_setting(url)


Name = Annotated[str, Field(pattern=r"^\w[\w$ -]*$")]
TableName = Annotated[str, Field(pattern=r"^\w[\w$ -]*(\.\w[\w$ -]*)?$")]


class SqlSettings(ExactlyOnceSettings, OutputSettings):
    """The settings of an SQL output."""

    url: Annotated[str, AfterValidator(_check_url)] = Field(
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
            ConfigIssue("key", f"{name} is none of the columns")
            for name in self.key
            if name not in self.columns
        ]
        problems += self.find_exactly_once_issues()
        if self.tls is not None and get_dialect_name(self.url) == "sqlite":
            problems.append(ConfigIssue("tls", "means nothing for a file"))
        if problems:
            raise ContradictorySettings(problems)
        return self


class SqlOutput(Output):
    """Writes each block in a transaction."""

    settings_type = SqlSettings
    settings: SqlSettings

    def __init__(self, settings: SqlSettings) -> None:
        super().__init__(settings)
        self._writers: ConnectionPool[TableWriter] = ConnectionPool(self._connect)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Return the block's events as rows of the table."""
        return build_rows(block, self.settings.columns, with_positions=self.settings.exactly_once)

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        rows: TableRows = prepared
        with self._writers.borrow() as writer:
            writer.write(rows)

    def check(self) -> None:
        """Connect, which looks at the table and its columns."""
        with self._writers.borrow():
            pass

    def cancel(self) -> None:
        self._writers.cancel()

    def close(self) -> None:
        self._writers.close()

    def _connect(self) -> TableWriter:
        settings = self.settings
        options = ConnectOptions(
            password=read_secret("password", settings.password_env, settings.password_file),
            tls=settings.tls,
            connect_timeout=settings.connect_timeout,
            timeout=settings.timeout,
            sqlite_must_exist=True,
        )
        try:
            dialect = load_dialect(settings.url, options)
        except Never as error:  # of the URL or the driver, which a person can change
            raise RetryLater(str(error)) from error
        target = Target(
            table=settings.table,
            columns=tuple(settings.columns),
            key=settings.key,
            delivered_as=settings.get_delivery_name(settings.table),
            timeout=settings.timeout,
        )
        return WRITERS[dialect.name](dialect, target)
