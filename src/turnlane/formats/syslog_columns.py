"""Syslog as columns: RFC 5424 and RFC 3164, distinguished message by message, a block at a time.

A message of RFC 5424 is split at its first six spaces. RFC 3164 hardly has a grammar: the time, the
host and the tag are three regular expressions, each applied to the text after the one before.
Arrow applies them to whole columns, and numpy reads numbers and times, so no message costs a step
in Python. A column that is not wanted is not computed.

Structured data becomes a map. Unusual elements (escapes, repeated names, no parameters) are read
one by one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from turnlane.formats.lines import copy_spans
from turnlane.formats.parse_settings import PARSE_ERROR
from turnlane.formats.syslog import MAX_PRIORITY, read_priorities

pc: Any = pyarrow.compute
"""Its stubs take a column of unknown type for a single value."""
Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
Texts = Any
"""A column of texts. Arrow's types have no common class for what its functions return."""

TIME_TYPE: Final = pa.timestamp("us", tz="UTC")
MAP_TYPE: Final = pa.map_(pa.string(), pa.string())
COLUMNS: Final[dict[str, pa.DataType]] = {
    "severity": pa.int8(),
    "facility": pa.int8(),
    "version": pa.int8(),
    "time": TIME_TYPE,
    "hostname": pa.string(),
    "app_name": pa.string(),
    "proc_id": pa.string(),
    "msg_id": pa.string(),
    "structured_data": MAP_TYPE,
    "message": pa.string(),
    PARSE_ERROR: pa.string(),
}
"""The columns of a message; ``severity`` replaces that of the event."""
PRIORITY_COLUMNS: Final = frozenset({"severity", "facility"})
"""The columns for which the priority is enough."""

_NO_VALUE, _NO_SYSLOG, _BAD_PRIORITY, _TOO_SHORT, _BAD_DATA, _BAD_TIME = range(1, 7)
_REASONS: Final = (
    None,
    "there is no value",
    "neither RFC 5424 nor RFC 3164: it starts with no <PRI> and no time",
    "its <PRI> is above 191",
    "it starts as RFC 5424 and ends before the structured data",
    "its structured data is malformed",
    "its time does not exist",
)
_NIL: Final = "-"
_AHEAD: Final = np.timedelta64(2, "D")
"""A message without a year that is further ahead of its arrival belongs to the year before."""


def parse_syslog(
    values: pa.BinaryArray,
    severities: pa.Array[Any],
    arrivals: pa.Array[Any],
    time_zone: str = "UTC",
    wanted: Collection[str] = tuple(COLUMNS),
) -> dict[str, pa.Array[Any]]:
    """Return the wanted columns of messages.

    Each column that can be read is set, even if others cannot be read. ``severities`` are those of
    the events, for messages without a ``<PRI>``; ``arrivals`` are their timestamps.
    """
    priorities, widths = read_priorities(values)
    is_bad = priorities > MAX_PRIORITY
    found = _array(priorities.astype(np.int16), mask=is_bad | (widths == 0))
    columns = split_priorities(found, severities)
    if not PRIORITY_COLUMNS.issuperset(wanted):
        reasons = np.where(is_bad & (widths > 0), _BAD_PRIORITY, 0).astype(np.int8)
        messages = _Messages(values, widths, arrivals, time_zone, wanted)
        columns |= messages.parse(reasons)
        if PARSE_ERROR in wanted:
            reasons[np.asarray(values.is_null())] = _NO_VALUE
            columns[PARSE_ERROR] = pa.array(_REASONS, pa.string()).take(_array(reasons))
    return {name: columns[name] for name in COLUMNS if name in wanted}


def split_priorities(
    priorities: pa.Array[Any], severities: pa.Array[Any]
) -> dict[str, pa.Array[Any]]:
    """Return the columns of the priority; an event without one keeps its severity."""
    found = pc.bit_wise_and(priorities, pa.scalar(7, pa.int16())).cast(pa.int8())
    facility = pc.shift_right(priorities, pa.scalar(3, pa.int16())).cast(pa.int8())
    return {"severity": pc.coalesce(found, severities.cast(pa.int8())), "facility": facility}


