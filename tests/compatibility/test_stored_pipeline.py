"""A pipeline of an older version: does it go on where it was?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.compatibility.comparison import check_same
from tests.compatibility.pipeline_directory import observe_pipeline
from tests.compatibility.stored import StoredVersion
from tests.conftest import skip_or_fail


@pytest.mark.timeout(900)
def test_pipeline_of_older_version_goes_on_with_its_checkpoints(
    version: StoredVersion, tmp_path: Path
) -> None:
    """Counts continue, files are not refused, and lines look the same."""
    if not (shutil.which("java") or "JAVA_HOME" in os.environ):
        skip_or_fail("Spark needs Java 17 or later")
    directory = version.unpack("pipeline", tmp_path / "pipeline")
    check_same(version.read("pipeline"), observe_pipeline(directory))
