"""From a document to settings; what pydantic finds wrong comes out as faults with places."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Union, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from turnlane.config.cross_checks import NOT_FOR_QUEUES, Found, across_sections, lost_cases
from turnlane.config.document import ConfigFaults, Document, Path, dotted
from turnlane.config.settings import Config, Plugged
from turnlane.errors import ConfigError
from turnlane.pipeline.cases import Case, Cases
from turnlane.queues.settings import QueueSettings
from turnlane.validation import ContradictorySettings, describe_issue, suggest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# ── masking ──
# Which settings are secret, and how those are shown that may hold a secret.

MASK: Final = "**********"
"""As pydantic shows a secret."""

_SECRET: Final = re.compile(
    r"(?i)secret|passw|token|credential|api[_-]?key|authorization|jaas"
    r"|(?:access|account|private|shared)[._-]?key"
)
_FREE: Final = frozenset({"conf", "options", "headers"})
"""Mappings whose names are others' to choose: nobody knows which of their values are secret."""
_HARMLESS: Final = re.compile(
    r"(?i)-?[\d.]+\s?[a-z]{0,3}|true|false|utc|fair|fifo|kryo|snappy|none"
)
"""Values that are shown nevertheless: numbers, sizes, times, switches."""
_HARMLESS_NAMES: Final = frozenset(
    {"accept", "content-type", "content-encoding", "user-agent"}
    | {"path", "dbtable", "driver", "topic", "header", "sep", "compression"}
)
_SHORT: Final = re.compile(r"(?i)(?:^|[._-])(?:key|pwd|pass|auth)(?:$|[._-])")
"""What makes a number secret, too, where names are free."""
_PASSWORD: Final = re.compile(r"(//[^/@:]*:)[^/]*@")
_VALUE: Final = re.compile(r"=[^&#]+")


def is_secret_name(path: Path) -> bool:
    """Whether the name of a setting says that it is secret."""
    name = _name(path)
    return bool(_SECRET.search(name)) and not name.endswith(("_env", "_file"))


def masked(path: Path, text: str) -> str:
    """The text of a setting, as it may be shown."""
    if is_secret_name(path) or (_is_free(path) and not _is_harmless(path, text)):
        return MASK
    return _without_secrets(text) if "://" in text else text


def _is_free(path: Path) -> bool:
    return any(part in _FREE for part in path[:-1])


def _is_harmless(path: Path, text: str) -> bool:
    name = _name(path)
    if name.lower() in _HARMLESS_NAMES:
        return True
    return bool(_HARMLESS.fullmatch(text)) and not _SHORT.search(name)


def _name(path: Path) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "")


def _without_secrets(url: str) -> str:
    """An address without its password, and without the values of its query.

    Not by urlunsplit, which leaves out the slashes before a host that is empty, as SQLite's is.
    """
    place, mark, query = url.partition("?")
    return _PASSWORD.sub(rf"\1{MASK}@", place) + mark + _VALUE.sub(f"={MASK}", query)


_HIDDEN: Final = "(hidden)"


def validated(document: Document) -> Config:
    """The settings. Raises ``ConfigFaults`` with everything that is wrong."""
    if not isinstance(document.data, dict):
        document.fault((), "this is not a mapping of settings, such as node: {data: …}")
        raise ConfigFaults(document.file, document.faults)
    config = None
    found = list(across_sections(document.data))
    broken = {fault.path for fault in document.faults}
    try:
        config = Config.model_validate(document.data)
    except ValidationError as error:
        found += _found(error, document)
    except ConfigError as error:  # from a validator that knows only its own knob
        found.append((_ending_with(document, error.knob), str(error), False))
    for path, message, of_key in found:
        if dotted(path) not in broken:  # what is wrong with it was said already
            document.fault(path, _concealed(message, path, document), of_key=of_key)
    if config is None or document.faults:
        raise ConfigFaults(document.file, document.faults)
    config._document = document  # noqa: SLF001 - for faults that are found later
    return config


def validated_cases(document: Document, config: Config) -> tuple[Case, ...]:
    """The cases of a file of its own. Raises ``ConfigFaults``."""
    if not isinstance(document.data, dict):
        document.fault((), "this is not a mapping with cases, such as tests: [{name: …}]")
        raise ConfigFaults(document.file, document.faults)
    actions = {action.name: {"output": action.output} for action in config.actions}
    found = list(lost_cases(document.data.get("tests"), actions))
    made = None
    try:
        made = Cases.model_validate(document.data)
    except ValidationError as error:
        found += _found(error, document)
    for path, message, of_key in found:
        document.fault(path, _concealed(message, path, document), of_key=of_key)
    if made is None or document.faults:
        raise ConfigFaults(document.file, document.faults)
    return made.tests


def _found(error: ValidationError, document: Document) -> Iterator[Found]:
    """All that pydantic says."""
    for detail in error.errors(include_url=False):
        path = _path(detail["loc"], document.data)
        if len(path) == 3 and (path[0], path[2]) == ("queues", "name"):
            path = path[:2]  # a queue's name is its key
        if path[:1] == ("actions",) and path[2:] == ("queue", "name"):
            continue  # it is the action's name, where the same is wrong
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ContradictorySettings):
            for knob, message in cause.problems:
                yield (*path, *knob.split(".")), message, False
        elif detail["type"] == "extra_forbidden":
            hint = suggest(str(path[-1]), _knobs_at(path[:-1], document.data))
            yield path, f"there is no such setting{hint}", True
        elif detail["type"] == "missing":
            yield path, "is required", True
        elif cause is not None:
            yield path, str(cause), path[:1] == ("queues",) and len(path) == 2
        else:
            yield path, describe_issue(_shown(detail, path, document)), False