class _Messages:
    """The texts of a block's messages, and how to read them."""

    def __init__(
        self,
        values: pa.BinaryArray,
        widths: npt.NDArray[np.uint8],
        arrivals: pa.Array[Any],
        time_zone: str,
        wanted: Collection[str],
    ) -> None:
        self._texts = decode_texts(values)
        self._widths = widths.astype(np.int64)
        self._arrivals = arrivals
        self._zone = time_zone
        self._wanted = wanted

    def parse(self, reasons: npt.NDArray[np.int8]) -> dict[str, Any]:
        """Return the columns beside those of the priority; sets the reasons of bad messages."""
        data, starts, ends = _get_bounds(self._texts)
        # A message of RFC 5424 starts with the version, and nil or the first digit of a year.
        one, space, year = (_get_bytes(data, starts + self._widths + at) for at in range(3))
        is_modern = (self._widths > 0) & (starts + self._widths + 2 < ends)
        is_modern &= (one == ord("1")) & (space == ord(" ")) & (_is_digit(year) | (year == 45))
        modern, other = np.flatnonzero(is_modern), np.flatnonzero(~is_modern)
        parts = []
        for rows, parse in ((modern, self._parse_modern), (other, self._parse_traditional)):
            if len(rows):
                columns, found = parse(rows)
                is_first = (found > 0) & ((reasons[rows] == 0) | (found == _NO_SYSLOG))
                reasons[rows[is_first]] = found[is_first]
                parts.append(columns)
        if len(parts) < 2:
            return parts[0] if parts else _complete({}, 0)
        order = _array(np.argsort(np.concatenate((modern, other)), kind="stable"))
        return {
            name: pa.concat_arrays([part[name] for part in parts]).take(order) for name in parts[0]
        }

    def _wants(self, *names: str) -> bool:
        return any(name in self._wanted for name in names)

    # ── RFC 5424 ──

    def _parse_modern(self, rows: Numbers) -> tuple[dict[str, Any], npt.NDArray[np.int8]]:
        pieces = _Pieces(self._texts.take(_array(rows)))
        columns: dict[str, Any] = {"version": _array(np.ones(len(rows), np.int8))}
        reasons = np.zeros(len(rows), np.int8)
        for at, name in enumerate(("hostname", "app_name", "proc_id", "msg_id"), start=2):
            if self._wants(name):
                columns[name] = _remove_nil(pieces.get(at))
        if self._wants("time", PARSE_ERROR):
            columns["time"], is_bad = parse_times(_remove_nil(pieces.get(1)), self._zone)
            reasons[is_bad] = _BAD_TIME
        if self._wants("message", "structured_data", PARSE_ERROR):
            rest = pieces.get(6)
            structured, is_bad, message = _split_data(rest)
            reasons[is_bad] = _BAD_DATA
            reasons[np.asarray(rest.is_null())] = _TOO_SHORT
            columns["message"] = pc.utf8_ltrim(message, "\ufeff")
            if self._wants("structured_data"):
                columns["structured_data"] = build_maps(structured)
        return _complete(columns, len(rows)), reasons

    # ── RFC 3164 ──

    def _parse_traditional(self, rows: Numbers) -> tuple[dict[str, Any], npt.NDArray[np.int8]]:
        texts = self._texts.take(_array(rows))
        data, starts, ends = _get_bounds(texts)
        widths = self._widths[rows]
        has_priority = widths > 0
        body_at = np.minimum(starts + widths, ends)
        body_at += has_priority & (body_at < ends) & (_get_bytes(data, body_at) == ord(" "))
        bodies = _copy_texts(texts, body_at, ends)
        columns: dict[str, Any] = {}
        reasons = np.zeros(len(rows), np.int8)
        head = _read_head(bodies)
        has_time = np.asarray(head.rest.is_valid())
        is_syslog = has_priority | has_time
        if self._wants("time", PARSE_ERROR):
            arrivals = self._arrivals.take(_array(rows))
            columns["time"], is_bad = parse_times(head.format_times(arrivals), self._zone)
            reasons[is_bad] = _BAD_TIME
        hosts, after_host = _read_hosts(head.rest)
        if self._wants("hostname"):
            columns["hostname"] = _remove_nil(pc.coalesce(hosts, head.origins))
        if self._wants("app_name", "proc_id", "message"):
            tags, processes, rest = _read_tags(pc.coalesce(after_host, bodies))
            columns["app_name"], columns["proc_id"] = _remove_nil(tags), _remove_nil(processes)
            columns["message"] = pc.if_else(_array(is_syslog), rest, texts)
        is_other = _array(~is_syslog)
        for name in ("app_name", "proc_id"):
            if name in columns and not is_syslog.all():
                columns[name] = pc.if_else(is_other, pa.scalar(None, pa.string()), columns[name])
        columns["version"] = _array(np.zeros(len(rows), np.int8), ~is_syslog)
        reasons[~is_syslog] = _NO_SYSLOG
        return _complete(columns, len(rows)), reasons


