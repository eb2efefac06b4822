"""Where messages begin and end in a stream: by newlines, or by lengths (RFC 6587).

A stream frames its messages in one of two ways: a newline after each, or its length in octets
before each (``25 <34>1 2026-08-14T09:00:00Z …``). Senders mix them, so :func:`cut` decides message
by message, as rsyslog does: ``[1-9][0-9]{0,8} <`` at the start of a message is a length, anything
else is the beginning of a line. A line may also end with a NUL, as those of Python's own
``SysLogHandler`` do over TCP.

As in rsyslog, one NUL at the end of a message and the newline of a counted one are not part of it,
a carriage return is, and an empty message is none. A message that is too long comes in pieces.

Everything here works on whole buffers. Only messages that are too long, and counted messages whose
lengths do not add up at first sight, cost Python one by one.
"""

from __future__ import annotations

import enum
import re
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turnlane.formats.lines import Bytes, Octets, Places, column, trimmed

# ── counts ──
# Many counted messages at once: their lengths guessed from their distances, then checked.

MAX_DIGITS: Final = 9
"""A longer number is no length."""
_POWERS: Final = 10 ** np.arange(1, MAX_DIGITS + 1)
_COUNTS_SPACE, _COUNTS_ZERO, _COUNTS_LESS = (ord(each) for each in " 0<")


class Chain(NamedTuple):
    """Messages that follow each other without a gap."""

    starts: Places
    ends: Places
    whole: bool
    """Whether there may be more of them after the marks that were looked at."""


def find_marks(data: Octets) -> Places:
    """Where ``<`` follows a digit and a space: the beginnings of counted messages, or so."""
    marks: Places = np.flatnonzero(data[2:] == _COUNTS_LESS) + 2
    marks = marks[data[marks - 1] == _COUNTS_SPACE]
    digits: NDArray[np.bool_] = data[marks - 2] - np.uint8(_COUNTS_ZERO) <= 9
    return marks[digits]


def chain(data: Octets, marks: Places, at: int, longest: int) -> Chain:
    """The messages that begin with the length written ``at`` a place.

    A message of n octets is followed by the digits of the next one's length, a space and the next
    mark; how many digits follows from that message's own distance. The guess holds up to the first
    message before whose mark another number is written: what is checked is the whole chain of
    lengths from a known beginning, so a wrong guess can cost time and nothing else.
    """
    gaps = np.diff(marks) - 1
    digits = _digits(gaps[:-1] - _digits(gaps[1:]))
    lengths = gaps[: max(0, len(digits) - 1)] - digits[1:]
    digits, marks = digits[: len(lengths)], marks[: len(lengths)]
    if not len(lengths) or marks[0] - 1 - digits[0] != at:
        return Chain(marks[:0], marks[:0], whole=False)
    right = _written(data, marks, digits) == lengths
    right &= (_digits(lengths) == digits) & (lengths <= longest)
    count = len(right) if right.all() else int(right.argmin())
    return Chain(marks[:count], marks[:count] + lengths[:count], count == len(right))


def _written(data: Octets, marks: Places, digits: Places) -> Places:
    """The numbers with this many digits before the marks; -1 where there is none."""
    value = np.zeros(len(marks), np.int64)
    valid = np.ones(len(marks), bool)
    for at in range(int(digits.max())):
        octets = data.take(marks - 2 - at, mode="clip") - np.uint8(_COUNTS_ZERO)
        within = digits > at
        valid &= ~within | (octets <= 9)
        value += np.where(within, octets, 0) * np.int64(10**at)
    return np.where(valid, value, -1)


def _digits(numbers: Places) -> Places:
    """How many decimal digits they have; at least one."""
    found: Places = np.searchsorted(_POWERS, numbers, "right") + 1
    return found


_NUL, _NEWLINE, _SPACE, _ZERO, _LESS = (ord(each) for each in "\0\n 0<")
_NOWHERE: Final = np.empty(0, np.int64)

_LINE_END: Final = re.compile(rb"\n")
_LINE_OR_NUL: Final = re.compile(rb"[\n\0]")

_WINDOW, _LARGEST_WINDOW = 64, 4_096
"""Counted messages whose lengths are checked in one go: at first, and once that has gone well."""
_SINGLES: Final = 64
"""Messages taken one by one before the next try to take many; doubled if the try fails."""
_SMALL: Final = 4_096
"""Buffers in which all messages are taken one by one."""
_FEW: Final = 32
"""Lines between counted messages that are not worth a vector."""

IN_LINE: Final = -1
"""The buffer begins inside a line of which earlier pieces were cut off."""


class Framing(enum.StrEnum):
    """How messages are told apart in a stream."""

    AUTO = "auto"
    """By what each of them begins with; a line ends with a newline or a NUL."""
    NEWLINE = "newline"
    """By the newline after each."""
    OCTET = "octet"
    """By the length before each message, independent of its first byte."""


_HEADERS: Final = {
    Framing.AUTO: re.compile(rb"([1-9][0-9]{0,8}) (?=<)"),
    Framing.NEWLINE: None,
    Framing.OCTET: re.compile(rb"([1-9][0-9]{0,8}) "),
}


class Found(NamedTuple):
    """Where messages are in a buffer, and what to go on with."""

    starts: Places
    ends: Places
    used: int
    """So many bytes are dealt with; the rest comes again, with more behind it."""
    inside: int
    """For the next call: 0 at the start of a message; how many octets of a counted message are
    still to come; or :data:`IN_LINE`."""
    oversize: int
    """How many messages were longer than allowed."""
    malformed: int
    """Messages that ended early, or had no length though all should have one."""


class Cut(NamedTuple):
    """The messages of a buffer; the rest as in :class:`Found`."""

    values: pa.BinaryArray
    used: int
    inside: int
    oversize: int
    malformed: int


