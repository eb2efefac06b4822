"""Inputs and outputs are found by module and class; others are refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnlane.config import ConfigFileError, json_schema, loads
from turnlane.errors import ConfigError
from turnlane.inputs import api as inputs
from turnlane.outputs import api as outputs

OWN = """
from pydantic import Field
from turnlane.outputs.api import Output, OutputSettings

class ShoutSettings(OutputSettings):
    volume: int = Field(default=11, ge=0, description="How loud.")

class Shout(Output):
    settings_type = ShoutSettings

    def send(self, prepared):
        print(prepared)

quiet = 1
"""


@pytest.fixture(autouse=True)
def _beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_plugin_of_tests.py").write_text(OWN)
    (tmp_path / "broken_plugin_of_tests.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def settings_of(output: str) -> object:
    text = f"node: {{data: data}}\nmain: {{}}\nactions:\n  - {{name: a, output: {output}}}\n"
    [action] = loads(text, "f").actions
    return action.output.model_dump()


def test_own_output_is_named_by_module_and_class() -> None:
    found = settings_of("{type: 'own_plugin_of_tests:Shout', volume: 3}")
    assert found == {"type": "own_plugin_of_tests:Shout", "volume": 3}
    kind = outputs.load("own_plugin_of_tests:Shout")
    assert kind is outputs.load("own_plugin_of_tests:Shout")


def test_settings_of_an_own_output_are_checked() -> None:
    with pytest.raises(ConfigFileError, match=r"f:4:\d+: actions\[0\]\.output\.volum: .*volume"):
        settings_of("{type: 'own_plugin_of_tests:Shout', volum: 3}")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no_such_module_anywhere:Shout", "No module named 'no_such_module_anywhere'"),
        ("own_plugin_of_tests:Whisper", "has no attribute 'Whisper'"),
        ("own_plugin_of_tests:quiet", "is 1, not a subclass of Output"),
        ("own_plugin_of_tests:ShoutSettings", "not a subclass of"),
        ("broken_plugin_of_tests:Shout", "ZeroDivisionError: division by zero"),
        (":Shout", "write module:Class"),
        ("own_plugin_of_tests:", "write module:Class"),
        ("own_plugin_of_tests:a.b", "write module:Class"),
    ],
)
def test_class_that_is_not_an_output_is_refused_with_the_reason(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        outputs.load(kind)


def test_output_is_refused_as_an_input() -> None:
    with pytest.raises(ConfigError, match="not a subclass of"):
        inputs.load("own_plugin_of_tests:Shout")


def test_json_schema_allows_an_own_output() -> None:
    schema = json_schema([], [])
    [own] = schema["$defs"]["ActionSection"]["properties"]["output"]["oneOf"]
    assert own["title"] == "an output of your own"
    [own] = schema["properties"]["inputs"]["items"]["oneOf"]
    assert own["title"] == "an input of your own"


def test_output_with_the_former_name_takes_apart_can_deliver_partly() -> None:
    class FormerOutput(outputs.Output):
        takes_apart = True

        def send(self, prepared: object) -> None:
            raise NotImplementedError

    assert FormerOutput(outputs.OutputSettings(type="former")).can_deliver_partly
