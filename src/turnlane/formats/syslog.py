"""Syslog: the priority of received messages, and events written as messages.

No message is parsed or changed on its way into a queue. Only its priority is read, so that a queue
under pressure can shed the least important messages.
"""

from __future__ import annotations

import re
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
MAX_PRIORITY: Final = 191
_LONGEST: Final = len("<191>")


def parse_severities(values: pa.BinaryArray) -> pa.Int8Array:
    """Return the severity of each message's ``<PRI>``, 0 (emergency) to 7; null without one."""
    numbers, widths = read_priorities(values)
    return pa.array((numbers & 7).astype(np.int8), pa.int8(), mask=_find_invalid(numbers, widths))


def parse_priorities(values: pa.BinaryArray) -> pa.Int16Array:
    """Return the number of each message's ``<PRI>``; null without one, or if it is too large."""
    numbers, widths = read_priorities(values)
    return pa.array(numbers.astype(np.int16), pa.int16(), mask=_find_invalid(numbers, widths))


def _find_invalid(numbers: Numbers, widths: npt.NDArray[np.uint8]) -> Mask | None:
    """Return which messages have no valid priority; ``None`` if all have one."""
    valid = (widths > 0) & (numbers <= MAX_PRIORITY)
    return None if valid.all() else ~valid


def read_priorities(values: pa.BinaryArray) -> tuple[Numbers, npt.NDArray[np.uint8]]:
    """Return the number in each message's ``<PRI>``, up to 999, and its bytes; 0 without one."""
    count = len(values)
    _, offsets, contents = values.buffers()
    if offsets is None or contents is None or not count or not contents.size:
        return np.zeros(count, np.uint16), np.zeros(count, np.uint8)
    data = np.frombuffer(memoryview(contents), np.uint8)
    bounds = np.frombuffer(memoryview(offsets), np.int32)[values.offset : values.offset + count + 1]
    if len(data) < _LONGEST:
        data = np.concatenate((data, np.zeros(_LONGEST, np.uint8)))
    # The first five bytes of each message; for a shorter message, also bytes of the next ones.
    starts = bounds[:-1].astype(np.intp)
    less, one, two, three, four = (data[at:].take(starts, mode="clip") for at in range(_LONGEST))
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
    return priority, width * ((less == _LESS) & (width <= np.diff(bounds)))


# ── streams that are not syslog ────────────────────────────────────────────────────────────────

FOREIGN_HEAD_BYTES: Final = 256
"""How many first bytes of a stream tell whether it is syslog."""

_SYSLOG_START: Final = re.compile(rb"<[0-9]{1,3}>|[1-9][0-9]{0,8} <")
_FOREIGN_STARTS: Final = (
    ("tls", "looks like TLS; send it to the `tls` address", rb"\x16\x03[\x00-\x04]"),
    (
        "http",
        "looks like HTTP; send it to an input of type `http`",
        rb"[A-Z]{3,7} \S+ HTTP/[0-9](?:\.[0-9])?\r\n(?:[!-9;-~]+:|\r\n)",
    ),
    ("beats", "looks like the protocol of Beats and Logstash", rb"(?s:2W....2[CJD])"),
)
_FOREIGN_PATTERNS: Final = [
    (reason, hint, re.compile(start)) for reason, hint, start in _FOREIGN_STARTS
]
_FORWARD_START: Final = re.compile(rb"[\x92-\x94](?:([\xa1-\xbf])|\xd9([\x01-\xff]))")
_MIN_CONTROLS: Final = 3
_CONTROL_BYTES: Final = bytes([*range(7), *range(0x0E, 0x1B)])
"""Control characters other than white space, bell, backspace, escape and the four separators."""


class ForeignStream(NamedTuple):
    """Why bytes are no syslog messages."""

    reason: str
    """The reason in metrics."""
    hint: str
    """The reason in logs, and what to do."""


BINARY: Final = ForeignStream("binary", "looks like binary data")


def recognize_foreign(head: bytes) -> ForeignStream | None:
    """Return why the first bytes of a stream, or of a datagram, cannot be syslog; ``None`` if not.

    Lines of text without ``<PRI>`` are syslog, in any encoding that extends ASCII.
    """
    if _SYSLOG_START.match(head):
        return None
    for reason, hint, pattern in _FOREIGN_PATTERNS:
        if pattern.match(head):
            return ForeignStream(reason, hint)
    if _is_forward_protocol(head):
        return ForeignStream("fluentd", "looks like Fluentd's forward protocol")
    return BINARY if is_binary(head) else None


