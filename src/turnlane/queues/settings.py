"""The knobs of every queue, with the same names in code and in configuration.

Each knob is declared once, with its default, meaning, example, and the kinds it belongs to; the
table in ``docs/queues.md`` is generated from these declarations. Defaults that depend on the kind
or on another knob are computed after validation, so that a queue only reads final values.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from turnlane.memory import memory_limit
from turnlane.queues.api import Durability, FullBehavior
from turnlane.runtime import count_cores
from turnlane.units import Duration, Percentage, Size, TimeWindow, format_size
from turnlane.validation import ConfigIssue, ContradictorySettings, convert_validation_error


class Kind(enum.StrEnum):
    """Where events wait."""

    DIRECT = "direct"
    MEMORY = "memory"
    DISK = "disk"
    DISK_ASSISTED = "disk_assisted"
    PROXY = "proxy"


ALL: Final = tuple(Kind)
WAITING: Final = (Kind.MEMORY, Kind.DISK, Kind.DISK_ASSISTED, Kind.PROXY)
STORING: Final = (Kind.MEMORY, Kind.DISK, Kind.DISK_ASSISTED)
ON_DISK: Final = (Kind.DISK, Kind.DISK_ASSISTED)

AUTO: Final = "auto"
"""The ``size`` whose limits are computed when the queue is opened."""
TARGET_UTILIZATION: Final = "85%"
LEAST_AUTO_BYTES: Final = 2**20
"""The least limit that ``size: auto`` gives, however little is available."""
LEAST_EVENT_BYTES: Final = 64
"""The limit in events that ``size: auto`` gives: one event for this many bytes."""


class Compression(enum.StrEnum):
    """Whether frames on disk are compressed."""

    AUTO = "auto"
    """Compress if that makes frames much smaller, while the disk is too slow."""
    SNAPPY = "snappy"
    NONE = "none"


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic
    return value


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", value):
        raise ValueError(f"{value!r} is not a name; use letters, digits, _, . and -, as in web-1")
    return value


Count = Annotated[int, BeforeValidator(_refuse_bool)]
EventBound = Annotated[
    Count, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": AUTO}]})
]
Rate = Annotated[float, BeforeValidator(_refuse_bool)]
Name = Annotated[str, AfterValidator(_check_name)]
DiskDurability = Literal[Durability.ALWAYS, Durability.INTERVAL, Durability.NEVER]


def knob(
    default: object,
    kinds: tuple[Kind, ...],
    meaning: str,
    *,
    example: object,
    shown: str | None = None,
    ge: int | None = None,
    gt: int | None = None,
    le: int | None = None,
) -> Any:  # noqa: ANN401 - as Field() does it, so that the annotation decides
    """Declare a knob; ``shown`` describes a default that is not a plain value."""
    extra: dict[str, Any] = {"kinds": [str(kind) for kind in kinds], "shown": shown or str(default)}
    return Field(
        default,
        description=meaning,
        examples=[example],
        json_schema_extra=extra,
        ge=ge,
        gt=gt,
        le=le,
    )


def parse_mark(value: object) -> int | Percentage:
    """Parse a fill level: a number of events, or a percentage of the size of the queue."""
    if isinstance(value, Percentage):
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        return Percentage.parse(value)
    raise ValueError(
        f"{value!r} is not a mark; write a number of events or a percentage of size, "
        "such as 40000 or 80%"
    )


def to_events(mark: int | Percentage, size: int | None) -> int | None:
    """Return a mark in events; ``None`` for a percentage if there is no size."""
    if isinstance(mark, int):
        return mark
    return None if size is None else mark.of(size)


def _format_mark(mark: int | Percentage) -> int | str:
    return mark if isinstance(mark, int) else str(mark)


Mark = Annotated[
    int | Percentage,
    PlainValidator(parse_mark),
    PlainSerializer(_format_mark),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?%$"},
            ],
            "description": "a number of events, or a percentage of size such as 80%",
            "examples": [40000, "80%"],
        }
    ),
]
"""A fill level: a number of events, or a percentage of ``size``."""


class QueueSettings(BaseModel):
    """The settings of one queue: checked, complete and immutable.

    The constructor raises ``ConfigError``, which names the knob and lists every problem.
    (``model_validate`` raises the error of pydantic, so that a larger model can contain this one.)
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    kind: Kind = knob(
        Kind.MEMORY,
        ALL,
        "Where events wait: `direct`, `memory`, `disk`, `disk_assisted` or `proxy`.",
        example="disk",
    )
    name: Name = knob(
        "queue",
        ALL,
        "Names the queue in logs, metrics and the `queue` column: letters, digits, `_`, `.`, `-`.",
        example="orders",
    )
    path: Path | None = knob(
        None,
        ON_DISK,
        "The queue's directory; created if it does not exist. Required.",
        example="/var/lib/turnlane/orders",
        shown="required",
    )

    # bounds
    size: EventBound | None = knob(
        None,
        STORING,
        "The most events the queue holds; for `disk_assisted`, in memory. `auto`: all limits "
        "follow from `target_utilization`.",
        example=100_000,
        shown="50000; `disk`: no bound",
        ge=1,
    )
    target_utilization: Percentage | None = knob(
        None,
        STORING,
        "With `size: auto`: how much of the available memory the queue may use; for `disk`, how "
        "much of the available disk space.",
        example="60%",
        shown="85% with `size: auto`",
    )
    max_bytes: Size | None = knob(
        None,
        WAITING,
        "The most bytes the queue holds: on disk for `disk`, in memory for the others.",
        example="512Mi",
        shown="256Mi; `disk`: 10Gi",
        ge=1,
    )
    memory_percent: Percentage | None = knob(
        None,
        WAITING,
        "`max_bytes`, for `disk` `memory_bytes`, as a percentage of the memory that the process or "
        "its container may use. Not together with that knob.",
        example="10%",
        shown="off",
    )
    max_event_bytes: Size = knob(
        "64Mi",
        ALL,
        "A larger event is refused with `EventTooLarge`. At most `max_bytes` and `resend_bytes`.",
        example="1Mi",
        ge=1,
    )

    # when it fills
    full_behavior: FullBehavior = knob(
        FullBehavior.BLOCK,
        WAITING,
        "What publishing does when the queue is full: `block`, `drop_newest` or `drop_oldest`.",
        example="drop_oldest",
    )
    full_timeout: Duration | None = knob(
        None,
        WAITING,
        "How long publishing blocks before `QueueFull`. Only with `full_behavior: block`.",
        example="2s",
        shown="no limit",
    )
    discard_mark: Mark | None = knob(
        None,
        WAITING,
        "From this fill level on, events of `discard_severity` or less important are dropped.",
        example="98%",
        shown="off",
    )
    discard_severity: Count | None = knob(
        None,
        WAITING,
        "The most important severity that may be dropped: 0 (emergency) to 7 (debug). "
        "Together with `discard_mark`.",
        example=5,
        shown="off",
        ge=0,
        le=7,
    )
    full_delay_mark: Mark | None = knob(
        "97%",
        WAITING,
        "From this fill level on, producers that can wait as long as needed (files) wait. "
        "`null` is off, as it is without a `size`.",
        example="90%",
    )
    light_delay_mark: Mark | None = knob(
        "70%",
        WAITING,
        "From this fill level on, producers that can be slowed down (TCP) wait `light_delay`. "
        "`null` is off, as it is without a `size`.",
        example="60%",
    )
    light_delay: Duration = knob(
        "1s", WAITING, "The longest wait of such a producer, each time.", example="200ms"
    )
    high_watermark: Mark = knob(
        "90%",
        (Kind.DISK_ASSISTED,),
        "The fill level of the memory at which the oldest events begin to go to disk.",
        example="80%",
    )
    low_watermark: Mark | None = knob(
        None,
        (Kind.DISK_ASSISTED,),
        "The fill level at which this ends. Below `high_watermark`.",
        example="50%",
        shown="70% of `high_watermark`",
    )

    # reading
    dequeue_batch_size: Count = knob(
        1024, STORING, "The most events in a batch.", example=5000, ge=1
    )
    minimum_batch_size: Count = knob(
        1,
        WAITING,
        "Wait for this many events before handing out a batch. At most the size of a batch.",
        example=100,
        ge=1,
    )
    minimum_batch_timeout: Duration = knob(
        "1s", WAITING, "How long to wait for `minimum_batch_size`.", example="250ms"
    )
    dequeue_rate: Rate | None = knob(
        None,
        STORING,
        "The most events that are handed out per second.",
        example=5000,
        shown="no limit",
        gt=0,
    )
    dequeue_window: TimeWindow | None = knob(
        None,
        STORING,
        "Hand out events only at this time of day, local time; may run over midnight.",
        example="22:00-06:00",
        shown="always",
    )
    sampling_interval: Count = knob(
        1, ALL, "Keep one of this many events; drop and count the others.", example=10, ge=1
    )

    # stopping
    shutdown_timeout: Duration = knob(
        "5s", ALL, "How long a draining close waits for consumers.", example="30s"
    )
    completion_timeout: Duration = knob(
        "30s",
        STORING,
        "How long a worker's consumer may work on a batch. Then it is cancelled and the batch is "
        "released.",
        example="2m",
        gt=0,
    )
    idle_timeout: Duration = knob(
        "60s", STORING, "How long a worker without work stays.", example="10s"
    )
    save_on_shutdown: bool = knob(
        default=True,
        kinds=(Kind.DISK_ASSISTED,),
        meaning="Write the events in memory to disk on close; otherwise they are dropped.",
        example=False,
        shown="true",
    )

    # workers
    workers: Count = knob(
        1,
        STORING,
        "The most workers a pool runs at a time. 0: two for each core.",
        example=8,
        ge=0,
    )
    worker_minimum_events: Count | None = knob(
        None,
        STORING,
        "One worker per this many waiting events. At most `size`.",
        example=5000,
        shown="`size` / `workers`; without a `size`: `dequeue_batch_size`",
        ge=1,
    )

    # disk
    durability: DiskDurability = knob(
        Durability.INTERVAL,
        ON_DISK,
        "When data is synced: before every ack (`always`, one sync for all that wait), every "
        "`sync_interval` (`interval`), or only by the operating system (`never`).",
        example="always",
    )
    sync_interval: Duration = knob(
        "1s",
        ON_DISK,
        "The time between syncs. Only with `durability: interval`.",
        example="200ms",
        gt=0,
    )
    chunk_size: Size = knob(
        "64Mi", ON_DISK, "A new chunk file starts after this many bytes.", example="256Mi", ge=1
    )
    memory_bytes: Size = knob(
        "64Mi",
        ON_DISK,
        "How much of the newest events also stays in memory. A consumer that keeps up never reads "
        "the disk.",
        example="16Mi",
        ge=1,
    )
    failover_memory: Size | None = knob(
        None,
        (Kind.DISK,),
        "While the disk fails (not while it is full), up to this many bytes of new events wait in "
        "memory; beyond that, `full_behavior` applies. They are lost if the process ends first.",
        example="256Mi",
        shown="off: publishers wait",
        ge=1,
    )
    write_buffer: Size = knob(
        "2Mi",
        ON_DISK,
        "How much is collected before it is written. At most `chunk_size`.",
        example="256Ki",
    )
    stale_flush: Duration = knob(
        "30s",
        ON_DISK,
        "Collected events that are older than this are written in any case.",
        example="5s",
        gt=0,
    )
    compression: Compression = knob(
        Compression.AUTO,
        ON_DISK,
        "Compression of each frame: `snappy`, `none`, or `auto` (only while the disk is too slow).",
        example="none",
    )

    # proxy
    batch_size: Count = knob(
        1024, (Kind.PROXY,), "The most events in a batch sent to the node.", example=4096, ge=1
    )
    batches: Count = knob(
        4,
        (Kind.PROXY,),
        "How many batches the queue holds; `batches` × `batch_size` is the queue's size.",
        example=8,
        ge=1,
    )
    resend_bytes: Size = knob(
        "64Mi",
        (Kind.PROXY,),
        "The most bytes kept to be sent again: accepted by the node, not yet persisted, published "
        "at a level above `accepted`.",
        example="128Mi",
        ge=1,
    )

    def __init__(self, /, **knobs: Any) -> None:
        try:
            super().__init__(**knobs)
        except ValidationError as error:
            raise convert_validation_error(error, type(self).model_fields) from None

    # Pydantic's mark for an __init__ that only wraps the usual one: a larger model then validates
    # this one in place, and its errors say where the problem is.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def of(cls, **knobs: Any) -> Self:
        """Make settings from knobs as written in code or configuration: ``max_bytes="512Mi"``."""
        return cls(**knobs)

    def replace(self, **knobs: Any) -> Self:
        """Return the same explicit settings with some changed; defaults are computed again."""
        return type(self)(**{knob: getattr(self, knob) for knob in self.model_fields_set} | knobs)

    @classmethod
    def kinds_of(cls, knob: str) -> tuple[Kind, ...]:
        """Return the kinds of queue that a knob belongs to."""
        extra: Any = cls.model_fields[knob].json_schema_extra
        return tuple(Kind(kind) for kind in extra["kinds"])

    @property
    def most_workers(self) -> int:
        """The most workers of a pool, with a number for 0."""
        return self.workers or 2 * count_cores()

    def with_bounds(self, available: int, least: int = 0) -> QueueSettings:
        """Return settings with numbers for ``size: auto``, if it was set.

        ``available`` is the memory, or for ``disk`` the disk space, that the queue has or could
        have; ``least`` are the bytes that it holds in any case.
        """
        if self.target_utilization is None:
            return self
        largest = self.max_event_bytes if "max_event_bytes" in self.explicit else LEAST_AUTO_BYTES
        share = self.target_utilization.of(available)
        most = max(share, largest, least, LEAST_AUTO_BYTES)
        return self.replace(
            target_utilization=None,
            max_bytes=most,
            size=most // LEAST_EVENT_BYTES,
            worker_minimum_events=self.worker_minimum_events,
        )

    @property
    def explicit(self) -> frozenset[str]:
        """The knobs that were given a value."""
        return frozenset(knob for knob in self.model_fields_set if getattr(self, knob) is not None)

    @cached_property
    def marks(self) -> Marks:
        """The marks in events."""
        return Marks.from_settings(self)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, knobs: object) -> object:
        """Treat ``null`` like a missing knob; but ``null`` switches a delay mark off.

        ``size: auto`` becomes a target, which stands for it from then on.
        """
        if not isinstance(knobs, dict):
            return knobs
        if knobs.get("size") == AUTO:
            target = knobs.get("target_utilization") or TARGET_UTILIZATION
            knobs = {**knobs, "size": None, "target_utilization": target}
        left_out = cls.model_fields.keys() - {"full_delay_mark", "light_delay_mark"}
        return {
            knob: value
            for knob, value in knobs.items()
            if value is not None or knob not in left_out
        }

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Compute the defaults; raise ``ContradictorySettings`` with all problems."""
        problems = list(_find_misplaced(self))
        if not problems:
            _compute_defaults(self)
            checks = (_find_unpaired, _find_too_large, _find_wrong_marks)
            problems = [problem for check in checks for problem in check(self)]
        if problems:
            raise ContradictorySettings(problems)
        return self


# ── marks in events ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a queue in events; ``None`` is off."""

    discard: int | None
    full_delay: int | None
    light_delay: int | None
    high: int | None
    low: int | None

    @classmethod
    def from_settings(cls, settings: QueueSettings) -> Self:
        """Return the marks of a queue with these settings."""
        size = _get_mark_base(settings)

        def at_least_one(mark: int | Percentage | None) -> int | None:
            events = None if mark is None else to_events(mark, size)
            return None if events is None else max(1, events)

        high = low = None
        if settings.kind is Kind.DISK_ASSISTED:
            high = at_least_one(settings.high_watermark)
            if settings.low_watermark is not None:
                low = to_events(settings.low_watermark, size)
            elif high is not None:
                low = Percentage(70).of(high)
        return cls(
            discard=at_least_one(settings.discard_mark),
            full_delay=at_least_one(settings.full_delay_mark),
            light_delay=at_least_one(settings.light_delay_mark),
            high=high,
            low=None if high is None else low,
        )


