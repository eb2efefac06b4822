"""What a pipeline is made of: parse, transform, and actions in order. No Spark in here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from turnlane.delivery.settings import DeliverySettings
from turnlane.queues.settings import Kind, Name, QueueSettings
from turnlane.units import Duration

MAIN: Final = "main"
"""The main queue's name, and the main lane's."""
DEAD_LETTERS: Final = "main.dead"
"""The queue of events that could not be parsed, where `on_error` is `dead`."""
FAILOVER: Final = "failover"
"""What the second output of an action is called: the action's name, a dot, and this."""
EVENTS: Final = "events"
"""What SQL calls the action's own events."""
DISCARD: Final = "discard"
"""The output that ends an event's way."""
SPARK: Final = "spark"
"""The output that Spark itself writes."""

_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _function(text: str) -> str:
    if not _FUNCTION.fullmatch(text):
        raise ValueError(f"is module:function, such as mypackage.clean:drop_tests, not {text!r}")
    return text


FunctionName = Annotated[str, AfterValidator(_function)]


class Part(BaseModel):
    """A part of a pipeline's description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


class SparkSettings(Part):
    """How Spark runs."""

    master: str = Field(
        default="local[*]", description="Where Spark runs.", examples=["spark://host:7077"]
    )
    app_name: str = Field(default="turnlane", description="Its name in Spark's own pages.")
    conf: dict[str, str] = Field(
        default={}, repr=False, description="Spark's own settings, by name."
    )
    checkpoints: Path | None = Field(
        default=None,
        description="Where stateful lanes keep their state: a directory; on a cluster, one that "
        "all of it reaches by the same path. Default: below the node's data.",
    )

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _in_a_directory(cls, place: object) -> object:
        """Lanes look after what is in it themselves, with files: no other scheme will do."""
        text = str(place)
        if text.startswith("file://"):
            return text.removeprefix("file://")
        if "://" in text:
            raise ValueError(
                "is a directory that every machine has, on a shared file system if there are "
                f"several, not {text!r}"
            )
        return place


class LaneSettings(Part):
    """How much a lane takes at a time."""

    max_events: int = Field(default=4_000_000, ge=1, description="The most events of a batch.")
    min_events: int = Field(
        default=1,
        ge=1,
        description="Wait for so many events, for `max_age` at most, before a batch.",
    )
    max_age: Duration = Field(
        default=60.0,
        description="See `min_events`. Lanes that write files wait for 100,000 events, for 10 "
        "minutes at most, if neither is given.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        description="The most tasks of a batch. Default: what Spark has cores for.",
    )
    worker_minimum_events: int = Field(
        default=100_000, ge=1, description="One more task for every so many events."
    )
    trigger: Duration = Field(default=0.0, description="The least time between two batches.")


class ActionSettings(Part):
    """Filter, queue and output: where some of the events go."""

    name: Name = Field(description="Its own name, and that of its queue and lane.")
    filter: str | None = Field(
        default=None, description="Which events: a condition in Spark SQL. Default: all."
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
    with_queues: tuple[str, ...] = Field(
        default=(),
        description="Other queues that `sql` joins with, as views of the same names. The join "
        "takes their events out, so nobody else may read them.",
    )
    output_mode: Literal["append", "update", "complete"] = Field(
        default="append", description="What `sql` that aggregates gives out, as Spark has it."
    )
    lane: LaneSettings = Field(
        default_factory=LaneSettings, description="How much the lane takes at a time."
    )
    delivery: DeliverySettings = Field(
        default_factory=DeliverySettings, description="How the events are brought to the output."
    )
    output: Any = Field(description="Where the events go.")

    @field_validator("delivery", mode="before")
    @classmethod
    def _usual(cls, delivery: object) -> object:
        return {} if delivery is None else delivery

    @property
    def is_direct(self) -> bool:
        """Whether the main lane itself calls the output."""
        return self.queue is None or self.queue.kind is Kind.DIRECT

    @property
    def discards(self) -> bool:
        """Whether the event's way ends here."""
        return bool(self.output.type == DISCARD)

    @property
    def tries_direct(self) -> bool:
        """Whether the main lane calls the output, and only what that leaves goes to the queue."""
        return not self.is_direct and self.delivery.mode == "try_direct"

    @property
    def is_called_by_main(self) -> bool:
        """Whether the main lane calls the output, if only to try."""
        return self.is_direct or self.tries_direct

    @property
    def dead_letters(self) -> str | None:
        """The queue of what can never be delivered; ``None`` where Spark itself writes."""
        return None if self.output.type in (DISCARD, SPARK) else f"{self.name}.dead"


class PipelineSettings(Part):
    """Everything between the main queue and the outputs."""

    parse: Any = None
    transform: FunctionName | None = None
    actions: tuple[ActionSettings, ...] = ()
    lane: LaneSettings = Field(default_factory=LaneSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)

    @property
    def dead_letters(self) -> str | None:
        """The queue of what could not be parsed, if that is to be kept apart."""
        return DEAD_LETTERS if self.parse is not None and self.parse.on_error == "dead" else None

    @property
    def dead_letter_queues(self) -> list[str]:
        """The queues of what cannot be parsed, and of what cannot be delivered."""
        names = [self.dead_letters, *(action.dead_letters for action in self.actions)]
        return [name for name in names if name is not None]

    @property
    def queued(self) -> tuple[ActionSettings, ...]:
        """The actions that have a queue."""
        return tuple(action for action in self.actions if not action.is_direct)

    @property
    def joined(self) -> frozenset[str]:
        """The queues that the SQL of some action joins with, and that nobody else reads."""
        return frozenset(name for action in self.actions for name in action.with_queues)

    def joiner(self, queue: str) -> str | None:
        """The action whose SQL joins with a queue."""
        return next((each.name for each in self.actions if queue in each.with_queues), None)

    @property
    def with_lane(self) -> tuple[ActionSettings, ...]:
        """The actions that have a lane of their own: those with a queue that no join reads."""
        return tuple(action for action in self.queued if action.name not in self.joined)

    def lanes(self) -> Iterator[str]:
        """The names of all lanes: the main one, and one for every action that has its own."""
        yield MAIN
        for action in self.with_lane:
            yield action.name
