"""Write the counts of the last runs into docs/reliability.md, from docs/reliability.json.

A run records its counts with :func:`record_run`. After a change of the JSON file by hand, run
``python -m scripts.reliability``; a test fails until the page has the same counts.
"""

from __future__ import annotations

import datetime as dt
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTS = ROOT / "docs/reliability.json"
PAGE = ROOT / "docs/reliability.md"
BEGIN = "<!-- counts: written by scripts/reliability.py -->"
END = "<!-- /counts -->"


def record_run(name: str, counts: Mapping[str, int | str]) -> None:
    """Replace the counts of a run, with the date and the commit, in the file and on the page."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    today = dt.datetime.now(dt.UTC).date().isoformat()
    runs = json.loads(COUNTS.read_text())
    runs[name] = {"date": today, "commit": commit, "counts": dict(counts)}
    COUNTS.write_text(json.dumps(runs, indent=2) + "\n")
    PAGE.write_text(with_table(PAGE.read_text()))


def _rows() -> Iterator[str]:
    for name, run in json.loads(COUNTS.read_text()).items():
        counts = "; ".join(
            f"{what}: {count:,}" if isinstance(count, int) else f"{what}: {count}"
            for what, count in run["counts"].items()
        )
        yield f"| {name} | {run['date']} | `{run['commit']}` | {counts} |"


def with_table(page: str) -> str:
    """Return the page with a new table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(["| run | date | commit | counts |", "|---|---|---|---|", *_rows()])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
