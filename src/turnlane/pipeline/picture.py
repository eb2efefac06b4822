"""A pipeline's topology as an SVG picture, drawn without any library."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final, NamedTuple

from turnlane.pipeline.graph import EVERY, Topology, cut, destination, lane_steps
from turnlane.pipeline.settings import MAIN, ActionSettings

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
