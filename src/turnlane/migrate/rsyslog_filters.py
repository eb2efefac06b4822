"""Filters of rsyslog as conditions in Spark SQL over the columns of ``parse: syslog``.

A filter is converted only if its meaning is certain. Two rules of rsyslog are easy to miss: in an
expression ``and`` and ``or`` have the same precedence, from left to right, and ``not`` belongs to
the next operand alone, so ``not $msg contains 'x'`` negates ``$msg``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from turnlane.formats.syslog import FACILITIES, SEVERITIES
from turnlane.migrate.rsyslog_syntax import Condition, Token, parse_property_filter, unescape

_MAX_DEPTH: Final = 40
"""How deep parentheses may be nested."""
EVERY: Final = "true"
NEVER: Final = "false"

_ALL: Final = frozenset(range(8))
SEVERITY_NAMES: Final = {name: number for number, name in enumerate(SEVERITIES)} | {
    "warn": 4,
    "error": 3,
    "panic": 0,
}
_FACILITY_NAMES: Final = {name: number for number, name in enumerate(FACILITIES)} | {
    "security": 4,
    "bsd_security": 13,
    "console": 14,
}

PROPERTIES: Final = {
    "msg": "message",
    "hostname": "hostname",
    "fromhost-ip": "source",
    "programname": "app_name",
    "app-name": "app_name",
    "procid": "proc_id",
    "msgid": "msg_id",
    "rawmsg": "CAST(value AS STRING)",
}
"""Properties of rsyslog that are texts, with their columns."""
NUMBERS: Final = {
    "syslogseverity": "severity",
    "syslogpriority": "severity",
    "syslogfacility": "facility",
}
_NAMED_NUMBERS: Final = {
    "syslogseverity-text": ("severity", SEVERITIES),
    "syslogpriority-text": ("severity", SEVERITIES),
    "syslogfacility-text": ("facility", FACILITIES),
}
_FUNCTIONS: Final = {
    "contains": "contains({}, {})",
    "contains_i": "contains(lower({}), lower({}))",
    "startswith": "startswith({}, {})",
    "startswith_i": "startswith(lower({}), lower({}))",
    "endswith": "endswith({}, {})",
}
_NO_MESSAGE_START: Final = "rsyslog's msg may begin with a space that turnlane's message has not"


class Unconvertible(Exception):
    """A filter whose meaning in turnlane is not certain."""


def convert_condition(condition: Condition) -> str:
    """Return the condition in SQL. Raises ``Unconvertible``."""
    if condition.tokens or condition.text[:2].lower() == "if":
        return _Expression(condition.tokens).convert()
    found = parse_property_filter(condition.text)
    if found is None:
        return convert_selector(condition.text)
    name, is_negated, operation, value = found
    operation = {"isequal": "==", "isempty": "=="}.get(operation, operation)
    made = _compare(name.lstrip("$"), operation, [value])
    return negate(made) if is_negated else made


def convert_selector(text: str) -> str:
    """Return ``mail.info;*.!=debug`` in SQL, from the severities that it takes of each facility."""
    taken: list[frozenset[int]] = [frozenset()] * len(FACILITIES)
    for names, wanted in _split_selector(text.lower()):
        is_excluded = wanted.startswith("!")
        severities = _get_severities(wanted.removeprefix("!"))
        for number in _get_facilities(names.split(",")):
            if severities is None:
                taken[number] = _ALL if is_excluded else frozenset()
            elif severities == _ALL:
                taken[number] = frozenset() if is_excluded else _ALL
            elif is_excluded and not taken[number]:
                raise Unconvertible(
                    f"versions of rsyslog differ in {wanted} without a priority before"
                )
            elif is_excluded:
                taken[number] -= severities
            else:
                taken[number] |= severities
    return _join_severities(taken)


def _split_selector(text: str) -> Iterator[tuple[str, str]]:
    """Yield facilities and priority of each part; a comma after a priority ends a part, too."""
    while text:
        match = re.match(r"([a-z0-9*,_]*)\.([^,;.]+)(?:[,;]+|$)", text)
        if match is None:
            raise Unconvertible(f"{text!r} is not facility.priority")
        yield match[1], match[2]
        text = text[match.end() :]


def _get_severities(wanted: str) -> frozenset[int] | None:
    """Return the severities of a priority; ``None`` for ``none``."""
    name = wanted.removeprefix("=")
    if name == "none":
        return None
    if wanted == "*":
        return _ALL
    number = int(name) if name in set("01234567") else SEVERITY_NAMES.get(name)
    if number is None:
        raise Unconvertible(f"there is no priority {name!r}")
    return frozenset({number} if wanted.startswith("=") else range(number + 1))


def _get_facilities(names: list[str]) -> list[int]:
    if "*" in names:
        return list(range(len(FACILITIES)))
    try:
        return [_FACILITY_NAMES[name] for name in names]
    except KeyError as error:
        raise Unconvertible(f"there is no facility {error}") from None


def _join_severities(taken: Sequence[frozenset[int]]) -> str:
    groups: dict[frozenset[int], list[int]] = {}
    for facility, severities in enumerate(taken):
        groups.setdefault(severities, []).append(facility)
    made = []
    for severities, facilities in groups.items():
        if severities:
            conditions = [_write_facilities(facilities), _write_severities(severities)]
            made.append(join_conditions("AND", *conditions))
    return join_conditions("OR", *made) if made else NEVER


def _write_facilities(numbers: list[int]) -> str:
    others = [number for number in range(len(FACILITIES)) if number not in numbers]
    if not others:
        return EVERY
    if len(numbers) == 1:
        return f"facility = {numbers[0]}"
    if len(others) == 1:
        return f"facility != {others[0]}"
    if len(others) < len(numbers):
        return f"facility NOT IN ({', '.join(map(str, others))})"
    return f"facility IN ({', '.join(map(str, numbers))})"


def _write_severities(numbers: frozenset[int]) -> str:
    last = max(numbers)
    if numbers == _ALL:
        return EVERY
    if len(numbers) == 1:
        return f"severity = {last}"
    if len(numbers) == last + 1:
        return f"severity <= {last}"
    return f"severity IN ({', '.join(map(str, sorted(numbers)))})"


def join_conditions(word: str, *conditions: str) -> str:
    """Join conditions with AND or OR, and simplify."""
    neutral, deciding = (EVERY, NEVER) if word == "AND" else (NEVER, EVERY)
    if deciding in conditions:
        return deciding
    needed = list(dict.fromkeys(each for each in conditions if each != neutral))
    if len(needed) <= 1:
        return needed[0] if needed else neutral
    return f" {word} ".join(f"({each})" if _is_compound(each) else each for each in needed)


def negate(condition: str) -> str:
    """Return the opposite; where a column is null, rsyslog has an empty text, so it is true."""
    if condition in {EVERY, NEVER}:
        return NEVER if condition == EVERY else EVERY
    return f"NOT coalesce({condition}, false)"


def _is_compound(condition: str) -> bool:
    return " AND " in condition or " OR " in condition


def quote(text: str) -> str:
    """Return a text as a literal of Spark SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def _compare(name: str, operation: str, values: list[str]) -> str:
    """Return a comparison of a property with texts, of which one has to match."""
    if operation in {"!=", "<>"}:
        return negate(_compare(name, "==", values))
    if name in NUMBERS:
        return _compare_number(NUMBERS[name], operation, values)
    if name in _NAMED_NUMBERS and operation == "==":
        column, names = _NAMED_NUMBERS[name]
        if unknown := set(values).difference(names):
            raise Unconvertible(f"rsyslog's {name} is never {min(unknown)!r}")
        return join_conditions("OR", *(f"{column} = {names.index(value)}" for value in values))
    if name not in PROPERTIES:
        raise Unconvertible(f"turnlane has no column for {name}")
    column = PROPERTIES[name]
    if operation == "==":
        if name == "msg" or "" in values:
            raise Unconvertible(_NO_MESSAGE_START if name == "msg" else "an empty text is null")
        return join_conditions("OR", *(f"{column} = {quote(value)}" for value in values))
    if operation not in _FUNCTIONS:
        raise Unconvertible(f"turnlane does not convert {operation}")
    if name == "msg" and (operation.startswith("starts") or any(v[:1] == " " for v in values)):
        raise Unconvertible(_NO_MESSAGE_START)
    made = (_FUNCTIONS[operation].format(column, quote(value)) for value in values)
    return join_conditions("OR", *made)


