"""The definition of a queue table: its name, its columns, its key, its options.

``CREATE QUEUE`` (:mod:`turnlane.table.grammar`) produces a :class:`Definition`; the database keeps
the statement as text, and every process parses the same text. So the text of a definition has to
produce an equal definition.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from turnlane.units import Duration, format_duration
from turnlane.validation import ConfigIssue, ContradictorySettings, convert_validation_error

# ── names ────────────────────────────────────────────────────────────────────────────────────────

MAX_NAME_BYTES: Final = 48
"""PostgreSQL cuts names at 63 bytes, and the name of an index is longer than its table's name."""


def check_name(name: str) -> str:
    """Return the name if every database accepts it; raise ``ValueError`` otherwise."""
    if not name:
        raise ValueError("a name cannot be empty")
    if not name.isprintable():
        raise ValueError(f"{name!r} is not a name: it has characters that cannot be printed")
    if name != name.strip():
        # MySQL refuses names that end in a space.
        raise ValueError(f"{name!r} is not a name: it begins or ends with a space")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"{name!r} is too long for a name: at most {MAX_NAME_BYTES} bytes")
    if any(ord(character) > 0xFFFF for character in name):
        raise ValueError(f"{name!r} is not a name: MySQL does not allow such characters in names")
    return name


def quote_identifier(name: str, quote: str = '"') -> str:
    """Return the name as a quoted identifier, safe for every character."""
    return quote + name.replace(quote, quote * 2) + quote


# ── options ──────────────────────────────────────────────────────────────────────────────────────

MAX_RETRY_SECONDS = 30 * 86_400.0
"""A retry after more than a month is a mistake."""

PositiveDuration = Annotated[Duration, Field(gt=0)]


class TableOrdering(enum.StrEnum):
    """Which events wait for each other."""

    NONE = "none"
    """None: events fire in parallel as they become due."""
    KEY = "key"
    """Events of one key fire one after the other; the key is the queue's ``SHARD BY`` column."""
    QUEUE = "queue"
    """All events of a shard fire one after the other."""


class Layout(enum.StrEnum):
    """The first column of the table's primary key."""

    TIME = "time"
    KEYSPACE = "keyspace"


class TableSettings(BaseModel):
    """The options of one queue table, from ``WITH (…)``; immutable; durations in seconds."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    max_qps: float | None = Field(
        default=None, gt=0, description="The most events fired in a second."
    )
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="The most events that are fired and not settled, at any time.",
    )
    ack_timeout: PositiveDuration = Field(
        default=30.0, description="An event not settled in this time is fired again."
    )
    backoff: Duration = Field(
        default=1.0, description="The wait before the first retry; then it doubles."
    )
    max_backoff: Duration = Field(
        default=600.0, le=MAX_RETRY_SECONDS, description="The longest wait."
    )
    max_attempts: int = Field(
        default=20,
        ge=1,
        description="An event fired this often without an ack becomes a dead letter.",
    )
    retention: Duration = Field(
        default=0.0,
        description="How long acked events are kept, by their fire time; `0s` deletes at once.",
    )
    window: PositiveDuration = Field(
        default=30.0, description="How far ahead the manager keeps events in memory."
    )
    window_events: int = Field(
        default=10_000, ge=10, description="The most events that wait in the manager's memory."
    )
    ordering: TableOrdering = Field(
        default=TableOrdering.NONE, description="`none`, `key` or `queue`."
    )
    layout: Layout = Field(
        default=Layout.TIME, description="`time` or `keyspace`: the primary key."
    )
    lease: PositiveDuration = Field(
        default=10.0, description="How long a manager keeps the lead without renewing it."
    )

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Check options. Raises ``ConfigError``, which names the option."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise convert_validation_error(error, cls.model_fields) from None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.backoff > self.max_backoff:
            raise ContradictorySettings([ConfigIssue("backoff", "must be at most max_backoff")])
        return self

    def get_changed_options(self) -> dict[str, str]:
        """Return the options that differ from their defaults, as ``WITH (…)`` writes them."""
        changed: dict[str, str] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value != getattr(DEFAULTS, name):
                changed[name] = format_duration(value) if name in DURATIONS else str(value)
        return changed


DURATIONS = frozenset({"ack_timeout", "backoff", "max_backoff", "retention", "window", "lease"})
DEFAULTS = TableSettings()


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A type of a user's column: its name in each database, and its type in Arrow."""

    sqlite: str
    postgres: str
    mysql: str
    arrow: pa.DataType
    arguments: tuple[int, ...] = (0,)
    """How many numbers in parentheses may follow."""
    renders_arguments: bool = True
    """Whether the databases get the numbers; the width of MySQL's integers means nothing."""
    can_be_key: bool = False
    """Whether its text is the same in every database, so that a key can be hashed by it."""

    def check_arguments(self, arguments: tuple[int, ...]) -> None:
        """Raise ``ValueError`` if this many numbers may not follow."""
        if len(arguments) not in self.arguments:
            allowed = " or ".join(map(str, self.arguments))
            raise ValueError(f"takes {allowed} numbers in parentheses, not {len(arguments)}")

    def render(self, database: str, arguments: tuple[int, ...]) -> str:
        """Return the type in the SQL of a database."""
        name: str = getattr(self, database)
        if not arguments or not self.renders_arguments:
            return name
        return f"{name}({', '.join(map(str, arguments))})"


