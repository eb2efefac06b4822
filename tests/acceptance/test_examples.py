"""Do the examples work? ``make demo`` runs the pipeline; the others are run here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_publisher_is_killed_and_every_event_accounted_for() -> None:
    program = EXAMPLES / "kill_and_recover.py"
    done = subprocess.run(
        [sys.executable, str(program), "--events", "50000"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50,000" in done.stdout
