"""The options of a queue table: what stands in ``WITH (…)``."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from turnlane.problems import Contradiction, Problem, config_error
from turnlane.quantities import Duration, format_duration

LONGEST_RETRY = 30 * 86_400.0
"""A retry further off than a month is a mistake."""

PositiveDuration = Annotated[Duration, Field(gt=0)]


class Ordering(enum.StrEnum):
    """What waits for what."""

    NONE = "none"
    """Nothing: events fire as they become due, side by side."""
    KEY = "key"
    """Events of one key fire one after the other; the key is the queue's ``SHARD BY`` column."""
    QUEUE = "queue"
    """All events of a shard fire one after the other."""


class Layout(enum.StrEnum):
    """What the table's primary key begins with."""

    TIME = "time"
    KEYSPACE = "keyspace"


class TableSettings(BaseModel):
    """The options of one queue table, checked and unchangeable; durations in seconds."""

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
    max_backoff: Duration = Field(default=600.0, le=LONGEST_RETRY, description="The longest wait.")
    max_attempts: int = Field(
        default=20, ge=1, description="Fired so often without an ack, an event is a dead letter."
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
    ordering: Ordering = Field(default=Ordering.NONE, description="`none`, `key` or `queue`.")
    layout: Layout = Field(
        default=Layout.TIME, description="`time` or `keyspace`: the primary key."
    )
    lease: PositiveDuration = Field(
        default=10.0, description="How long a manager that is not heard of keeps the lead."
    )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Check options. Raises ``ConfigError``, which names the option."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise config_error(error, cls.model_fields) from None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.backoff > self.max_backoff:
            raise Contradiction([Problem("backoff", "must be at most max_backoff")])
        return self

    def changed(self) -> dict[str, str]:
        """The options that differ from their defaults, as ``WITH (…)`` has them."""
        return {
            name: _written(name, getattr(self, name))
            for name in type(self).model_fields
            if getattr(self, name) != getattr(DEFAULTS, name)
        }


DURATIONS = frozenset({"ack_timeout", "backoff", "max_backoff", "retention", "window", "lease"})


def _written(name: str, value: object) -> str:
    if name in DURATIONS:
        assert isinstance(value, float)
        return format_duration(value)
    return str(value)


DEFAULTS = TableSettings()
