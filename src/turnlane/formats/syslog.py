"""Syslog as it comes in: messages told apart, and how important each of them is.

No message is parsed or changed on the way into a queue; only its priority is looked at, so that a
queue under pressure can shed what matters least.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.events import Block
from turnlane.formats.lines import join_columns, to_large_binary

Numbers = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]

_LESS, _GREATER, _ZERO = (ord(each) for each in "<>0")
_MAX_PRIORITY: Final = 191
_LONGEST: Final = len("<191>")


def parse_severities(values: pa.BinaryArray) -> pa.Int8Array:
    """The severity in each message's ``<PRI>``, 0 (emergency) to 7 (debug); null without one."""
    numbers, missing = _priorities(values)
    return pa.array((numbers & 7).astype(np.int8), pa.int8(), mask=missing)


def parse_priorities(values: pa.BinaryArray) -> pa.Int16Array:
    """The number in each message's ``<PRI>``; null without one, or if it is too large."""
    numbers, missing = _priorities(values)
    return pa.array(numbers.astype(np.int16), pa.int16(), mask=missing)


def _priorities(values: pa.BinaryArray) -> tuple[Numbers, Mask | None]:
    """The numbers, and which of them are none, if any."""
    count = len(values)
    _, offsets, contents = values.buffers()
    if offsets is None or contents is None or not count or not contents.size:
        return np.zeros(count, np.uint16), np.ones(count, np.bool_)
    data = np.frombuffer(memoryview(contents), np.uint8)
    bounds = np.frombuffer(memoryview(offsets), np.int32)[values.offset : values.offset + count + 1]
    less, one, two, three, four = _beginnings(data, bounds[:-1].astype(np.intp))
    ones, tens, hundreds = (each - np.uint8(_ZERO) for each in (one, two, three))
    # A byte below "0" wraps to a large number: only digits are at most 9.
    digits = ones <= 9
    short = digits & (two == _GREATER)
    digits &= tens <= 9
    middle = digits & (three == _GREATER)
    long = digits & (hundreds <= 9) & (four == _GREATER)
    two_digits = np.uint16(10) * ones + tens
    priority = np.where(short, ones, two_digits)
    priority = np.where(long, np.uint16(10) * two_digits + hundreds, priority)
    width = np.uint8(3) * short + np.uint8(4) * middle + np.uint8(5) * long
    valid = (less == _LESS) & (width > 0) & (width <= np.diff(bounds))
    valid &= priority <= _MAX_PRIORITY
    return priority, None if valid.all() else ~valid


def _beginnings(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp]) -> list[Any]:
    """The first five bytes of each message; of a shorter one, some are of others."""
    if len(data) < _LONGEST:
        data = np.concatenate((data, np.zeros(_LONGEST, np.uint8)))
    return [data[at:].take(starts, mode="clip") for at in range(_LONGEST)]


# ── syslog_writing ──
# Events as syslog messages, all of a block at once: RFC 5424, RFC 3164, and how messages end.

Facility = Literal[
    "kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv",
    "ftp", "ntp", "audit", "alert", "clock",
    "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7",
]  # fmt: skip
Severity = Literal["emerg", "alert", "crit", "err", "warning", "notice", "info", "debug"]
FACILITIES: Final = get_args(Facility)
SEVERITIES: Final = get_args(Severity)
"""A name's place is its number."""

_NIL: Final = "-"
_NOT_PRINTED: Final = "[^!-~]"
_HOST, _APP, _PROC, _MSG_ID = 255, 48, 128, 32
"""How long RFC 5424 lets its fields be."""
_TAG: Final = 32
"""How long RFC 3164 lets a tag be."""


class SyslogColumnNames(NamedTuple):
    """The columns that the parts of a message come from."""

    facility: str
    severity: str
    time: str
    hostname: str
    app_name: str
    proc_id: str
    msg_id: str
    message: str


class SyslogDefaults(NamedTuple):
    """What stands in a message whose event does not say."""

    facility: int
    severity: int
    hostname: str
    app_name: str


def format_rfc5424(
    block: Block,
    names: SyslogColumnNames,
    otherwise: SyslogDefaults,
    ids: tuple[str, Any] | None = None,
) -> Any:  # noqa: ANN401
    """A message each; structured data has the event's id, if there is an element for it."""
    return join_columns(
        *_priority(block, names, otherwise),
        _word("1 "),
        _moment(_time(block, names)),
        _word(" "),
        _field(block, names.hostname, otherwise.hostname, _HOST),
        _word(" "),
        _field(block, names.app_name, otherwise.app_name, _APP),
        _word(" "),
        _field(block, names.proc_id, _NIL, _PROC),
        _word(" "),
        _field(block, names.msg_id, _NIL, _MSG_ID),
        *_structured(ids),
        _message(block, names),
    )


def _structured(ids: tuple[str, Any] | None) -> tuple[Any, ...]:
    if ids is None:
        return (_word(" - "),)
    element, texts = ids
    escaped = pc.replace_substring_regex(texts, r'(["\\\]])', r"\\\1")
    return _word(f' [{element} id="'), to_large_binary(escaped), _word('"] ')


