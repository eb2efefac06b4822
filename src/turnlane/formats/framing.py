"""Where messages begin and end in a stream: by newlines, or by lengths (RFC 6587).

A stream frames its messages in one of two ways: a newline after each, or its length in octets
before each (``25 <34>1 2026-08-14T09:00:00Z …``). Senders mix them, so :func:`find_messages`
decides for each message, as rsyslog does: ``[1-9][0-9]{0,8} <`` at the start of a message is a
length, anything else is the beginning of a line. A line may also end with a NUL: Python's own
``SysLogHandler`` sends such lines over TCP.

As in rsyslog, one NUL at the end of a message and the newline of a counted message do not belong to
the message, a carriage return does, and empty messages are left out. A message that is too long is
cut into pieces.

Everything here works on whole buffers. Python handles a message by itself only if it is too long,
or if it is counted and its length was not guessed from the distances between messages.
"""

from __future__ import annotations

import enum
import re
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnlane.formats.lines import Bytes, Octets, Positions, trim_ends

MAX_DIGITS: Final = 9
"""A longer number is not a length."""
_POWERS: Final = 10 ** np.arange(1, MAX_DIGITS + 1)
_NUL, _NEWLINE, _SPACE, _ZERO, _LESS = (ord(each) for each in "\0\n 0<")
_NO_POSITIONS: Final = np.empty(0, np.int64)

_LINE_END: Final = re.compile(rb"\n")
_LINE_OR_NUL: Final = re.compile(rb"[\n\0]")

_WINDOW, _LARGEST_WINDOW = 64, 4_096
"""Counted messages whose lengths are checked in one step: at first, and after successful steps."""
_SINGLES: Final = 64
"""Messages found one by one before the next try to find many; doubled if the try fails."""
_SMALL: Final = 4_096
"""Up to this size all messages of a buffer are found one by one."""
_FEW: Final = 32
"""Fewer lines than this between counted messages are found one by one."""

IN_LINE: Final = -1
"""The buffer begins inside a line of which earlier pieces were cut off."""


class Framing(enum.StrEnum):
    """How messages are separated in a stream."""

    AUTO = "auto"
    """By the beginning of each message; a line ends with a newline or a NUL."""
    NEWLINE = "newline"
    """By the newline after each."""
    OCTET = "octet"
    """By the length before each message, independent of its first byte."""


_HEADERS: Final = {
    Framing.AUTO: re.compile(rb"([1-9][0-9]{0,8}) (?=<)"),
    Framing.NEWLINE: None,
    Framing.OCTET: re.compile(rb"([1-9][0-9]{0,8}) "),
}


class FoundMessages(NamedTuple):
    """The messages of a buffer, and the state for the next call."""

    starts: Positions
    ends: Positions
    used: int
    """The bytes that are done; the caller passes the rest again, with more bytes behind it."""
    inside: int
    """For the next call: 0 at the start of a message; the number of missing octets of a counted
    message; or :data:`IN_LINE`."""
    oversize: int
    """How many messages were longer than allowed."""
    malformed: int
    """How many messages ended early, or had no length although every message needs one."""


def find_messages(
    buffer: Bytes,
    longest: int,
    framing: Framing = Framing.AUTO,
    *,
    inside: int = 0,
    last: bool = False,
) -> FoundMessages:
    """Find the messages in the next bytes of a stream, which may be cut off anywhere.

    A message over ``longest`` bytes becomes pieces of that length. ``last`` says that the stream
    has ended: then the beginning of a message counts as a message. ``used`` leaves over at most
    ``longest`` bytes and a length.
    """
    finder = _MessageFinder(buffer, longest, framing, inside)
    finder.run()
    if last:
        finder.finish()
    return FoundMessages(
        *finder.get_spans(), finder.at, finder.inside, finder.oversize, finder.malformed
    )


def _find_chain(
    data: Octets, marks: Positions, at: int, longest: int
) -> tuple[Positions, Positions, bool]:
    """Find counted messages without a gap between them; the first length stands ``at`` a place.

    Returns starts, ends, and whether more messages may follow after the given marks. A mark is the
    ``<`` after a length. A message of n octets is followed by the digits of the next length, a
    space and the next mark; the distance between the next two marks tells how many digits that
    are. The guess is checked from a known beginning along the whole chain of lengths and holds up
    to the first number that differs, so a wrong guess costs only time.
    """
    gaps = np.diff(marks) - 1
    digits = _count_digits(gaps[:-1] - _count_digits(gaps[1:]))
    lengths = gaps[: max(0, len(digits) - 1)] - digits[1:]
    digits, marks = digits[: len(lengths)], marks[: len(lengths)]
    if not len(lengths) or marks[0] - 1 - digits[0] != at:
        return marks[:0], marks[:0], False
    right = _read_numbers(data, marks, digits) == lengths
    right &= (_count_digits(lengths) == digits) & (lengths <= longest)
    count = len(right) if right.all() else int(right.argmin())
    return marks[:count], marks[:count] + lengths[:count], count == len(right)


