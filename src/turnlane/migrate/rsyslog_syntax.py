"""The statements of an rsyslog configuration, in RainerScript and in the legacy format.

The reader follows rsyslog's lexer and grammar as far as statements go: objects with parameters,
directives (``$Name value``), filters with their blocks, and actions. It reads any text: a part that
is no statement becomes an :class:`Unknown` with its line, and reading goes on in the next line.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_MAX_DEPTH: Final = 40
"""How deep blocks may be nested."""

_SPACE: Final = re.compile(r"(?:\s+|#[^\n]*|/\*.*?(?:\*/|\Z))+", re.DOTALL)
_OBJECT: Final = re.compile(
    r"(main_queue|timezone|parser|global|template|ruleset|property|constant|input|module|"
    r"lookup_table|dyn_stats|percentile_stats|ratelimit|include|action)\s*\(",
    re.IGNORECASE,
)
_KEYWORD: Final = re.compile(
    r"(if|foreach|set|reset|unset|stop|call|call_indirect|continue|reload_lookup_table|else)\b",
    re.IGNORECASE,
)
_ELSE: Final = re.compile(r"else\b", re.IGNORECASE)
_DIRECTIVE: Final = re.compile(r"\$[A-Za-z]+")
_PROPERTY: Final = re.compile(
    r':(\$?[\w-]+)[ ]*,[ ]*(!?)([a-z]+)[ ]*,[ ]*"((?:\\.|[^"\\])*)"', re.IGNORECASE
)
_SELECTOR: Final = re.compile(r"[*a-z][*a-z]*[0-7]*[.,][,!=;.*a-z0-9]+(?=\s|\{)", re.IGNORECASE)
_NAME: Final = re.compile(r"[a-z][a-z0-9_.]*", re.IGNORECASE)
_CALLED: Final = re.compile(r"[a-z][\w.-]*", re.IGNORECASE)
_ACTION_WORD: Final = re.compile(r"[a-z0-9_][a-z0-9_\-+,;]*", re.IGNORECASE)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|`((?:[^`\\]|\\.)*)`', re.DOTALL)
_TOKEN: Final = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<variable>\$[$!./]?[@\w]*[!@\w.\[\]-]*)
    | (?P<number>0x[0-9a-f]+|[0-9]+)
    | (?P<word>[a-z][a-z0-9_]*)
    | (?P<sign>==|<=|>=|!=|<>|[<>()\[\],=+*/%&;{-])
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


class Unreadable(Exception):
    """A text that is no statement."""


class Parameter(NamedTuple):
    """A parameter of an object, or the value of a directive that means the same."""

    written: str
    """Its name as it stands in the file."""
    value: str
    line: int

    @property
    def name(self) -> str:
        return self.written.lower()


class Token(NamedTuple):
    """A part of an expression: its kind (``text``, ``variable``, …) and its text."""

    kind: str
    text: str


@dataclass
class Statement:
    """A statement and the line in which it begins."""

    line: int
    text: str
    """The statement as it is written, or its beginning."""


@dataclass
class ObjectStatement(Statement):
    """``action(…)``, ``input(…)``, ``ruleset(…) {…}`` and so on."""

    kind: str
    parameters: list[Parameter]
    body: list[Statement] = field(default_factory=list)


@dataclass
class Directive(Statement):
    """``$Name value``; the name without the dollar sign."""

    name: str
    value: str


@dataclass
class Condition(Statement):
    """Statements for messages that pass a filter, and for those that do not."""

    tokens: list[Token]
    """The expression of an ``if``; empty for a selector and a property filter."""
    then: list[Statement]
    otherwise: list[Statement]


@dataclass
class LegacyAction(Statement):
    """``/var/log/messages``, ``@@host:514``, ``~`` and so on."""


@dataclass
class Stop(Statement):
    """The end of the way of a message."""


@dataclass
class RulesetCall(Statement):
    """The statements of a ruleset."""

    ruleset: str


@dataclass
class Unknown(Statement):
    """A part of the file that turnlane does not read; ``why`` tells the reason."""

    why: str


def parse_statements(text: str) -> list[Statement]:
    """Return the statements of a configuration."""
    return list(_Reader(text.replace("\r\n", "\n")).read_file())


def parse_property_filter(text: str) -> tuple[str, bool, str, str] | None:
    """Return property, negation, operation and value of ``:msg, !contains, "x"``."""
    match = _PROPERTY.match(text)
    if match is None:
        return None
    return match[1].lower(), bool(match[2]), match[3].lower(), unescape(match[4])


def unescape(text: str) -> str:
    """Return a quoted text without its escapes."""

    def replace(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "x" and len(code) == 3:
            return chr(int(code[1:], 16))
        if code.isdigit() and code[0] in "01234567":
            return chr(int(code, 8) & 0xFF)
        return _ESCAPED.get(code, code)

    return _ESCAPE.sub(replace, text)


class _Reader:
    """Reads statements from a text, at a position that moves on."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._lines = [match.start() for match in re.finditer("\n", text)]

    def read_file(self) -> Iterator[Statement]:
        while self._skip_space():
            start = self._at
            try:
                if self._text[start] == "&":  # without a filter before it
                    self._at += 1
                yield self._read_statement()
            except Unreadable as error:
                self._at = start
                yield Unknown(self._line(start), self._read_line(), str(error))

    # ── characters ──

    def _line(self, at: int) -> int:
        return bisect_right(self._lines, at - 1) + 1 if at else 1

    def _skip_space(self) -> bool:
        """Skip spaces and comments; return whether text follows."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._at < len(self._text)

    def _peek(self, sign: str) -> bool:
        return self._skip_space() and self._text[self._at] == sign

    def _expect(self, sign: str, where: str) -> None:
        if not self._peek(sign):
            raise Unreadable(f"there is no {sign} {where}")
        self._at += 1

    def _read_line(self) -> str:
        """Return the rest of the line; a backslash at its end continues it."""
        pieces = []
        while True:
            end = self._text.find("\n", self._at)
            end = len(self._text) if end < 0 else end
            piece = self._text[self._at : end]
            self._at = min(end + 1, len(self._text))
            pieces.append(piece.removesuffix("\\").strip())
            if not piece.endswith("\\") or self._at >= len(self._text):
                return " ".join(pieces).strip()

    # ── statements ──

    def _read_statement(self) -> Statement:
        if not self._skip_space():
            raise Unreadable("an action is missing at the end of the file")
        start = self._at
        line = self._line(start)
        if found := _OBJECT.match(self._text, start):
            self._at = found.end()
            return self._read_object(found[1].lower(), start)
        if found := _DIRECTIVE.match(self._text, start):
            self._at = found.end()
            return Directive(line, found[0], found[0][1:], self._read_line())
        if found := _KEYWORD.match(self._text, start):
            self._at = found.end()
            return self._read_keyword(found[1].lower(), start)
        if found := _PROPERTY.match(self._text, start) or _SELECTOR.match(self._text, start):
            self._at = found.end()
            return Condition(line, found[0], [], self._read_block(), [])
        return LegacyAction(line, self._read_legacy_action())

    def _read_legacy_action(self) -> str:
        sign, after = self._text[self._at], self._text[self._at + 1 : self._at + 2]
        if sign in "/-@|^?>:.~" and after.strip():
            return self._read_line()
        word = _ACTION_WORD.match(self._text, self._at)
        if word is None and sign not in "~*":
            raise Unreadable(f"{sign!r} begins no statement")
        self._at = self._at + 1 if word is None else word.end()
        return sign if word is None else word[0]

    def _read_block(self) -> list[Statement]:
        """Return the statements of ``{…}``, or one statement and those that ``&`` adds."""
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                raise Unreadable("blocks are nested too deeply")
            if self._peek("{"):
                self._at += 1
                return self._read_body()
            found = [self._read_statement()]
            while self._peek("&"):
                self._at += 1
                found.append(self._read_statement())
            return found
        finally:
            self._depth -= 1

    def _read_body(self) -> list[Statement]:
        """Return the statements until the closing brace."""
        found = []
        while not self._peek("}"):
            if self._at >= len(self._text):
                raise Unreadable("a block is not closed: } is missing")
            if self._text[self._at] == "&":
                self._at += 1
            else:
                found.append(self._read_statement())
        self._at += 1
        return found

    def _read_object(self, kind: str, start: int) -> ObjectStatement:
        parameters = []
        while not self._peek(")"):
            line = self._line(self._at)
            name = _NAME.match(self._text, self._at)
            if name is None:
                raise Unreadable(f"{kind}( has no ) after its parameters")
            self._at = name.end()
            self._expect("=", f"after {name[0]}")
            parameters.append(Parameter(name[0], self._read_value(name[0]), line))
        self._at += 1
        text = self._text[start : self._at]
        made = ObjectStatement(self._line(start), " ".join(text.split()), kind, parameters)
        if kind in {"ruleset", "template"} and self._peek("{"):
            made.body = self._read_block()
        return made

    def _read_value(self, name: str) -> str:
        """Return a quoted text; the texts of an array are joined with commas."""
        if not self._peek("["):
            match = _QUOTED.match(self._text, self._at)
            if match is None:
                raise Unreadable(f"the value of {name} is not in double quotes")
            self._at = match.end()
            return f"`{match[2]}`" if match[1] is None else unescape(match[1])
        self._at += 1
        texts = [self._read_value(name)]
        while self._peek(","):
            self._at += 1
            texts.append(self._read_value(name))
        self._expect("]", f"after the values of {name}")
        return ",".join(texts)

    def _read_keyword(self, word: str, start: int) -> Statement:
        line = self._line(start)
        if word == "stop":
            return Stop(line, word)
        if word == "if":
            tokens = self._read_tokens("then")
            text = " ".join(self._text[start : self._at].split())
            then = self._read_block()
            otherwise = []
            if self._skip_space() and _ELSE.match(self._text, self._at):
                self._at += len("else")
                otherwise = self._read_block()
            return Condition(line, text, tokens, then, otherwise)
        if word == "call":
            self._skip_space()
            name = _CALLED.match(self._text, self._at)
            if name is None:
                raise Unreadable("call names no ruleset")
            self._at = name.end()
            return RulesetCall(line, f"call {name[0]}", name[0])
        if word == "foreach":
            self._read_tokens("do")
            self._read_block()
        elif word == "reload_lookup_table":
            self._read_tokens(")")
        elif word in {"set", "reset", "unset", "call_indirect"}:
            self._read_tokens(";")
        elif word == "else":
            raise Unreadable("else has no if before it")
        text = " ".join(self._text[start : self._at].split())
        return Unknown(line, text, f"turnlane has no {word}")

    def _read_tokens(self, end: str) -> list[Token]:
        """Return the tokens until ``end``, and skip that."""
        found: list[Token] = []
        while self._skip_space():
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                raise Unreadable(f"{self._text[self._at]!r} is not a part of an expression")
            self._at = match.end()
            token = Token(str(match.lastgroup), match[0])
            if token.text.lower() == end and token.kind in {"word", "sign"}:
                return found
            found.append(token)
        raise Unreadable(f"the expression has no {end} after it")
