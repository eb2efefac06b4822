"""Write the reference table of every queue knob into docs/queues.md, from the settings themselves.

Run ``python -m scripts.knob_table`` after changing a knob; a test fails until that is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnlane.queues.settings import ALL, ON_DISK, STORING, WAITING, Kind, QueueSettings

PAGE = Path(__file__).parents[1] / "docs/queues.md"
BEGIN = "<!-- knobs: written by scripts/knob_table.py -->"
END = "<!-- /knobs -->"

GROUPS = {
    ALL: "all",
    WAITING: "all but `direct`",
    STORING: "`memory`, `disk`, `disk_assisted`",
    ON_DISK: "`disk`, `disk_assisted`",
    (Kind.DISK,): "`disk`",
    (Kind.DISK_ASSISTED,): "`disk_assisted`",
    (Kind.PROXY,): "`proxy`",
}


def knob_table() -> str:
    """The table in Markdown, a row for each knob."""
    return "\n".join(
        ["| knob | kinds | default | meaning | example |", "|---|---|---|---|---|", *_rows()]
    )


def _rows() -> Iterator[str]:
    for knob, field in QueueSettings.model_fields.items():
        extra: Any = field.json_schema_extra
        example = (field.examples or [None])[0]
        written = str(example).lower() if isinstance(example, bool) else example
        kinds = GROUPS[QueueSettings.kinds_of(knob)]
        yield (
            f"| `{knob}` | {kinds} | {extra['shown']} | {field.description} | `{knob}: {written}` |"
        )


def with_table(page: str) -> str:
    """The page with the table between its two marks made new."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{knob_table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
