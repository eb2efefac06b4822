"""The settings of an action under ``delivery:``, and the columns that turnlane adds to rows."""

from __future__ import annotations

import enum
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from turnlane.units import Duration, Size
from turnlane.validation import SettingsModel


class Ordering(enum.StrEnum):
    """Which events must wait for which others."""

    NONE = "none"
    """No event waits for another."""
    KEY = "key"
    """Events of one key are delivered one after another."""
    STRICT = "strict"
    """All events are delivered one after another."""


class FailoverSettings(SettingsModel):
    """A second output, used while the first one is not available."""

    output: Any = Field(description="The second output.")
    after: Duration = Field(
        default=60.0,
        description="How long the breaker must be open before the second output is used.",
    )


class DeadLetterSettings(SettingsModel):
    """What happens to events that can never be delivered."""

    memory_events: int = Field(
        default=10_000,
        ge=0,
        description="How many dead letters wait in the node's memory while their queue is full. "
        "If there are more, the oldest are dropped and counted.",
    )
    on_disk_error: Literal["keep", "memory"] = Field(
        default="keep",
        description="What happens to dead letters if the node's disk is full or fails: `keep` "
        "leaves their events in the action's queue, to be delivered again; `memory` lets the dead "
        "letters wait in memory.",
    )


class DeliverySettings(SettingsModel):
    """How an action's events are delivered."""

    batch_events: int = Field(default=1000, ge=1, description="The most events in one send.")
    batch_bytes: Size = Field(
        default=1 << 20,
        ge=1,
        description="The most bytes in one send. A larger event is sent alone.",
    )
    batch_age: Duration = Field(
        default=0.0, description="How long a batch that is not full may wait for more events."
    )
    concurrency: Literal["adaptive"] | int = Field(
        default="adaptive",
        description="How many sends a task has in progress: `adaptive` adjusts to the "
        "destination, or a fixed number.",
    )
    min_concurrency: int = Field(default=1, ge=1, description="The least for `adaptive`.")
    max_concurrency: int = Field(default=32, ge=1, description="The most for `adaptive`.")
    max_in_flight: int = Field(
        default=64,
        ge=1,
        description="The most sends in progress of all tasks together, on all executors.",
    )
    rate_limit: float | None = Field(
        default=None,
        gt=0,
        description="The most events per second of all tasks together. Default: no limit.",
    )
    backoff: Duration = Field(
        default=1.0,
        description="How long to wait after a failure. The wait grows with every further one. "
        "0: not at all, until the breaker opens.",
    )
    backoff_multiplier: float = Field(
        default=2.0,
        ge=1,
        le=100,
        description="By how much the wait grows with every further failure. 1: it stays the same.",
    )
    max_backoff: Duration = Field(default=300.0, description="The longest wait after failures.")
    jitter: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="The share by which a wait varies randomly, to either side.",
    )
    breaker_failures: int = Field(
        default=5,
        ge=0,
        description="How many failures in a row open the breaker. 0: it never opens.",
    )
    breaker_reset: Duration = Field(
        default=30.0,
        description="How long the breaker stays open at least, before one probe is sent.",
    )
    max_attempts: int = Field(
        default=10,
        ge=1,
        description="How many times events are sent that fail with an unknown error. An error "
        "that the output declares retryable is retried without a limit.",
    )
    ordering: Ordering = Field(
        default=Ordering.NONE, description="Which events must wait for which others."
    )
    mode: Literal["queue", "try_direct"] = Field(
        default="queue",
        description="`queue`: all events go through the action's queue. `try_direct`: the main "
        "lane delivers, and only the events that it could not deliver go through the queue.",
    )
    only_when_suspended: bool = Field(
        default=False,
        description="Take only the events that the previous action could not deliver now.",
    )
    fresh_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="The share of a batch that is reserved for the newest events while there is a "
        "backlog. Not used with an `ordering`.",
    )
    max_time: Duration = Field(
        default=5.0,
        gt=0,
        description="How long a task sends. The next batch delivers the rest.",
    )
    pipelined: bool = Field(
        default=True,
        description="Whether events are prepared on threads of their own while others are sent.",
    )
    preparers: int = Field(
        default=2,
        ge=0,
        description="How many threads of a task prepare events. 0: one for each core.",
    )
    senders: int | None = Field(
        default=None,
        ge=1,
        description="The most threads of a task that send, whatever `concurrency` allows. "
        "Default: no further limit.",
    )
    channel_size: int | None = Field(
        default=None,
        ge=1,
        description="The most prepared batches of a task that wait for a sender. Default: two more "
        "than it sends at a time.",
    )
    failover: FailoverSettings | None = Field(
        default=None,
        description="A second output, used while the first one is not available.",
    )
    dead_letters: DeadLetterSettings = Field(
        default_factory=DeadLetterSettings,
        description="What happens to events that can never be delivered.",
    )

    @property
    def most_sends(self) -> int:
        """The most sends that a task may have in progress."""
        fixed = self.concurrency if isinstance(self.concurrency, int) else self.max_concurrency
        return min(fixed, self.senders or fixed)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if isinstance(self.concurrency, int) and self.concurrency < 1:
            raise ValueError(
                f"concurrency must be adaptive or a number of at least 1, not {self.concurrency}"
            )
        if self.min_concurrency > self.max_concurrency:
            raise ValueError(
                f"min_concurrency ({self.min_concurrency}) is more than max_concurrency "
                f"({self.max_concurrency})"
            )
        if self.backoff > self.max_backoff:
            raise ValueError(
                f"backoff ({self.backoff:g} s) is more than max_backoff ({self.max_backoff:g} s)"
            )
        if not self.breaker_failures and not self.backoff:
            raise ValueError(
                "breaker_failures and backoff are both 0: a destination that is away would be "
                "tried again and again without a pause; set one of them"
            )
        if not self.breaker_failures and self.failover is not None:
            raise ValueError(
                "breaker_failures is 0, but failover waits for the breaker to open: remove one"
            )
        if self.rate_limit is not None and self.rate_limit * self.max_time < 2:
            # Half a task's time must be enough for one event.
            raise ValueError(
                f"max_time ({self.max_time:g} s) is too short for rate_limit ({self.rate_limit:g} "
                "events per second): two events must fit into it"
            )
        return self


