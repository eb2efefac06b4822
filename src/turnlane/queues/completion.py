"""What follows from a queue's settings taken together: defaults by kind, and contradictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from turnlane.problems import Contradiction, Problem
from turnlane.quantities import Percentage, format_size
from turnlane.queues.contract import Durability, FullBehavior
from turnlane.queues.kinds import ON_DISK, Kind
from turnlane.queues.memory_limit import memory_limit

if TYPE_CHECKING:
    from turnlane.queues.settings import QueueSettings

SIZES: Final = {Kind.MEMORY: 50_000, Kind.DISK_ASSISTED: 50_000}
"""Events, by kind; ``disk`` has no bound, and a proxy's follows from its batches."""

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


def complete(settings: QueueSettings) -> None:
    """Fill in what was left open; raise :class:`Contradiction` with all that does not fit."""
    problems = list(_misplaced(settings))
    if not problems:
        _fill_in(settings)
        problems = list(_contradictions(settings))
    if problems:
        raise Contradiction(problems)


def _misplaced(settings: QueueSettings) -> Iterator[Problem]:
    """Knobs that the kind has no use for, and the path that it cannot do without."""
    kind = settings.kind
    for knob in sorted(settings.explicit):
        kinds = settings.kinds_of(knob)
        if knob == "size" and kind is Kind.PROXY:
            yield Problem(knob, "follows from batches * batch_size in a proxy queue; set those")
        elif kind not in kinds:
            yield Problem(knob, f"means nothing in a {kind} queue, only in {', '.join(kinds)}")
    if kind in ON_DISK and settings.path is None:
        yield Problem("path", f"is required for a {kind} queue, such as /var/lib/turnlane/orders")
    if settings.memory_percent is not None and settings.max_bytes is not None:
        yield Problem("memory_percent", "contradicts max_bytes; set one of them")


def _fill_in(settings: QueueSettings) -> None:
    """Work out what was left open, in this order: later defaults follow from earlier ones."""
    for knob, default in _DEFAULTS.items():
        if knob not in settings.explicit:
            # Past the freeze, and not counted as set, so that replace() works it out anew.
            settings.__dict__[knob] = default(settings)


def _size(settings: QueueSettings) -> int | None:
    if settings.kind is Kind.PROXY:
        return settings.batches * settings.batch_size
    return SIZES.get(settings.kind)


def _max_bytes(settings: QueueSettings) -> int | None:
    if settings.memory_percent is not None:
        return max(1, settings.memory_percent.of(memory_limit()))
    return MAX_BYTES.get(settings.kind)


def _worker_minimum_events(settings: QueueSettings) -> int:
    if settings.size is None:
        return settings.dequeue_batch_size
    return max(1, settings.size // settings.workers)


def _dequeue_batch_size(settings: QueueSettings) -> int:
    """A proxy takes its batches itself, to send them."""
    proxy = settings.kind is Kind.PROXY
    return settings.batch_size if proxy else settings.dequeue_batch_size


def _max_event_bytes(settings: QueueSettings) -> int:
    return min([settings.max_event_bytes, *_event_bounds(settings).values()])


def _write_buffer(settings: QueueSettings) -> int:
    return min(settings.write_buffer, settings.chunk_size)


_DEFAULTS: Final[dict[str, Callable[[QueueSettings], int | None]]] = {
    "size": _size,
    "max_bytes": _max_bytes,
    "dequeue_batch_size": _dequeue_batch_size,
    "worker_minimum_events": _worker_minimum_events,
    "max_event_bytes": _max_event_bytes,
    "write_buffer": _write_buffer,
}


def _event_bounds(settings: QueueSettings) -> dict[str, int]:
    """The knobs that no single event may be larger than."""
    bounds = {} if settings.max_bytes is None else {"max_bytes": settings.max_bytes}
    if settings.kind is Kind.PROXY:
        bounds["resend_bytes"] = settings.resend_bytes
    return bounds


def _contradictions(settings: QueueSettings) -> Iterator[Problem]:
    yield from _unpaired(settings)
    yield from _too_much(settings)
    yield from _marks_out_of_place(settings)


def _unpaired(settings: QueueSettings) -> Iterator[Problem]:
    """Knobs that need another one, or another value of it."""
    explicit = settings.explicit
    for one, other in (
        ("discard_mark", "discard_severity"),
        ("discard_severity", "discard_mark"),
    ):
        if one in explicit and other not in explicit:
            yield Problem(other, f"is required with {one}; set both or neither")
    if "full_timeout" in explicit and settings.full_behavior is not FullBehavior.BLOCK:
        yield Problem("full_timeout", f"contradicts full_behavior: {settings.full_behavior}")
    if "sync_interval" in explicit and settings.durability is not Durability.INTERVAL:
        yield Problem("sync_interval", f"contradicts durability: {settings.durability}")


def _too_much(settings: QueueSettings) -> Iterator[Problem]:
    """Numbers that exceed the one that bounds them."""
    bytes_within = [("max_event_bytes", bound) for bound in _event_bounds(settings)]
    for knob, bound in [*bytes_within, ("write_buffer", "chunk_size")]:
        value, most = getattr(settings, knob), getattr(settings, bound)
        if value > most:
            message = f"must be at most {bound}, {format_size(most)}, not {format_size(value)}"
            yield Problem(knob, message)
    batch = "batch_size" if settings.kind is Kind.PROXY else "dequeue_batch_size"
    for knob, bound in (
        ("minimum_batch_size", batch),
        ("minimum_batch_size", "size"),
        ("worker_minimum_events", "size"),
    ):
        value, most = getattr(settings, knob), getattr(settings, bound)
        if most is not None and value > most:
            yield Problem(knob, f"must be at most {bound}, {most}, not {value}")


def _marks_out_of_place(settings: QueueSettings) -> Iterator[Problem]:
    """Marks beyond the size, below one event, or relative to a size that is not there."""
    knobs = [knob for knob in _MARKS if knob in settings.explicit]
    problems = [problem for knob in knobs for problem in _mark_problems(settings, knob)]
    yield from problems
    high, low = settings.marks.high, settings.marks.low
    if not problems and high is not None and low is not None and low >= high:
        message = f"must be below high_watermark, {high} events, not {low}"
        yield Problem("low_watermark", message)


def _mark_problems(settings: QueueSettings, knob: str) -> Iterator[Problem]:
    mark: int | Percentage = getattr(settings, knob)
    size = settings.size
    if size is None and isinstance(mark, Percentage):
        yield Problem(knob, f"{mark} of what? Set size, or write a number of events")
    elif mark == 0 and knob != "low_watermark":
        yield Problem(knob, "must be at least 1 event, or null to switch it off")
    elif size is not None and isinstance(mark, int) and mark > size:
        yield Problem(knob, f"must be at most size, {size} events, not {mark}")
