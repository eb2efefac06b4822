"""Parses blocks without Spark: the formats whose columns a reader adds to events itself.

Spark plans every batch again, and a parser made of its expressions would be a part of every filter
that reads a parsed column: planning took seconds, however small the batch was. To Spark, columns
that the reader adds are columns like any other. And only those that the plan needs are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from turnlane.delivery.settings import PRIORITY
from turnlane.events import BASE_SCHEMA, Block
from turnlane.formats import syslog_columns
from turnlane.formats.parse_settings import Format, ParseSettings

BLOCK_FORMATS: Final = frozenset({Format.SYSLOG, Format.OTLP})
"""The formats that can be parsed here; Spark parses the others."""
_SOURCES: Final[Mapping[Format, AbstractSet[str]]] = {
    Format.SYSLOG: frozenset({"value", "severity", "timestamp"}),
    Format.OTLP: frozenset({"value", "headers"}),
}


def find_loaded_columns(settings: ParseSettings, wanted: AbstractSet[str]) -> AbstractSet[str]:
    """Return the columns to load so that the ``wanted`` columns are there or can be computed.

    ``wanted`` may have words that are no columns.
    """
    if settings.format in BLOCK_FORMATS:
        return wanted & (set(BASE_SCHEMA.names) | get_parsed_types(settings.format).keys())
    own = wanted & set(BASE_SCHEMA.names)
    return own if settings.format is Format.NONE else own | {"value"}


def get_parsed_types(parse_format: Format) -> Mapping[str, pa.DataType]:
    """Return the columns that a format adds to events, or replaces, with their types."""
    if parse_format is Format.OTLP:
        from turnlane.formats.otlp_columns import COLUMNS  # needs the extra `otlp`

        return COLUMNS
    return syslog_columns.COLUMNS


class BlockParser:
    """Computes parsed columns of blocks; ``wanted`` may also have names of other columns."""

    def __init__(self, settings: ParseSettings, wanted: Collection[str]) -> None:
        self._settings = settings
        self.columns: Final = frozenset(get_parsed_types(settings.format)) & frozenset(wanted)

    @property
    def source_columns(self) -> AbstractSet[str]:
        """The columns that are needed: of events, or ``PRIORITY``, which a node computes."""
        if self._needs_priority_only:
            return frozenset({"severity", PRIORITY})
        return _SOURCES[self._settings.format] if self.columns else frozenset()

    @property
    def _needs_priority_only(self) -> bool:
        is_syslog = self._settings.format is Format.SYSLOG
        return is_syslog and bool(self.columns) and self.columns <= syslog_columns.PRIORITY_COLUMNS

    def parse(self, block: Block) -> Mapping[str, pa.Array[Any]]:
        """Return the parsed columns of a block."""
        if not self.columns:
            return {}
        if self._needs_priority_only and PRIORITY in block.schema.names:
            severities = _get_column(block, "severity")
            found = syslog_columns.split_priorities(block.column(PRIORITY), severities)
            return {name: found[name] for name in self.columns}
        values = _get_column(block, "value")
        if self._settings.format is Format.OTLP:
            from turnlane.formats.otlp_columns import decode_columns

            signals: Any = pc.map_lookup(
                _get_column(block, "headers"), pa.scalar("signal"), "first"
            )
            decoded = decode_columns(values, signals)
            return {name: decoded.field(name) for name in self.columns}
        return syslog_columns.parse_syslog(
            values,
            _get_column(block, "severity"),
            _get_column(block, "timestamp"),
            self._settings.time_zone,
            self.columns,
        )


def _get_column(block: Block, name: str) -> Any:  # noqa: ANN401
    """Return a column of events; nulls if the block does not have it."""
    kind = BASE_SCHEMA.field(name).type
    if name not in block.schema.names:
        return pa.nulls(block.num_rows, kind)
    column = block.column(name)
    return column if column.type == kind else column.cast(kind)
