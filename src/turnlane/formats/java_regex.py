"""Java's regular expressions, as far as one can judge them without Java: groups, names, brackets.

Named groups become numbered ones. So a name may be any column name (Java itself refuses ``_``),
and one pass can take out all groups.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TOKEN: Final = re.compile(
    r"""
      (?P<quoted>\\Q.*?(?:\\E|\Z))
    | (?P<back>\\k<(?P<backname>[^>]*)>)
    | (?P<escape>\\.)
    | (?P<stray>\\\Z)
    | (?P<named>\(\?P?<(?![=!])(?P<name>[^>]*)>?)
    | (?P<special>\(\?)
    | (?P<group>\()
    | (?P<close>\))
    | (?P<class>\[)
    | (?P<other>[^\\()\[]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_CLASS: Final = re.compile(r"\\Q.*?(?:\\E|\Z)|\\.|\[\^?\]?|\]|[^\\\[\]]+|\\\Z", re.DOTALL)


class BadPattern(ValueError):
    """The pattern cannot be a regular expression; says where."""


class GroupedPattern(NamedTuple):
    """A pattern with no names in it, and the numbers of the groups that had one."""

    pattern: str
    numbers: dict[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """The named groups, in order."""
        return tuple(self.numbers)

    @classmethod
    def of(cls, pattern: str) -> GroupedPattern:
        """Read a pattern. Raises ``BadPattern``."""
        return _Scan(pattern).done()


class _Scan:
    """One way through a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._written: list[str] = []
        self._opened: list[int] = []
        self._numbers: dict[str, int] = {}
        self._count = 0

    def done(self) -> GroupedPattern:
        at = 0
        while at < len(self._pattern):
            found = _TOKEN.match(self._pattern, at)
            assert found is not None, "some alternative takes any character"
            at = self._take(found)
        if self._opened:
            raise BadPattern(f"the group opened at {_place(self._opened[-1])} is never closed")
        return GroupedPattern("".join(self._written), self._numbers)

    def _take(self, token: re.Match[str]) -> int:
        at, end, text = token.start(), token.end(), token[0]
        match token.lastgroup:
            case "named":
                self._named(at, token)
                text = "("
            case "group":
                self._open(at, counts=True)
            case "special":
                self._open(at, counts=False)
            case "close":
                if not self._opened:
                    raise BadPattern(f"`)` at {_place(at)} closes nothing")
                self._opened.pop()
            case "class":
                end = self._class_end(at)
                text = self._pattern[at:end]
            case "stray":
                raise BadPattern("it ends with a lone backslash")
            case "other":
                self._check_start(at, text)
            case "back":
                text = self._reference(at, token)
        self._written.append(text)
        return end

    def _open(self, at: int, *, counts: bool) -> None:
        self._opened.append(at)
        self._count += counts

    def _named(self, at: int, token: re.Match[str]) -> None:
        name = token["name"]
        if not token[0].endswith(">"):
            raise BadPattern(f"the group's name at {_place(at)} is not closed with >")
        if token[0].startswith("(?P"):
            raise BadPattern(f"{token[0]} at {_place(at)} is Python; Java writes (?<{name}>…)")
        if name in self._numbers:
            raise BadPattern(f"there are two groups {name!r}")
        self._open(at, counts=True)
        self._numbers[name] = self._count

    def _reference(self, at: int, token: re.Match[str]) -> str:
        name = token["backname"]
        if name not in self._numbers:
            raise BadPattern(f"there is no group {name!r} before {_place(at)}")
        return rf"(?:\{self._numbers[name]})"

    def _check_start(self, at: int, text: str) -> None:
        opened = not self._written or self._written[-1] == "("
        if opened and text[0] in "*+?":
            raise BadPattern(f"`{text[0]}` at {_place(at)} repeats nothing")

    def _class_end(self, at: int) -> int:
        """Where the character class that opens here ends; classes nest in Java."""
        depth, place = 0, at
        while place < len(self._pattern):
            found = _IN_CLASS.match(self._pattern, place)
            assert found is not None, "some alternative takes any character"
            depth += found[0].startswith("[")
            depth -= found[0] == "]"
            place = found.end()
            if depth == 0:
                return place
        raise BadPattern(f"the character class opened at {_place(at)} is never closed")


def _place(at: int) -> str:
    return f"character {at + 1}"
