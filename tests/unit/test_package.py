"""The package as a whole: what it exports, what it needs, what it calls itself."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import turnlane

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

IMPORT_ALL_WITHOUT_PYSPARK = """
import importlib, pkgutil, sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pyspark":
            raise ImportError("pyspark is forbidden here")

sys.meta_path.insert(0, Forbid())

import turnlane

for module in pkgutil.walk_packages(turnlane.__path__, "turnlane."):
    if not module.name.startswith(("turnlane.spark", "turnlane.outputs.spark")):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


def test_every_core_module_imports_without_pyspark() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL_WITHOUT_PYSPARK],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("turnlane.client", {"turnlane.table", "turnlane.queues.disk"}),
        ("turnlane.cli.app", {"rich", "pyarrow.parquet"}),
        ("turnlane.spark.source", {"turnlane.table", "turnlane.delivery.engine"}),
    ],
)
def test_seldom_used_modules_are_imported_late(module: str, unneeded: set[str]) -> None:
    """Commands and processes of Spark are many and short."""
    program = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not unneeded & set(run.stdout.split())


def test_all_is_sorted() -> None:
    names = turnlane.__all__
    assert list(names) == sorted(names)
    assert len(set(names)) == len(names)


def test_all_is_complete() -> None:
    for name in turnlane.__all__:
        getattr(turnlane, name)  # some are imported only now
    public = {
        name
        for name, value in vars(turnlane).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name not in {"annotations", "Any", "TYPE_CHECKING"}
    }
    assert public == {name for name in turnlane.__all__ if not name.startswith("_")}
    for name in turnlane.__all__:
        assert hasattr(turnlane, name)


def test_every_public_name_has_a_docstring() -> None:
    undocumented = [
        name
        for name in turnlane.__all__
        if callable(getattr(turnlane, name)) and not getattr(turnlane, name).__doc__
    ]
    assert undocumented == []


def test_version_is_the_same_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert turnlane.__version__ == PROJECT["version"]
    assert importlib.metadata.version("turnlane") == PROJECT["version"]
    assert PROJECT["version"] in re.findall(r"\d+\.\d+\.\d+", changelog)


def test_package_is_marked_as_typed() -> None:
    assert (Path(turnlane.__file__).parent / "py.typed").exists()


def test_constraints_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