def _complete(columns: dict[str, Any], count: int) -> dict[str, Any]:
    """Return all columns of the messages of one kind: missing ones are null."""
    kinds: dict[str, Any] = {
        name: kind
        for name, kind in COLUMNS.items()
        if name not in PRIORITY_COLUMNS and name != PARSE_ERROR
    }
    return {name: columns.get(name, pa.nulls(count, kind)) for name, kind in kinds.items()}


def _remove_nil(texts: Texts) -> Texts:
    is_nil = pc.is_in(texts, value_set=pa.array(["", _NIL]))
    return pc.if_else(is_nil, pa.scalar(None, pa.string()), texts)


# ── texts and their bytes ──


def _array(numbers: npt.NDArray[Any], mask: Mask | None = None) -> Any:  # noqa: ANN401
    """Return a column; Arrow's own types say that every array of numpy is one of booleans."""
    return pa.array(numbers, mask=mask)


def decode_texts(values: pa.BinaryArray) -> Texts:
    """Return values as texts; bytes that are no UTF-8 become ``\ufffd``."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        pass
    # One device may write another encoding: only messages that are not ASCII cost a step each.
    data, starts, ends = _get_bounds(values)
    high = np.flatnonzero(data >= 0x80)
    is_ascii = np.searchsorted(high, starts) == np.searchsorted(high, ends)
    plain, others = np.flatnonzero(is_ascii), np.flatnonzero(~is_ascii)
    decoded = [
        None if each is None else each.decode(errors="replace")
        for each in values.take(_array(others)).to_pylist()
    ]
    parts = [values.take(_array(plain)).cast(pa.string()), pa.array(decoded, pa.string())]
    order = np.argsort(np.concatenate((plain, others)), kind="stable")
    return pa.concat_arrays(parts).take(_array(order))


def _get_bounds(texts: Texts) -> tuple[npt.NDArray[np.uint8], Numbers, Numbers]:
    """Return the bytes of a column, and where each text starts and ends in them."""
    _, offsets, contents = texts.buffers()
    if not len(texts):
        none = np.zeros(0, np.int64)
        return np.zeros(1, np.uint8), none, none
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = np.zeros(1, np.uint8)
    if contents is not None and contents.size:
        data = np.frombuffer(contents, np.uint8)
    return data, bounds[:-1].astype(np.int64), bounds[1:].astype(np.int64)


def _get_bytes(data: npt.NDArray[np.uint8], places: Numbers) -> npt.NDArray[np.uint8]:
    """Return the bytes at these places; the last byte for places behind the end."""
    return data.take(places, mode="clip")


def _is_digit(octets: npt.NDArray[np.uint8]) -> Mask:
    found: Mask = octets - np.uint8(48) <= 9  # a byte below "0" wraps to a large number
    return found


def _copy_texts(texts: Texts, starts: Numbers, ends: Numbers) -> Texts:
    """Return parts of texts, which are given by their bounds; null stays null."""
    parts = _copy_parts(texts, starts, ends)
    if texts.null_count:
        parts = pc.if_else(texts.is_valid(), parts, pa.scalar(None, pa.string()))
    return parts


class _Pieces:
    """The first six words of each text, and the rest."""

    def __init__(self, texts: Texts) -> None:
        lists = pc.split_pattern(texts, " ", max_splits=6)
        self._words = lists.values
        bounds = np.asarray(lists.offsets).astype(np.int64)
        self._starts, self._counts = bounds[:-1], np.diff(bounds)

    def get(self, at: int) -> Texts:
        """Return a word of each text; null if there are fewer words."""
        return self._words.take(_array(self._starts + at, self._counts <= at))


def _extract(texts: Texts, pattern: str) -> dict[str, Texts]:
    """Return the named groups of a pattern at the start of texts; groups without a match are null.

    A pattern must not match the rest of a text: to copy it takes longer than the search.
    """
    groups = pc.extract_regex(texts, pattern)
    null = pa.scalar(None, pa.string())
    return {
        groups.type.field(at).name: pc.if_else(
            pc.and_(groups.is_valid(), pc.greater(pc.binary_length(groups.field(at)), 0)),
            groups.field(at),
            null,
        )
        for at in range(groups.type.num_fields)
    }


def _get_lengths(texts: Texts) -> Numbers:
    """Return the bytes of texts; 0 for null."""
    return np.asarray(pc.fill_null(pc.binary_length(texts), 0)).astype(np.int64)


# ── RFC 3164: the time, the host, the tag ──

_BLANK: Final = r"\t\n\x0b\f\r "
_CUT: Final = r"\x1f"
_CLOCK: Final = r"\d\d:\d\d:\d\d(?:\.\d{1,9})?"
_ISO: Final = rf"\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?"
_MONTHS: Final = (
    "Jan",
    "Feb",
    "Mar",
    "Apr",
    "May",
    "Jun",
    "Jul",
    "Aug",
    "Sep",
    "Oct",
    "Nov",
    "Dec",
)
_HEAD: Final = (
    rf"^(?:(?P<iso>{_ISO})(?:[: ]|$)"
    rf"|(?P<bsd>(?:(?P<year>\d{{4}}) )?(?P<month>{'|'.join(_MONTHS)}) {{1,2}}(?P<day>\d{{1,2}}) "
    rf"(?:(?P<later_year>\d{{4}}) )?(?P<clock>{_CLOCK}))(?:(?P<zone> [A-Z]{{3,4}}:)|[: ]|$))"
)
# A sequence number, a host, and the star or dot of an unset clock, as Cisco's devices write them.
_NUMBERED: Final = r"^(?P<number>[0-9]{0,10}: )"
_ORIGIN: Final = (
    rf"^[0-9]{{0,10}}: (?P<origin>[^{_BLANK}:{_CUT}]{{1,255}}): "
    r"[*.]?(?:\d{4} )?[A-Z][a-z]{2} [ \d]?\d (?:\d{4} )?[\d:.]{8,18}(?: [A-Z]{3,4})?: %"
)
# The word before the tag. A word that ends in a colon or has brackets is the tag itself.
_NO_WORD: Final = rf"{_BLANK}{_CUT}\[\]"
_WORD: Final = rf"(?:[^%{_NO_WORD}:]|[^%{_NO_WORD}][^{_NO_WORD}]*[^{_NO_WORD}:])"
_HOST: Final = rf"^(?:(?P<host>{_WORD})(?: |$)|(?P<marked>{_WORD}): %)"
_MAX_HOST: Final = 255
_NAME: Final = rf"[^{_BLANK}:\[{_CUT}]+"
_TAG: Final = (
    rf"^(?:(?P<tag>{_NAME}):(?:[{_BLANK}]|$)"
    rf"|(?P<named>(?P<name>{_NAME})\[(?P<process>[^\]{_BLANK}{_CUT}]*)\]:?))"
)
_MAX_TAG: Final = 128


class _Head(NamedTuple):
    """The times at the start of messages, and the texts after them."""

    groups: dict[str, Texts]
    origins: Texts
    """The hosts that Cisco's devices write before the time."""
    rest: Texts
    """Null for a message without a time."""

    def format_times(self, arrivals: pa.Array[Any]) -> Texts:
        """Return the times as RFC 5424 writes them.

        A time without a year gets the latest year that is not after its arrival.
        """
        month, day = self.groups["month"], pc.utf8_lpad(self.groups["day"], 2, "0")
        if month.null_count == len(month):
            return self.groups["iso"]
        numbers = pc.index_in(month, value_set=pa.array(_MONTHS))
        months = np.asarray(pc.fill_null(numbers, 0)).astype(np.int64) + 1
        days = np.asarray(pc.fill_null(day, "0").cast(pa.int64()))
        arrived = np.asarray(pc.fill_null(arrivals.cast(pa.timestamp("us")).cast(pa.int64()), 0))
        latest = (arrived.astype("datetime64[us]") + _AHEAD).astype("datetime64[D]")
        first_month = latest.astype("datetime64[Y]").astype("datetime64[M]")
        latest_months = (latest.astype("datetime64[M]") - first_month).astype(np.int64) + 1
        latest_days = (latest - latest.astype("datetime64[M]")).astype(np.int64) + 1
        years = latest.astype("datetime64[Y]").astype(np.int64) + 1970
        years -= months * 100 + days > latest_months * 100 + latest_days
        guessed = pc.utf8_lpad(_array(years).cast(pa.string()), 4, "0")
        year, later = (pc.fill_null(self.groups[name], "") for name in ("year", "later_year"))
        given = pc.binary_join_element_wise(year, later, "")
        year = pc.if_else(pc.equal(given, ""), guessed, given)
        is_utc = pc.is_in(self.groups["zone"], value_set=pa.array([" UTC:", " GMT:"]))
        times = pc.binary_join_element_wise(
            pc.binary_join_element_wise(
                year, pc.utf8_lpad(_array(months).cast(pa.string()), 2, "0"), day, "-"
            ),
            "T",
            self.groups["clock"],
            pc.if_else(is_utc, "Z", ""),
            "",
        )
        return pc.coalesce(self.groups["iso"], times)