def _read_numbers(data: Octets, marks: Positions, digits: Positions) -> Positions:
    """Return the numbers with this many digits before the marks; -1 where there is none."""
    value = np.zeros(len(marks), np.int64)
    valid = np.ones(len(marks), bool)
    for at in range(int(digits.max())):
        octets = data.take(marks - 2 - at, mode="clip") - np.uint8(_ZERO)
        within = digits > at
        valid &= ~within | (octets <= 9)
        value += np.where(within, octets, 0) * np.int64(10**at)
    return np.where(valid, value, -1)


def _count_digits(numbers: Positions) -> Positions:
    """Return how many decimal digits the numbers have; at least one."""
    counts: Positions = np.searchsorted(_POWERS, numbers, "right") + 1
    return counts


class _MessageFinder:
    """Finds the messages of one buffer, up to ``at``; ``inside`` as in :class:`FoundMessages`."""

    def __init__(self, buffer: Bytes, longest: int, framing: Framing, inside: int) -> None:
        self.at = 0
        self.inside = inside
        self.oversize = 0
        self.malformed = 0
        self._buffer = buffer
        self._data: Octets = np.frombuffer(buffer, np.uint8)
        self._size = len(self._data)
        self._longest = longest
        self._framing = framing
        self._header = _HEADERS[framing]
        self._line_end = _LINE_OR_NUL if framing is Framing.AUTO else _LINE_END
        self._singles = _SINGLES
        self._found: list[tuple[Positions, Positions]] = []

    def get_spans(self) -> tuple[Positions, Positions]:
        """Return starts and ends of the messages, in order, without empty messages."""
        if not self._found:
            return _NO_POSITIONS, _NO_POSITIONS
        starts, ends = self._found[0]
        if len(self._found) > 1:
            starts, ends = (np.concatenate(each) for each in zip(*self._found, strict=True))
        full = ends > starts
        return (starts, ends) if full.all() else (starts[full], ends[full])

    def run(self) -> None:
        """Find all messages whose end is known."""
        if self.inside > 0:
            self._continue_counted()
        while self.at < self._size and self.inside <= 0:
            before = self.at
            if self.inside or self._size - self.at > min(_SMALL, self._longest):
                self._take_chain()
                self._take_lines()
            self._take_singles()
            if self.at == before:
                return

    def finish(self) -> None:
        """Add the rest as a message: the stream has ended."""
        header = self._match_length()
        self.malformed += header is not None or self.inside > 0
        if self.at < self._size:  # not if it has ended just after a piece
            start = header.end() if header else self.at
            self._add(np.array([start]), np.array([self._size]))
        self.at, self.inside = self._size, 0

    def _add(self, starts: Positions, ends: Positions) -> None:
        self._found.append((starts, trim_ends(self._data, starts, ends)))

    def _take_singles(self) -> None:
        """Find a few messages one by one; each may be framed in its own way."""
        if self.inside:
            return
        starts: list[int] = []
        ends: list[int] = []
        header = None
        while len(starts) < self._singles:
            header = self._match_length()
            if header is not None:
                start, end = header.end(), header.end() + int(header[1])
                if end > self._size or end - start > self._longest:
                    break
                self.at = end
            elif (line_end := self._line_end.search(self._buffer, self.at)) is not None:
                start, end = self.at, line_end.start()
                if end - start > self._longest:
                    break
                self.malformed += self._framing is Framing.OCTET and end > start
                self.at = end + 1
            else:
                break
            starts.append(start)
            ends.append(self._trim_end(start, end))
        if starts:
            self._found.append((np.array(starts), np.array(ends)))
        if header is not None and self.at < header.end() and int(header[1]) > self._longest:
            self.oversize += 1
            self.at, self.inside = header.end(), int(header[1])
            self._continue_counted()

    def _trim_end(self, start: int, end: int) -> int:
        """Return the same as :func:`trim_ends`, for one message."""
        for octet in (_NUL, _NEWLINE):
            if end > start and self._buffer[end - 1] == octet:
                end -= 1
        return end

    # ── lines ────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _line_ends(self) -> Positions:
        if self._framing is not Framing.AUTO:
            return np.flatnonzero(self._data == _NEWLINE)
        ends: Positions = np.flatnonzero(self._data <= _NEWLINE)
        octets = self._data[ends]
        wanted: NDArray[np.bool_] = (octets == _NEWLINE) | (octets == _NUL)
        return ends[wanted]

    @cached_property
    def _headers(self) -> Positions:
        """The starts of the lines that begin with a length, if the buffer shows enough of them."""
        if self._header is None:
            return _NO_POSITIONS
        data = self._data
        starts = self._line_ends + 1
        lines = starts[data.take(starts, mode="clip") - np.uint8(_ZERO + 1) < 9]
        found = []
        for at in range(1, MAX_DIGITS + 1):
            lines = lines[lines + at + 1 < self._size]
            if not len(lines):
                break
            octets = data[lines + at]
            counted = octets == _SPACE
            if self._framing is Framing.AUTO:
                counted &= data[lines + at + 1] == _LESS
            found.append(lines[counted])
            lines = lines[octets - np.uint8(_ZERO) <= 9]
        return np.sort(np.concatenate(found)) if found else _NO_POSITIONS

    def _take_lines(self) -> None:
        """Find lines up to the next one with a length; a few are left to `_take_singles`."""
        if self.inside == 0 and self._match_length() is not None:
            return
        index = int(np.searchsorted(self._headers, self.at, "right"))
        until = int(self._headers[index]) if index < len(self._headers) else self._size
        first, after = np.searchsorted(self._line_ends, (self.at, until))
        ends = self._line_ends[first:after]
        few = until < self._size and len(ends) < _FEW and self.inside == 0
        if few and ends[0] - self.at <= self._longest:
            return
        if len(ends):
            starts = np.concatenate(([self.at], ends[:-1] + 1))
            if self._framing is Framing.OCTET:
                self.malformed += int(np.count_nonzero(ends > starts))
            self._split_lines(starts, ends)
            self.at = int(ends[-1]) + 1
            self.inside = 0
        if until == self._size:
            self._take_long_line()

    def _split_lines(self, starts: Positions, ends: Positions) -> None:
        """Add complete lines, long ones in pieces."""
        done = 0
        for line in np.flatnonzero(ends - starts > self._longest):
            self._add(starts[done:line], ends[done:line])
            self.oversize += bool(line) or self.inside == 0
            bounds = np.arange(starts[line], ends[line], self._longest)
            self._found.append((bounds[:-1], bounds[1:]))
            self._add(bounds[-1:], ends[line : line + 1])
            done = int(line) + 1
        self._add(starts[done:], ends[done:])

    def _take_long_line(self) -> None:
        """Cut pieces off a line without an end that is already too long."""
        pieces = (self._size - self.at - 1) // self._longest
        if pieces <= 0:
            return
        self.oversize += self.inside == 0
        self._take_pieces(pieces)
        self.inside = IN_LINE

    def _take_pieces(self, count: int) -> None:
        bounds = self.at + self._longest * np.arange(count + 1)
        self._found.append((bounds[:-1], bounds[1:]))
        self.at = int(bounds[-1])

    # ── counted messages ─────────────────────────────────────────────────────────────────────────

    def _match_length(self) -> re.Match[bytes] | None:
        """Return the length at this position, if a counted message begins here."""
        if self._header is None or self.inside:
            return None
        return self._header.match(self._buffer, self.at)

    def _continue_counted(self) -> None:
        """Add the received part of a counted message that is too long, in pieces."""
        available = self._size - self.at
        pieces = min((self.inside - 1) // self._longest, available // self._longest)
        self._take_pieces(pieces)
        self.inside -= pieces * self._longest
        if self.inside <= min(self._longest, self._size - self.at):
            end = self.at + self.inside
            self._add(np.array([self.at]), np.array([end]))
            self.at, self.inside = end, 0

    @cached_property
    def _marks(self) -> Positions:
        """Where ``<`` follows a digit and a space: most counted messages begin there."""
        data = self._data
        marks: Positions = np.flatnonzero(data[2:] == _LESS) + 2
        marks = marks[data[marks - 1] == _SPACE]
        digits: NDArray[np.bool_] = data[marks - 2] - np.uint8(_ZERO) <= 9
        return marks[digits]

    def _take_chain(self) -> None:
        """Find counted messages by the distances between them, as long as the guesses hold."""
        if self._match_length() is None:
            return
        start, size, right = self.at, _WINDOW, True
        while right:
            first = int(np.searchsorted(self._marks, self.at))
            marks = self._marks[first : first + size]
            starts, ends, right = _find_chain(self._data, marks, self.at, self._longest)
            if len(ends):
                self._add(starts, ends)
                self.at = int(ends[-1])
            size = min(8 * size, _LARGEST_WINDOW)
        self._singles = 2 * self._singles if self.at == start else _SINGLES
