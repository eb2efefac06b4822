"""PostgreSQL: rows are copied in, in one go, as CSV that Arrow writes."""

from __future__ import annotations

import contextlib
import io
import select
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from turnlane.errors import Never, RetryLater, TurnlaneError
from turnlane.formats.lines import joined
from turnlane.outputs.http_connections import hang_up_on
from turnlane.outputs.sql_database import Database

_BYTEA: Final = 17
_INCOMING: Final = "turnlane_incoming"
"""A temporary table, for rows that may replace others: COPY itself only adds."""
_ROW: Final = "turnlane_row"
_HEX: Final = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)

_DATA: Final = frozenset({"22", "23", "44", "54"})
"""Classes of errors that lie in the events: values, constraints, checks of views, sizes."""
_PASSING: Final = frozenset({"08", "25", "28", "3D", "3F", "40", "42", "53", "55", "57", "58"})
"""Classes that pass, or that a person has to put right: connections, rights, tables, resources."""


class Postgres(Database):
    """A connection to PostgreSQL."""

    _connection: psycopg.Connection[Any]

    def connect(self) -> None:
        target = self.target
        milliseconds = max(1, int(target.timeout * 1000))
        settings: dict[str, Any] = {
            **self._tls(),
            "connect_timeout": max(2, int(target.connect_timeout)),  # less means something else
            "application_name": "turnlane",
            "options": f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}",
            "tcp_user_timeout": milliseconds,
        }
        if target.password is not None:
            settings["password"] = target.password
        self._connection = psycopg.connect(target.url, **settings)

    def _tls(self) -> dict[str, str]:
        tls = self.target.tls
        if tls is None:
            return {}
        files = {"sslrootcert": tls.ca or "system", "sslcert": tls.cert, "sslkey": tls.key}
        if not tls.verify:
            del files["sslrootcert"]
        given = {name: str(file) for name, file in files.items() if file is not None}
        return {"sslmode": "verify-full" if tls.verify else "require", **given}

    def look(self) -> None:
        found = self._connection.execute(_sql(f"SELECT {self.columns} FROM {self.table} LIMIT 0"))  # noqa: S608
        codes = (each.type_code for each in found.description or ())
        self._types = dict(zip(self.target.columns, codes, strict=True))
        if self.target.key:
            self._make_incoming()
        self._connection.commit()

    def _make_incoming(self) -> None:
        rows = f"SELECT {self.columns}, CAST(0 AS bigint) AS {_ROW} FROM {self.table}"  # noqa: S608
        make = f"CREATE TEMPORARY TABLE {_INCOMING} ON COMMIT DELETE ROWS AS {rows} WITH NO DATA"
        self._connection.execute(_sql(make))

    @property
    def is_open(self) -> bool:
        if self._connection.closed:
            return False
        # Nobody has asked anything: what there is to read is the server's farewell.
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        return not poll.poll(0)

    def cancel(self) -> None:
        hang_up_on(self._connection.fileno())

    def execute(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        cursor = self._connection.execute(_sql(statement.replace("?", "%s")), values)
        return cursor.fetchall() if cursor.description else ()

    def insert(self, rows: pa.RecordBatch) -> None:
        if not self.target.key:
            self._copy(f"{self.table} ({self.columns})", rows)
            return
        numbers = pa.array(np.arange(rows.num_rows))
        self._copy(f"{_INCOMING} ({self.columns}, {_ROW})", rows.append_column(_ROW, numbers))
        self._connection.execute(_sql(self._upsert()))

    def _upsert(self) -> str:
        """The last row of each key; one without a whole key is a row by itself."""
        key = [self.quoted(name) for name in self.target.key]
        lacking = " OR ".join(f"{name} IS NULL" for name in key)
        alone = [*key, f"CASE WHEN {lacking} THEN {_ROW} END"]
        others = self.others("{0} = EXCLUDED.{0}")
        then = f"UPDATE SET {others}" if others else "NOTHING"
        return (
            f"INSERT INTO {self.table} ({self.columns}) "  # noqa: S608 - all names are quoted
            f"SELECT DISTINCT ON ({', '.join(alone)}) {self.columns} FROM {_INCOMING} "
            f"ORDER BY {', '.join(alone)}, {_ROW} DESC "
            f"ON CONFLICT ({', '.join(key)}) DO {then}"
        )

    def _copy(self, place: str, rows: pa.RecordBatch) -> None:
        text = csv_of(rows, self._types)
        with self._connection.cursor() as cursor:
            statement = _sql(f"COPY {place} FROM STDIN (FORMAT csv, ENCODING 'UTF8')")
            with cursor.copy(statement) as copy:
                copy.write(text)

    def begin(self) -> None:
        """Psycopg does so itself, with the first statement."""

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.rollback()

    def understood(self, error: Exception) -> TurnlaneError | None:
        if not isinstance(error, psycopg.Error):
            return None
        return meaning(error.sqlstate, str(error))

    def close(self) -> None:
        self._connection.close()


def meaning(state: str | None, text: str) -> TurnlaneError | None:
    """What an SQLSTATE means for the events. Without one the server has not been heard at all."""
    said = f"PostgreSQL: {' '.join(text.split())}"
    if state is None or state[:2] in _PASSING:
        return RetryLater(said)
    return Never(said) if state[:2] in _DATA else None


def csv_of(rows: pa.RecordBatch, types: Mapping[str, int]) -> memoryview:
    """Rows as COPY reads them: nothing is null, and what is empty has quotes."""
    columns = [
        _written(rows.column(name), is_bytes=types.get(name) == _BYTEA)
        for name in rows.schema.names
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
    file = io.BytesIO()
    csv.write_csv(batch, file, csv.WriteOptions(include_header=False, quoting_style="needed"))
    return file.getbuffer()


def _written(column: Any, *, is_bytes: bool) -> Any:  # noqa: ANN401
    binary = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    if is_bytes:
        return _hexadecimal(column.cast(pa.binary())) if binary or _is_text(column) else column
    if binary:
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            raise Never("a value is no UTF-8, and its column in the table is of text") from None
    return column


def _is_text(column: Any) -> bool:  # noqa: ANN401
    return pa.types.is_string(column.type) or pa.types.is_large_string(column.type)


def _hexadecimal(column: Any) -> Any:  # noqa: ANN401
    """Bytes as PostgreSQL reads them, without a Python object for any of them."""
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)
    bounds = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    data = np.frombuffer(column.buffers()[2] or b"", dtype=np.uint8)[bounds[0] : bounds[-1]]
    digits = np.empty(2 * len(data), dtype=np.uint8)
    digits[0::2], digits[1::2] = _HEX[data >> 4], _HEX[data & 15]
    ends = pa.py_buffer((2 * (bounds - bounds[0])).data)
    buffers = [None, ends, pa.py_buffer(digits.data)]
    texts: Any = pa.Array.from_buffers(pa.large_binary(), len(column), buffers)
    marked = joined(pa.scalar(b"\\x", pa.large_binary()), texts).cast(pa.large_string())
    return pc.if_else(column.is_valid(), marked, pa.scalar(None, pa.large_string()))


def _sql(statement: str) -> Any:  # noqa: ANN401
    """Psycopg takes only texts that stand in the program; ours are made of quoted names."""
    return statement