def _compare_number(column: str, operation: str, values: list[str]) -> str:
    sign = {"==": "=", "<=": "<=", ">=": ">=", "<": "<", ">": ">"}.get(operation)
    if sign is None or not all(value.isdecimal() and len(value) < 4 for value in values):
        raise Unconvertible(f"{column} is a number, and {operation} {values} is not about numbers")
    return join_conditions("OR", *(f"{column} {sign} {int(value)}" for value in values))


class _Expression:
    """Converts the tokens of an ``if``, from left to right."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def convert(self) -> str:
        made = self._convert_all()
        if self._at < len(self._tokens):
            raise Unconvertible(f"turnlane does not convert {self._tokens[self._at].text!r} here")
        return made

    def _next(self, *texts: str) -> bool:
        """Skip the next token if it is one of these."""
        if self._at < len(self._tokens) and self._tokens[self._at].text.lower() in texts:
            self._at += 1
            return True
        return False

    def _take(self, *kinds: str) -> Token:
        token = self._tokens[self._at] if self._at < len(self._tokens) else Token("", "")
        if token.kind not in kinds:
            raise Unconvertible(f"turnlane converts no {token.text or 'missing operand'!r} here")
        self._at += 1
        return token

    def _convert_all(self) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unconvertible("the expression is nested too deeply")
        made = self._convert_operand()
        while True:
            if self._next("and"):
                made = join_conditions("AND", made, self._convert_operand())
            elif self._next("or"):
                made = join_conditions("OR", made, self._convert_operand())
            else:
                self._depth -= 1
                return made

    def _convert_operand(self) -> str:
        if self._next("not"):
            token = self._tokens[self._at] if self._at < len(self._tokens) else Token("", "")
            if token.text.lower() not in {"(", "prifilt"}:
                raise Unconvertible("without parentheses, not belongs to the next operand alone")
            return negate(self._convert_operand())
        if self._next("("):
            made = self._convert_all()
            if not self._next(")"):
                raise Unconvertible("a parenthesis holds more than comparisons")
            return made
        if self._next("prifilt"):
            self._expect("(")
            made = convert_selector(_get_text(self._take("text")))
            self._expect(")")
            return made
        name = self._take("variable").text.lower().lstrip("$")
        operation = self._take("sign", "word").text.lower()
        return _compare(name, operation, self._take_values())

    def _expect(self, text: str) -> None:
        if not self._next(text):
            raise Unconvertible(f"{text} is missing")

    def _take_values(self) -> list[str]:
        if not self._next("["):
            return [_get_text(self._take("text", "number"))]
        values = [_get_text(self._take("text"))]
        while self._next(","):
            values.append(_get_text(self._take("text")))
        self._expect("]")
        return values


def _get_text(token: Token) -> str:
    if token.kind == "text":
        return unescape(token.text[1:-1])
    if not token.text.startswith("0"):
        return token.text
    try:
        return str(int(token.text, 16 if "x" in token.text.lower() else 8))
    except ValueError:
        why = "a number that begins with 0 is octal, or begins with 0x and is hexadecimal"
        raise Unconvertible(f"{token.text[:20]} is no number: {why}") from None
