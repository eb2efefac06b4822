"""Draws bar charts for the tables of ``docs/benchmarks.md``."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.command import format_number
from benchmarks.outcome import Cell, Table

OURS, OTHERS = "#1f6f8b", "#b8c4cc"
LOGARITHMIC_FROM = 20
"""Bars that differ by more than this factor are drawn on a logarithmic axis."""

mpl.use("svg")
mpl.rcParams.update(
    {
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "turnlane",  # The same table gives the same file.
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def draw(table: Table, path: Path) -> None:
    """Draw a table: a chart for each column, with a bar for each row."""
    height = 0.6 + 0.3 * len(table.rows)
    width = 2.5 + 2.2 * len(table.columns)
    figure, fields = plt.subplots(
        1, len(table.columns), figsize=(width, height), sharey=True, squeeze=False
    )
    for number, (column, field) in enumerate(zip(table.columns, fields[0], strict=True)):
        cells = [row[number] for row in table.rows.values()]
        _draw_bars(field, list(table.rows), cells)
        field.set_title(column if not table.unit else f"{column}, {table.unit}", fontsize=9)
    fields[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_bars(field: Axes, names: list[str], cells: list[Cell | None]) -> None:
    values = [cell.value if cell else 0.0 for cell in cells]
    present = [value for value in values if value > 0]
    colors = [OURS if name.startswith(("turnlane", "proxy")) else OTHERS for name in names]
    if not any(color == OURS for color in colors):
        colors = [OURS] * len(names)
    field.barh(names, values, color=colors, height=0.65)
    if max(present) > LOGARITHMIC_FROM * min(present):
        field.set_xscale("log")
        field.set_xlim(min(present) / 3, max(present) * 20)
    else:
        field.set_xlim(0, max(present) * 1.35)
    for row, value in enumerate(values):
        field.text(value, row, f" {format_number(value)}", va="center", fontsize=8)
    field.tick_params(axis="x", labelsize=7)
