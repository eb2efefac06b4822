"""The JSON Schema of a configuration, for editors and for checks outside turnlane."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from turnlane.config.cross_checks import KINDS
from turnlane.config.settings import INPUTS, OUTPUTS, Config
from turnlane.plugins import PluginSettings
from turnlane.queues.settings import Kind

Schema = dict[str, Any]

_VARIABLE: Final[Schema] = {
    "type": "string",
    "pattern": r"\$\{",
    "description": "a variable of the environment: ${VAR}, ${VAR:-default} or ${VAR:?message}",
}
_NARROW: Final = ("pattern", "enum", "const", "format")
_NOTES: Final = ("title", "description", "default", "examples", "kinds", "shown")


def json_schema(
    inputs: Iterable[str] | None = None, outputs: Iterable[str] | None = None
) -> Schema:
    """Return the schema of a file; ``inputs`` and ``outputs`` are types (default: all)."""
    schema = Config.model_json_schema()
    definitions: Schema = schema["$defs"]
    for knob in ("path", "name"):  # the node sets them
        del definitions["QueueSettings"]["properties"][knob]
    definitions["QueueSettings"]["properties"]["kind"]["default"] = "disk"
    schema["properties"]["inputs"]["items"] = _any_of(
        INPUTS, "input", INPUTS.types() if inputs is None else inputs, definitions
    )
    any_output = _any_of(
        OUTPUTS, "output", OUTPUTS.types() if outputs is None else outputs, definitions
    )
    for place in ("ActionSection", "FailoverSection"):
        definitions[place]["properties"]["output"] = any_output
    _allow_short_forms(schema["properties"], definitions)
    opened: Schema = _allow_variables(schema)
    opened["$defs"]["Variable"] = _VARIABLE
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "turnlane configuration",
        **{key: value for key, value in opened.items() if key != "title"},
    }


def _allow_short_forms(sections: Schema, definitions: Schema) -> None:
    """Allow one word, or nothing, in place of some sections."""
    queue, nothing = {"$ref": "#/$defs/QueueSettings"}, {"type": "null"}
    kind = {"enum": [Kind.DIRECT, *KINDS], "type": "string"}
    sections["queues"]["additionalProperties"] = {"anyOf": [queue, nothing]}
    definitions["ActionSection"]["properties"]["queue"]["anyOf"] = [queue, kind, nothing]
    word = definitions.pop("Format")
    definitions["ParseSettings"]["properties"]["format"] |= word
    definitions["ParseSettings"]["properties"]["format"].pop("$ref", None)
    _allow(sections["parse"], {"type": "string", "enum": word["enum"]}, nothing)
    for section in ("lane", "nodes", "spark"):
        _allow(sections[section], nothing)
    text = {"type": "string"}
    definitions["Case"]["properties"]["events"]["items"] = {
        "anyOf": [{"$ref": "#/$defs/CaseEvent"}, text]
    }


def _allow(place: Schema, *others: Schema) -> None:
    """Allow a section's model, or one of the others."""
    place["anyOf"] = [{"$ref": place.pop("$ref")}, *others]


def _any_of(
    plugins: PluginSettings, noun: str, kinds: Iterable[str], definitions: Schema
) -> Schema:
    """Return one alternative for each type of plug-in; ``type`` selects it."""
    choices = []
    for kind in kinds:
        # With a prefix: two plug-ins may use one name for different models.
        settings = plugins.get_model(kind).model_json_schema(
            ref_template=f"#/$defs/{kind}_{{model}}"
        )
        inner = settings.pop("$defs", {})
        definitions.update({f"{kind}_{name}": schema for name, schema in inner.items()})
        settings["properties"]["type"] = {"const": kind, "description": f"Which {noun} this is."}
        settings["required"] = sorted({*settings.get("required", []), "type"})
        name = f"{kind}_{noun}"
        definitions[name] = {**settings, "title": name}
        choices.append({"$ref": f"#/$defs/{name}"})
    choices.append(_describe_own_plugin(noun))
    return {"oneOf": choices}


def _describe_own_plugin(noun: str) -> Schema:
    """Return the alternative for a plug-in that is named by module and class."""
    kind = {"type": "string", "pattern": r"^[\w.]+:\w+$", "description": "module:Class"}
    title = f"an {noun} of your own"
    return {"type": "object", "title": title, "properties": {"type": kind}, "required": ["type"]}


def _allow_variables(schema: Any, key: str | None = None) -> Any:  # noqa: ANN401 - JSON
    """Return the schema with variables allowed where a setting is not free text."""
    if isinstance(schema, list):
        return [_allow_variables(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if key not in {"properties", "$defs", "type"} and _is_narrow(schema):
        notes = {note: schema[note] for note in _NOTES if note in schema}
        rest = {word: value for word, value in schema.items() if word not in notes}
        return {**notes, "anyOf": [rest, {"$ref": "#/$defs/Variable"}]}
    return {word: _allow_variables(value, word) for word, value in schema.items()}


def _is_narrow(schema: Schema) -> bool:
    kind = schema.get("type")
    scalar = kind in {"integer", "number", "boolean"}
    return scalar or (kind == "string" and any(word in schema for word in _NARROW))
