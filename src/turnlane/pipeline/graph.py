"""A pipeline's topology for people: as text for a terminal, and as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
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


# ── picture ──
# A pipeline's topology as an SVG picture, drawn without any library.

_ROW: Final = 74
_HEIGHT: Final = 48
_TOP: Final = 64
_MARGIN: Final = 24
_COLUMNS: Final = {
    "input": (_MARGIN, 220),
    "main": (304, 230),
    "action": (604, 300),
    "queue": (964, 150),
    "output": (1174, 240),
}
"""Where boxes begin, and how wide they are."""
_WIDTH: Final = 1174 + 240 + _MARGIN
_LETTER: Final = 7.2
"""How wide a letter is, about, at the size of the text."""
_TITLES: Final = {
    "input": "inputs",
    "main": "main queue and lane",
    "action": "actions, in order",
    "queue": "queues, a lane each",
    "output": "outputs",
}
_STYLE: Final = """
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933; }
.title { font-size: 13px; font-weight: 600; fill: #52606d; }
.small { fill: #52606d; }
.name { font-weight: 600; }
rect { stroke-width: 1.5; }
.paper { fill: #ffffff; }
.input { fill: #e6f6ff; stroke: #2186eb; }
.main { fill: #fff3c4; stroke: #cb6e17; }
.action { fill: #f5f7fa; stroke: #7b8794; }
.queue { fill: #fff3c4; stroke: #cb6e17; }
.output { fill: #e3f9e5; stroke: #2f8132; }
.ends { fill: #f5f7fa; stroke: #9aa5b1; stroke-dasharray: 4 3; }
path { fill: none; stroke: #7b8794; stroke-width: 1.5; marker-end: url(#arrow); }
path.lane { stroke: #cb6e17; stroke-width: 2.5; }
"""


class _Box(NamedTuple):
    kind: str
    style: str
    at: float
    """The middle of its height."""
    name: str
    about: str = ""

    @property
    def left(self) -> int:
        return _COLUMNS[self.kind][0]

    @property
    def right(self) -> int:
        return self.left + _COLUMNS[self.kind][1]


def svg(topology: Topology) -> str:
    """The whole picture."""
    rows = max(len(topology.inputs), len(topology.pipeline.actions), 1)
    height = _TOP + rows * _ROW + 56
    parts = [*_frame(topology, height), *_contents(topology, rows), "</svg>"]
    return "\n".join(parts) + "\n"


def _frame(topology: Topology, height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">'
    )
    yield f"<title>{escape(topology.lanes)}</title>"
    yield f"<style>{_STYLE}</style>"
    yield (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#7b8794"/></marker></defs>'
    )
    yield f'<rect class="paper" x="0" y="0" width="{_WIDTH}" height="{height}"/>'
    for kind, title in _TITLES.items():
        yield f'<text class="title" x="{_COLUMNS[kind][0]}" y="34">{title}</text>'
    yield f'<text class="title" x="{_MARGIN}" y="{height - 22}">{escape(topology.lanes)}</text>'


def _contents(topology: Topology, rows: int) -> Iterator[str]:
    middle = _TOP + rows * _ROW / 2
    kind = topology.queues.get(MAIN, "disk")
    main = _Box("main", "main", middle, f"{MAIN} ({kind})", " · ".join(topology.stages))
    yield from _drawn(main)
    for at, each in enumerate(topology.inputs):
        row = _row(at, len(topology.inputs), rows)
        queue = "" if each.queue == MAIN else f" → queue {each.queue}"
        box = _Box("input", "input", row, f"{each.name}{queue}", each.where)
        yield from _drawn(box)
        if each.queue == MAIN:
            yield _arrow(box, main)
    for at, action in enumerate(topology.pipeline.actions):
        row = _row(at, len(topology.pipeline.actions), rows)
        yield from _action(action, destination(action, topology.pipeline), main, row)


def _action(action: ActionSettings, where: str, main: _Box, row: float) -> Iterator[str]:
    box = _Box("action", "action", row, action.name, action.filter or EVERY)
    ends = action.discards and action.is_direct
    name, _, about = where.partition(" ")
    output = _Box("output", "ends" if ends else "output", row, name.rstrip(":"), about)
    yield from _drawn(box)
    yield from _drawn(output)
    yield _arrow(main, box)
    if action.is_direct:
        yield _arrow(box, output)
        return
    assert action.queue is not None
    steps = ", ".join(lane_steps(action))
    queue = _Box("queue", "queue", row, str(action.queue.kind), steps)
    yield from _drawn(queue)
    yield _arrow(box, queue)
    yield _arrow(queue, output, "lane")


def _row(at: int, count: int, rows: int) -> float:
    """The middle of a row; fewer boxes than rows stand around the middle."""
    return _TOP + (rows - count) * _ROW / 2 + (at + 0.5) * _ROW


def _drawn(box: _Box) -> Iterator[str]:
    width = box.right - box.left
    room = int((width - 20) / _LETTER)
    top = box.at - _HEIGHT / 2
    whole = f"{box.name} {box.about}".strip()
    yield f"<g><title>{escape(whole)}</title>"
    yield (
        f'<rect class="{box.style}" x="{box.left}" y="{top:g}" width="{width}" '
        f'height="{_HEIGHT}" rx="6"/>'
    )
    y = box.at - 4 if box.about else box.at + 4
    yield f'<text class="name" x="{box.left + 10}" y="{y:g}">{escape(cut(box.name, room))}</text>'
    if box.about:
        about = escape(cut(box.about, room))
        yield f'<text class="small" x="{box.left + 10}" y="{box.at + 14:g}">{about}</text>'
    yield "</g>"


def _arrow(start: _Box, end: _Box, style: str = "way") -> str:
    bend = (end.left - start.right) / 2
    return (
        f'<path class="{style}" d="M{start.right},{start.at:g} '
        f"C{start.right + bend:g},{start.at:g} {end.left - bend:g},{end.at:g} "
        f'{end.left},{end.at:g}"/>'
    )
