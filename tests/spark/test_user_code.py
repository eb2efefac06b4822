"""A user's module is imported again at a reload if its file has changed, not before."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from turnlane.errors import ConfigError
from turnlane.spark.transforms import (
    call_transform,
    find_changed_modules,
    import_user_module,
    reload_changed_modules,
)

_numbers = itertools.count()

Write = Callable[[str], object]


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that is not imported yet; Spark's processes can import it, too."""
    name = f"rules_{next(_numbers)}"
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def write_module(tmp_path: Path, name: str) -> Write:
    return (tmp_path / f"{name}.py").write_text


def test_changed_module_is_imported_again_only_at_a_reload(name: str, write_module: Write) -> None:
    write_module("word = 'one'\n")
    first = import_user_module(name)
    with reload_changed_modules():
        assert import_user_module(name) is first
    write_module("word = 'another'\n")
    assert import_user_module(name) is first, "a restarted lane keeps its code"
    assert find_changed_modules() == [name]
    with reload_changed_modules():
        assert import_user_module(name).word == "another"
    assert find_changed_modules() == []
    assert import_user_module(name).word == "another"


def test_failed_reload_restores_the_module(name: str, write_module: Write) -> None:
    write_module("word = 'one'\n")
    first = import_user_module(name)
    write_module("word = \n")
    with pytest.raises(SyntaxError), reload_changed_modules():
        import_user_module(name)
    assert import_user_module(name) is first
    assert find_changed_modules() == [name], "the next reload tries again"


def test_removed_module_fails_only_when_it_is_needed(
    name: str, write_module: Write, tmp_path: Path
) -> None:
    write_module("word = 'one'\n")
    first = import_user_module(name)
    (tmp_path / f"{name}.py").unlink()
    with pytest.raises(ModuleNotFoundError), reload_changed_modules():
        import_user_module(name)
    assert import_user_module(name) is first
    with reload_changed_modules():
        pass
    assert find_changed_modules() == []


TRANSFORM = """\
from pyspark.sql import functions as F

def word(number):
    return WORD

def FUNCTION(events):
    return events.select(F.udf(word, useArrow=False)("id"))
"""


def test_spark_runs_the_new_code(
    spark: SparkSession, name: str, write_module: Write, tmp_path: Path
) -> None:
    """Spark's processes live on and have imported the module as well."""

    def words(function: str) -> set[str]:
        return {row[0] for row in call_transform(f"{name}:{function}", spark.range(8)).collect()}

    source = TRANSFORM.replace("FUNCTION", "first")
    write_module(source.replace("WORD", "'one'"))
    spark.sparkContext.addPyFile(str(tmp_path / f"{name}.py"))
    assert words("first") == {"one"}
    write_module(source.replace("WORD", "'another'"))
    with reload_changed_modules():
        assert words("first") == {"another"}
    write_module(TRANSFORM.replace("FUNCTION", "second").replace("WORD", "helper()") + HELPER)
    with reload_changed_modules():
        assert words("second") == {"help"}
    with pytest.raises(ConfigError, match="no attribute 'first'"):
        call_transform(f"{name}:first", spark.range(8))


HELPER = """
def helper():
    return "help"
"""
