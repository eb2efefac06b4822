"""A syslog parser in plain Python; the Spark expressions must give the same results."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo

MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
BLANKS = " \t\n\x0b\f\r"
CUT = "\x1f"
CLOCK = re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]{1,9})?")
DATED = re.compile(
    r"[*.]?(?:[0-9]{4} )?[A-Z][a-z]{2} [ 0-9]?[0-9] (?:[0-9]{4} )?[0-9:.]{8,18}(?: [A-Z]{3,4})?: %"
)
ISO = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]" + CLOCK.pattern + r"(Z|[+-][0-9]{2}:?[0-9]{2})?")


@dataclass
class Message:
    """Return the columns of a message."""

    severity: int | None = None
    facility: int | None = None
    version: int | None = None
    time: datetime | None = None
    hostname: str | None = None
    app_name: str | None = None
    proc_id: str | None = None
    msg_id: str | None = None
    structured_data: dict[str, str] | None = None
    message: str | None = None
    parse_error: str | None = None
    bad: list[str] = field(default_factory=list)

    def columns(self) -> dict[str, object]:
        found = dict(vars(self))
        bad = found.pop("bad")
        found["parse_error"] = bad[0] if bad else None
        return found


def parse(value: bytes | None, arrival: datetime, zone: tzinfo = UTC) -> dict[str, object]:
    if value is None:
        return Message(bad=["value"]).columns()
    text = value.decode(errors="replace")
    found = Message()
    priority = _priority(text)
    rest = text
    if priority is not None:
        rest = text[text.index(">") + 1 :]
        if priority <= 191:
            found.facility, found.severity = divmod(priority, 8)
    if priority is not None and re.match(r"1 [-0-9]", rest):
        found.version = 1
        _modern(found, text, zone)
    else:
        _traditional(found, text, rest, arrival, zone, marked=priority is not None)
    if priority is not None and priority > 191:
        found.bad.insert(0, "PRI")
    return found.columns()


def _priority(text: str) -> int | None:
    head, end, _ = text[:5].partition(">")
    if not end or not head.startswith("<") or not head[1:].isascii() or not head[1:].isdigit():
        return None
    return int(head[1:])


# ── RFC 5424 ────────────────────────────────────────────────────────────────────────────────────


def _modern(found: Message, text: str, zone: tzinfo) -> None:
    words = text.split(" ", 6)
    known = [None if word in ("", "-") else word for word in words[:6]] + [None] * 6
    _, stamp, found.hostname, found.app_name, found.proc_id, found.msg_id = known[:6]
    if len(words) < 7:
        found.bad.append("ends")
    else:
        _rest(found, words[6])
    if stamp is not None:
        found.time = _iso(stamp, zone) if ISO.fullmatch(stamp) else None
        if found.time is None:
            found.bad.append("time")


def _rest(found: Message, rest: str) -> None:
    if rest == "-" or rest.startswith(("- ", "-\n")):
        message = rest[2:]
    else:
        end = _data(found, rest)
        message = rest if end is None else rest[end + 1 :]
        if end is None:
            found.bad.append("structured data")
    found.message = message.lstrip("\ufeff")


def _data(found: Message, rest: str) -> int | None:  # noqa: C901
    """Read the elements; returns where they end, or ``None`` if they are malformed."""
    pairs: list[tuple[str, str]] = []
    at = 0
    while rest[at : at + 1] == "[":
        name, at = _label(rest, at + 1)
        if not name:
            return None
        params = []
        while rest[at : at + 1] == " ":
            while rest[at : at + 1] == " ":
                at += 1
            if rest[at : at + 1] == "]":
                break
            label, at = _label(rest, at)
            if not label or rest[at : at + 2] != '="':
                return None
            value, at = _quoted(rest, at + 2)
            if value is None:
                return None
            params.append((f"{name}.{label}", value))
        if rest[at : at + 1] != "]":
            return None
        at += 1
        pairs += params or [(name, "")]
    if at == 0 or rest[at : at + 1] not in ("", " "):
        return None
    found.structured_data = {}
    for key, value in pairs:
        known = found.structured_data.get(key)
        found.structured_data[key] = value if known is None else f"{known},{value}"
    return at


def _label(rest: str, at: int) -> tuple[str, int]:
    start = at
    while at < len(rest) and rest[at] not in BLANKS + '=]"':
        at += 1
    return rest[start:at], at


def _quoted(rest: str, at: int) -> tuple[str | None, int]:
    letters: list[str] = []
    while at < len(rest):
        if rest[at] == '"':
            return "".join(letters), at + 1
        if rest[at] == "\\":
            following = rest[at + 1 : at + 2]
            if not following:
                return None, at
            letters.append(following if following in '"\\]' else "\\" + following)
            at += 2
        else:
            letters.append(rest[at])
            at += 1
    return None, at


# ── RFC 3164 ────────────────────────────────────────────────────────────────────────────────────


def _traditional(
    found: Message, text: str, rest: str, arrival: datetime, zone: tzinfo, *, marked: bool
) -> None:
    bare = rest.removeprefix(" ") if marked else rest
    headed = _header(found, bare, arrival, zone)
    if (headed is None and not marked) or text.startswith(CUT):
        vars(found).update(vars(Message(message=text, bad=["neither"])))
        return
    found.version = 0
    body = bare if headed is None else headed
    found.message = _tag(found, body)


def _header(found: Message, rest: str, arrival: datetime, zone: tzinfo) -> str | None:
    """Return the text after the time and the host; ``None`` without a time."""
    rest, origin = _cisco(rest)
    cut = _iso_time(found, rest, zone) or _bsd_time(found, rest, arrival, zone)
    if cut is None:
        return None
    rest = rest[cut:]
    if rest.startswith(":"):
        rest = rest[1:].removeprefix(" ")
    elif rest.startswith(" "):
        rest = rest[1:]
    host, rest = _host(rest)
    found.hostname = None if host == "-" else host or origin
    return rest


def _cisco(rest: str) -> tuple[str, str | None]:
    origin = None
    number, colon, after = rest.partition(": ")
    if colon and len(number) <= 10 and (not number or (number.isascii() and number.isdigit())):
        rest = after
        word, colon, after = rest.partition(": ")
        cisco = DATED.match(after)
        if colon and cisco and 0 < len(word) < 256 and not set(word) & set(BLANKS + ":" + CUT):
            origin, rest = word, after
    return (rest[1:] if rest[:1] in ("*", ".") else rest), origin


def _iso_time(found: Message, rest: str, zone: tzinfo) -> int | None:
    match = ISO.match(rest)
    if match is None or rest[match.end() : match.end() + 1] not in ("", " ", ":"):
        return None
    found.time = _iso(match[0], zone)
    if found.time is None:
        found.bad.append("time")
    return match.end()


def _bsd_time(found: Message, rest: str, arrival: datetime, zone: tzinfo) -> int | None:
    match = re.match(r"(?:([0-9]{4}) )?([A-Z][a-z]{2}) {1,2}([0-9]{1,2}) (?:([0-9]{4}) )?", rest)
    clock = match and CLOCK.match(rest, match.end())
    if not match or not clock or match[2] not in MONTHS:
        return None
    end = clock.end()
    named = re.compile(r" ([A-Z]{3,4})(?=:)").match(rest, end)
    if named:
        end = named.end()
        zone = UTC if named[1] in ("UTC", "GMT") else zone
    elif rest[end : end + 1] not in ("", " ", ":"):
        return None
    month, day = MONTHS.index(match[2]) + 1, int(match[3])
    latest = (arrival + timedelta(days=2)).date()
    year = latest.year - ((month, day) > (latest.month, latest.day))
    text = (match[1] or "") + (match[4] or "") or f"{year:04}"
    found.time = _iso(f"{text}-{month:02}-{day:02}T{clock[0]}", zone) if len(text) == 4 else None
    if found.time is None:
        found.bad.append("time")
    return end


def _host(rest: str) -> tuple[str | None, str]:
    at = 0
    while at < len(rest) and at < 255 and rest[at] not in BLANKS + CUT + "[]":
        at += 1
    word, after = rest[:at], rest[at:]
    if word.endswith(":"):
        if (
            word[0] != "%"
            and after.startswith(" %")
            and len(word.rstrip(":")) == len(word) - 1
            and len(word) > 1
        ):
            return word[:-1], after[1:]
        return None, rest
    if not word or word.startswith("%") or not (after == "" or after.startswith(" ")):
        return None, rest
    return word, after.removeprefix(" : ") if after.startswith(" : ") else after[1:]


def _tag(found: Message, rest: str) -> str:
    at = 0
    while at < len(rest) and at < 128 and rest[at] not in BLANKS + ":[" + CUT:
        at += 1
    tag, after = rest[:at], rest[at:]
    if not tag:
        return rest
    if after.startswith(":") and (len(after) == 1 or after[1] in BLANKS):
        found.app_name = None if tag == "-" else tag
        return after[1:].removeprefix(" ")
    pid, bracket, behind = after[1:].partition("]")
    if after.startswith("[") and bracket and len(pid) <= 128 and not set(pid) & set(BLANKS + CUT):
        found.app_name = None if tag == "-" else tag
        found.proc_id = None if pid in ("", "-") else pid
        return behind.removeprefix(":").removeprefix(" ")
    return rest


def _iso(text: str, zone: tzinfo) -> datetime | None:
    """Return the time in microseconds; ``None`` if it does not exist."""
    head, fraction, tail = re.match(r"(.{19})(?:[.,](\d+))?(.*)", text).groups()  # type: ignore[union-attr]
    try:
        moment = datetime.fromisoformat(head)
        offset = datetime.fromisoformat(f"2000-01-01T00:00:00{tail}").tzinfo if tail else zone
    except ValueError:
        return None
    minutes = (offset or zone).utcoffset(None) if tail else None
    if (minutes and abs(minutes) > timedelta(hours=18)) or re.search(r":?[6-9]\d\Z", tail):
        return None
    moment += timedelta(microseconds=int((fraction or "0").ljust(6, "0")[:6]))
    return moment.replace(tzinfo=offset).astimezone(UTC)