def is_binary(head: bytes) -> bool:
    """Whether bytes without ``<PRI>`` are not text.

    Some text has control characters: colours, field separators, a NUL at the end of lines. Only
    binary data has several different ones.
    """
    rest = head.translate(None, _CONTROL_BYTES)
    if len(head) - len(rest) < _MIN_CONTROLS:
        return False
    return len(set(head)) - len(set(rest)) >= _MIN_CONTROLS


def _is_forward_protocol(head: bytes) -> bool:
    """Whether a MessagePack array begins that has a tag, and then neither text nor a small number.

    The second element is a time, an array of events, or bytes: all begin with a byte above 127.
    """
    found = _FORWARD_START.match(head)
    if found is None:
        return False
    size = found[2][0] if found[1] is None else found[1][0] - 0xA0
    tag, after = head[found.end() : found.end() + size], head[found.end() + size :]
    return len(tag) == size and tag.isascii() and bool(after) and after[0] > 0x7F


# ── events as messages, a block at a time ─────────────────────────────────────────────────────

Facility = Literal[
    "kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv",
    "ftp", "ntp", "audit", "alert", "clock",
    "local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7",
]  # fmt: skip
Severity = Literal["emerg", "alert", "crit", "err", "warning", "notice", "info", "debug"]
FACILITIES: Final = get_args(Facility)
SEVERITIES: Final = get_args(Severity)
"""The position of a name is its number."""

_NIL: Final = "-"
_NOT_PRINTABLE: Final = "[^!-~]"
_MAX_HOST, _MAX_APP, _MAX_PROC, _MAX_MSG_ID = 255, 48, 128, 32
"""The longest fields of RFC 5424."""
_MAX_TAG: Final = 32
"""The longest tag of RFC 3164."""


class SyslogColumnNames(NamedTuple):
    """The columns of the parts of a message."""

    facility: str
    severity: str
    time: str
    hostname: str
    app_name: str
    proc_id: str
    msg_id: str
    message: str


class SyslogDefaults(NamedTuple):
    """The parts of a message whose event does not have them."""

    facility: int
    severity: int
    hostname: str
    app_name: str


def format_rfc5424(
    block: Block,
    names: SyslogColumnNames,
    defaults: SyslogDefaults,
    ids: tuple[str, Any] | None = None,
) -> Any:  # noqa: ANN401
    """Return a column of messages; ``ids`` are an element's name and ids for structured data."""
    times = _get_times(block, names)
    microseconds = pc.round(pc.multiply(pc.subsecond(times), 1e6)).cast(pa.int64())
    digits = pc.utf8_lpad(microseconds.cast(pa.string()), 6, "0").cast(pa.large_binary())
    fraction = pc.fill_null(join_columns(digits, _scalar("Z")), _scalar(""))
    structured: tuple[Any, ...] = (_scalar(" - "),)
    if ids is not None:
        element, texts = ids
        escaped = pc.replace_substring_regex(texts, r'(["\\\]])', r"\\\1")
        structured = _scalar(f' [{element} id="'), to_large_binary(escaped), _scalar('"] ')
    return join_columns(
        *_format_priority(block, names, defaults),
        _scalar("1 "),
        _format_seconds(times, "%Y-%m-%dT%H:%M:%S.", _NIL),
        fraction,
        _scalar(" "),
        _format_field(block, names.hostname, defaults.hostname, _MAX_HOST),
        _scalar(" "),
        _format_field(block, names.app_name, defaults.app_name, _MAX_APP),
        _scalar(" "),
        _format_field(block, names.proc_id, _NIL, _MAX_PROC),
        _scalar(" "),
        _format_field(block, names.msg_id, _NIL, _MAX_MSG_ID),
        *structured,
        _get_messages(block, names),
    )


def format_rfc3164(block: Block, names: SyslogColumnNames, defaults: SyslogDefaults) -> Any:  # noqa: ANN401
    """Return a column of messages. Times are in UTC: the format has no time zone."""
    process: Any = _scalar("")
    if names.proc_id in block.schema.names:
        ids = _format_field(block, names.proc_id, _NIL, _MAX_PROC)
        in_brackets = join_columns(_scalar("["), ids, _scalar("]"))
        process = pc.if_else(block.column(names.proc_id).is_null(), _scalar(""), in_brackets)
    return join_columns(
        *_format_priority(block, names, defaults),
        _format_seconds(_get_times(block, names), "%b %e %H:%M:%S", "Jan  1 00:00:00"),
        _scalar(" "),
        _format_field(block, names.hostname, defaults.hostname, _MAX_HOST),
        _scalar(" "),
        _format_field(block, names.app_name, defaults.app_name, _MAX_TAG),
        process,
        _scalar(": "),
        _get_messages(block, names),
    )


