"""The command line that every benchmark module has."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.effort import Effort
from benchmarks.outcome import Cell, Outcome, Table


def main(run: Callable[[Effort], Outcome], description: str) -> None:
    """Run a benchmark and print its results."""
    options = _create_parser(description).parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.directory) as place:
        outcome = run(Effort(Path(place), quick=options.quick, scale=options.scale))
    show(outcome)
    print(f"\nTook {time.monotonic() - started:.0f} s.")
    if options.save:
        options.save.write_text(json.dumps(outcome.as_dict()))
    if options.json:
        print(json.dumps(outcome.named()))


def _create_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small run of some minutes")
    parser.add_argument("--json", action="store_true", help="end with the figures as JSON")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all results to a file")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path.cwd(),
        help="where to measure",
    )
    parser.add_argument("--scale", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser


def show(outcome: Outcome) -> None:
    """Print tables, then figures beside their targets."""
    for table in outcome.tables:
        _show_table(table)
    print("\nFigures: median (lowest to highest round)")
    for each in outcome.figures:
        spread = f"({each.low:.3g} to {each.high:.3g})"
        print(
            f"  {each.name:<24}{each.value:>8.3g} {each.unit:<9}{spread:<22}"
            f"{each.target:<7}{each.verdict}"
        )
    for remark in outcome.remarks:
        print(remark)


def _show_table(table: Table) -> None:
    width = max(map(len, table.rows)) + 2
    unit = f" ({table.unit})" if table.unit else ""
    print(f"\n{table.title}{unit}")
    print(" " * (width + 2) + "".join(f"{column:>26}" for column in table.columns))
    for name, cells in table.rows.items():
        print(f"  {name:<{width}}" + "".join(f"{format_cell(cell):>26}" for cell in cells))


def format_cell(cell: Cell | None) -> str:
    """Format a number with its lowest and highest round."""
    if cell is None:
        return "–"
    return f"{format_number(cell.value)} ({format_number(cell.low)}–{format_number(cell.high)})"


def format_number(value: float) -> str:
    """Format a number with three significant digits; large numbers end in ``k`` or ``M``."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