def _read_head(bodies: Texts) -> _Head:
    data, starts, ends = _get_bounds(bodies)
    first = _get_bytes(data, starts)
    origins: Texts = pa.nulls(len(bodies), pa.string())
    is_numbered = (_is_digit(first) | (first == ord(":"))) & (starts < ends)
    if is_numbered.any():
        candidates = pc.if_else(_array(is_numbered), bodies, pa.scalar(None, pa.string()))
        origins = _extract(candidates, _ORIGIN)["origin"]
        lengths = _get_lengths(origins)
        starts = starts + _get_lengths(_extract(candidates, _NUMBERED)["number"])
        starts += np.where(lengths > 0, lengths + 2, 0)
        first = _get_bytes(data, starts)
    starts = starts + ((first == ord("*")) | (first == ord("."))) * (starts < ends)
    groups = _extract(_copy_texts(bodies, starts, ends), _HEAD)
    widths = _get_lengths(groups["iso"]) + _get_lengths(groups["bsd"])
    zones = _get_lengths(groups["zone"])
    places = np.minimum(starts + widths + zones, ends)
    # After a named zone comes a space at most, else a colon or a space, or both.
    has_colon = (zones == 0) & (places < ends) & (_get_bytes(data, places) == ord(":"))
    places += has_colon
    places += (places < ends) & (_get_bytes(data, places) == ord(" "))
    rest = _copy_texts(bodies, places, ends)
    has_time = _array(widths > 0)
    null = pa.scalar(None, pa.string())
    return _Head(groups, pc.if_else(has_time, origins, null), pc.if_else(has_time, rest, null))