def _has(data: object, part: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, dict) and part in data


def _path(location: Sequence[str | int], data: Any) -> Path:  # noqa: ANN401 - whatever YAML has
    """Where in the document that is; pydantic also names the branches of unions it has tried."""
    path: Path = ()
    for at, part in enumerate(location):
        if _has(data, part):
            data = data[part]
        elif isinstance(data, dict) and at == len(location) - 1:
            data = None  # a setting that is missing
        else:
            continue
        path = (*path, part)
    return path


def _ending_with(document: Document, knob: str) -> Path:
    """The only setting of that name, or the whole."""
    end = tuple(knob.split("."))
    paths = [path for path in document.keys if path[-len(end) :] == end]
    return paths[0] if len(paths) == 1 else ()


# ── what is not shown ────────────────────────────────────────────────────────────────────────────


class _Words(str):
    """A text that stands for itself, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(detail: ErrorDetails, path: Path, document: Document) -> ErrorDetails:
    """What was given, as it may be repeated: no secrets, nothing that came from a variable."""
    given = detail["input"]
    if path in document.written:
        given = document.written[path]
    elif isinstance(given, dict):
        given = _Words("a mapping")
    elif isinstance(given, list | tuple):
        given = _Words("a list")
    elif _is_secret(path, document.data):
        given = _Words(_HIDDEN)
    return cast("ErrorDetails", {**detail, "input": given})


def _concealed(message: str, path: Path, document: Document) -> str:
    """A message of somebody's validator, without the values that must not be repeated."""
    value = _value_at(path, document.data)
    written = document.written.get(path)
    if written is not None and isinstance(value, str) and value:
        message = message.replace(repr(value), repr(written)).replace(value, written)
    for secret in _secrets((), document.data):
        message = message.replace(secret, _HIDDEN)
    return message


def shown(config: Config) -> Any:  # noqa: ANN401 - JSON
    """All settings as JSON has them: variables as they are written, what may be secret masked."""
    document = config._document  # noqa: SLF001 - of this package
    written = {} if document is None else document.written
    return _hidden((), config.model_dump(mode="json"), written)


def _hidden(path: Path, data: Any, written: Mapping[Path, str]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(data, dict):
        return {name: _hidden((*path, name), value, written) for name, value in data.items()}
    if isinstance(data, list):
        return [_hidden((*path, at), value, written) for at, value in enumerate(data)]
    if path in written:
        return written[path]
    return masked(path, data) if isinstance(data, str) else data


def _secrets(path: Path, data: object) -> Iterator[str]:
    """All values that are secret by their place."""
    entries = enumerate(data) if isinstance(data, list) else ()
    for part, value in data.items() if isinstance(data, dict) else entries:
        yield from _secrets((*path, part), value)
    if path and isinstance(data, str | int | float) and not isinstance(data, bool):
        text = str(data)
        if len(text) > 3 and _is_secret(path, None):
            yield text


def _is_secret(path: Path, data: object) -> bool:
    if is_secret_name(path):
        return True
    return data is not None and SecretStr in _kinds_at(path, data)


def _value_at(path: Path, data: Any) -> object:  # noqa: ANN401 - whatever YAML has
    for part in path:
        try:
            data = data[part]
        except (LookupError, TypeError):
            return None
    return cast("object", data)


# ── what there could be ──────────────────────────────────────────────────────────────────────────


def _knobs_at(path: Path, data: object) -> list[str]:
    """The settings that exist at a place, to guess what a misspelt one was meant to be."""
    models = [kind for kind in _kinds_at(path, data) if _is_model(kind)]
    return [
        name
        for model in models
        for name in model.model_fields
        if not (issubclass(model, QueueSettings) and name in NOT_FOR_QUEUES)
    ]


def _kinds_at(path: Path, data: object) -> list[Any]:
    """The types that a value at a place may have."""
    kinds: list[Any] = [Config]
    for at, part in enumerate(path):
        inner = [each for kind in kinds for each in _inside(kind, part)]
        value = _value_at(path[: at + 1], data)
        kinds = [each.model_of(value) if isinstance(each, Plugged) else each for each in inner]
    return kinds


def _inside(kind: Any, part: str | int) -> list[Any]:  # noqa: ANN401 - annotations
    """The types that a value of this type has at a key or index."""
    if _is_model(kind):
        field = kind.model_fields.get(part)
        if field is None:
            return []
        return _plugged(field.metadata) or _alternatives(field.annotation)
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(origin, type) and arguments and issubclass(origin, Mapping | Sequence):
        return _alternatives(arguments[-1 if issubclass(origin, Mapping) else 0])
    return []


def _alternatives(kind: Any) -> list[Any]:  # noqa: ANN401 - annotations
    origin = get_origin(kind)
    if origin is Annotated:
        return _plugged(kind.__metadata__) or _alternatives(get_args(kind)[0])
    if origin in (Union, types.UnionType):
        return [each for argument in get_args(kind) for each in _alternatives(argument)]
    return [kind]


def _plugged(metadata: Iterable[Any]) -> list[Any]:
    return [each for each in metadata if isinstance(each, Plugged)]


def _is_model(kind: Any) -> bool:  # noqa: ANN401 - annotations
    return isinstance(kind, type) and issubclass(kind, BaseModel)
