"""``make bench``: run every benchmark module and write ``docs/benchmarks.md``.

Each module runs in a process of its own and saves its results; this module draws and writes them.
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

from benchmarks.command import format_cell
from benchmarks.machine import describe_machine
from benchmarks.outcome import Figure, Outcome, Table
from benchmarks.plots import draw

MODULES = {
    "queues": "Queues",
    "node": "The node",
    "spark": "The pipeline on Spark",
    "realistic": "Parsers and filters",
    "delivery": "Delivery",
    "table": "Queue tables",
}
"""The benchmark modules, and the titles of their chapters."""

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "img"

INTRODUCTION = """\
`make bench` writes this page. `python -m benchmarks.{first} --quick` prints the tables of one
chapter in about a minute; chapters with Spark take a few minutes. Systems take turns in several
rounds. The page shows the median, followed by the lowest and the highest round. A ratio is computed
round by round, because the speed of a machine changes with time. Events are log lines of words,
numbers and timestamps, the same in every run. A figure that misses its target has the mark ✗; a
missed target is not an error.
"""


def main() -> None:
    """Run all modules, draw the charts, and write the page."""
    parser = argparse.ArgumentParser(description="Run all benchmarks, write docs/benchmarks.md.")
    parser.add_argument("--quick", action="store_true", help="one or two minutes for each module")
    options = parser.parse_args()
    outcomes = {name: run_module(name, quick=options.quick) for name in MODULES}
    IMAGES.mkdir(exist_ok=True)
    for drawn in IMAGES.glob("*.svg"):  # Some may belong to tables that no longer exist.
        drawn.unlink()
    PAGE.write_text(build_page(outcomes, quick=options.quick))
    print(f"Wrote {PAGE.relative_to(ROOT)}.")


def run_module(name: str, *, quick: bool) -> Outcome:
    """Run one module, which prints its results; returns them."""
    with tempfile.TemporaryDirectory() as place:
        saved = Path(place) / "outcome.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--save", str(saved)]
        subprocess.run(command + ["--quick"] * quick, cwd=ROOT, check=True)
        return Outcome.from_dict(json.loads(saved.read_text()))


def build_page(outcomes: dict[str, Outcome], *, quick: bool) -> str:
    """Return the whole page."""
    today = dt.datetime.now(tz=dt.UTC).date()
    parts = ["# Benchmarks", INTRODUCTION.format(first=next(iter(MODULES)))]
    parts.append(_build_machine_table({"Date": f"{today}{', a quick run' if quick else ''}"}))
    for name, outcome in outcomes.items():
        parts += [f"## {MODULES[name]}", _build_figures(outcome.figures), *outcome.remarks]
        parts += [_build_chapter(name, table) for table in outcome.tables]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _build_machine_table(more: dict[str, str]) -> str:
    return _build_grid(["Machine", ""], [*more.items(), *describe_machine(ROOT).items()])


def _build_figures(figures: Sequence[Figure]) -> str:
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
    return _build_grid(["figure", "median", "rounds", "target", "how it is measured"], rows)


def _build_chapter(module: str, table: Table) -> str:
    image = f"{module}-{_make_slug(table.title)}.svg"
    draw(table, IMAGES / image)
    unit = f", {table.unit}" if table.unit else ""
    rows = [(name, *map(format_cell, cells)) for name, cells in table.rows.items()]
    paragraphs = (
        f"### {table.title}",
        table.note,
        _build_grid([f"median (rounds){unit}", *table.columns], rows),
        f"![{table.title}](img/{image})",
    )
    return "\n\n".join(filter(None, paragraphs))


def _build_grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _make_slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


if __name__ == "__main__":
    main()