def _define_integer(postgres: str, mysql: str, arrow: pa.DataType) -> ColumnType:
    return ColumnType(
        "INTEGER", postgres, mysql, arrow, (0, 1), renders_arguments=False, can_be_key=True
    )


TIME_TYPE: Final = pa.timestamp("us", tz="UTC")
_TEXT: Final = pa.string()
_DECIMAL: Final = ColumnType("NUMERIC", "NUMERIC", "DECIMAL", _TEXT, (0, 1, 2))
_BYTES: Final = ColumnType("BLOB", "BYTEA", "LONGBLOB", pa.binary())
_INT: Final = _define_integer("INTEGER", "INT", pa.int32())

TYPES: Final[Mapping[str, ColumnType]] = {
    "BIGINT": _define_integer("BIGINT", "BIGINT", pa.int64()),
    "INT": _INT,
    "INTEGER": _INT,
    "SMALLINT": _define_integer("SMALLINT", "SMALLINT", pa.int16()),
    "BOOLEAN": ColumnType("BOOLEAN", "BOOLEAN", "BOOLEAN", pa.bool_()),
    "REAL": ColumnType("REAL", "REAL", "FLOAT", pa.float32()),
    "DOUBLE": ColumnType("REAL", "DOUBLE PRECISION", "DOUBLE", pa.float64()),
    "NUMERIC": _DECIMAL,
    "DECIMAL": _DECIMAL,
    "CHAR": ColumnType("CHAR", "CHAR", "CHAR", _TEXT, (1,)),
    "VARCHAR": ColumnType("VARCHAR", "VARCHAR", "VARCHAR", _TEXT, (1,), can_be_key=True),
    "TEXT": ColumnType("TEXT", "TEXT", "LONGTEXT", _TEXT, can_be_key=True),
    "BLOB": _BYTES,
    "BYTEA": _BYTES,
    "DATE": ColumnType("DATE", "DATE", "DATE", pa.date32()),
    "TIMESTAMP": ColumnType("TIMESTAMP", "TIMESTAMPTZ", "DATETIME(6)", TIME_TYPE),
    "JSON": ColumnType("TEXT", "JSONB", "JSON", _TEXT),
    "UUID": ColumnType("TEXT", "UUID", "CHAR(36)", _TEXT),
}

SYSTEM_COLUMNS: Final[Mapping[str, pa.DataType]] = {
    "event_id": pa.int64(),
    "fire_at": TIME_TYPE,
    "state": pa.string(),
    "attempts": pa.int32(),
    "priority": pa.int16(),
    "keyspace_id": pa.int64(),
    "event_name": pa.string(),
    "event_group": pa.string(),
    "after_group": pa.string(),
    "last_error": pa.string(),
}
"""The columns that every queue table has, in Arrow's types; a user's column needs another name."""

INSERT_COLUMNS: Final = ("fire_at", "priority", "event_name", "event_group", "after_group")
"""The system columns that an insert may set; turnlane sets the others."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the user."""

    name: str
    type: str
    arguments: tuple[int, ...] = ()
    required: bool = False

    @property
    def arrow_type(self) -> pa.DataType:
        """Its type in Arrow: a decimal only if it has a precision, and Arrow has room for it."""
        if TYPES[self.type] is _DECIMAL and self.arguments and 1 <= self.arguments[0] <= 38:
            return pa.decimal128(*self.arguments)
        return TYPES[self.type].arrow

    def __str__(self) -> str:
        numbers = f"({', '.join(map(str, self.arguments))})" if self.arguments else ""
        required = " NOT NULL" if self.required else ""
        return f"{quote_identifier(self.name)} {self.type}{numbers}{required}"


# ── the definition ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Definition:
    """A queue as ``CREATE QUEUE`` describes it; ``str()`` returns that statement."""

    name: str
    columns: tuple[Column, ...]
    shard_by: str | None = None
    settings: TableSettings = field(default_factory=TableSettings)

    def __post_init__(self) -> None:
        if self.name.lower().startswith("turnlane_"):
            raise ValueError("names that begin with turnlane_ are turnlane's own")
        known: set[str] = set()
        for name in self.column_names:
            # MySQL and SQLite ignore case in column names.
            if name.lower() in SYSTEM_COLUMNS:
                raise ValueError(f"every queue has a column {name!r} of its own")
            if name.lower() in known:
                raise ValueError(f"the column {name!r} is defined twice")
            known.add(name.lower())
        self._check_key()

    def _check_key(self) -> None:
        if self.shard_by is None:
            if self.settings.ordering is TableOrdering.KEY:
                raise ValueError("ordering = key needs SHARD BY (column)")
            return
        column = next((each for each in self.columns if each.name == self.shard_by), None)
        if column is None:
            raise ValueError(f"SHARD BY: there is no column {self.shard_by!r}")
        if not TYPES[column.type].can_be_key:
            raise ValueError(f"SHARD BY: a column of type {column.type} cannot be the key")

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the user's columns."""
        return tuple(column.name for column in self.columns)

    def __str__(self) -> str:
        columns = ", ".join(map(str, self.columns))
        text = f"CREATE QUEUE {quote_identifier(self.name)} ({columns})"
        if self.shard_by is not None:
            text += f" SHARD BY ({quote_identifier(self.shard_by)})"
        options = self.settings.get_changed_options()
        if options:
            text += f" WITH ({', '.join(f'{name} = {value}' for name, value in options.items())})"
        return text
