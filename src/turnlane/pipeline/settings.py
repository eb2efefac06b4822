"""The settings of a pipeline: parse, transform, and an ordered list of actions.

The configuration file is checked into these models. They do not import Spark, so the node, the
command line and the outputs can read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from turnlane.delivery.settings import DeliverySettings
from turnlane.queues.settings import Kind, Name, QueueSettings
from turnlane.units import Duration, SizeOrShare
from turnlane.validation import ConfigIssue, ContradictorySettings, SettingsModel

MAIN: Final = "main"
"""The name of the main queue and of the main lane."""
DEAD_LETTERS: Final = "main.dead"
"""The queue of events that cannot be parsed, if `on_error` is `dead`."""
FAILOVER: Final = "failover"
"""Suffix of an action's second output: its full name is `<action>.failover`."""
EVENTS_VIEW: Final = "events"
"""The view in which an action's SQL finds the action's own events."""
DISCARD: Final = "discard"
"""The output type that ends the routing of an event."""
SPARK: Final = "spark"
"""The output type whose data Spark itself writes."""
DRIVER_MEMORY: Final = "spark.driver.memory"
"""Spark's own setting for the heap of the driver."""

_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _check_function_name(text: str) -> str:
    if not _FUNCTION.fullmatch(text):
        raise ValueError(f"is module:function, such as mypackage.clean:drop_tests, not {text!r}")
    return text


FunctionName = Annotated[str, AfterValidator(_check_function_name)]


class SparkSettings(SettingsModel):
    """Settings of the Spark session."""

    master: str = Field(
        default="local[*]", description="Where Spark runs.", examples=["spark://host:7077"]
    )
    app_name: str = Field(
        default="turnlane", description="The application name that Spark's own pages show."
    )
    conf: dict[str, str] = Field(
        default={}, repr=False, description="Settings of Spark itself, by name."
    )
    driver_memory: SizeOrShare | None = Field(
        default=None,
        description="The heap of Spark's Java process here, the driver: a percentage of the memory "
        "that the container or machine allows, or a size. Not together with "
        "`spark.driver.memory` in `conf`. Default: Spark's own, 1 GiB.",
        examples=["25%"],
    )
    checkpoints: Path | None = Field(
        default=None,
        description="The directory in which stateful lanes keep their state. On a cluster, every "
        "machine must reach it by the same path. Default: below the node's data.",
    )

    @model_validator(mode="after")
    def _check_driver_memory(self) -> Self:
        if self.driver_memory is not None and DRIVER_MEMORY in self.conf:
            message = f"contradicts {DRIVER_MEMORY} in conf; set one of them"
            raise ContradictorySettings([ConfigIssue("driver_memory", message)])
        return self

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _require_directory(cls, place: object) -> object:
        """Refuse URLs other than ``file://``: lanes create and remove checkpoints as files."""
        text = str(place)
        if text.startswith("file://"):
            return text.removeprefix("file://")
        if "://" in text:
            raise ValueError(
                "is a directory that every machine has, on a shared file system if there are "
                f"several, not {text!r}"
            )
        return place


class LaneSettings(SettingsModel):
    """How many events a lane reads in one batch, and with how many tasks."""

    max_events: int = Field(default=4_000_000, ge=1, description="The most events of a batch.")
    min_events: int = Field(
        default=1,
        ge=1,
        description="Wait for this many events before a batch, but no longer than `max_age`.",
    )
    max_age: Duration = Field(
        default=60.0,
        description="The longest wait for `min_events`. A lane that writes files waits for 100,000 "
        "events, so long at most, if `min_events` is not given.",
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        description="The most tasks of a batch. 0: two for each core of Spark. Default: one for "
        "each core.",
    )
    worker_minimum_events: int = Field(
        default=100_000, ge=1, description="A batch gets one more task for each this many events."
    )
    trigger: Duration = Field(default=0.0, description="The least time between two batches.")
    stall_timeout: Duration = Field(
        default=60.0,
        gt=0,
        description="After this time with events waiting, without a batch that ends and without a "
        "known reason, the lane reports that it has stalled, and starts again if that is safe.",
    )

    def get_workers(self, cores: int) -> int:
        """Return how many tasks a batch may have if Spark has this many cores."""
        return cores if self.workers is None else self.workers or 2 * cores


