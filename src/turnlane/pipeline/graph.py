"""Draws the topology of a pipeline: as text for a terminal, and as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple

from turnlane.pipeline.settings import MAIN, ActionSettings, PipelineSettings

ANY_EVENT: Final = "every event"
NO_FURTHER_ACTION: Final = "discard: goes no further"
LOCATION_SETTINGS: Final = ("path", "url", "address", "endpoint", "queue", "table")
"""The settings of an output that may name its destination; the first one found is shown."""


class InputSummary(NamedTuple):
    """An input as the drawing shows it."""

    name: str
    where: str
    queue: str


@dataclass(frozen=True)
class Topology:
    """Inputs, queues and actions of a pipeline, for :func:`render_text` and :func:`render_svg`."""

    inputs: tuple[InputSummary, ...]
    pipeline: PipelineSettings
    """The caller has removed secrets: filters and destinations are shown as they are."""
    queues: Mapping[str, str]
    """The kinds of all queues, by name."""

    @property
    def stages(self) -> list[str]:
        """The steps of the main lane before its actions."""
        parse = getattr(self.pipeline.parse, "format", None)
        found = [f"parse: {parse}"] if parse not in (None, "none") else []
        if self.pipeline.transform is not None:
            found.append(f"transform: {self.pipeline.transform}")
        return found

    @property
    def lanes(self) -> str:
        """A line with the number of lanes: the main lane plus one for each queued action."""
        names = list(self.pipeline.lane_names())
        return f"lanes: 1 + {len(names) - 1} = {len(names)} ({', '.join(names)})"


def describe_destination(action: ActionSettings, pipeline: PipelineSettings) -> str:
    """Return the type and the address of an action's output in a few words."""
    output = action.output
    joining = pipeline.find_joining_action(action.name)
    if joining is not None:
        return f"joined by {joining}"
    if action.is_discard:
        return NO_FURTHER_ACTION if action.is_direct else "discard"
    words = [str(output.type)]
    if output.type == "spark":
        words.append(str(output.format))
    for name in LOCATION_SETTINGS:
        value = getattr(output, name, None)
        if value is not None:
            words.append(str(value))
            break
    return " ".join(words)


def describe_lane_steps(action: ActionSettings) -> list[str]:
    """Return what an action's lane does between queue and output."""
    steps = [] if action.transform is None else [f"transform {action.transform}"]
    return steps if action.sql is None else [*steps, "sql"]