def _read_hosts(rest: Texts) -> tuple[Texts, Texts]:
    """Return the host at the start of each text, and the text after it."""
    groups = _extract(rest, _HOST)
    hosts = pc.coalesce(groups["host"], groups["marked"])
    is_long = pc.greater(pc.utf8_length(hosts), _MAX_HOST)
    hosts = pc.if_else(is_long, pa.scalar(None, pa.string()), hosts)
    data, starts, ends = _get_bounds(rest)
    lengths = _get_lengths(hosts)
    places = starts + lengths
    has_host = lengths > 0
    signs = [_get_bytes(data, places + at) for at in range(3)]
    is_apart = (signs[0] == ord(" ")) & (signs[1] == ord(":")) & (signs[2] == ord(" "))
    is_apart &= places + 2 < ends
    is_marked = np.asarray(pc.and_not(groups["marked"].is_valid(), groups["host"].is_valid()))
    places += has_host * np.where(is_apart, 3, np.where(is_marked, 2, 1))
    return hosts, _copy_texts(rest, np.minimum(places, ends), ends)


def _read_tags(bodies: Texts) -> tuple[Texts, Texts, Texts]:
    """Return the tag at the start of each text, its process, and the text after it."""
    groups = _extract(bodies, _TAG)
    tags, processes = pc.coalesce(groups["tag"], groups["name"]), groups["process"]
    is_long = np.asarray(pc.fill_null(pc.greater(pc.utf8_length(tags), _MAX_TAG), fill_value=False))
    long_process = pc.fill_null(pc.greater(pc.utf8_length(processes), _MAX_TAG), fill_value=False)
    is_long = is_long | np.asarray(long_process)
    data, starts, ends = _get_bounds(bodies)
    widths = np.where(
        np.asarray(groups["tag"].is_valid()),
        _get_lengths(groups["tag"]) + 1,
        _get_lengths(groups["named"]),
    )
    widths[is_long] = 0
    places = starts + widths
    places += (widths > 0) & (places < ends) & (_get_bytes(data, places) == ord(" "))
    null = pa.scalar(None, pa.string())
    if is_long.any():
        tags, processes = (pc.if_else(_array(is_long), null, each) for each in (tags, processes))
    return tags, processes, _copy_texts(bodies, places, ends)


# ── times ──

_MAX_OFFSET: Final = 18 * 60
"""Minutes. No time zone is further from UTC."""