# ── defaults by kind, and contradictions ────────────────────────────────────────────────────────

SIZES: Final = {Kind.MEMORY: 50_000, Kind.DISK_ASSISTED: 50_000}
"""Events, by kind. ``disk`` has no bound; a proxy computes it from its batches."""

MAX_BYTES: Final = {
    Kind.MEMORY: 256 * 2**20,
    Kind.DISK_ASSISTED: 256 * 2**20,
    Kind.PROXY: 256 * 2**20,
    Kind.DISK: 10 * 2**30,
}

_MARKS: Final = (
    "discard_mark",
    "full_delay_mark",
    "light_delay_mark",
    "high_watermark",
    "low_watermark",
)


def _find_misplaced(settings: QueueSettings) -> Iterator[ConfigIssue]:
    """Find knobs that the kind does not have, and a missing path."""
    kind = settings.kind
    for setting in sorted(settings.explicit):
        kinds = settings.kinds_of(setting)
        if setting == "size" and kind is Kind.PROXY:
            yield ConfigIssue(
                setting, "follows from batches * batch_size in a proxy queue; set those"
            )
        elif kind not in kinds:
            yield ConfigIssue(
                setting, f"means nothing in a {kind} queue, only in {', '.join(kinds)}"
            )
    if kind in ON_DISK and settings.path is None:
        yield ConfigIssue(
            "path", f"is required for a {kind} queue, such as /var/lib/turnlane/orders"
        )
    bound = _get_memory_bound(kind)
    if settings.memory_percent is not None and bound in settings.explicit:
        yield ConfigIssue("memory_percent", f"contradicts {bound}; set one of them")
    if settings.target_utilization is not None:
        for setting in sorted({"size", "max_bytes"} & settings.explicit):
            message = f"contradicts {setting}; remove one of them, or set size: {AUTO}"
            yield ConfigIssue("target_utilization", message)
        if settings.memory_percent is not None and bound == "max_bytes":
            yield ConfigIssue("memory_percent", f"contradicts size: {AUTO}; set one of them")


