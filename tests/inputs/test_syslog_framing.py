"""Streams become messages without a loss, for any bytes and any parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnlane.formats.framing import FoundMessages, Framing, _MessageFinder, find_messages
from turnlane.formats.lines import copy_spans, trim_ends
from turnlane.formats.syslog import parse_severities

LONGEST = 40


@dataclass
class Cut:
    """The messages of a buffer as a column, and the rest of the result."""

    values: pa.BinaryArray
    found: FoundMessages


def cut(buffer: bytes, longest: int, framing: Framing = Framing.AUTO, **state: Any) -> Cut:
    found = find_messages(buffer, longest, framing, **state)
    return Cut(copy_spans(buffer, found.starts, found.ends), found)


def trim(messages: list[bytes]) -> list[bytes | None]:
    """Return datagrams without the NUL and the newline at their ends."""
    sizes = np.array([len(each) for each in messages], np.int64)
    ends = np.cumsum(sizes)
    buffer = b"".join(messages)
    trimmed = trim_ends(np.frombuffer(buffer, np.uint8), ends - sizes, ends) if buffer else ends
    return copy_spans(buffer, ends - sizes, trimmed).to_pylist()


def reference(stream: bytes, longest: int, framing: Framing) -> list[bytes]:
    """Find the messages one after another in the whole stream."""
    header = re.compile(rb"([1-9][0-9]{0,8}) (<)?")
    newline, either = re.compile(b"\n"), re.compile(b"[\n\0]")
    messages: list[bytes] = []
    at = 0
    while at < len(stream):
        found = header.match(stream, at)
        if framing is Framing.NEWLINE or (framing is Framing.AUTO and found and not found[2]):
            found = None
        if found:
            start = found.end(1) + 1
            at = start + int(found[1])
            messages += pieces(stream[start:at], longest)
        else:
            end = (either if framing is Framing.AUTO else newline).search(stream, at)
            line = stream[at : end.start() if end else len(stream)]
            at += len(line) + 1
            messages += pieces(line, longest)
    return messages


def pieces(message: bytes, longest: int) -> list[bytes]:
    found = [message[at : at + longest] for at in range(0, len(message), longest)] or [b""]
    found.append(found.pop().removesuffix(b"\0").removesuffix(b"\n"))
    return [each for each in found if each]


def in_parts(stream: bytes, cuts: list[int], longest: int, framing: Framing) -> list[bytes]:
    """Return the messages of a stream that arrives in parts."""
    messages: list[bytes] = []
    rest, inside = b"", 0
    bounds = [0, *sorted(min(each, len(stream)) for each in cuts), len(stream)]
    for start, end in pairwise(bounds):
        buffer = rest + stream[start:end]
        found = cut(buffer, longest, framing, inside=inside)
        messages += values_of(found.values)
        rest, inside = buffer[found.found.used :], found.found.inside
        assert len(rest) <= longest + 11
    messages += values_of(cut(rest, longest, framing, inside=inside, last=True).values)
    return messages


def values_of(column: pa.BinaryArray) -> list[bytes]:
    return [each or b"" for each in column.to_pylist()]


def counted(message: bytes) -> bytes:
    return b"%d %s" % (len(message), message)


def line(message: bytes) -> bytes:
    return message.replace(b"\n", b" ") + b"\n"


def nul_ended(message: bytes) -> bytes:
    return message.replace(b"\0", b" ") + b"\0"


TEXTS = st.binary(max_size=30) | st.text("<>0123456789 \n\r\0ab", max_size=90).map(str.encode)
MESSAGES = st.builds(
    lambda priority, rest: b"<%d>%s" % (priority, rest), st.integers(0, 999), TEXTS
)
STREAMS = st.lists(
    MESSAGES.map(counted)
    | MESSAGES.map(line)
    | MESSAGES.map(nul_ended)
    | TEXTS.map(line)
    | TEXTS
    | TEXTS.map(counted)
).map(b"".join)
FRAMINGS = st.sampled_from(Framing)


@given(STREAMS, st.lists(st.integers(0, 600), max_size=6), FRAMINGS, st.sampled_from([12, 40, 900]))
@example(b"3 <1>", [1, 2, 3, 4], Framing.AUTO, LONGEST)
@example(b"\n" * 50 + b"5 <1>a\n", [], Framing.AUTO, LONGEST)
@example(b"a" * 40 + b"\n" + b"b" * 80 + b"\0\n", [40, 41, 81, 121], Framing.AUTO, LONGEST)
@example(b"90 <" + b"a" * 89 + b"7 <1>reader", [3, 50], Framing.AUTO, LONGEST)
def test_stream_gives_the_same_messages_for_any_parts(
    stream: bytes, cuts: list[int], framing: Framing, longest: int
) -> None:
    expected = reference(stream, longest, framing)
    assert in_parts(stream, cuts, longest, framing) == expected
    assert in_parts(stream, [], longest, framing) == expected


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_lines_keep_every_byte(stream: bytes, cuts: list[int]) -> None:
    stream = stream.replace(b"\0", b"\1")
    found = in_parts(stream, cuts, LONGEST, Framing.NEWLINE)
    assert b"".join(found) == stream.replace(b"\n", b"")


@given(st.lists(MESSAGES, min_size=1, max_size=40), st.lists(st.integers(0, 4000), max_size=3))
def test_counted_messages_are_unchanged(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(counted, messages))
    expected = [each.removesuffix(b"\0").removesuffix(b"\n") for each in messages]
    assert in_parts(stream, cuts, 1_000, Framing.AUTO) == expected


@pytest.mark.parametrize("size", [1, 7, 8, 9, 10, 94, 95, 96, 97, 98, 99, 100, 101, 998, 1_000])
def test_lengths_around_powers_of_ten_are_found(size: int) -> None:
    messages = [b"<1>%s" % (b"x" * max(0, size - 3 + step % 3)) for step in range(50)]
    found = cut(b"".join(map(counted, messages)), 65_536)
    assert found.values.to_pylist() == messages
    assert found.found.malformed == found.found.oversize == 0


def test_marks_inside_messages_are_ignored() -> None:
    messages = [b"<1>took 5 <b>7 <34>1" + b"x" * (step % 13) + b"2" for step in range(9_000)]
    assert cut(b"".join(map(counted, messages)), 65_536).values.to_pylist() == messages


@given(STREAMS, st.lists(st.integers(0, 99_999), max_size=3), FRAMINGS)
def test_long_streams_give_the_same_messages(
    stream: bytes, cuts: list[int], framing: Framing
) -> None:
    stream *= 1 + 20_000 // (len(stream) + 1)
    assert in_parts(stream, cuts, 900, framing) == reference(stream, 900, framing)


def test_impossible_length_begins_a_line() -> None:
    stream = b"0 <1>a\n1234567890 <1>b\n12x <1>c\n007 <1>d\n5 no\n"
    assert cut(stream, 100).values.to_pylist() == stream.splitlines()


def test_octet_framing_counts_messages_without_a_length() -> None:
    found = cut(b"<1>a line\n6 <1>abc<2>another\n", 100, Framing.OCTET)
    assert found.values.to_pylist() == [b"<1>a line", b"<1>abc", b"<2>another"]
    assert found.found.malformed == 2


def test_too_long_message_is_cut_and_the_next_is_whole() -> None:
    found = cut(counted(b"<1>" + b"a" * 97) + counted(b"<2>b") + b"c" * 95 + b"\n<3>d\n", 40)
    assert found.values.to_pylist() == [
        b"<1>" + b"a" * 37,
        b"a" * 40,
        b"a" * 20,
        b"<2>b",
        *(b"c" * each for each in (40, 40, 15)),
        b"<3>d",
    ]
    assert found.found.oversize == 2


def test_counted_message_that_ends_early_is_kept_and_counted() -> None:
    found = cut(b"50 <34>1 half of", 100, last=True)
    assert found.values.to_pylist() == [b"<34>1 half of"]
    assert found.found.malformed == 1


def test_counted_message_that_ends_between_pieces_is_counted() -> None:
    found = cut(b"2000 <" + b"x" * 479, 480)
    assert values_of(found.values) == [b"<" + b"x" * 479]
    last = cut(b"", 480, inside=found.found.inside, last=True)
    assert (len(last.values), last.found.malformed, last.found.inside) == (0, 1, 0)


def test_priority_gives_the_severity() -> None:
    cases = {
        b"<0>": 0, b"<34>1 x": 2, b"<191>": 7, b"<192>": None, b"<999>x": None, b"<>x": None,
        b"": None, b"<": None, b"<1": None, b"<12": None, b"<a>": None, b"<1a>": None,
        b"<12a>": None, b"<1234>": None, b"x<1>": None, b"<165>": 5, b"<-1>": None, b"<7>": 7,
    }  # fmt: skip
    column = pa.array(list(cases), pa.binary())
    assert parse_severities(column).to_pylist() == list(cases.values())
    assert parse_severities(column.slice(2, 5)).to_pylist() == list(cases.values())[2:7]


@given(st.lists(st.binary(max_size=8) | st.from_regex(rb"\A<[0-9]{0,4}>?[0-9a]?\Z")))
def test_vectorised_severity_equals_a_parsed_one(messages: list[bytes]) -> None:
    column = pa.array(messages, pa.binary())
    found = [re.match(rb"<([0-9]{1,3})>", each) for each in messages]
    numbers = [int(each[1]) if each else 999 for each in found]
    assert parse_severities(column).to_pylist() == [
        number % 8 if number <= 191 else None for number in numbers
    ]


def test_datagrams_lose_only_their_newline_and_nul() -> None:
    assert trim([b"a\n", b"b\0", b"c\n\0", b"d\r\n", b"", b"\n", b"e\n\n"]) == [
        b"a", b"b", b"c", b"d\r", b"", b"", b"e\n"
    ]  # fmt: skip
    assert trim([]) == []
    assert trim([b""]) == [b""]


@pytest.mark.parametrize("frame", [line, counted])
def test_usual_stream_needs_no_step_per_message(
    frame: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = b"<34>1 2026-08-14T09:00:00Z host app 123 - - " + b"x" * 50
    stream = b"".join(frame(message + b"%d" % each) for each in range(20_000))
    calls = 0
    for name, step in vars(_MessageFinder).items():
        if callable(step) and not name.startswith("__"):

            def counted_step(*given: Any, step: Any = step) -> Any:
                nonlocal calls
                calls += 1
                return step(*given)

            monkeypatch.setattr(_MessageFinder, name, counted_step)
    found = cut(stream, 65_536)
    assert len(found.values) == 20_000
    assert 0 < calls < 500