def frame_by_length(messages: Any) -> Any:  # noqa: ANN401
    """Write the length before each message (RFC 6587); empty messages stay empty."""
    lengths = pc.binary_length(messages).cast(pa.string()).cast(pa.large_binary())
    counted = join_columns(lengths, _scalar(" "), messages)
    return pc.if_else(pc.equal(messages, _scalar("")), messages, counted)


def frame_by_newline(messages: Any) -> Any:  # noqa: ANN401
    """Write a newline after each message; newlines inside become spaces."""
    return join_columns(pc.replace_substring(messages, "\n", " "), _scalar("\n"))


def _format_priority(
    block: Block, names: SyslogColumnNames, defaults: SyslogDefaults
) -> tuple[Any, Any, Any]:
    facility = _get_numbers(block, names.facility, defaults.facility, len(FACILITIES))
    severity = _get_numbers(block, names.severity, defaults.severity, len(SEVERITIES))
    priority: Any = pc.add(pc.multiply(facility, 8), severity)
    return _scalar("<"), priority.cast(pa.string()).cast(pa.large_binary()), _scalar(">")


def _get_numbers(block: Block, name: str, default: int, count: int) -> Any:  # noqa: ANN401
    """Return the numbers of a column, and the default for those not in 0 to ``count - 1``."""
    at = block.schema.get_field_index(name)
    if at < 0 or not pa.types.is_integer(block.schema.field(at).type):
        return pa.repeat(pa.scalar(default, pa.int64()), block.num_rows)
    numbers: Any = block.column(at).cast(pa.int64())
    valid = pc.is_in(numbers, value_set=pa.array(range(count), pa.int64()))
    return pc.if_else(valid, numbers, pa.scalar(default, pa.int64()))


def _get_times(block: Block, names: SyslogColumnNames) -> Any:  # noqa: ANN401
    """Return the times of the events; an unknown one is the time of arrival."""
    kind = pa.timestamp("us", tz="UTC")
    found = [
        block.column(name).cast(kind)
        for name in (names.time, "timestamp")
        if name in block.schema.names and pa.types.is_timestamp(block.schema.field(name).type)
    ]
    return pc.coalesce(*found) if found else pa.nulls(block.num_rows, kind)


def _format_seconds(times: Any, form: str, default: str) -> Any:  # noqa: ANN401
    """Format times. Many events share a second, so each second is formatted once."""
    seconds = pc.floor_temporal(times, unit="second").cast(pa.timestamp("s", tz="UTC"))
    encoded = seconds.dictionary_encode()
    texts: Any = pc.strftime(encoded.dictionary, form)
    return pc.fill_null(texts.take(encoded.indices).cast(pa.large_binary()), _scalar(default))


def _format_field(block: Block, name: str, default: str, most: int) -> Any:  # noqa: ANN401
    """Return a header field: printable ASCII without spaces. Each distinct word is cleaned once."""
    fallback = _clean_words(pa.array([default]), default, most)[0]
    if name not in block.schema.names:
        return pa.repeat(fallback, block.num_rows)
    encoded: Any = block.column(name).cast(pa.string()).dictionary_encode()
    words = _clean_words(encoded.dictionary, default, most)
    return pc.fill_null(words.take(encoded.indices), fallback)


def _clean_words(words: Any, default: str, most: int) -> Any:  # noqa: ANN401
    clean: Any = pc.replace_substring_regex(words.cast(pa.large_binary()), _NOT_PRINTABLE, "_")
    clean = pc.binary_slice(clean, 0, most)
    return pc.if_else(pc.equal(clean, _scalar("")), _scalar(default), clean)


def _get_messages(block: Block, names: SyslogColumnNames) -> Any:  # noqa: ANN401
    """Return the message of each event; the raw value if it has none."""
    found = [
        block.column(name).cast(pa.large_binary())
        for name in (names.message, "value", "payload")
        if name in block.schema.names
    ]
    return to_large_binary(pc.coalesce(*found))


def _scalar(text: str) -> Any:  # noqa: ANN401
    return pa.scalar(text.encode(), pa.large_binary())
