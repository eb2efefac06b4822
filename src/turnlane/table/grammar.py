"""The statements about queues, and about the schedules of events that recur.

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

Words are matched without regard to case; a name in double quotes or backticks is taken as it is.
A statement may end with a semicolon. Comments start with ``--``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn, Protocol

from turnlane.errors import ConfigError, NoSuchSchedule, SyntaxFault
from turnlane.table.definition import TYPES, Column, Definition, TableSettings, check_name
from turnlane.table.schedules import Schedule
from turnlane.validation import did_you_mean

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s|--[^\n]*)+)
      | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`)
      | (?P<text>'(?:[^']|'')*')
      | (?P<value>[0-9][0-9A-Za-z_.]*)
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>[(),=;-])""",
    re.VERBOSE,
)


LiteralValue = str | int | float | bool | None
LITERALS: Final[dict[str, LiteralValue]] = {"TRUE": True, "FALSE": False, "NULL": None}


@dataclass(frozen=True, slots=True)
class CreateQueue:
    """Make a queue."""

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
    """Have an event recur."""

    schedule: Schedule


@dataclass(frozen=True, slots=True)
class DropSchedule:
    """Have it recur no more."""

    name: str
    queue: str


@dataclass(frozen=True, slots=True)
class ShowSchedules:
    """List the schedules."""


ScheduleStatement = CreateSchedule | DropSchedule | ShowSchedules
Statement = CreateQueue | DropQueue | ShowQueues | ScheduleStatement


class Token(NamedTuple):
    """A piece of a statement, and where it starts."""

    kind: str
    text: str
    at: int

    @property
    def word(self) -> str:
        """A bare word in capitals; nothing for any other token."""
        return self.text.upper() if self.kind == "word" else ""

    @property
    def shown(self) -> str:
        """As an error message has it."""
        return "the end" if self.kind == "end" else repr(self.text)


def parse(text: str) -> Statement:
    """The statement that ``text`` is. Raises ``SyntaxFault`` with line and column."""
    return _Parser(text).statement()


def parse_definition(text: str) -> Definition:
    """The definition in a ``CREATE QUEUE`` statement."""
    statement = parse(text)
    if not isinstance(statement, CreateQueue):
        raise SyntaxFault("expected CREATE QUEUE", 1, 1)
    return statement.definition


