"""From pydantic's errors to ours: every problem named by its knob, in words a user can act on."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_WORDS: Final = {
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


class ConfigIssue(NamedTuple):
    """One thing that is wrong with a setting."""

    knob: str
    message: str


class ContradictorySettings(ValueError):
    """Raised by a model's own validator: settings that are right alone and wrong together."""

    def __init__(self, problems: Sequence[ConfigIssue]) -> None:
        super().__init__("; ".join(f"{knob}: {message}" for knob, message in problems))
        self.problems = tuple(problems)


class ConfigIssues(ConfigError):
    """Several things are wrong, a line for each; ``problems`` has them all, ``knob`` the first."""

    def __init__(self, problems: Sequence[ConfigIssue]) -> None:
        super().__init__(*_told(problems))
        self.problems = tuple(problems)


class IssueCollector:
    """What is found wrong by one check after another, to be told all at once."""

    def __init__(self) -> None:
        self._problems: list[ConfigIssue] = []

    def add(self, knob: str, message: str) -> None:
        """Note one."""
        self._problems.append(ConfigIssue(knob, message))

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Go on behind this block if it raises ``ConfigError``."""
        try:
            yield
        except ConfigError as error:
            self._problems += get_issues(error)

    def tell(self) -> None:
        """Raise ``ConfigIssues`` if there are any."""
        if self._problems:
            raise ConfigIssues(self._problems)


def get_issues(error: ConfigError) -> Sequence[ConfigIssue]:
    """All that an error tells of."""
    if isinstance(error, ConfigIssues):
        return error.problems
    return [ConfigIssue(error.knob, get_message(error))]


def get_message(error: ConfigError) -> str:
    """What an error says, without the knob that it says it of."""
    return str(error).removeprefix(f"{error.knob}: ")


def convert_validation_error(error: ValidationError, knobs: Iterable[str] = ()) -> ConfigError:
    """One ``ConfigError`` for all that pydantic found, a line for each problem.

    ``knobs`` are the names that exist, to guess what a misspelt one was meant to be.
    """
    names = list(knobs)
    found = [problem for detail in error.errors() for problem in _problems(detail, names)]
    return ConfigError(*_told(found))  # of no other class: clients know errors by its name


def _told(problems: Sequence[ConfigIssue]) -> tuple[str, str]:
    """The first one's knob, and a line for each of them."""
    first, *others = problems
    return first.knob, "\n".join([first.message, *(f"{knob}: {text}" for knob, text in others)])


def suggest(word: str, known: Iterable[str]) -> str:
    """``; did you mean x?`` if a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _problems(detail: ErrorDetails, names: list[str]) -> Iterator[ConfigIssue]:
    where = [str(part) for part in detail["loc"]]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ContradictorySettings):
        for knob, message in cause.problems:
            yield ConfigIssue(".".join([*where, knob]), message)
    elif detail["type"] == "extra_forbidden":
        hint = suggest(where[-1], names)
        yield ConfigIssue(".".join(where), f"there is no such knob{hint}")
    elif cause is not None:
        yield ConfigIssue(".".join(where), str(cause))
    else:
        yield ConfigIssue(".".join(where), describe_issue(detail))


def describe_issue(detail: ErrorDetails) -> str:
    """What pydantic found, in our words, with what was given instead."""
    context: dict[str, Any] = {**detail.get("ctx", {})}
    expected = _choices(str(context.get("expected", "")))
    words = _WORDS.get(detail["type"])
    if words is None:
        return detail["msg"][:1].lower() + detail["msg"][1:]
    if detail["type"] == "missing":
        return words
    hint = suggest(str(detail["input"]), expected.split(", ")) if expected else ""
    return f"{words.format(**{**context, 'expected': expected})}, not {_shown(detail)}{hint}"


def _choices(expected: str) -> str:
    """``'a', 'b' or <Letter.C: 'c'>`` as ``a, b, c``."""
    return ", ".join(re.findall(r"'([^']*)'", expected))


def _shown(detail: ErrorDetails) -> str:
    text = repr(detail["input"])
    return text if len(text) <= 80 else f"{text[:77]}..."