def parse_times(texts: Texts, time_zone: str) -> tuple[Texts, Mask]:
    """Return times of the form ``2026-01-31T12:00:00.5+01:00``, and which texts are no such time.

    The fraction may have up to nine digits, and the zone may be missing: then the time is in
    ``time_zone``.
    """
    data, starts, ends = _get_bounds(texts)
    is_there = np.asarray(texts.is_valid())
    good = is_there & (ends - starts >= 19)
    octets = [_get_bytes(data, starts + at) for at in range(19)]
    for at, sign in ((4, "-"), (7, "-"), (13, ":"), (16, ":")):
        good &= octets[at] == ord(sign)
    good &= (octets[10] == ord("T")) | (octets[10] == ord(" "))

    def read(*places: int) -> Numbers:
        nonlocal good
        number = np.zeros(len(good), np.int64)
        for at in places:
            good &= _is_digit(octets[at])
            number = number * 10 + (octets[at] - np.uint8(48))
        return number

    year, month, day = read(0, 1, 2, 3), read(5, 6), read(8, 9)
    hour, minute, second = read(11, 12), read(14, 15), read(17, 18)
    good &= (year > 0) & (month >= 1) & (month <= 12) & (hour < 24) & (minute < 60) & (second < 60)
    months = np.where(good, (year - 1970) * 12 + month - 1, 0).astype("datetime64[M]")
    first_days = months.astype("datetime64[D]").astype(np.int64)
    good &= (day >= 1) & (day <= (months + 1).astype("datetime64[D]").astype(np.int64) - first_days)
    seconds = (first_days + day - 1) * 86_400 + hour * 3600 + minute * 60 + second

    tail = starts + 19
    is_fraction = (tail < ends) & (_get_bytes(data, tail) == ord("."))
    micros, width, is_inside = (
        np.zeros(len(good), np.int64),
        is_fraction.astype(np.int64),
        is_fraction,
    )
    for place in range(9 if is_fraction.any() else 0):
        octet = _get_bytes(data, tail + 1 + place)
        is_inside = is_inside & (tail + 1 + place < ends) & _is_digit(octet)
        width += is_inside
        if place < 6:
            micros += np.where(is_inside, octet.astype(np.int64) - 48, 0) * 10 ** (5 - place)
    good &= ~is_fraction | (width > 1)
    offsets, is_local, is_zone = _read_zones(data, tail + width, ends)
    good &= is_zone
    moments = (seconds - offsets * 60) * 1_000_000 + micros
    times = _array(np.where(good, moments, 0), ~good).cast(pa.timestamp("us"))
    if time_zone != "UTC" and (is_local & good).any():
        times = pc.if_else(_array(is_local), _to_utc(times, time_zone), times)
    return times.cast(TIME_TYPE), is_there & ~good


def _read_zones(
    data: npt.NDArray[np.uint8], at: Numbers, ends: Numbers
) -> tuple[Numbers, Mask, Mask]:
    """Return the minutes east of UTC, which times have no zone, and which are valid."""
    left = ends - at
    sign, third = _get_bytes(data, at), _get_bytes(data, at + 3)
    has_colon = (left == 6) & (third == ord(":"))
    is_signed = (sign == ord("+")) | (sign == ord("-"))
    is_offset = is_signed & (has_colon | (left == 5))
    minutes_at = at + 3 + has_colon
    octets = [_get_bytes(data, each) for each in (at + 1, at + 2, minutes_at, minutes_at + 1)]
    tens, ones, minute_tens, minute_ones = (octet.astype(np.int64) - 48 for octet in octets)
    minutes = minute_tens * 10 + minute_ones
    total = (tens * 10 + ones) * 60 + minutes
    is_valid = np.logical_and.reduce([_is_digit(octet) for octet in octets])
    is_valid &= is_offset & (minutes < 60) & (total <= _MAX_OFFSET)
    offsets = np.where(is_valid, np.where(sign == ord("-"), -total, total), 0)
    is_local = left == 0
    is_utc = (left == 1) & (sign == ord("Z"))
    return offsets, is_local, is_local | is_utc | is_valid


def _to_utc(times: Texts, time_zone: str) -> Texts:
    """Return local times in UTC. A time that a change of clocks leaves out is moved on by it."""
    options = {"ambiguous": "earliest", "nonexistent": "earliest"}
    found = pc.assume_timezone(times, time_zone, **options)
    is_left_out = pc.not_equal(pc.local_timestamp(found), times)
    if pc.any(is_left_out).as_py():
        day = pa.scalar(86_400_000_000, pa.duration("us"))
        before = pc.assume_timezone(pc.subtract(times, day), time_zone, **options)
        found = pc.if_else(is_left_out, pc.add(before, day), found)
    return found.cast(TIME_TYPE).cast(pa.timestamp("us"))