def format_rfc3164(block: Block, names: SyslogColumnNames, otherwise: SyslogDefaults) -> Any:  # noqa: ANN401
    """A message each. The time is in UTC: there is no place for a zone."""
    return join_columns(
        *_priority(block, names, otherwise),
        _second(_time(block, names), "%b %e %H:%M:%S", "Jan  1 00:00:00"),
        _word(" "),
        _field(block, names.hostname, otherwise.hostname, _HOST),
        _word(" "),
        _field(block, names.app_name, otherwise.app_name, _TAG),
        _process(block, names.proc_id),
        _word(": "),
        _message(block, names),
    )


def frame_by_length(messages: Any) -> Any:  # noqa: ANN401
    """Messages with their lengths before them (RFC 6587), which knows no empty ones."""
    lengths = pc.binary_length(messages)
    counted = join_columns(lengths.cast(pa.string()).cast(pa.large_binary()), _word(" "), messages)
    return pc.if_else(pc.equal(messages, _word("")), messages, counted)


def frame_by_newline(messages: Any) -> Any:  # noqa: ANN401
    """Messages with newlines after them; those within become spaces."""
    return join_columns(pc.replace_substring(messages, "\n", " "), _word("\n"))


def _priority(
    block: Block, names: SyslogColumnNames, otherwise: SyslogDefaults
) -> tuple[Any, Any, Any]:
    facility = _number(block, names.facility, otherwise.facility, len(FACILITIES))
    severity = _number(block, names.severity, otherwise.severity, len(SEVERITIES))
    priority: Any = pc.add(pc.multiply(facility, 8), severity)
    return _word("<"), priority.cast(pa.string()).cast(pa.large_binary()), _word(">")


def _number(block: Block, name: str, otherwise: int, count: int) -> Any:  # noqa: ANN401
    """The column's numbers where they are from 0 to ``count - 1``."""
    at = block.schema.get_field_index(name)
    if at < 0 or not pa.types.is_integer(block.schema.field(at).type):
        return pa.repeat(pa.scalar(otherwise, pa.int64()), block.num_rows)
    numbers: Any = block.column(at).cast(pa.int64())
    valid = pc.is_in(numbers, value_set=pa.array(range(count), pa.int64()))
    return pc.if_else(valid, numbers, pa.scalar(otherwise, pa.int64()))


def _time(block: Block, names: SyslogColumnNames) -> Any:  # noqa: ANN401
    """When it happened; where that is not known, when it arrived."""
    kind = pa.timestamp("us", tz="UTC")
    found = [
        block.column(name).cast(kind)
        for name in (names.time, "timestamp")
        if name in block.schema.names and pa.types.is_timestamp(block.schema.field(name).type)
    ]
    return pc.coalesce(*found) if found else pa.nulls(block.num_rows, kind)


def _moment(times: Any) -> Any:  # noqa: ANN401
    """Times to the microsecond, as RFC 5424 has them; null is nil."""
    seconds = _second(times, "%Y-%m-%dT%H:%M:%S.", _NIL)
    rest = pc.subsecond(times)
    digits = pc.round(pc.multiply(rest, 1e6)).cast(pa.int64()).cast(pa.string())
    padded = join_columns(pc.utf8_lpad(digits, 6, "0").cast(pa.large_binary()), _word("Z"))
    return join_columns(seconds, pc.fill_null(padded, _word("")))


def _second(times: Any, form: str, otherwise: str) -> Any:  # noqa: ANN401
    """Times as text. Many events share a second: each is written out once."""
    seconds = pc.floor_temporal(times, unit="second").cast(pa.timestamp("s", tz="UTC"))
    encoded = seconds.dictionary_encode()
    texts: Any = pc.strftime(encoded.dictionary, form)
    return pc.fill_null(texts.take(encoded.indices).cast(pa.large_binary()), _word(otherwise))


def _field(block: Block, name: str, otherwise: str, most: int) -> Any:  # noqa: ANN401
    """A word of a header: printable ASCII without spaces. Few differ: each is tidied once."""
    if name not in block.schema.names:
        return pa.repeat(_tidied(pa.array([otherwise]), otherwise, most)[0], block.num_rows)
    encoded: Any = block.column(name).cast(pa.string()).dictionary_encode()
    tidy = _tidied(encoded.dictionary, otherwise, most)
    fallback = _tidied(pa.array([otherwise]), otherwise, most)[0]
    return pc.fill_null(tidy.take(encoded.indices), fallback)


def _tidied(words: Any, otherwise: str, most: int) -> Any:  # noqa: ANN401
    clean: Any = pc.replace_substring_regex(words.cast(pa.large_binary()), _NOT_PRINTED, "_")
    clean = pc.binary_slice(clean, 0, most)
    return pc.if_else(pc.equal(clean, _word("")), _word(otherwise), clean)


def _process(block: Block, name: str) -> Any:  # noqa: ANN401
    """The process in brackets, after the tag; nothing if it is not known."""
    if name not in block.schema.names:
        return _word("")
    known = block.column(name)
    ids = _field(block, name, _NIL, _PROC)
    return pc.if_else(pc.is_null(known), _word(""), join_columns(_word("["), ids, _word("]")))


def _message(block: Block, names: SyslogColumnNames) -> Any:  # noqa: ANN401
    """The text; where there is none, the value as it came."""
    found = [
        block.column(name).cast(pa.large_binary())
        for name in (names.message, "value", "payload")
        if name in block.schema.names
    ]
    return to_large_binary(pc.coalesce(*found))


def _word(text: str) -> Any:  # noqa: ANN401
    return pa.scalar(text.encode(), pa.large_binary())
