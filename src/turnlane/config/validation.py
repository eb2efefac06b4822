"""From a document to settings: the issues that pydantic and the cross checks find, with positions.

No message, and no output of :func:`get_visible_settings`, shows a secret or the value of a
variable. A value is secret because of its type (``SecretStr``), because of its name, or because it
stands in a mapping with free names and does not look harmless.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from turnlane.config.cross_checks import FORBIDDEN_IN_QUEUES, check_cases, check_sections
from turnlane.config.document import Document, Path, SettingIssue, format_path
from turnlane.config.settings import Config
from turnlane.errors import ConfigError
from turnlane.pipeline.cases import Case, Cases
from turnlane.plugins import PluginSettings
from turnlane.queues.settings import QueueSettings
from turnlane.validation import ContradictorySettings, describe_issue, suggest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Model = TypeVar("Model", bound=BaseModel)


def validate(document: Document) -> Config:
    """Return the settings. Raises ``ConfigFileError`` with every issue."""
    config = _validate(
        document, Config.model_validate, check_sections, "settings, such as node: {data: …}"
    )
    config._document = document  # noqa: SLF001 - for issues that are found later
    return config


def validate_cases(document: Document, config: Config) -> tuple[Case, ...]:
    """Return the cases of a file that has nothing else. Raises ``ConfigFileError``."""
    actions = {action.name: {"output": action.output} for action in config.actions}
    return _validate(
        document,
        Cases.model_validate,
        lambda data: check_cases(data.get("tests"), actions),
        "cases, such as tests: [{name: …}]",
    ).tests


def _validate(
    document: Document,
    make: Callable[[object], Model],
    check: Callable[[dict[str, Any]], Iterable[SettingIssue]],
    expected: str,
) -> Model:
    if not isinstance(document.data, dict):
        document.add_issue((), f"this is not a mapping with {expected}")
        document.raise_issues()
    made = None
    found = list(check(document.data))
    reported = {issue.path for issue in document.issues}
    try:
        made = make(document.data)
    except ValidationError as error:
        found += _convert(error, document)
    except ConfigError as error:  # from a validator that knows only the name of its setting
        found.append(SettingIssue(_find_only(document, error.knob), str(error)))
    for issue in found:
        if format_path(issue.path) not in reported:
            message = _hide_secrets(issue.message, issue.path, document)
            document.issues.append(document.locate(issue._replace(message=message)))
    document.raise_issues()
    assert made is not None
    return made


def _convert(error: ValidationError, document: Document) -> Iterator[SettingIssue]:
    """Return the issues that pydantic found."""
    for detail in error.errors(include_url=False):
        path = _find_path(detail["loc"], document.data)
        if len(path) == 3 and (path[0], path[2]) == ("queues", "name"):
            path = path[:2]  # a queue's name is its key
        if path[:1] == ("actions",) and path[2:] == ("queue", "name"):
            continue  # it is the name of the action, which has the same issue
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ContradictorySettings):
            for knob, message in cause.issues:
                yield SettingIssue((*path, *knob.split(".")), message)
        elif detail["type"] == "extra_forbidden":
            hint = suggest(str(path[-1]), _list_settings_at(path[:-1], document.data))
            yield SettingIssue(path, f"there is no such setting{hint}", of_key=True)
        elif detail["type"] == "missing":
            yield SettingIssue(path, "is required", of_key=True)
        elif cause is not None:
            yield SettingIssue(path, str(cause), path[:1] == ("queues",) and len(path) == 2)
        else:
            yield SettingIssue(path, describe_issue(_hide_input(detail, path, document)))


def _find_path(location: Sequence[str | int], data: Any) -> Path:  # noqa: ANN401 - any YAML
    """Return pydantic's location without the branches of unions that it has tried."""
    path: Path = ()
    for at, part in enumerate(location):
        is_index = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_index or (isinstance(data, dict) and part in data):
            data = data[part]
        elif isinstance(data, dict) and at == len(location) - 1:
            data = None  # a setting that is missing
        else:
            continue
        path = (*path, part)
    return path


def _find_only(document: Document, knob: str) -> Path:
    """Return the path of the only setting with this name; the whole document if there are more."""
    end = tuple(knob.split("."))
    paths = [path for path in document.keys if path[-len(end) :] == end]
    return paths[0] if len(paths) == 1 else ()


def _get_value(path: Path, data: Any) -> object:  # noqa: ANN401 - any value of YAML
    for part in path:
        try:
            data = data[part]
        except (LookupError, TypeError):
            return None
    return cast("object", data)


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────

MASK: Final = "**********"
"""The text that pydantic shows for a secret."""
_HIDDEN: Final = "(hidden)"

_SECRET_NAME: Final = re.compile(
    r"(?i)secret|passw|token|credential|api[_-]?key|authorization|jaas"
    r"|(?:access|account|private|shared)[._-]?key"
)
_FREE_MAPPINGS: Final = frozenset({"conf", "options", "headers"})
"""Mappings with free names: any of their values may be secret."""
_HARMLESS: Final = re.compile(
    r"(?i)-?[\d.]+\s?[a-z]{0,3}|true|false|utc|fair|fifo|kryo|snappy|none"
)
"""Values that are shown in free mappings too: numbers, sizes, times, switches."""
_HARMLESS_NAMES: Final = frozenset(
    {"accept", "content-type", "content-encoding", "user-agent"}
    | {"path", "dbtable", "driver", "topic", "header", "sep", "compression"}
)
_SHORT_SECRET_NAME: Final = re.compile(r"(?i)(?:^|[._-])(?:key|pwd|pass|auth)(?:$|[._-])")
"""Names whose numbers are secret too, in free mappings."""
_URL_PASSWORD: Final = re.compile(r"(//[^/@:]*:)[^/]*@")
_QUERY_VALUE: Final = re.compile(r"=[^&#]+")