class ActionSettings(SettingsModel):
    """An action: which events it takes, the queue in front of it, and its output."""

    name: Name = Field(description="The name of the action, of its queue and of its lane.")
    filter: str | None = Field(
        default=None, description="Which events it takes: a condition in Spark SQL. Default: all."
    )
    queue: QueueSettings | None = Field(
        default=None,
        description="The queue in front of the output, which gives the action a lane of its own. "
        "Without one, or with `kind: direct`, the main lane itself calls the output.",
    )
    transform: FunctionName | None = Field(
        default=None, description="A function from DataFrame to DataFrame, `module:function`."
    )
    sql: str | None = Field(
        default=None,
        description="A query over `events`; may aggregate over windows. Needs a queue.",
    )
    watermark: Duration | None = Field(
        default=None,
        description="How late an event may be and still count, for `sql` with windows.",
    )
    idle_after: Duration | None = Field(
        default=60.0,
        gt=0,
        description="After this time without events, the watermark moves on by the clock, so that "
        "the last windows come out. `null`: only newer events move it.",
    )
    with_queues: tuple[str, ...] = Field(
        default=(),
        description="Other queues that `sql` joins with, as views of the same names. The join "
        "removes their events, so no other action may read them.",
    )
    output_mode: Literal["append", "update", "complete"] = Field(
        default="append", description="Spark's output mode for `sql` that aggregates."
    )
    lane: LaneSettings = Field(
        default_factory=LaneSettings, description="The size of the lane's batches."
    )
    delivery: DeliverySettings = Field(
        default_factory=DeliverySettings, description="How the events are delivered to the output."
    )
    output: Any = Field(description="Where the events go.")

    @field_validator("delivery", mode="before")
    @classmethod
    def _use_defaults_for_none(cls, delivery: object) -> object:
        return {} if delivery is None else delivery

    @property
    def is_direct(self) -> bool:
        """Whether the main lane itself calls the output, without a queue in between."""
        return self.queue is None or self.queue.kind is Kind.DIRECT

    @property
    def is_discard(self) -> bool:
        """Whether the action discards its events."""
        return bool(self.output.type == DISCARD)

    @property
    def is_try_direct(self) -> bool:
        """Whether the main lane calls the output first, and queues what it cannot deliver now."""
        return not self.is_direct and self.delivery.mode == "try_direct"

    @property
    def is_called_by_main(self) -> bool:
        """Whether the main lane calls the output, always or as a first try."""
        return self.is_direct or self.is_try_direct

    @property
    def dead_letters(self) -> str | None:
        """The queue of events that cannot be transformed or delivered; ``None`` without either."""
        has_code = self.transform is not None or self.sql is not None
        if self.is_discard or (self.output.type == SPARK and not has_code):
            return None
        return f"{self.name}.dead"


class PipelineSettings(SettingsModel):
    """The settings of everything between the main queue and the outputs."""

    parse: Any = None
    transform: FunctionName | None = None
    actions: tuple[ActionSettings, ...] = ()
    lane: LaneSettings = Field(default_factory=LaneSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)

    @property
    def dead_letters(self) -> str | None:
        """The queue of events that cannot be parsed, if the settings ask for one."""
        return DEAD_LETTERS if self.parse is not None and self.parse.on_error == "dead" else None

    @property
    def has_code(self) -> bool:
        """Whether the main lane has a transform or filters, which may fail at an event."""
        return self.transform is not None or any(action.filter for action in self.actions)

    @property
    def dead_letter_queues(self) -> list[str]:
        """All dead letter queues: of events that cannot be parsed, transformed or delivered."""
        main = DEAD_LETTERS if self.dead_letters or self.has_code else None
        names = [main, *(action.dead_letters for action in self.actions)]
        return [name for name in names if name is not None]

    @property
    def queued_actions(self) -> tuple[ActionSettings, ...]:
        """The actions that have a queue."""
        return tuple(action for action in self.actions if not action.is_direct)

    @property
    def joined_queues(self) -> frozenset[str]:
        """The queues that the SQL of an action joins with. No lane of their own reads them."""
        return frozenset(name for action in self.actions for name in action.with_queues)

    def find_joining_action(self, queue: str) -> str | None:
        """Return the name of the action whose SQL joins with a queue, if there is one."""
        return next((each.name for each in self.actions if queue in each.with_queues), None)

    @property
    def actions_with_lane(self) -> tuple[ActionSettings, ...]:
        """The actions that have a lane of their own: a queue that no join reads."""
        joined = self.joined_queues
        return tuple(action for action in self.queued_actions if action.name not in joined)

    def lane_names(self) -> Iterator[str]:
        """Yield the names of all lanes: the main lane first, then the lanes of the actions."""
        yield MAIN
        for action in self.actions_with_lane:
            yield action.name
