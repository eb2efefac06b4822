"""Issues with settings: pydantic's errors in words that a user can act on, named by their setting.

Every model of settings derives from :class:`SettingsModel`.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict

from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_MESSAGES: Final = {
    "missing": "is required",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt:g}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt:g}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "dict_type": "must be a mapping",
    "mapping_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "enum": "must be one of {expected}",
    "literal_error": "must be one of {expected}",
}


class SettingsModel(BaseModel):
    """Base of the models of settings: frozen, without unknown keys, with checked defaults."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


class ConfigIssue(NamedTuple):
    """One issue with a setting."""

    knob: str
    message: str


class ContradictorySettings(ValueError):
    """Raised by a validator of a model: each setting is valid alone, but not with the others."""

    def __init__(self, issues: Sequence[ConfigIssue]) -> None:
        super().__init__("; ".join(f"{knob}: {message}" for knob, message in issues))
        self.issues = tuple(issues)


class ConfigIssues(ConfigError):
    """Several issues, one on each line; ``knob`` is the setting of the first one."""

    def __init__(self, issues: Sequence[ConfigIssue]) -> None:
        super().__init__(*_join_issues(issues))
        self.issues = tuple(issues)


class IssueCollector:
    """Collects the issues of several checks, to raise them together."""

    def __init__(self) -> None:
        self._issues: list[ConfigIssue] = []

    def add(self, knob: str, message: str) -> None:
        """Add an issue."""
        self._issues.append(ConfigIssue(knob, message))

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Add the issues of a ``ConfigError`` in the block, and continue after it."""
        try:
            yield
        except ConfigError as error:
            self._issues += get_issues(error)

    def raise_issues(self) -> None:
        """Raise ``ConfigIssues`` if there are any."""
        if self._issues:
            raise ConfigIssues(self._issues)


def get_issues(error: ConfigError) -> Sequence[ConfigIssue]:
    """Return all issues of an error."""
    if isinstance(error, ConfigIssues):
        return error.issues
    return [ConfigIssue(error.knob, get_message(error))]


def get_message(error: ConfigError) -> str:
    """Return the message of an error without the name of the setting."""
    return str(error).removeprefix(f"{error.knob}: ")


def convert_validation_error(error: ValidationError, knobs: Iterable[str] = ()) -> ConfigError:
    """Return one ``ConfigError`` for everything that pydantic found, with a line for each issue.

    ``knobs`` are the names that exist, to suggest one for a misspelt name.
    """
    names = list(knobs)
    found = [issue for detail in error.errors() for issue in _convert_detail(detail, names)]
    return ConfigError(*_join_issues(found))  # not a subclass: clients know errors by class name


def _join_issues(issues: Sequence[ConfigIssue]) -> tuple[str, str]:
    """Return the knob of the first issue, and a text with a line for each issue."""
    first, *others = issues
    return first.knob, "\n".join([first.message, *(f"{knob}: {text}" for knob, text in others)])


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean x?`` if a known word is similar, else an empty text."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _convert_detail(detail: ErrorDetails, names: list[str]) -> Iterator[ConfigIssue]:
    where = [str(part) for part in detail["loc"]]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ContradictorySettings):
        for knob, message in cause.issues:
            yield ConfigIssue(".".join([*where, knob]), message)
    elif detail["type"] == "extra_forbidden":
        hint = suggest(where[-1], names)
        yield ConfigIssue(".".join(where), f"there is no such knob{hint}")
    elif cause is not None:
        yield ConfigIssue(".".join(where), str(cause))
    else:
        yield ConfigIssue(".".join(where), describe_issue(detail))


def describe_issue(detail: ErrorDetails) -> str:
    """Return what pydantic found in our words, with the given value."""
    context: dict[str, Any] = {**detail.get("ctx", {})}
    # pydantic has `'a', 'b' or <Letter.C: 'c'>`; a message has `a, b, c`.
    choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
    message = _MESSAGES.get(detail["type"])
    if message is None:
        return detail["msg"][:1].lower() + detail["msg"][1:]
    if detail["type"] == "missing":
        return message
    hint = suggest(str(detail["input"]), choices)
    given = repr(detail["input"])
    given = given if len(given) <= 80 else f"{given[:77]}..."
    return f"{message.format(**{**context, 'expected': ', '.join(choices)})}, not {given}{hint}"
