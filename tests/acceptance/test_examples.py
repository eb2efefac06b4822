"""Do the examples work, or say what they lack? ``make demo`` runs the pipeline to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_killed_publisher_leaves_every_event_accounted_for() -> None:
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


def test_demo_without_its_requirements_ends_with_the_reason(tmp_path: Path) -> None:
    """It would wait for four minutes, and Java does not come by itself."""
    pytest.importorskip("pyspark.sql")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "pipeline.py")],
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "Spark needs Java 17" in done.stdout
    assert "turnlane run has ended with exit code 1" in done.stderr


@pytest.mark.parametrize(
    ("what", "who"),
    [("demo", "The demo needs"), ("test", "Some tests need"), ("bench", "Some benchmarks need")],
)
def test_missing_requirement_names_the_part_that_needs_it(
    what: str, who: str, tmp_path: Path
) -> None:
    """On a machine with an old Java, for a user who may install nothing."""
    for name, says in (("java", "echo 'openjdk version \"11.0.2\"' >&2"), ("id", "echo 1000")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts/peers"), what],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr.startswith(f"{who}: ")
    assert "openjdk-17-jre-headless" in done.stderr