def _get_memory_bound(kind: Kind) -> str:
    """Return the knob that bounds the memory of a queue."""
    return "memory_bytes" if kind is Kind.DISK else "max_bytes"


def _get_mark_base(settings: QueueSettings) -> int | None:
    """Return the events of which marks are percentages; for ``size: auto`` one that is likely."""
    return settings.size if settings.target_utilization is None else 10**6


def _compute_defaults(settings: QueueSettings) -> None:
    """Compute the defaults in this order: later ones depend on earlier ones."""
    explicit, kind = settings.explicit, settings.kind

    def set_default(knob: str, value: int | None) -> None:
        if knob not in explicit:
            # Around the freeze, and not counted as set, so that replace() computes it again.
            settings.__dict__[knob] = value

    is_proxy, percent = kind is Kind.PROXY, settings.memory_percent
    batches = settings.batches * settings.batch_size
    if settings.target_utilization is None:
        set_default("size", batches if is_proxy else SIZES.get(kind))
        set_default("max_bytes", MAX_BYTES.get(kind))
    if percent is not None:
        set_default(_get_memory_bound(kind), max(1, percent.of(memory_limit())))
    if is_proxy:  # it takes its batches itself, to send them
        set_default("dequeue_batch_size", settings.batch_size)
    size = settings.size
    share = settings.dequeue_batch_size if size is None else max(1, size // settings.most_workers)
    set_default("worker_minimum_events", share)
    largest = min([settings.max_event_bytes, *_event_bounds(settings).values()])
    set_default("max_event_bytes", largest)
    set_default("write_buffer", min(settings.write_buffer, settings.chunk_size))


def _event_bounds(settings: QueueSettings) -> dict[str, int]:
    """Return the knobs that bound the size of a single event."""
    bounds = {} if settings.max_bytes is None else {"max_bytes": settings.max_bytes}
    if settings.kind is Kind.PROXY:
        bounds["resend_bytes"] = settings.resend_bytes
    return bounds


def _find_unpaired(settings: QueueSettings) -> Iterator[ConfigIssue]:
    """Find knobs that need another knob, or another value of it."""
    explicit = settings.explicit
    pair = ("discard_mark", "discard_severity")
    for one, other in (pair, pair[::-1]):
        if one in explicit and other not in explicit:
            yield ConfigIssue(other, f"is required with {one}; set both or neither")
    if "full_timeout" in explicit and settings.full_behavior is not FullBehavior.BLOCK:
        yield ConfigIssue("full_timeout", f"contradicts full_behavior: {settings.full_behavior}")
    if "sync_interval" in explicit and settings.durability is not Durability.INTERVAL:
        yield ConfigIssue("sync_interval", f"contradicts durability: {settings.durability}")


def _find_too_large(settings: QueueSettings) -> Iterator[ConfigIssue]:
    """Find numbers that exceed the knob that bounds them."""
    bytes_within = [("max_event_bytes", bound) for bound in _event_bounds(settings)]
    for setting, bound in [*bytes_within, ("write_buffer", "chunk_size")]:
        value, most = getattr(settings, setting), getattr(settings, bound)
        if value > most:
            message = f"must be at most {bound}, {format_size(most)}, not {format_size(value)}"
            yield ConfigIssue(setting, message)
    batch = "batch_size" if settings.kind is Kind.PROXY else "dequeue_batch_size"
    for setting, bound in (
        ("minimum_batch_size", batch),
        ("minimum_batch_size", "size"),
        ("worker_minimum_events", "size"),
    ):
        value, most = getattr(settings, setting), getattr(settings, bound)
        if most is not None and value > most:
            yield ConfigIssue(setting, f"must be at most {bound}, {most}, not {value}")


def _find_wrong_marks(settings: QueueSettings) -> Iterator[ConfigIssue]:
    """Find marks above the size, below one event, or in percent of a size that is not set."""
    knobs = [setting for setting in _MARKS if setting in settings.explicit]
    problems = [problem for setting in knobs for problem in _check_mark(settings, setting)]
    yield from problems
    high, low = settings.marks.high, settings.marks.low
    if not problems and high is not None and low is not None and low >= high:
        message = f"must be below high_watermark, {high} events, not {low}"
        yield ConfigIssue("low_watermark", message)


def _check_mark(settings: QueueSettings, setting: str) -> Iterator[ConfigIssue]:
    mark: int | Percentage = getattr(settings, setting)
    size = _get_mark_base(settings)
    if size is None and isinstance(mark, Percentage):
        yield ConfigIssue(setting, f"{mark} needs a size; set size, or write a number of events")
    elif mark == 0 and setting != "low_watermark":
        yield ConfigIssue(setting, "must be at least 1 event, or null to switch it off")
    elif size is not None and size == settings.size and isinstance(mark, int) and mark > size:
        yield ConfigIssue(setting, f"must be at most size, {size} events, not {mark}")