def find(
    buffer: Bytes,
    longest: int,
    framing: Framing = Framing.AUTO,
    *,
    inside: int = 0,
    last: bool = False,
) -> Found:
    """Find the messages in the next bytes of a stream, which may be cut off anywhere.

    Messages over ``longest`` bytes come in pieces of that length. After ``last`` nothing more will
    follow, so that what is there of a message is kept as if it were complete. ``used`` leaves at
    most ``longest`` bytes and a length over.
    """
    cutter = _Cutter(buffer, longest, framing, inside)
    cutter.run()
    if last:
        cutter.finish()
    return Found(*cutter.spans(), cutter.at, cutter.inside, cutter.oversize, cutter.malformed)


def cut(
    buffer: Bytes,
    longest: int,
    framing: Framing = Framing.AUTO,
    *,
    inside: int = 0,
    last: bool = False,
) -> Cut:
    """The messages in the next bytes of a stream, as :func:`find` finds them, in a column."""
    starts, ends, *rest = find(buffer, longest, framing, inside=inside, last=last)
    return Cut(column(buffer, starts, ends), *rest)


class _Cutter:
    """One buffer being cut: ``at`` is how far it has come, ``inside`` what it stands in."""

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
        self._found: list[tuple[Places, Places]] = []

    def spans(self) -> tuple[Places, Places]:
        """Where the messages are, in order; empty ones left out."""
        if not self._found:
            return _NOWHERE, _NOWHERE
        starts, ends = self._found[0]
        if len(self._found) > 1:
            starts, ends = (np.concatenate(each) for each in zip(*self._found, strict=True))
        full = ends > starts
        return (starts, ends) if full.all() else (starts[full], ends[full])

    def run(self) -> None:
        """Take everything that can be told for sure."""
        if self.inside > 0:
            self._go_on_counted()
        while self.at < self._size and self.inside <= 0:
            before = self.at
            if self.inside or self._size - self.at > min(_SMALL, self._longest):
                self._take_chain()
                self._take_lines()
            self._take_singles()
            if self.at == before:
                return

    def finish(self) -> None:
        """The stream has ended: the rest is a message."""
        header = self._counted_here()
        self.malformed += header is not None or self.inside > 0
        if self.at < self._size:  # not if it has ended just after a piece
            start = header.end() if header else self.at
            self._add(np.array([start]), np.array([self._size]))
        self.at, self.inside = self._size, 0

    def _add(self, starts: Places, ends: Places) -> None:
        self._found.append((starts, trimmed(self._data, starts, ends)))

    def _take_singles(self) -> None:
        """Take a few messages one by one; each may be framed in its own way."""
        if self.inside:
            return
        starts: list[int] = []
        ends: list[int] = []
        header = None
        while len(starts) < self._singles:
            header = self._counted_here()
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
            ends.append(self._trimmed_end(start, end))
        if starts:
            self._found.append((np.array(starts), np.array(ends)))
        if header is not None and self.at < header.end() and int(header[1]) > self._longest:
            self.oversize += 1
            self.at, self.inside = header.end(), int(header[1])
            self._go_on_counted()

    def _trimmed_end(self, start: int, end: int) -> int:
        """As :func:`trimmed`, for one message."""
        for octet in (_NUL, _NEWLINE):
            if end > start and self._buffer[end - 1] == octet:
                end -= 1
        return end

    # ── lines ────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _line_ends(self) -> Places:
        """Where lines end."""
        if self._framing is not Framing.AUTO:
            return np.flatnonzero(self._data == _NEWLINE)
        ends: Places = np.flatnonzero(self._data <= _NEWLINE)
        octets = self._data[ends]
        wanted: NDArray[np.bool_] = (octets == _NEWLINE) | (octets == _NUL)
        return ends[wanted]

    @cached_property
    def _headers(self) -> Places:
        """Where lines begin that begin with a length, as far as that can be told."""
        if self._header is None:
            return _NOWHERE
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
        return np.sort(np.concatenate(found)) if found else _NOWHERE

    def _take_lines(self) -> None:
        """Take the lines up to the next that begins with a length; a few are left as singles."""
        if self.inside == 0 and self._counted_here() is not None:
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

    def _split_lines(self, starts: Places, ends: Places) -> None:
        """Take complete lines, long ones in pieces."""
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
        """Cut pieces off a line that has no end yet and is too long already."""
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

    def _counted_here(self) -> re.Match[bytes] | None:
        """The length that stands here, if a counted message begins here."""
        if self._header is None or self.inside:
            return None
        return self._header.match(self._buffer, self.at)

    def _go_on_counted(self) -> None:
        """Take the received part of a counted message that is too long to keep."""
        available = self._size - self.at
        pieces = min((self.inside - 1) // self._longest, available // self._longest)
        self._take_pieces(pieces)
        self.inside -= pieces * self._longest
        if self.inside <= min(self._longest, self._size - self.at):
            end = self.at + self.inside
            self._add(np.array([self.at]), np.array([end]))
            self.at, self.inside = end, 0

    @cached_property
    def _marks(self) -> Places:
        return find_marks(self._data)

    def _take_chain(self) -> None:
        """Take as many counted messages as can be told from the distances between them."""
        if self._counted_here() is None:
            return
        start, size, right = self.at, _WINDOW, True
        while right:
            first = int(np.searchsorted(self._marks, self.at))
            marks = self._marks[first : first + size]
            starts, ends, right = chain(self._data, marks, self.at, self._longest)
            if len(ends):
                self._add(starts, ends)
                self.at = int(ends[-1])
            size = min(8 * size, _LARGEST_WINDOW)
        self._singles = 2 * self._singles if self.at == start else _SINGLES
