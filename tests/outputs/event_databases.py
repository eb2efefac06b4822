"""Tables in each database for the tests of outputs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql

from turnlane.outputs.sql import SqlOutput, SqlSettings

COLUMNS = {
    "postgresql": "id bigint PRIMARY KEY, note varchar(20) NOT NULL, raw bytea",
    "mysql": "id bigint PRIMARY KEY, note varchar(20) NOT NULL, raw blob",
    "sqlite": "id integer PRIMARY KEY, note text NOT NULL CHECK (length(note) <= 20), raw blob",
}


class EventDatabase:
    """A database with a table ``events``."""

    def __init__(self, url: str, pooled: str | None = None) -> None:
        """Make one; outputs connect to ``pooled``, if it is given."""
        self.url = url
        self._output_url = pooled or url
        self.kind = urlsplit(url).scheme

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """Open a connection of the test, to read the table and to disturb the output."""
        parts = urlsplit(self.url)
        if self.kind == "postgresql":
            with psycopg.connect(self.url, autocommit=True) as found:
                yield found
        elif self.kind == "mysql":
            with closing(
                pymysql.connect(
                    host=parts.hostname, port=parts.port, user="root", database="turnlane",
                    autocommit=True,
                )
            ) as found:  # fmt: skip
                yield found
        else:
            path = self.url.removeprefix("sqlite:///")
            with closing(sqlite3.connect(path, isolation_level=None, timeout=20)) as found:
                yield found

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements; returns the rows of the last one."""
        rows: Sequence[Any] = ()
        with self.connect() as connection, closing(connection.cursor()) as cursor:
            for statement in statements:
                cursor.execute(statement)
            if cursor.description:
                rows = cursor.fetchall()
        return [tuple(row) for row in rows]

    def make_table(self, columns: str | None = None) -> None:
        self.run(
            "DROP TABLE IF EXISTS events",
            "DROP TABLE IF EXISTS turnlane_delivered",
            f"CREATE TABLE events ({columns or COLUMNS[self.kind]})",
        )

    def read_ids(self) -> list[int]:
        return [row[0] for row in self.run("SELECT id FROM events ORDER BY id")]

    def read_delivered_ranges(self) -> list[tuple[int, int]]:
        """Return the recorded ranges of offsets."""
        mark = "`" if self.kind == "mysql" else '"'
        first, end = f"{mark}first{mark}", f"{mark}end{mark}"
        found = self.run(
            f"SELECT {first}, {end} FROM turnlane_delivered WHERE {first} >= 0 ORDER BY {first}"
        )
        return [(int(first), int(end)) for first, end in found]

    def make_output(self, **knobs: Any) -> SqlOutput:
        given = {
            "type": "sql",
            "url": self._output_url,
            "table": "events",
            "columns": {"id": "offset", "note": "value"},
            **knobs,
        }
        return SqlOutput(SqlSettings.model_validate(given))