# ── structured data of RFC 5424: `[id name="value" …][…]` as a map of `id.name` to value ──

_ID: Final = rf'[^{_BLANK}=\]"]+'
_PARAM: Final = rf'{_ID}="[^"\\]*(?:\\.[^"\\]*)*"'
_ELEMENTS: Final = rf"(?:\[{_ID}(?: +{_PARAM})* *\])+"
_DATA: Final = rf"(?s)^(?P<data>{_ELEMENTS})(?: |$)"
_ELEMENT: Final = re.compile(rf"\[({_ID})((?: +{_PARAM})*) *\]", re.DOTALL)
_PAIR: Final = re.compile(rf'({_ID})="([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_ESCAPED: Final = re.compile(r'\\(["\\\]])')


def _split_data(rest: Texts) -> tuple[Texts, Mask, Texts]:
    """Return the structured data, which texts have malformed data, and the messages.

    The data is null if it is nil, malformed or missing.
    """
    data, starts, ends = _get_bounds(rest)
    first, second = _get_bytes(data, starts), _get_bytes(data, starts + 1)
    is_there = np.asarray(rest.is_valid())
    is_nil = (first == ord(_NIL)) & (ends > starts)
    is_nil &= (ends == starts + 1) | (second == ord(" ")) | (second == ord("\n"))
    null = pa.scalar(None, pa.string())
    structured: Texts = pa.nulls(len(rest), pa.string())
    if not is_nil[is_there].all():
        structured = _find_data(pc.if_else(_array(is_nil), null, rest))
    has_data = np.asarray(structured.is_valid())
    widths = np.where(has_data, _get_lengths(structured) + 1, is_nil * 2)
    messages = _copy_texts(rest, np.minimum(starts + widths, ends), ends)
    return structured, is_there & ~is_nil & ~has_data, messages


def _find_data(rest: Texts) -> Texts:
    """Return the elements at the start of texts; null if they are malformed."""
    # They end at the first "] ", unless that is inside a value. To check this is much cheaper than
    # to have the regular expression find the end.
    _, starts, ends = _get_bounds(rest)
    found = np.asarray(pc.fill_null(pc.find_substring(rest, "] "), -1)).astype(np.int64)
    heads = _copy_texts(rest, starts, np.where(found < 0, ends, starts + found + 1))
    is_whole = pc.match_substring_regex(heads, f"(?s)^{_ELEMENTS}$")
    null = pa.scalar(None, pa.string())
    structured = pc.if_else(is_whole, heads, null)
    if structured.null_count > rest.null_count:
        others = _extract(pc.if_else(structured.is_valid(), null, rest), _DATA)["data"]
        structured = pc.coalesce(structured, others)
    return structured


def build_maps(structured: Texts) -> Any:  # noqa: ANN401
    """Return structured data as maps; null stays null.

    An element without parameters has an empty value. The values of a repeated parameter are joined
    with commas.
    """
    count = len(structured)
    rows = np.flatnonzero(np.asarray(structured.is_valid()))
    if not len(rows):
        return pa.nulls(count, MAP_TYPE)
    texts = structured.take(_array(rows))
    plain, maps = _build_plain_maps(texts)
    unusual = np.flatnonzero(~plain)
    others = pa.array(
        [_read_data(each) for each in texts.take(_array(unusual)).to_pylist()], MAP_TYPE
    )
    order = np.concatenate((np.flatnonzero(plain), unusual))
    places = np.zeros(count, np.int64)
    places[rows[order]] = np.arange(len(rows))
    mask = np.ones(count, np.bool_)
    mask[rows] = False
    return pa.concat_arrays([maps, others]).take(_array(places, mask))


def _build_plain_maps(texts: Texts) -> tuple[Mask, Texts]:
    """Return which texts have only plain elements, and their maps.

    A plain element has parameters with different names, and no escapes. So quotes come in pairs,
    and brackets outside quotes open and close elements.
    """
    octets, starts, ends = _get_bounds(texts)
    is_plain = ~np.asarray(pc.match_substring(texts, "\\"))
    # Texts with escapes are left out: a quote in them may be no end of a value.
    octets = np.where(_repeat_by_text(is_plain, starts, ends, len(octets)), octets, 0)
    quotes = np.flatnonzero(octets == ord('"'))
    turns = np.zeros(len(octets), np.int8)
    turns[quotes[0::2]], turns[quotes[1::2]] = 1, -1
    outside = np.where(np.cumsum(turns, dtype=np.int8) == 0, octets, 0)
    opens, closes, spaces = (np.flatnonzero(outside == ord(sign)) for sign in "[] ")

    def count_by_text(places: Numbers) -> Numbers:
        return np.searchsorted(places, ends) - np.searchsorted(places, starts)

    # A name may have an opening bracket in it, and an element may have no parameters.
    is_plain &= count_by_text(opens) == count_by_text(closes)
    params = _count_in_order(opens, quotes[0::2])
    is_plain[np.searchsorted(ends, opens[params == 0], side="right")] = False
    is_kept = _repeat_by_text(is_plain, starts, ends, len(octets))
    opened, closed = (each[is_kept[each]] for each in (quotes[0::2], quotes[1::2]))
    text_of = np.searchsorted(ends, opened, side="right")
    names = _copy_names(texts, opens, spaces, opened)
    repeated = _find_repeated(text_of, names)
    values = _copy_parts(texts, opened + 1, closed)
    if len(repeated):
        is_plain[repeated] = False
        is_kept = is_plain[text_of]
        names, values = names.filter(_array(is_kept)), values.filter(_array(is_kept))
        text_of = text_of[is_kept]
    sizes = np.bincount(text_of, minlength=len(texts))[is_plain]
    bounds = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    return is_plain, pa.MapArray.from_arrays(_array(bounds), names, values)


def _repeat_by_text(flags: Mask, starts: Numbers, ends: Numbers, size: int) -> Mask:
    """Return a flag for each byte: that of its text."""
    found = np.zeros(size, np.bool_)
    if len(starts):
        found[starts[0] : ends[-1]] = np.repeat(flags, ends - starts)
    return found


def _count_in_order(bounds: Numbers, places: Numbers) -> Numbers:
    """Return how many places come after each bound and before the next."""
    firsts = np.searchsorted(places, bounds)
    return np.diff(firsts, append=len(places))


def _copy_names(texts: Texts, opens: Numbers, spaces: Numbers, opened: Numbers) -> Texts:
    """Return the name of each parameter, ``id.name``; ``opened`` are the quotes of their values."""
    if not len(opened):
        return pa.array([], pa.string())
    # An id ends at the first space, and a name starts at the last one before its value.
    opens = opens[np.searchsorted(opens, opened) - 1]
    ids, id_of = np.unique(opens, return_inverse=True)
    id_texts = _copy_parts(texts, ids + 1, spaces[np.searchsorted(spaces, ids)])
    names = _copy_parts(texts, spaces[np.searchsorted(spaces, opened) - 1] + 1, opened - 1)
    return pc.binary_join_element_wise(id_texts.take(_array(id_of)), names, ".")


def _copy_parts(texts: Texts, starts: Numbers, ends: Numbers) -> Texts:
    """Return parts of a column's bytes, which are in order and do not overlap, as texts."""
    contents = texts.buffers()[2]
    parts = copy_spans(contents if contents is not None else b"", starts, ends)
    return pa.Array.from_buffers(pa.string(), len(parts), parts.buffers(), offset=parts.offset)


def _find_repeated(texts: Numbers, names: Texts) -> Numbers:
    """Return the texts that have a name twice; ``texts`` says for each name in which text it is."""
    encoded = names.dictionary_encode()
    size = len(encoded.dictionary)
    pairs = texts * size + np.asarray(encoded.indices).astype(np.int64)
    if len(texts) and (texts[-1] + 1) * size <= 8 * len(names):
        found = np.flatnonzero(np.bincount(pairs) > 1)
    else:
        pairs.sort()
        found = pairs[1:][pairs[1:] == pairs[:-1]]
    return found // max(size, 1)


def _read_data(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, key, value in _list_params(text):
        label = f"{name}.{key}" if key else name
        plain = _ESCAPED.sub(r"\1", value)
        found[label] = plain if label not in found else f"{found[label]},{plain}"
    return found


def _list_params(text: str) -> Iterable[tuple[str, str, str]]:
    for element in _ELEMENT.finditer(text):
        params = _PAIR.findall(element[2])
        yield from ((element[1], key, value) for key, value in params)
        if not params:
            yield element[1], "", ""
