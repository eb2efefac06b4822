"""The grammar of statements about queues and schedules, and a parser for it.

::

    statement = create | drop | schedule | drop schedule | SHOW QUEUES | SHOW SCHEDULES
    create    = CREATE QUEUE [IF NOT EXISTS] name ( column {, column} [,] )
                [SHARD BY ( name )] [WITH ( option {, option} [,] )]
    drop      = DROP QUEUE [IF EXISTS] name
    column    = name type [( number {, number} )] [NOT NULL | NULL]
    option    = word = value

    schedule  = CREATE SCHEDULE name ON name EVERY text [TIME ZONE text]
                [VALUES ( name = literal {, name = literal} [,] )]
    literal   = text | [-] number | TRUE | FALSE | NULL
    drop schedule = DROP SCHEDULE name ON name

Words match in any case; a name in double quotes or backticks keeps its case. A statement may end
with a semicolon. Comments start with ``--``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn, TypeVar

from turnlane.errors import ConfigError, SyntaxFault
from turnlane.table.definition import TYPES, Column, Definition, TableSettings, check_name
from turnlane.table.schedules import Schedule
from turnlane.validation import suggest

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s|--[^\n]*)+)
      | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`)
      | (?P<text>'(?:[^']|'')*')
      | (?P<value>[0-9][0-9A-Za-z_.]*)
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>[(),=;-])""",
    re.VERBOSE,
)

T = TypeVar("T")

LiteralValue = str | int | float | bool | None
LITERALS: Final[dict[str, LiteralValue]] = {"TRUE": True, "FALSE": False, "NULL": None}


@dataclass(frozen=True, slots=True)
class CreateQueue:
    """Create a queue."""

    definition: Definition
    if_not_exists: bool = False


@dataclass(frozen=True, slots=True)
class DropQueue:
    """Delete a queue and everything in it."""

    name: str
    if_exists: bool = False


@dataclass(frozen=True, slots=True)
class ShowQueues:
    """List the queues."""


@dataclass(frozen=True, slots=True)
class CreateSchedule:
    """Create a schedule: an event recurs."""

    schedule: Schedule


@dataclass(frozen=True, slots=True)
class DropSchedule:
    """Delete a schedule."""

    name: str
    queue: str


@dataclass(frozen=True, slots=True)
class ShowSchedules:
    """List the schedules."""


ScheduleStatement = CreateSchedule | DropSchedule | ShowSchedules
Statement = CreateQueue | DropQueue | ShowQueues | ScheduleStatement


class SqlToken(NamedTuple):
    """A token of a statement, and its position."""

    kind: str
    text: str
    at: int

    @property
    def word(self) -> str:
        """The bare word in capitals; an empty text for any other token."""
        return self.text.upper() if self.kind == "word" else ""

    @property
    def description(self) -> str:
        """The token for an error message."""
        return "the end" if self.kind == "end" else repr(self.text)


def parse(text: str) -> Statement:
    """Parse a statement. Raises ``SyntaxFault`` with line and column."""
    return _Parser(text).parse_statement()


def parse_definition(text: str) -> Definition:
    """Parse a ``CREATE QUEUE`` statement. Raises ``SyntaxFault``."""
    statement = parse(text)
    if not isinstance(statement, CreateQueue):
        raise SyntaxFault("expected CREATE QUEUE", 1, 1)
    return statement.definition