# ── columns that turnlane adds to rows on their way to outputs ───────────────────────────────────

OWN_PREFIX: Final = "turnlane_"
"""The prefix of turnlane's own columns. No parser and no transform may create such a column."""
DIRECT: Final = f"{OWN_PREFIX}direct"
"""The outputs that the main lane calls for a row."""
PRIORITY: Final = f"{OWN_PREFIX}priority"
"""The number in the ``<PRI>`` of a syslog message, if no other part of it is used."""
ROUTES: Final = f"{OWN_PREFIX}routes"
"""One bit for each queue that a row goes to."""
DISCARDED: Final = f"{OWN_PREFIX}discarded_"
"""The prefix of columns that say whether a random discard takes a row; its number follows."""
GROUP_OFFSETS: Final = f"{OWN_PREFIX}places"
"""The offsets of all events that a row stands for."""
NULL_BITS: Final = f"{OWN_PREFIX}hollows"
"""One bit for each column of lists or maps: whether the value is null."""
PAYLOAD: Final = "payload"
"""The event as the output sends it. Output plugins read it, so it has no prefix."""
POSITION_COLUMNS: Final = ("partition", "offset")
"""The columns that identify an event in its queue."""
ROW_NUMBER_COLUMN: Final = f"{OWN_PREFIX}row"
"""Numbers the rows that a transform made of one event: 0, 1, …"""
INTERNAL_COLUMNS: Final = ("queue", *POSITION_COLUMNS, DIRECT, PAYLOAD, ROW_NUMBER_COLUMN)
"""Columns about the way of an event, not about its contents: destinations do not store them."""
