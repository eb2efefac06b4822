"""Each parser of outside bytes gets its whole corpus, and new bytes for a few seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import IN_CI, skip_or_fail
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
SECONDS = 10 if IN_CI else 2


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_bytes_of_the_corpus_break_no_promise(name: str) -> None:
    paths = sorted((CORPUS / name).iterdir())
    assert paths
    for path in paths:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_new_bytes_break_no_promise(name: str, tmp_path: Path) -> None:
    if sys.version_info >= (3, 14) or os.uname().machine != "x86_64":
        pytest.skip("atheris runs on x86-64 with Python 3.11 to 3.13; elsewhere only the corpus")
    if find_spec("atheris") is None:
        skip_or_fail("atheris is not installed: make .venv again")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", name, str(SECONDS)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-5000:]
