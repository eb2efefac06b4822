"""Log events: a fixed name with fields, formatted here for people and as JSON.

A module logs an event by its name, ``area.what_happened``, and passes everything that varies as a
field, so that people can search for the name and programs can alert on it::

    log = get_logger(__name__)
    log.warning("commit.resume_failed", commit=7, error=error, hint="retried at the next start")

The records go through Python's ``logging``. ``record.getMessage()`` is a readable line, so the
handlers of a program that embeds turnlane need no special formatter:

    commit.resume_failed commit=7 error="OSError: disk full" (retried at the next start)

``record.event`` and ``record.fields`` carry the parts for formatters. The fields are converted to
plain values (text, numbers, booleans, ``None``, lists, dictionaries) when the event is logged: a
record never keeps an exception and its frames alive, another process can read it, and a later
change of an object does not change the record. Nothing is converted or formatted if the level is
off.

``TerminalFormatter`` and ``JsonLineFormatter`` also format the records of other libraries, which
have a message and no event.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import re
import select
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""A value that JSON has."""

HINT: Final = "hint"
"""The field for a remark to people: what happens next, or what they can do. A line ends with it."""

STDERR: Final = 2
STDERR_SECONDS: Final = 5.0
"""How long a line waits for room in stderr."""

_CALLER: Final = 3
"""Stack levels between ``logging`` and the caller: ``EventLogger._log``, its public method."""
_SECONDS: Final = "%Y-%m-%dT%H:%M:%S"
_NEEDS_QUOTES: Final = re.compile(r'[\s"=\\]')


def get_logger(name: str) -> EventLogger:
    """Return the event logger of a module, by the name of the module."""
    return EventLogger(logging.getLogger(name))


