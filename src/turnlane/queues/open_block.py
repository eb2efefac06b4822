"""The block that single events are gathered in until somebody needs it as Arrow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from turnlane.events import BASE_SCHEMA, Block, values_array

_OPTIONAL = ("key", "headers", "severity", "source")


class OpenBlock:
    """Columns as plain lists: appending to them is the cheapest thing Python can do.

    Columns that hardly anybody fills exist only from the first event that fills them on.
    """

    __slots__ = ("_columns", "first", "size", "timestamps", "values")

    def __init__(self, first: int) -> None:
        self.first = first
        self.size = 0
        """Bytes that the events count for."""
        self.values: list[bytes] = []
        self.timestamps: list[int] = []
        """In nanoseconds."""
        self._columns: dict[str, list[object]] = {}

    def annotate(
        self,
        key: str | None,
        headers: Mapping[str, str] | None,
        severity: int | None,
        source: str | None,
    ) -> None:
        """Give the event appended last what is not ``None`` here."""
        for name, given in zip(_OPTIONAL, (key, headers, severity, source), strict=True):
            if given is not None:
                column = self._columns.setdefault(name, [])
                column.extend([None] * (len(self.values) - 1 - len(column)))
                column.append(list(given.items()) if isinstance(given, Mapping) else given)

    def cut(self, count: int) -> None:
        """Keep only the first ``count`` events."""
        del self.values[count:], self.timestamps[count:]
        for column in self._columns.values():
            del column[count:]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def end(self) -> int:
        """The offset after its last event."""
        return self.first + len(self.values)

    def seal(self) -> Block:
        """The events as a block, with the base columns."""
        stamps = np.array(self.timestamps, dtype=np.int64) // 1000
        arrays = {
            "value": values_array(self.values),
            "timestamp": pa.array(stamps).view(BASE_SCHEMA.field("timestamp").type),
        }
        count = len(self.values)
        for name, column in self._columns.items():
            column.extend([None] * (count - len(column)))
            arrays[name] = pa.array(column, BASE_SCHEMA.field(name).type)
        names = [name for name in BASE_SCHEMA.names if name in arrays]
        return pa.RecordBatch.from_arrays([arrays[name] for name in names], names=names)