def shorten(text: str, length: int) -> str:
    """Return the text in one line, with an ellipsis if it is longer than ``length``."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


# ── text ──


def render_text(topology: Topology, width: int = 100) -> Iterator[str]:
    """Yield the topology as lines of text, about ``width`` characters wide."""
    yield "inputs"
    yield from _render_inputs(topology, width)
    yield ""
    yield f"queue {MAIN} ({topology.queues.get(MAIN, 'disk')})"
    for stage in topology.stages:
        yield f"  │ {shorten(stage, width - 4)}"
    yield "  │"
    yield from _render_actions(topology, width)
    yield ""
    yield topology.lanes


def _render_inputs(topology: Topology, width: int) -> Iterator[str]:
    names = max((len(each.name) for each in topology.inputs), default=0)
    places = min(width // 2, max((len(each.where) for each in topology.inputs), default=0))
    mains = [each for each in topology.inputs if each.queue == MAIN]
    others = [each for each in topology.inputs if each.queue != MAIN]
    for each in [*others, *mains]:
        head = f"  {each.name:<{names}}  {shorten(each.where, places):<{places}} "
        if each in others:
            yield f"{head}──▶ queue {each.queue} ({topology.queues.get(each.queue, '?')})"
        elif each is mains[-1]:
            yield f"{head}{'──▶' if len(mains) == 1 else '─┴▶'} queue {MAIN}"
        else:
            yield f"{head}─{'┐' if each is mains[0] else '┤'}"
    if not topology.inputs:
        yield "  (none: events are published by clients)"


def _render_actions(topology: Topology, width: int) -> Iterator[str]:
    actions = topology.pipeline.actions
    names = max(len(action.name) for action in actions)
    room = max(len(ANY_EVENT), width - names - 50)
    filters = [shorten(action.filter or ANY_EVENT, room) for action in actions]
    longest = max(map(len, filters))
    for at, (action, shown) in enumerate(zip(actions, filters, strict=True)):
        corner = "└─" if at == len(actions) - 1 else "├─"
        way = [describe_destination(action, topology.pipeline)]
        if not action.is_direct:
            assert action.queue is not None
            way = [f"queue ({action.queue.kind})", *describe_lane_steps(action), *way]
        yield f"  {corner} {action.name:<{names}}  {shown:<{longest}} ──▶ {' ══▶ '.join(way)}"


# ── SVG, without a drawing library ──

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
"""The left edge and the width of each column of boxes."""
_WIDTH: Final = 1174 + 240 + _MARGIN
_LETTER: Final = 7.2
"""The approximate width of a letter at the size of the text."""
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
    """A box of the picture: in the column ``kind``, drawn in a CSS class ``style``."""

    kind: str
    style: str
    at: float
    """The vertical position of its centre."""
    name: str
    about: str = ""

    @property
    def left(self) -> int:
        return _COLUMNS[self.kind][0]

    @property
    def right(self) -> int:
        return self.left + _COLUMNS[self.kind][1]


def render_svg(topology: Topology) -> str:
    """Return the topology as an SVG document."""
    rows = max(len(topology.inputs), len(topology.pipeline.actions), 1)
    height = _TOP + rows * _ROW + 56
    parts = [*_draw_frame(topology, height), *_draw_contents(topology, rows), "</svg>"]
    return "\n".join(parts) + "\n"


def _draw_frame(topology: Topology, height: int) -> Iterator[str]:
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


def _draw_contents(topology: Topology, rows: int) -> Iterator[str]:
    middle = _TOP + rows * _ROW / 2
    kind = topology.queues.get(MAIN, "disk")
    main = _Box("main", "main", middle, f"{MAIN} ({kind})", " · ".join(topology.stages))
    yield from _draw_box(main)
    for at, each in enumerate(topology.inputs):
        row = _compute_row(at, len(topology.inputs), rows)
        queue = "" if each.queue == MAIN else f" → queue {each.queue}"
        box = _Box("input", "input", row, f"{each.name}{queue}", each.where)
        yield from _draw_box(box)
        if each.queue == MAIN:
            yield _draw_arrow(box, main)
    for at, action in enumerate(topology.pipeline.actions):
        row = _compute_row(at, len(topology.pipeline.actions), rows)
        yield from _draw_action(action, describe_destination(action, topology.pipeline), main, row)


def _draw_action(action: ActionSettings, where: str, main: _Box, row: float) -> Iterator[str]:
    box = _Box("action", "action", row, action.name, action.filter or ANY_EVENT)
    ends = action.is_discard and action.is_direct
    name, _, about = where.partition(" ")
    output = _Box("output", "ends" if ends else "output", row, name.rstrip(":"), about)
    yield from _draw_box(box)
    yield from _draw_box(output)
    yield _draw_arrow(main, box)
    if action.is_direct:
        yield _draw_arrow(box, output)
        return
    assert action.queue is not None
    steps = ", ".join(describe_lane_steps(action))
    queue = _Box("queue", "queue", row, str(action.queue.kind), steps)
    yield from _draw_box(queue)
    yield _draw_arrow(box, queue)
    yield _draw_arrow(queue, output, "lane")


def _compute_row(at: int, count: int, rows: int) -> float:
    """Return the centre of a row. If there are fewer boxes than rows, they are centred."""
    return _TOP + (rows - count) * _ROW / 2 + (at + 0.5) * _ROW


def _draw_box(box: _Box) -> Iterator[str]:
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
    name = escape(shorten(box.name, room))
    yield f'<text class="name" x="{box.left + 10}" y="{y:g}">{name}</text>'
    if box.about:
        about = escape(shorten(box.about, room))
        yield f'<text class="small" x="{box.left + 10}" y="{box.at + 14:g}">{about}</text>'
    yield "</g>"


def _draw_arrow(start: _Box, end: _Box, style: str = "way") -> str:
    bend = (end.left - start.right) / 2
    return (
        f'<path class="{style}" d="M{start.right},{start.at:g} '
        f"C{start.right + bend:g},{start.at:g} {end.left - bend:g},{end.at:g} "
        f'{end.left},{end.at:g}"/>'
    )
