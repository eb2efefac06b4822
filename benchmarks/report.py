"""``make bench``: run every benchmark module and write ``docs/benchmarks.md``.

Each module runs in a process of its own and saves what it found; this one only draws and writes.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import cell_text
from benchmarks.machine import describe_machine
from benchmarks.outcome import Figure, Outcome, Table
from benchmarks.plots import draw

MODULES = {
    "queues": "Queues",
    "node": "The node",
    "spark": "The pipeline on Spark",
    "delivery": "Delivery",
    "table": "Queue tables",
}
"""The benchmark modules, and the titles of their chapters."""

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "img"

INTRODUCTION = """\
Written by `make bench`; `python -m benchmarks.{first} --quick` prints the same tables in about a
minute, as it does for every other chapter but those on Spark, which take some. Contestants take
turns, several rounds in one run, and what is quoted is the median, with the lowest and the highest
round after it. A ratio is taken round by round between neighbours, so that both saw the same
machine at the same time. Events are log lines of words, numbers and timestamps, the same in every
run. A figure that misses its target is shown so; nothing fails for being slow.
"""


def main() -> None:
    """Measure, draw, write."""
    parser = argparse.ArgumentParser(description="Run all benchmarks, write docs/benchmarks.md.")
    parser.add_argument("--quick", action="store_true", help="a minute or two a module")
    options = parser.parse_args()
    outcomes = {name: measured(name, quick=options.quick) for name in MODULES}
    IMAGES.mkdir(exist_ok=True)
    for drawn in IMAGES.glob("*.svg"):  # some may be of tables that there are no more
        drawn.unlink()
    PAGE.write_text(page(outcomes, quick=options.quick))
    print(f"Wrote {PAGE.relative_to(ROOT)}.")


def measured(name: str, *, quick: bool) -> Outcome:
    """Run one module; what it prints is seen, what it saves is returned."""
    with tempfile.TemporaryDirectory() as place:
        saved = Path(place) / "outcome.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--save", str(saved)]
        subprocess.run(command + ["--quick"] * quick, cwd=ROOT, check=True)
        return Outcome.from_dict(json.loads(saved.read_text()))


def page(outcomes: dict[str, Outcome], *, quick: bool) -> str:
    """The whole page."""
    today = dt.datetime.now(tz=dt.UTC).date()
    parts = ["# Benchmarks", INTRODUCTION.format(first=next(iter(MODULES)))]
    parts.append(_machine({"Date": f"{today}{', a quick run' if quick else ''}"}))
    for name, outcome in outcomes.items():
        parts += [f"## {MODULES[name]}", _figures(outcome.figures), *outcome.remarks]
        parts += [_chapter(name, table) for table in outcome.tables]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _machine(more: dict[str, str]) -> str:
    return _grid(["Machine", ""], [*more.items(), *describe_machine(ROOT).items()])


def _figures(figures: Sequence[Figure]) -> str:
    rows = [
        (
            f"`{each.name}`",
            f"{each.value:.3g} {each.unit}".strip(),
            f"{each.low:.3g}–{each.high:.3g}",
            f"{each.target} {each.verdict}".strip(),
            each.how,
        )
        for each in figures
    ]
    return _grid(["figure", "median", "rounds", "target", "how it is measured"], rows)


def _chapter(module: str, table: Table) -> str:
    image = f"{module}-{_slug(table.title)}.svg"
    draw(table, IMAGES / image)
    unit = f", {table.unit}" if table.unit else ""
    rows = [(name, *map(cell_text, cells)) for name, cells in table.rows.items()]
    return "\n\n".join(
        (
            f"### {table.title}",
            table.note,
            _grid([f"median (rounds){unit}", *table.columns], rows),
            f"![{table.title}](img/{image})",
        )
    )


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


if __name__ == "__main__":
    main()