class _Parser:
    """A recursive descent parser: one method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split_tokens()
        self._next = 0

    def parse_statement(self) -> Statement:
        parsed: Statement
        verb = self._take_word("CREATE", "DROP", "SHOW").word
        if verb == "SHOW":
            shown = self._take_word("QUEUES", "SCHEDULES").word
            parsed = ShowQueues() if shown == "QUEUES" else ShowSchedules()
        elif self._take_word("QUEUE", "SCHEDULE").word == "SCHEDULE":
            if verb == "CREATE":
                parsed = self._parse_create_schedule()
            else:
                parsed = DropSchedule(*self._parse_schedule_name())
        elif verb == "CREATE":
            parsed = self._parse_create()
        else:
            if_exists = self._take_phrase("IF", "EXISTS")
            parsed = DropQueue(self._parse_name("a queue's name"), if_exists)
        self._take_if(";")
        if self._peek().kind != "end":
            self._fail(f"expected the end, found {self._peek().description}", self._peek())
        return parsed

    def _parse_create(self) -> CreateQueue:
        if_not_exists = self._take_phrase("IF", "NOT", "EXISTS")
        start = self._peek()
        name = self._parse_name("a queue's name")
        columns = self._parse_list(self._parse_column)
        shard_by = None
        if self._take_phrase("SHARD", "BY"):
            self._take_sign("(")
            shard_by = self._parse_name("a column's name")
            self._take_sign(")")
        settings = self._parse_settings() if self._take_phrase("WITH") else TableSettings()
        try:
            definition = Definition(name, tuple(columns), shard_by, settings)
        except ValueError as error:
            self._fail(str(error), start)
        return CreateQueue(definition, if_not_exists)

    def _parse_column(self) -> Column:
        name = self._parse_name("a column's name")
        token = self._peek()
        kind = self._take("word", "a type").word
        if kind not in TYPES:
            self._fail(f"there is no type {token.description}{suggest(kind, TYPES)}", token)
        if kind == "DOUBLE":
            self._take_phrase("PRECISION")
        arguments = self._parse_arguments() if self._peek().text == "(" else ()
        try:
            TYPES[kind].check_arguments(arguments)
        except ValueError as error:
            self._fail(f"{kind} {error}", token)
        required = self._take_phrase("NOT", "NULL")
        if not required:
            self._take_phrase("NULL")
        return Column(name, kind, arguments, required)

    def _parse_arguments(self) -> tuple[int, ...]:
        self._take_sign("(")
        numbers = [self._parse_number()]
        while self._take_if(","):
            numbers.append(self._parse_number())
        self._take_sign(")")
        return tuple(numbers)

    def _parse_number(self) -> int:
        token = self._take("value", "a whole number")
        if not token.text.isdecimal() or len(token.text) > 9:
            self._fail(f"expected a whole number, found {token.description}", token)
        return int(token.text)

    def _parse_settings(self) -> TableSettings:
        start = self._peek()
        options = self._parse_pairs(self._parse_option)
        try:
            return TableSettings.from_options(**options)
        except ConfigError as error:
            self._fail(str(error), start)

    def _parse_list(self, parse_item: Callable[[], T]) -> list[T]:
        """Parse ``( item {, item} [,] )``."""
        self._take_sign("(")
        items = [parse_item()]
        while self._take_if(",") and self._peek().text != ")":
            items.append(parse_item())
        self._take_sign(")")
        return items

    def _parse_pairs(self, parse_pair: Callable[[], tuple[str, T]]) -> dict[str, T]:
        """Parse ``( name = value {, name = value} [,] )``."""
        pairs: dict[str, T] = {}

        def add_pair() -> None:
            at = self._peek()
            name, value = parse_pair()
            if name in pairs:
                self._fail(f"{name!r} is given twice", at)
            pairs[name] = value

        self._parse_list(add_pair)
        return pairs

    def _parse_option(self) -> tuple[str, str]:
        name = self._take("word", "an option").text.lower()
        self._take_sign("=")
        token = self._peek()
        if token.kind not in {"word", "value", "text"}:
            self._fail(f"expected a value for {name}, found {token.description}", token)
        self._next += 1
        return name, _unquote(token.text) if token.kind == "text" else token.text.lower()

    # ── schedules ────────────────────────────────────────────────────────────────────────────────

    def _parse_create_schedule(self) -> CreateSchedule:
        start = self._peek()
        name, queue = self._parse_schedule_name()
        self._take_word("EVERY")
        every = _unquote(self._take("text", "a cron expression in quotes").text)
        zone = "UTC"
        if self._take_phrase("TIME", "ZONE"):
            zone = _unquote(self._take("text", "a time zone in quotes").text)
        values = self._parse_pairs(self._parse_value) if self._take_phrase("VALUES") else {}
        schedule = Schedule(queue, name, every, zone, values)
        try:
            schedule.check()
        except ValueError as error:
            self._fail(str(error), start)
        return CreateSchedule(schedule)

    def _parse_schedule_name(self) -> tuple[str, str]:
        name = self._parse_name("a schedule's name")
        self._take_word("ON")
        return name, self._parse_name("a queue's name")

    def _parse_value(self) -> tuple[str, LiteralValue]:
        name = self._parse_name("a column's name")
        self._take_sign("=")
        return name, self._parse_literal()

    def _parse_literal(self) -> LiteralValue:
        token = self._peek()
        if token.kind == "text":
            self._next += 1
            return _unquote(token.text)
        if token.kind == "word":
            word = self._take_word(*LITERALS).word
            return LITERALS[word]
        sign = -1 if self._take_if("-") else 1
        number = self._take("value", "a value").text
        try:
            return sign * (int(number) if number.isdecimal() else float(number))
        except ValueError:
            self._fail(f"{number!r} is not a number", token)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def _split_tokens(self) -> list[SqlToken]:
        tokens = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self._fail(f"cannot read {self._text[at]!r}", SqlToken("", "", at))
            if match.lastgroup != "space":
                tokens.append(SqlToken(match.lastgroup or "", match.group(), at))
            at = match.end()
        return [*tokens, SqlToken("end", "", len(self._text))]

    def _peek(self, ahead: int = 0) -> SqlToken:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def _take(self, kind: str, wanted: str) -> SqlToken:
        token = self._peek()
        if token.kind != kind:
            self._fail(f"expected {wanted}, found {token.description}", token)
        self._next += 1
        return token

    def _take_word(self, *words: str) -> SqlToken:
        token = self._peek()
        if token.word not in words:
            hint = suggest(token.word, words)
            self._fail(f"expected {' or '.join(words)}, found {token.description}{hint}", token)
        self._next += 1
        return token

    def _take_phrase(self, *words: str) -> bool:
        """Take the words if all of them come next; whether they did."""
        if any(self._peek(ahead).word != word for ahead, word in enumerate(words)):
            return False
        self._next += len(words)
        return True

    def _take_sign(self, sign: str) -> None:
        if not self._take_if(sign):
            self._fail(f"expected {sign!r}, found {self._peek().description}", self._peek())

    def _take_if(self, sign: str) -> bool:
        if self._peek().text != sign:
            return False
        self._next += 1
        return True

    def _parse_name(self, wanted: str) -> str:
        token = self._peek()
        if token.kind not in {"word", "quoted"}:
            self._fail(f"expected {wanted}, found {token.description}", token)
        self._next += 1
        try:
            # A bare name has no case; a quoted name keeps it.
            return check_name(token.text.lower() if token.kind == "word" else _unquote(token.text))
        except ValueError as error:
            self._fail(str(error), token)

    def _fail(self, message: str, token: SqlToken) -> NoReturn:
        line = self._text.count("\n", 0, token.at) + 1
        column = token.at - (self._text.rfind("\n", 0, token.at) + 1) + 1
        raise SyntaxFault(message, line, column) from None


def _unquote(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote)
