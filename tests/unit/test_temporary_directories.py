"""The temporary directories of a process are gone when it ends, in any way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from turnlane.cli.process import exit_now
from turnlane.runtime import create_scratch_directory as scratch

assert scratch("turnlane-").is_dir()
(scratch("turnlane-") / "file").touch()
{end}
"""


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "exit_now(3)"])
def test_ended_process_leaves_no_scratch_directories(end: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ended.returncode == 3
    assert not list(tmp_path.iterdir())
