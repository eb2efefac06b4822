"""Syslog as columns: RFC 5424 and RFC 3164, distinguished message by message.

The parser consists of Spark expressions, so Spark leaves out columns that no filter and no output
reads: a filter by severity reads five bytes of a message. A message of RFC 5424 is split at its
first six spaces. Regular expressions are needed only for structured data and for RFC 3164, which
hardly has a grammar, and each text is matched once: the expression writes its groups with a
separator between them, and the result is split at the separators. A pass for each group would cost
many times as much.

Steps pass on columns whose names start with ``_``: Spark computes such a column once for all
columns that read it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from turnlane.delivery.settings import PRIORITY
from turnlane.formats.parse_settings import PARSE_ERROR, ParseSettings

# ── structured data of RFC 5424: `[id name="value" …][…]` as a map of `id.name` to value ──
# Loops over groups are possessive (`*+`). Java needs stack for each turn of a loop that backtracks,
# so a single long message could end the task, again at each restart.

_VALUE: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PARAM: Final = rf'[^\s=\]"]++={_VALUE}'
_ELEMENT: Final = rf'\[[^\s=\]"]++(?: ++{_PARAM})*+ *+\]'
_WHOLE: Final = rf"(?s)\A(?:{_ELEMENT})++(?= |\z)"
_ESCAPED: Final = r'\\(["\\\]])'


def build_map(data: Column) -> Column:
    """Return the map, null for nil. An element without parameters has an empty value.

    The values of a repeated parameter are joined with commas.
    """
    elements = F.regexp_extract_all(data, F.lit(f"(?s){_ELEMENT}"), F.lit(0))
    pairs = F.flatten(F.transform(elements, _list_pairs))
    empty = F.create_map().cast("map<string,string>")
    return F.when(~data.isin("", "-"), F.aggregate(pairs, empty, _add_pair))


def _list_pairs(element: Column) -> Column:
    """Return the parameters of an element, each as a struct of key and value."""
    inner = F.substr(element, F.lit(2), F.length(element) - 2)
    name = F.substring_index(inner, " ", 1)
    params = F.regexp_extract_all(element, F.lit(f"(?s){_PARAM}"), F.lit(0))
    found = F.transform(params, lambda param: _build_pair(name, param))
    alone = F.array(F.struct(name.alias("key"), F.lit("").alias("value")))
    return F.when(F.size(params) == 0, alone).otherwise(found)


def _build_pair(name: Column, param: Column) -> Column:
    label = F.substring_index(param, "=", 1)
    start = F.length(label) + 3
    value = F.substr(param, start, F.length(param) - start)
    plain = F.when(
        F.contains(value, F.lit("\\")), F.regexp_replace(value, _ESCAPED, "$1")
    ).otherwise(value)
    return F.struct(F.concat(name, F.lit("."), label).alias("key"), plain.alias("value"))


def _add_pair(known: Column, pair: Column) -> Column:
    """Return the map with one more pair; a key that exists already gets both values."""
    earlier = F.element_at(known, pair["key"])
    others = F.map_filter(known, lambda key, _: key != pair["key"])
    joined = F.concat_ws(",", earlier, pair["value"])
    return F.when(
        earlier.isNull(), F.map_concat(known, F.create_map(pair["key"], pair["value"]))
    ).otherwise(F.map_concat(others, F.create_map(pair["key"], joined)))


# ── messages ──

COLUMNS: Final = (
    "facility", "version", "time", "hostname", "app_name", "proc_id", "msg_id",
    "structured_data", "message", PARSE_ERROR,
)  # fmt: skip

_MORE: Final = frozenset(COLUMNS) - {"facility"}
"""The columns that need more than the priority."""
_CUT: Final = "\x1f"
"""The separator of groups. Only the last group, the message, can contain it."""

# A sequence number, a host, and the star or dot of an unset clock, as Cisco's devices write them.
_DATED: Final = r"[*.]?(?:\d{4} )?[A-Z][a-z]{2} [ \d]?\d (?:\d{4} )?[\d:.]{8,18}(?: [A-Z]{3,4})?: %"
_CISCO: Final = rf"(?:\d{{0,10}}: (?:([^\s:\x1f]{{1,255}}): (?={_DATED}))?)?[*.]?"
_CLOCK: Final = r"\d\d:\d\d:\d\d(?:\.\d{1,9})?"
_TIME: Final = (
    rf"(?:(\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?)"
    r"|(?:(\d{4}) )?(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(\d{1,2}) "
    rf"(?:(\d{{4}}) )?({_CLOCK})(?: ([A-Z]{{3,4}})(?=:))?)"
)
# The word before the tag. A word that ends in a colon or has brackets is the tag itself.
_HOST: Final = r"(?:(?!%)([^\s\x1f\[\]]{0,254}[^\s\x1f\[\]:])(?: : | |: (?=%)|\z))?"
_TAG: Final = r"(?:([^\s:\[\x1f]{1,128})(?::(?=\s|\z)|\[([^\]\s\x1f]{0,128})\]:?) ?)?"
# The look-behind requires a <PRI> or a time: a text with neither is no syslog.
_BSD: Final = (
    rf"(?s)\A(?:<[0-9]{{1,3}}> ?)?(?:{_CISCO}{_TIME}(?:: ?| |\z){_HOST})?(?<=.){_TAG}(.*)\z"
)
# The groups: first in the order of the pieces of RFC 5424, then groups that only RFC 3164 has. A
# message with an origin has no host.
_BSD_PIECES: Final = _CUT.join(
    ("", "$2", "$1$9", "$10", "$11", "", "$4", "$5", "$3$6", "$7", "$8", "$12")
)
_ISO, _HOSTNAME, _APP, _PROC, _MSG_ID, _REST = range(1, 7)
_MONTH, _DAY, _YEAR, _CLOCK_AT, _ZONE, _TEXT = range(6, 12)

_REASONS: Final = (
    "there is no value",
    "neither RFC 5424 nor RFC 3164: it starts with no <PRI> and no time",
    "its <PRI> is above 191",
    "it starts as RFC 5424 and ends before the structured data",
    "its structured data is malformed",
    "its time does not exist",
)

_MONTHS: Final = "Jan.Feb.Mar.Apr.May.Jun.Jul.Aug.Sep.Oct.Nov.Dec"
_NIL: Final = "-"
_AHEAD_DAYS: Final = 2
"""A message without a year that is further ahead of its arrival belongs to the year before."""


def parse_syslog(
    df: DataFrame, settings: ParseSettings, wanted: Collection[str] | None = None
) -> DataFrame:
    """Add the columns of a syslog message and ``parse_error``; ``severity`` comes from ``<PRI>``.

    Each column that can be read is set, even if others cannot be read. If ``wanted`` needs only the
    ``<PRI>``, no other columns are added; if that is a column already, no message is read.
    """
    kept = [name for name in df.columns if name not in (*COLUMNS, "severity", PRIORITY)]
    is_known = PRIORITY in df.columns
    if is_known:
        steps = df.withColumn("_priority", F.col(PRIORITY))
    else:
        steps = df.withColumn("_head", F.left("value", F.lit(5)).cast("string"))
        steps = steps.withColumn("_end", F.instr("_head", ">"))
        steps = steps.withColumn("_priority", _read_priority())
    priority = F.when(F.col("_priority") <= 191, F.col("_priority"))
    severity = priority.bitwiseAND(F.lit(7)).cast("tinyint")
    by_priority = {
        "severity": F.coalesce(severity, F.col("severity")),
        "facility": F.shiftright(priority, 3).cast("tinyint"),
    }
    if is_known or (wanted is not None and needs_priority_only(wanted)):
        return steps.withColumns(by_priority).select(*kept, "severity", "facility")
    steps = steps.withColumn("_text", F.make_valid_utf8(F.col("value").cast("string")))
    # A message of RFC 5424 starts with the version, and nil or the first digit of a year.
    start = F.substr(F.col("_text"), F.col("_end") + 1, F.lit(3))
    is_modern = (start == "1 -") | start.between("1 0", "1 9")
    steps = steps.withColumn("_modern", F.col("_priority").isNotNull() & is_modern)
    steps = steps.withColumn("_split", _split_text())
    # If it is no syslog, there are no pieces. Only a matched text starts with an empty piece.
    is_matched = (F.size("_split") == _TEXT + 1) & (F.get("_split", F.lit(0)) == "")
    pieces = F.when(F.col("_modern") | is_matched, F.col("_split"))
    steps = steps.withColumn("_pieces", pieces)
    steps = steps.withColumns({"_month": _find_month(), "_data": _find_data()})
    zone = _get_zone_suffix(df, settings.time_zone)
    steps = steps.withColumn("_time", _build_time(zone))
    columns = {
        **by_priority,
        "version": F.when(F.col("_pieces").isNotNull(), F.col("_modern").cast("tinyint")),
        "time": F.col("_time").try_cast("timestamp"),
        "hostname": _get_word(_HOSTNAME),
        "app_name": _get_word(_APP),
        "proc_id": _get_word(_PROC),
        "msg_id": _get_word(_MSG_ID),
        "message": _find_message(),
    }
    steps = steps.withColumns(columns).withColumn("_wrong", _number_reason())
    # `_wrong` is read twice, which separates this step: Spark compiles all steps before it into one
    # loop, and the functions that build a map from arrays cannot be part of such a loop.
    reason = F.element_at(F.array(*map(F.lit, _REASONS)), F.col("_wrong"))
    steps = steps.withColumns(
        {
            "structured_data": build_map(F.col("_data")),
            PARSE_ERROR: F.when(F.col("_wrong") > 0, reason),
        }
    )
    return steps.select(*kept, "severity", *COLUMNS)


def needs_priority_only(wanted: Collection[str]) -> bool:
    """Whether the priority is enough to compute these columns."""
    return _MORE.isdisjoint(wanted)


def _read_priority() -> Column:
    """Return the number in ``<PRI>``, of any size; null without one."""
    digits = F.substr(F.col("_head"), F.lit(2), F.col("_end") - 2)
    # A cast accepts blanks and signs as well. They come before the digits in ASCII.
    all_digits = (digits >= "0") & (F.right(digits, F.lit(1)) >= "0")
    number = F.when(all_digits, digits.try_cast("smallint"))
    return F.when(F.startswith("_head", F.lit("<")) & (F.col("_end") > 2), number)


def _split_text() -> Column:
    # A text that starts with the separator would look like a matched text.
    return (
        F.when(F.col("_modern"), F.split("_text", " ", 7))
        .when(F.startswith("_text", F.lit(_CUT)), None)
        .otherwise(F.split(F.regexp_replace("_text", _BSD, _BSD_PIECES), _CUT, _TEXT + 1))
    )


def _get_piece(at: int) -> Column:
    return F.get("_pieces", F.lit(at))


def _get_word(at: int) -> Column:
    """Return a piece; null if it is empty or nil."""
    return F.when(~_get_piece(at).isin("", _NIL), _get_piece(at))


def _get_zone_suffix(df: DataFrame, zone: str) -> str:
    """Return the suffix that puts a time into a zone; empty if Spark uses that zone anyway."""
    if df.sparkSession.conf.get("spark.sql.session.timeZone") == zone:
        return ""
    return "Z" if zone == "UTC" else f" {zone}"


def _find_month() -> Column:
    """Return the number of the month; 0 without a name."""
    name = F.when(F.col("_modern"), "").otherwise(_get_piece(_MONTH))
    return F.when(name != "", F.shiftright(F.instr(F.lit(_MONTHS), name) + 3, 2)).otherwise(0)


def _build_time(suffix: str) -> Column:
    """Return the time as a text for a cast; ``?`` if it is invalid, null if there is none.

    A time of RFC 3164 without a year gets the latest year that is not after its arrival.
    """
    latest = F.date_add(F.to_date("timestamp"), _AHEAD_DAYS)
    date = F.col("_month") * 100 + _get_piece(_DAY).cast("int")
    guessed = F.year(latest) - F.when(date > F.month(latest) * 100 + F.day(latest), 1).otherwise(0)
    year = F.coalesce(F.nullif(_get_piece(_YEAR), F.lit("")), guessed.cast("string"))
    zone = F.when(_get_piece(_ZONE).isin("UTC", "GMT"), "Z").otherwise(suffix)
    day = F.concat_ws("-", year, F.col("_month").cast("string"), _get_piece(_DAY))
    bsd = F.concat(day, F.lit("T"), _get_piece(_CLOCK_AT), zone)

    iso = _get_piece(_ISO)
    whole = iso
    if suffix:
        signs = [F.substr(iso, F.lit(at), F.lit(1)).isin("+", "-") for at in (-6, -5)]
        has_zone = F.endswith(iso, F.lit("Z")) | signs[0] | signs[1]
        whole = F.concat(iso, F.when(has_zone, "").otherwise(suffix))
    shaped = F.when(F.length(iso) >= 19, whole).otherwise("?")
    return F.when(F.col("_month") > 0, bsd).when(~iso.isin("", _NIL), shaped)


def _find_data() -> Column:
    """Return the structured data, which may be nil; empty if malformed, null if missing."""
    rest = _get_piece(_REST)
    nil = (rest == _NIL) | F.left(rest, F.lit(2)).isin(_NIL + " ", _NIL + "\n")
    data = F.when(nil, _NIL).otherwise(F.regexp_extract(rest, _WHOLE, 0))
    return F.when(F.col("_modern"), data)


def _find_message() -> Column:
    start = F.when(F.col("_data") == "", 1).otherwise(F.length("_data") + 2)
    modern = F.ltrim(F.substr(_get_piece(_REST), start), F.lit("\ufeff"))
    return (
        F.when(F.col("_pieces").isNull(), F.col("_text"))
        .when(F.col("_modern"), modern)
        .otherwise(_get_piece(_TEXT))
    )


def _number_reason() -> Column:
    """Return the number of the reason in ``_REASONS``, from 1; 0 if the message is valid."""
    is_no_time = F.col("_time").isNotNull() & F.col("time").isNull()
    return (
        F.when(F.col("value").isNull(), 1)
        .when(F.col("_pieces").isNull(), 2)
        .when(F.col("_priority") > 191, 3)
        .when(F.col("_modern") & F.col("_data").isNull(), 4)
        .when(F.col("_data") == "", 5)
        .when(is_no_time, 6)
        .otherwise(0)
    )