class _Parser:
    """Recursive descent: a method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._scan()
        self._next = 0

    def statement(self) -> Statement:
        parsed: Statement
        match self._take_word("CREATE", "DROP", "SHOW").word:
            case "CREATE":
                parsed = self._create_schedule() if self._about_schedules() else self._create()
            case "DROP":
                parsed = self._drop_schedule() if self._about_schedules() else self._drop()
            case _:
                shown = self._take_word("QUEUES", "SCHEDULES").word
                parsed = ShowQueues() if shown == "QUEUES" else ShowSchedules()
        self._skip(";")
        if self._peek().kind != "end":
            self._fail(f"expected the end, found {self._peek().shown}", self._peek())
        return parsed

    def _about_schedules(self) -> bool:
        return self._take_word("QUEUE", "SCHEDULE").word == "SCHEDULE"

    def _create(self) -> CreateQueue:
        lenient = self._take_phrase("IF", "NOT", "EXISTS")
        start = self._peek()
        name = self._name("a queue's name")
        columns = self._columns()
        shard_by = self._shard_by() if self._take_phrase("SHARD", "BY") else None
        settings = self._settings() if self._take_phrase("WITH") else TableSettings()
        try:
            definition = Definition(name, tuple(columns), shard_by, settings)
        except ValueError as error:
            self._fail(str(error), start)
        return CreateQueue(definition, lenient)

    def _drop(self) -> DropQueue:
        lenient = self._take_phrase("IF", "EXISTS")
        return DropQueue(self._name("a queue's name"), lenient)

    def _columns(self) -> list[Column]:
        self._take_sign("(")
        columns = [self._column()]
        while self._skip(",") and self._peek().text != ")":
            columns.append(self._column())
        self._take_sign(")")
        return columns

    def _column(self) -> Column:
        name = self._name("a column's name")
        token = self._peek()
        kind = self._take("word", "a type").word
        if kind not in TYPES:
            self._fail(f"there is no type {token.shown}{did_you_mean(kind, TYPES)}", token)
        if kind == "DOUBLE":
            self._take_phrase("PRECISION")
        arguments = self._arguments() if self._peek().text == "(" else ()
        try:
            TYPES[kind].check(arguments)
        except ValueError as error:
            self._fail(f"{kind} {error}", token)
        required = self._take_phrase("NOT", "NULL")
        if not required:
            self._take_phrase("NULL")
        return Column(name, kind, arguments, required)

    def _arguments(self) -> tuple[int, ...]:
        self._take_sign("(")
        numbers = [self._number()]
        while self._skip(","):
            numbers.append(self._number())
        self._take_sign(")")
        return tuple(numbers)

    def _number(self) -> int:
        token = self._take("value", "a whole number")
        if not token.text.isdecimal() or len(token.text) > 9:
            self._fail(f"expected a whole number, found {token.shown}", token)
        return int(token.text)

    def _shard_by(self) -> str:
        self._take_sign("(")
        name = self._name("a column's name")
        self._take_sign(")")
        return name

    def _settings(self) -> TableSettings:
        start = self._peek()
        self._take_sign("(")
        options = dict([self._option()])
        while self._skip(",") and self._peek().text != ")":
            at = self._peek()
            name, value = self._option()
            if name in options:
                self._fail(f"{name} stands there twice", at)
            options[name] = value
        self._take_sign(")")
        return self._checked(options, start)

    def _option(self) -> tuple[str, str]:
        name = self._take("word", "an option").text.lower()
        self._take_sign("=")
        token = self._peek()
        if token.kind not in {"word", "value", "text"}:
            self._fail(f"expected a value for {name}, found {token.shown}", token)
        self._next += 1
        return name, _unquoted(token.text) if token.kind == "text" else token.text.lower()

    def _checked(self, options: dict[str, str], start: Token) -> TableSettings:
        try:
            return TableSettings.of(**options)
        except ConfigError as error:
            self._fail(str(error), start)

    # ── schedules ────────────────────────────────────────────────────────────────────────────────

    def _create_schedule(self) -> CreateSchedule:
        start = self._peek()
        name, queue = self._schedule_name()
        self._take_word("EVERY")
        every = _unquoted(self._take("text", "a cron expression in quotes").text)
        zone = "UTC"
        if self._take_phrase("TIME", "ZONE"):
            zone = _unquoted(self._take("text", "a time zone in quotes").text)
        values = self._values() if self._take_phrase("VALUES") else {}
        schedule = Schedule(queue, name, every, zone, values)
        try:
            schedule.check()
        except ValueError as error:
            self._fail(str(error), start)
        return CreateSchedule(schedule)

    def _drop_schedule(self) -> DropSchedule:
        return DropSchedule(*self._schedule_name())

    def _schedule_name(self) -> tuple[str, str]:
        name = self._name("a schedule's name")
        self._take_word("ON")
        return name, self._name("a queue's name")

    def _values(self) -> dict[str, LiteralValue]:
        self._take_sign("(")
        values = dict([self._value()])
        while self._skip(",") and self._peek().text != ")":
            at = self._peek()
            name, value = self._value()
            if name in values:
                self._fail(f"{name!r} stands there twice", at)
            values[name] = value
        self._take_sign(")")
        return values

    def _value(self) -> tuple[str, LiteralValue]:
        name = self._name("a column's name")
        self._take_sign("=")
        return name, self._literal()

    def _literal(self) -> LiteralValue:
        token = self._peek()
        if token.kind == "text":
            self._next += 1
            return _unquoted(token.text)
        if token.kind == "word":
            word = self._take_word(*LITERALS).word
            return LITERALS[word]
        sign = -1 if self._skip("-") else 1
        number = self._take("value", "a value").text
        try:
            return sign * (int(number) if number.isdecimal() else float(number))
        except ValueError:
            self._fail(f"{number!r} is not a number", token)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────

    def _scan(self) -> list[Token]:
        tokens = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self._fail(f"cannot read {self._text[at]!r}", Token("", "", at))
            if match.lastgroup != "space":
                tokens.append(Token(match.lastgroup or "", match.group(), at))
            at = match.end()
        return [*tokens, Token("end", "", len(self._text))]

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def _take(self, kind: str, wanted: str) -> Token:
        token = self._peek()
        if token.kind != kind:
            self._fail(f"expected {wanted}, found {token.shown}", token)
        self._next += 1
        return token

    def _take_word(self, *words: str) -> Token:
        token = self._peek()
        if token.word not in words:
            hint = did_you_mean(token.word, words)
            self._fail(f"expected {' or '.join(words)}, found {token.shown}{hint}", token)
        self._next += 1
        return token

    def _take_phrase(self, *words: str) -> bool:
        """Take all of the words, if they come next."""
        if any(self._peek(ahead).word != word for ahead, word in enumerate(words)):
            return False
        self._next += len(words)
        return True

    def _take_sign(self, sign: str) -> None:
        if not self._skip(sign):
            self._fail(f"expected {sign!r}, found {self._peek().shown}", self._peek())

    def _skip(self, sign: str) -> bool:
        if self._peek().text != sign:
            return False
        self._next += 1
        return True

    def _name(self, wanted: str) -> str:
        token = self._peek()
        if token.kind not in {"word", "quoted"}:
            self._fail(f"expected {wanted}, found {token.shown}", token)
        self._next += 1
        try:
            # A bare name is the same in every case; a quoted one is taken as it is.
            return check_name(token.text.lower() if token.kind == "word" else _unquoted(token.text))
        except ValueError as error:
            self._fail(str(error), token)

    def _fail(self, message: str, token: Token) -> NoReturn:
        line = self._text.count("\n", 0, token.at) + 1
        column = token.at - (self._text.rfind("\n", 0, token.at) + 1) + 1
        raise SyntaxFault(message, line, column) from None


def _unquoted(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote)


# ── scheduling ──
# Scheduling: the statements about schedules, for queues in one database or in several.


class ScheduleOwner(AbstractContextManager["ScheduleOwner"], Protocol):
    """A queue, as far as its schedules go."""

    def schedule(self, name: str, every: str, time_zone: str, /, **columns: object) -> None:
        """Make one."""

    def unschedule(self, name: str) -> bool:
        """Forget one; false if there is none."""

    def schedules(self) -> list[Schedule]:
        """All there are."""


def run_schedule_statement(
    statement: ScheduleStatement,
    opened: Callable[[str], ScheduleOwner],
    queues: Callable[[], Iterable[str]],
) -> list[str]:
    """Run it on a queue; returns the names concerned, or statements that make what there is."""
    match statement:
        case CreateSchedule(made):
            with opened(made.queue) as queue:
                queue.schedule(made.name, made.every, made.time_zone, **made.columns)
            return [made.name]
        case DropSchedule(name, of):
            with opened(of) as queue:
                if not queue.unschedule(name):
                    raise NoSuchSchedule(f"{of!r} has no schedule {name!r}")
            return [name]
        case _:
            shown: list[str] = []
            for name in queues():
                with opened(name) as queue:
                    shown += map(str, queue.schedules())
            return shown