class EventLogger:
    """Logs events with fields to a logger of ``logging``, whose level and handlers apply.

    ``exc_info`` adds a traceback: ``True`` for the exception that is handled now, or an exception.
    Every other keyword argument is a field.
    """

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def is_enabled_for(self, level: int) -> bool:
        """Whether events of this level are logged; for fields that are costly to compute."""
        return self._logger.isEnabledFor(level)

    def debug(
        self, event: str, /, *, exc_info: BaseException | bool = False, **fields: Any
    ) -> None:
        """Log an event that only helps to find a fault in turnlane."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._log(logging.DEBUG, event, fields, exc_info=exc_info)

    def info(self, event: str, /, *, exc_info: BaseException | bool = False, **fields: Any) -> None:
        """Log an event that is part of normal work."""
        if self._logger.isEnabledFor(logging.INFO):
            self._log(logging.INFO, event, fields, exc_info=exc_info)

    def warning(
        self, event: str, /, *, exc_info: BaseException | bool = False, **fields: Any
    ) -> None:
        """Log an event that people should know about, although work continues."""
        if self._logger.isEnabledFor(logging.WARNING):
            self._log(logging.WARNING, event, fields, exc_info=exc_info)

    def error(
        self, event: str, /, *, exc_info: BaseException | bool = False, **fields: Any
    ) -> None:
        """Log a failure that needs a person."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._log(logging.ERROR, event, fields, exc_info=exc_info)

    def exception(
        self, event: str, /, *, exc_info: BaseException | bool = True, **fields: Any
    ) -> None:
        """Log an unexpected failure, with the traceback of the exception that is handled now."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._log(logging.ERROR, event, fields, exc_info=exc_info)

    def log(
        self, level: int, event: str, /, *, exc_info: BaseException | bool = False, **fields: Any
    ) -> None:
        """Log an event at a level that the caller computes."""
        if self._logger.isEnabledFor(level):
            self._log(level, event, fields, exc_info=exc_info)

    def _log(
        self, level: int, event: str, fields: dict[str, Any], *, exc_info: BaseException | bool
    ) -> None:
        values = {name: _convert_to_plain(value) for name, value in fields.items()}
        self._logger.log(
            level,
            _EventText(event, values),
            exc_info=exc_info,
            extra={"event": event, "fields": values},
            stacklevel=_CALLER,
        )


class TerminalFormatter(logging.Formatter):
    """Formats a record as a line for people: time in UTC, level, event, fields; then a traceback.

    A record without an event has its logger's name and its message instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of a traceback if the record has one."""
        return _replace_surrogates(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the first line; ``logging`` adds the traceback."""
        source = "" if _get_event(record) is not None else f"{record.name}: "
        return f"{_format_time(self, record)} {record.levelname:<7} {source}{record.message}"


class JsonLineFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line.

    Every object has ``time`` (UTC), ``level`` and ``logger``. An event adds ``event`` and
    ``fields``, a record of another library ``message``; a traceback is in ``exception``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        entry: dict[str, Any] = {
            "time": _format_time(self, record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event = _get_event(record)
        if event is None:
            entry["message"] = record.getMessage()
        else:
            entry["event"] = event
            entry["fields"] = getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return _replace_surrogates(json.dumps(entry, default=str, ensure_ascii=False))


# ── records ──────────────────────────────────────────────────────────────────────────────────────


class _EventText:
    """The message of a record, which becomes text when a handler asks for it."""

    __slots__ = ("_event", "_fields")

    def __init__(self, event: str, fields: Mapping[str, Plain]) -> None:
        self._event = event
        self._fields = fields

    def __str__(self) -> str:
        return format_event(self._event, self._fields)


def _get_event(record: logging.LogRecord) -> str | None:
    """Return the event of a record of this module; other libraries may have an ``event`` too."""
    event = getattr(record, "event", None)
    has_fields = isinstance(getattr(record, "fields", None), dict)
    return event if isinstance(event, str) and has_fields else None


def _format_time(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return f"{formatter.formatTime(record, _SECONDS)}.{int(record.msecs):03d}Z"


def _replace_surrogates(text: str) -> str:
    r"""Write halves of surrogate pairs, which UTF-8 cannot encode, as ``\udc80``: valid in JSON."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def _convert_to_plain(value: object) -> Plain:
    """Return the value in a form that JSON has. Never raises: logging must not break its caller."""
    try:
        return _convert(value)
    except Exception as error:  # noqa: BLE001 - a __str__ may raise anything
        return f"<{type(value).__name__}: no text, {type(error).__name__}>"


def _convert(value: object) -> Plain:  # noqa: PLR0911 - one return for each kind
    match value:
        case enum.Enum():
            return _convert(value.value)
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else str(float(value))
        case BaseException():
            return _describe_exception(value)
        case bytes() | bytearray():
            return value.decode("utf-8", "backslashreplace")
        case Mapping():
            return {str(_convert(key)): _convert(each) for key, each in value.items()}
        case list() | tuple() | AbstractSet():
            return [_convert(each) for each in value]
        case _:
            return str(value)


def _describe_exception(error: BaseException) -> str:
    """Return ``Type: message``, or the type alone if the exception has no message."""
    name, message = type(error).__name__, str(error).strip()
    return f"{name}: {message}" if message else name


# ── output ───────────────────────────────────────────────────────────────────────────────────────


def write_to_stderr(line: bytes) -> None:
    """Write a line, given without its end, to stderr. Raises ``OSError``.

    Waits a short time if stderr is a pipe that is full and does not block. Safe on a thread that
    still runs when Python exits.
    """
    rest = line + b"\n"
    while rest:
        try:
            rest = rest[os.write(STDERR, rest) :]
        except BlockingIOError:
            if not select.select([], [STDERR], [], STDERR_SECONDS)[1]:
                raise


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def format_event(event: str, fields: Mapping[str, Plain]) -> str:
    """Return an event as a line for people: ``event field=value … (hint)``.

    Line breaks and control characters in values are escaped, so a sender of events cannot forge
    lines of the log.
    """
    parts = [event]
    for name, value in fields.items():
        if name != HINT:
            parts.append(f"{name}={_quote(_format_value(value))}")
    hint = fields.get(HINT)
    if hint:
        parts.append(f"({_escape(_format_value(hint))})")
    return " ".join(parts)


def _format_value(value: Plain) -> str:
    match value:
        case str():
            return value
        case dict():
            return ",".join(f"{key}:{_format_value(each)}" for key, each in value.items())
        case list():
            return ",".join(_format_value(each) for each in value)
        case _:
            return json.dumps(value)  # true, false, null, numbers


def _quote(text: str) -> str:
    if text and text.isprintable() and not _NEEDS_QUOTES.search(text):
        return text
    return _escape(json.dumps(text, ensure_ascii=False))


def _escape(text: str) -> str:
    """Replace what a terminal would not print as it is, also escape sequences."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escape_character(each) for each in text)


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
