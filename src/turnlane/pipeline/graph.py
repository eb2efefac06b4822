"""A pipeline's topology for people: as text for a terminal, and as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from turnlane.pipeline.settings import MAIN, ActionSettings, PipelineSettings

EVERY: Final = "every event"
ENDS: Final = "discard: goes no further"
PLACES: Final = ("path", "url", "address", "endpoint", "queue", "table")
"""The settings of an output that may say where it leads to."""


class Source(NamedTuple):
    """An input, as it is shown."""

    name: str
    where: str
    queue: str


@dataclass(frozen=True)
class Topology:
    """What there is to be drawn."""

    inputs: tuple[Source, ...]
    pipeline: PipelineSettings
    """With filters and places as they may be shown: all of them are."""
    queues: Mapping[str, str]
    """The kinds of all queues, by name."""

    @property
    def stages(self) -> list[str]:
        """What the main lane does with every event."""
        parse = getattr(self.pipeline.parse, "format", None)
        found = [f"parse: {parse}"] if parse not in (None, "none") else []
        if self.pipeline.transform is not None:
            found.append(f"transform: {self.pipeline.transform}")
        return found

    @property
    def lanes(self) -> str:
        """The lanes, counted as rsyslog counts threads: one, and one for each queued action."""
        names = list(self.pipeline.lanes())
        return f"lanes: 1 + {len(names) - 1} = {len(names)} ({', '.join(names)})"


def destination(action: ActionSettings, pipeline: PipelineSettings) -> str:
    """Where an action leads to, in a few words."""
    output = action.output
    joiner = pipeline.joiner(action.name)
    if joiner is not None:
        return f"joined by {joiner}"
    if action.discards:
        return ENDS if action.is_direct else "discard"
    words = [str(output.type)]
    if output.type == "spark":
        words.append(str(output.format))
    for name in PLACES:
        value = getattr(output, name, None)
        if value is not None:
            words.append(str(value))
            break
    return " ".join(words)


def lane_steps(action: ActionSettings) -> list[str]:
    """What an action's lane does between queue and output."""
    steps = [] if action.transform is None else [f"transform {action.transform}"]
    return steps if action.sql is None else [*steps, "sql"]


def cut(text: str, length: int) -> str:
    """The text in one line, with an ellipsis if it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def text_lines(topology: Topology, width: int = 100) -> Iterator[str]:
    """The topology, a line at a time."""
    yield "inputs"
    yield from _input_lines(topology, width)
    yield ""
    yield f"queue {MAIN} ({topology.queues.get(MAIN, 'disk')})"
    for stage in topology.stages:
        yield f"  │ {cut(stage, width - 4)}"
    yield "  │"
    yield from _action_lines(topology, width)
    yield ""
    yield topology.lanes


def _input_lines(topology: Topology, width: int) -> Iterator[str]:
    names = max((len(each.name) for each in topology.inputs), default=0)
    places = min(width // 2, max((len(each.where) for each in topology.inputs), default=0))
    mains = [each for each in topology.inputs if each.queue == MAIN]
    others = [each for each in topology.inputs if each.queue != MAIN]
    for each in [*others, *mains]:
        head = f"  {each.name:<{names}}  {cut(each.where, places):<{places}} "
        if each in others:
            yield f"{head}──▶ queue {each.queue} ({topology.queues.get(each.queue, '?')})"
        elif each is mains[-1]:
            yield f"{head}{'──▶' if len(mains) == 1 else '─┴▶'} queue {MAIN}"
        else:
            yield f"{head}─{'┐' if each is mains[0] else '┤'}"
    if not topology.inputs:
        yield "  (none: events are published by clients)"


def _action_lines(topology: Topology, width: int) -> Iterator[str]:
    actions = topology.pipeline.actions
    names = max(len(action.name) for action in actions)
    room = max(len(EVERY), width - names - 50)
    filters = [cut(action.filter or EVERY, room) for action in actions]
    longest = max(map(len, filters))
    for at, (action, shown) in enumerate(zip(actions, filters, strict=True)):
        corner = "└─" if at == len(actions) - 1 else "├─"
        way = [destination(action, topology.pipeline)]
        if not action.is_direct:
            assert action.queue is not None
            way = [f"queue ({action.queue.kind})", *lane_steps(action), *way]
        yield f"  {corner} {action.name:<{names}}  {shown:<{longest}} ──▶ {' ══▶ '.join(way)}"
