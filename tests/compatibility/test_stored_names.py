"""The words of users: is every one of an older version still there?"""

from __future__ import annotations

from pathlib import Path

from tests.compatibility.comparison import check_same
from tests.compatibility.configurations import (
    observe_configuration,
    observe_knobs,
    prepare_directory,
    read_settings,
)
from tests.compatibility.names import read_commands, read_entry_points, read_python_names
from tests.compatibility.spark_source import read_source_names
from tests.compatibility.stored import StoredVersion


def test_configurations_of_older_version_have_the_same_settings(
    version: StoredVersion, tmp_path: Path
) -> None:
    prepare_directory(tmp_path)
    said = {file.name: observe_configuration(file, tmp_path) for file in version.configurations}
    check_same(version.read("configurations"), said)


def test_every_setting_keeps_its_name_and_default(version: StoredVersion) -> None:
    check_same(version.read("settings"), read_settings())


def test_every_knob_of_a_queue_keeps_its_name(version: StoredVersion) -> None:
    check_same(version.read("knobs"), observe_knobs())


def test_every_command_keeps_its_options(version: StoredVersion) -> None:
    check_same(version.read("commands"), read_commands())


def test_every_entry_point_keeps_its_name(version: StoredVersion) -> None:
    found = read_entry_points(Path(__file__).parents[2])
    check_same(version.read("entry-points"), found)


def test_every_python_name_stays_and_is_called_as_before(version: StoredVersion) -> None:
    found = read_python_names()
    check_same(version.read("python"), found)
    for name, parameters in found["functions"].items():
        added = parameters.keys() - version.read("python")["functions"][name].keys()
        assert not any(parameters[each].get("is_required") for each in added), name


def test_every_option_of_spark_sources_is_accepted(version: StoredVersion) -> None:
    check_same(version.read("spark"), read_source_names())
