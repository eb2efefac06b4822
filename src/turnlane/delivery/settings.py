"""How an action's events are delivered: the settings under ``delivery:``."""

from __future__ import annotations

import enum
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnlane.units import Duration, Size


class Ordering(enum.StrEnum):
    """What waits for what."""

    NONE = "none"
    """Good events pass those that have to wait."""
    KEY = "key"
    """Events of one key go one after another."""
    STRICT = "strict"
    """All events go one after another."""


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


class FailoverSettings(_Part):
    """A second output, for when the first one stays away."""

    output: Any = Field(description="Where the events go then.")
    after: Duration = Field(
        default=60.0, description="How long the breaker has been open before that."
    )


class DeadLetterSettings(_Part):
    """What cannot be delivered, ever."""

    memory_events: int = Field(
        default=10_000,
        ge=0,
        description="So many wait in the node's memory while their queue is full; "
        "beyond that the oldest are dropped, and counted.",
    )
    on_disk_error: Literal["keep", "memory"] = Field(
        default="keep",
        description="What becomes of them if the node's disk is full or fails: their events stay "
        "in the action's queue and come again, or they wait in memory, too.",
    )


class DeliverySettings(_Part):
    """How an action's events are delivered."""

    batch_events: int = Field(default=1000, ge=1, description="The most events of one send.")
    batch_bytes: Size = Field(
        default=1 << 20, ge=1, description="The most bytes of one send; a larger event goes alone."
    )
    batch_age: Duration = Field(
        default=0.0, description="How long a batch may wait to be full before it is sent."
    )
    concurrency: Literal["adaptive"] | int = Field(
        default="adaptive", description="Sends at a time, in a task: found out, or a fixed number."
    )
    min_concurrency: int = Field(default=1, ge=1, description="The least that `adaptive` uses.")
    max_concurrency: int = Field(default=32, ge=1, description="The most that `adaptive` uses.")
    max_in_flight: int = Field(
        default=64,
        ge=1,
        description="The most sends under way, of all tasks together, on all executors.",
    )
    rate_limit: float | None = Field(
        default=None,
        gt=0,
        description="The most events in a second, of all tasks together. Default: no limit.",
    )
    backoff: Duration = Field(
        default=1.0, gt=0, description="How long to wait after a failure; twice that after two, …"
    )
    max_backoff: Duration = Field(default=300.0, description="The longest that `backoff` gets.")
    jitter: float = Field(
        default=0.2, ge=0, le=1, description="The share of a wait that is left to chance."
    )
    breaker_failures: int = Field(
        default=5, ge=1, description="After so many failures in a row the breaker opens."
    )
    breaker_reset: Duration = Field(
        default=30.0, description="How long it stays open at least before one probe is let through."
    )
    max_attempts: int = Field(
        default=10,
        ge=1,
        description="How often events are sent whose error nobody knows; "
        "what the output says may be retried is retried for ever.",
    )
    ordering: Ordering = Field(default=Ordering.NONE, description="What waits for what.")
    mode: Literal["queue", "try_direct"] = Field(
        default="queue",
        description="Whether events always go through the action's queue, or only those that the "
        "main lane could not deliver itself.",
    )
    only_when_suspended: bool = Field(
        default=False, description="Take only what the action before could not deliver now."
    )
    fresh_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="The share of a batch that is given to the newest events while there is a "
        "backlog. With an `ordering`, none.",
    )
    max_time: Duration = Field(
        default=5.0,
        gt=0,
        description="How long a task goes on sending; the rest is left to the next batch.",
    )
    pipelined: bool = Field(
        default=True, description="Whether events are prepared apart from the sending."
    )
    failover: FailoverSettings | None = Field(
        default=None, description="A second output, for when the first one stays away."
    )
    dead_letters: DeadLetterSettings = Field(
        default_factory=DeadLetterSettings, description="What cannot be delivered, ever."
    )

    @property
    def most_sends(self) -> int:
        """How many sends a task may have at a time, whatever it finds out."""
        return self.concurrency if isinstance(self.concurrency, int) else self.max_concurrency

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if isinstance(self.concurrency, int) and self.concurrency < 1:
            raise ValueError("concurrency is adaptive, or a number of at least 1")
        if self.min_concurrency > self.max_concurrency:
            raise ValueError("min_concurrency is more than max_concurrency")
        if self.backoff > self.max_backoff:
            raise ValueError("backoff is more than max_backoff")
        if self.rate_limit is not None and self.rate_limit * self.max_time < 2:
            # Half a task's time has to be enough for one event.
            raise ValueError("max_time leaves no time for two events at rate_limit")
        return self


# ── columns ──
# The columns that turnlane itself adds to rows on their way to outputs.

OWN_PREFIX: Final = "turnlane_"
"""How the names of columns begin that are ours alone: no parser and no transform may make one."""
DIRECT: Final = f"{OWN_PREFIX}direct"
"""Which outputs are called at once."""
PRIORITY: Final = f"{OWN_PREFIX}priority"
"""The number in the ``<PRI>`` of a syslog message, if nothing else of it is wanted."""
ROUTES: Final = f"{OWN_PREFIX}routes"
"""A bit for every queue that a row goes into."""
DISCARDED: Final = f"{OWN_PREFIX}discarded_"
"""How the names of columns begin that say what a discard takes by chance; its number follows."""
GROUP_OFFSETS: Final = f"{OWN_PREFIX}places"
"""The places of all events that a row stands for."""
NULL_BITS: Final = f"{OWN_PREFIX}hollows"
"""A bit for every column of lists or maps: whether it is null."""
PAYLOAD: Final = "payload"
"""The event as the output sends it. Outputs of others read it, so it has a plain name."""