def get_visible_settings(config: Config) -> Any:  # noqa: ANN401 - JSON
    """Return all settings as JSON: variables as they are written, possible secrets masked."""
    document = config._document  # noqa: SLF001 - of this package
    written: Mapping[Path, str] = {} if document is None else document.written

    def mask(path: Path, data: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(data, dict):
            return {name: mask((*path, name), value) for name, value in data.items()}
        if isinstance(data, list):
            return [mask((*path, at), value) for at, value in enumerate(data)]
        if path in written:
            return written[path]
        return _mask_text(path, data) if isinstance(data, str) else data

    return mask((), config.model_dump(mode="json"))


def _mask_text(path: Path, text: str) -> str:
    name = _get_name(path)
    harmless = name.lower() in _HARMLESS_NAMES or (
        _HARMLESS.fullmatch(text) and not _SHORT_SECRET_NAME.search(name)
    )
    is_free = any(part in _FREE_MAPPINGS for part in path[:-1])
    if _has_secret_name(path) or (is_free and not harmless):
        return MASK
    if "://" not in text:
        return text
    # Not by urlunsplit: it drops the slashes before an empty host, which SQLite has.
    place, mark, query = text.partition("?")
    return _URL_PASSWORD.sub(rf"\1{MASK}@", place) + mark + _QUERY_VALUE.sub(f"={MASK}", query)


def _has_secret_name(path: Path) -> bool:
    name = _get_name(path)
    return bool(_SECRET_NAME.search(name)) and not name.endswith(("_env", "_file"))


def _get_name(path: Path) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "")


class _Unquoted(str):
    """A text whose ``repr`` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _hide_input(detail: ErrorDetails, path: Path, document: Document) -> ErrorDetails:
    """Replace the value of an error by text that may be shown."""
    given = detail["input"]
    if path in document.written:
        given = document.written[path]
    elif isinstance(given, dict):
        given = _Unquoted("a mapping")
    elif isinstance(given, list | tuple):
        given = _Unquoted("a list")
    elif _has_secret_name(path) or SecretStr in _list_types_at(path, document.data):
        given = _Unquoted(_HIDDEN)
    return cast("ErrorDetails", {**detail, "input": given})


def _hide_secrets(message: str, path: Path, document: Document) -> str:
    """Remove the values of variables and secrets from the message of a validator."""
    value = _get_value(path, document.data)
    written = document.written.get(path)
    if written is not None and isinstance(value, str) and value:
        message = message.replace(repr(value), repr(written)).replace(value, written)
    for secret in _find_secrets((), document.data):
        message = message.replace(secret, _HIDDEN)
    return message


def _find_secrets(path: Path, data: object) -> Iterator[str]:
    """Return all values with secret names, except very short ones."""
    entries = enumerate(data) if isinstance(data, list) else ()
    for part, value in data.items() if isinstance(data, dict) else entries:
        yield from _find_secrets((*path, part), value)
    if path and isinstance(data, str | int | float) and not isinstance(data, bool):
        text = str(data)
        if len(text) > 3 and _has_secret_name(path):
            yield text


# ── the types of settings ──
# pydantic's errors do not say which model refused a key, so the annotations are followed here.


def _list_settings_at(path: Path, data: object) -> list[str]:
    """Return the settings that exist in a section, to suggest one for a misspelt name."""
    return [
        name
        for kind in _list_types_at(path, data)
        if _is_model(kind)
        for name in kind.model_fields
        if not (issubclass(kind, QueueSettings) and name in FORBIDDEN_IN_QUEUES)
    ]


def _list_types_at(path: Path, data: object) -> list[Any]:
    """Return the types that a value at a path may have."""
    kinds: list[Any] = [Config]
    for at, part in enumerate(path):
        inner = [each for kind in kinds for each in _list_types_inside(kind, part)]
        value = _get_value(path[: at + 1], data)
        kinds = [
            each.find_model(value) if isinstance(each, PluginSettings) else each for each in inner
        ]
    return kinds


def _list_types_inside(kind: Any, part: str | int) -> list[Any]:  # noqa: ANN401 - annotations
    """Return the types that a value of this type has at a key or index."""
    if _is_model(kind):
        field = kind.model_fields.get(part)
        return [] if field is None else _list_alternatives(field.annotation, field.metadata)
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(origin, type) and arguments and issubclass(origin, Mapping | Sequence):
        return _list_alternatives(arguments[-1 if issubclass(origin, Mapping) else 0])
    return []


def _list_alternatives(kind: Any, metadata: Iterable[Any] = ()) -> list[Any]:  # noqa: ANN401
    plugins = [each for each in metadata if isinstance(each, PluginSettings)]
    if plugins:
        return plugins
    origin = get_origin(kind)
    if origin is Annotated:
        return _list_alternatives(get_args(kind)[0], kind.__metadata__)
    if origin in (Union, types.UnionType):
        return [each for argument in get_args(kind) for each in _list_alternatives(argument)]
    return [kind]


def _is_model(kind: Any) -> bool:  # noqa: ANN401 - annotations
    return isinstance(kind, type) and issubclass(kind, BaseModel)
