"""Log events: the text of a record, its parts, and its two forms on stderr."""

from __future__ import annotations

import ast
import enum
import io
import json
import logging
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnlane.logs import EventLogger, JsonLineFormatter, TerminalFormatter, get_logger

SOURCES = Path(__file__).parents[2] / "src" / "turnlane"
EVENT_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
METHODS = {"debug", "info", "warning", "error", "exception", "log"}
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


class Color(enum.Enum):
    RED = "red"


class Unprintable:
    def __str__(self) -> str:
        raise ValueError


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger of its own, which passes nothing on to other handlers."""
    found = logging.getLogger("turnlane.test_logs")
    found.propagate = False
    found.setLevel(logging.DEBUG)
    yield found
    found.handlers.clear()
    found.setLevel(logging.NOTSET)
    found.propagate = True


@pytest.fixture
def records(logger: logging.Logger) -> list[logging.LogRecord]:
    handler = Records()
    logger.addHandler(handler)
    return handler.all


@pytest.fixture
def log(logger: logging.Logger) -> EventLogger:
    return get_logger(logger.name)


def format_as(logger: logging.Logger, formatter: logging.Formatter) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return stream


# ── records ──────────────────────────────────────────────────────────────────────────────────────


def test_event_with_fields_has_a_readable_message_and_its_parts(
    log: EventLogger, records: list[logging.LogRecord]
) -> None:
    log.warning("commit.resume_failed", commit=7, error="disk full")
    (record,) = records
    assert record.getMessage() == 'commit.resume_failed commit=7 error="disk full"'
    assert vars(record)["event"] == "commit.resume_failed"
    assert vars(record)["fields"] == {"commit": 7, "error": "disk full"}
    assert record.levelno == logging.WARNING


def test_event_with_a_hint_ends_with_it_in_parentheses(
    log: EventLogger, records: list[logging.LogRecord]
) -> None:
    log.info("commit.resume_failed", hint="retried at the next start", commit=7)
    assert records[0].getMessage() == "commit.resume_failed commit=7 (retried at the next start)"
    assert vars(records[0])["fields"]["hint"] == "retried at the next start"


def test_event_name_with_a_percent_sign_is_not_a_format(
    log: EventLogger, records: list[logging.LogRecord]
) -> None:
    log.info("disk.usage", used="90%s")
    assert records[0].getMessage() == "disk.usage used=90%s"


def test_each_method_logs_at_its_level(log: EventLogger, records: list[logging.LogRecord]) -> None:
    log.debug("a.b")
    log.info("a.b")
    log.warning("a.b")
    log.error("a.b")
    log.exception("a.b", exc_info=ValueError("x"))  # noqa: LOG004
    log.log(logging.CRITICAL, "a.b")
    assert [each.levelno for each in records] == [10, 20, 30, 40, 40, 50]


@pytest.mark.parametrize("method", sorted(METHODS - {"log"}))
def test_record_names_the_line_of_the_caller(
    method: str, log: EventLogger, records: list[logging.LogRecord]
) -> None:
    line = sys._getframe().f_lineno + 1
    getattr(log, method)("a.b")
    assert (records[0].pathname, records[0].lineno) == (__file__, line)
    assert records[0].funcName == "test_record_names_the_line_of_the_caller"


def test_log_with_a_level_names_the_line_of_the_caller(
    log: EventLogger, records: list[logging.LogRecord]
) -> None:
    log.log(logging.INFO, "a.b")
    assert records[0].funcName == "test_log_with_a_level_names_the_line_of_the_caller"


def test_level_that_is_off_converts_no_field(
    log: EventLogger, logger: logging.Logger, records: list[logging.LogRecord]
) -> None:
    class Watched:
        converted = 0

        def __str__(self) -> str:
            self.converted += 1
            return "text"

    value = Watched()
    logger.setLevel(logging.WARNING)
    log.info("a.b", value=value)
    assert (value.converted, records) == (0, [])
    assert not log.is_enabled_for(logging.INFO)
    log.warning("a.b", value=value)
    assert value.converted == 1


def test_field_named_like_a_parameter_is_a_field(
    log: EventLogger, records: list[logging.LogRecord]
) -> None:
    log.log(logging.INFO, "a.b", event="e", level="l", self="s", message="m", name="n")
    assert records[0].getMessage() == "a.b event=e level=l self=s message=m name=n"


def test_record_with_an_exception_as_a_field_can_be_pickled(
    log: EventLogger, records: list[logging.LogRecord]
) -> None:
    log.info("a.b", error=OSError("gone"), path=Path("x"))
    copy = pickle.loads(pickle.dumps(records[0]))
    assert copy.getMessage() == 'a.b error="OSError: gone" path=x'


# ── values ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "text", "plain"),
    [
        (7, "7", 7),
        (1.5, "1.5", 1.5),
        (float("inf"), "inf", "inf"),
        (True, "true", True),
        (None, "null", None),
        ("plain", "plain", "plain"),
        ("", '""', ""),
        ("two words", '"two words"', "two words"),
        ("a=b", '"a=b"', "a=b"),
        ('say "hi"', '"say \\"hi\\""', 'say "hi"'),
        ("C:\\x", '"C:\\\\x"', "C:\\x"),
        ("Zoë", "Zoë", "Zoë"),
        ("one\ntwo", '"one\\ntwo"', "one\ntwo"),
        ("\x1b[31m\x9b", '"\\u001b[31m\\x9b"', "\x1b[31m\x9b"),
        # xdist cannot send a test id that is not UTF-8.
        pytest.param("\udc80", '"\\udc80"', "\udc80", id="lone surrogate"),
        (b"bytes\xff", '"bytes\\\\xff"', "bytes\\xff"),
        (Path("data/x"), "data/x", "data/x"),
        (Color.RED, "red", "red"),
        (range(3), '"range(0, 3)"', "range(0, 3)"),
        (["a", 1], "a,1", ["a", 1]),
        (("a b", None), '"a b,null"', ["a b", None]),
        ({"lane": 1, "queue": "q"}, "lane:1,queue:q", {"lane": 1, "queue": "q"}),
        ({1: {2}}, "1:2", {"1": [2]}),
        (ValueError("no good"), '"ValueError: no good"', "ValueError: no good"),
        (KeyError(), "KeyError", "KeyError"),
        (OSError(28, "full"), '"OSError: [Errno 28] full"', "OSError: [Errno 28] full"),
    ],
)
def test_value_of_a_kind_becomes_its_text_and_its_json(
    value: Any, text: str, plain: Any, log: EventLogger, records: list[logging.LogRecord]
) -> None:
    log.info("a.b", value=value)
    assert records[0].getMessage() == f"a.b value={text}"
    assert json.loads(JsonLineFormatter().format(records[0]))["fields"] == {"value": plain}


def test_value_whose_text_fails_does_not_break_the_caller(
    log: EventLogger, records: list[logging.LogRecord]
) -> None:
    endless: list[Any] = []
    endless.append(endless)
    log.info("a.b", value=Unprintable(), endless=endless)
    assert vars(records[0])["fields"] == {
        "value": "<Unprintable: no text, ValueError>",
        "endless": "<list: no text, RecursionError>",
    }


def test_hint_with_control_characters_stays_on_one_line(
    log: EventLogger, records: list[logging.LogRecord]
) -> None:
    log.info("a.b", hint="one\ntwo")
    assert records[0].getMessage() == "a.b (one\\ntwo)"


# ── on a terminal ────────────────────────────────────────────────────────────────────────────────


def test_event_on_a_terminal_has_time_level_name_and_fields(
    log: EventLogger, logger: logging.Logger
) -> None:
    stream = format_as(logger, TerminalFormatter())
    log.info("queue.opened", queue="main", events=3)
    line = stream.getvalue()
    assert re.fullmatch(TIME + r" INFO    queue\.opened queue=main events=3\n", line)


def test_record_of_another_library_on_a_terminal_has_its_logger_and_message(
    logger: logging.Logger,
) -> None:
    stream = format_as(logger, TerminalFormatter())
    logger.warning("%d left", 3)
    assert re.fullmatch(TIME + r" WARNING turnlane\.test_logs: 3 left\n", stream.getvalue())


def test_exception_on_a_terminal_is_followed_by_its_traceback(
    log: EventLogger, logger: logging.Logger
) -> None:
    stream = format_as(logger, TerminalFormatter())
    try:
        raise ValueError("bad")  # noqa: TRY301
    except ValueError:
        log.exception("task.failed", task=1)
    first, second, *_, last = stream.getvalue().splitlines()
    assert first.endswith(" ERROR   task.failed task=1")
    assert (second, last) == ("Traceback (most recent call last):", "ValueError: bad")


# ── in JSON ──────────────────────────────────────────────────────────────────────────────────────


def test_event_in_json_is_one_object_on_one_line(log: EventLogger, logger: logging.Logger) -> None:
    stream = format_as(logger, JsonLineFormatter())
    log.warning("disk.slow", path="a\nb", seconds=1.5)
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert re.fullmatch(TIME, entry.pop("time"))
    assert entry == {
        "level": "warning",
        "logger": "turnlane.test_logs",
        "event": "disk.slow",
        "fields": {"path": "a\nb", "seconds": 1.5},
    }


def test_record_of_another_library_in_json_has_a_message(logger: logging.Logger) -> None:
    stream = format_as(logger, JsonLineFormatter())
    logger.info("%d left", 3, extra={"event": object()})
    entry = json.loads(stream.getvalue())
    assert entry["message"] == "3 left"
    assert not {"event", "fields"} & set(entry)


def test_exception_in_json_has_its_traceback_in_the_object(
    log: EventLogger, logger: logging.Logger
) -> None:
    stream = format_as(logger, JsonLineFormatter())
    log.error("task.failed", exc_info=ValueError("bad"))
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["exception"] == "ValueError: bad"


def test_exception_method_without_an_exception_adds_no_traceback(
    log: EventLogger, logger: logging.Logger
) -> None:
    stream = format_as(logger, JsonLineFormatter())
    log.exception("task.failed")  # noqa: LOG004
    assert "exception" not in json.loads(stream.getvalue())


@pytest.mark.parametrize("formatter", [TerminalFormatter(), JsonLineFormatter()])
def test_text_that_utf8_cannot_encode_is_written_escaped(formatter: logging.Formatter) -> None:
    # Formatted directly: pytest would keep the logged text, and xdist cannot send it.
    record = logging.LogRecord("turnlane", logging.INFO, __file__, 1, "half \udc80", None, None)
    assert "half \\udc80" in formatter.format(record)


# ── the source ───────────────────────────────────────────────────────────────────────────────────


def test_every_logged_event_is_a_dotted_constant_with_fields_by_name() -> None:
    wrong = [each for path in sorted(SOURCES.rglob("*.py")) for each in find_wrong_calls(path)]
    assert wrong == []


def find_wrong_calls(path: Path) -> Iterator[str]:
    """Yield the calls of event loggers that search and alerts could not rely on."""
    text = path.read_text(encoding="utf-8")
    if "get_logger(__name__)" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="log" | "_log"), attr=method), args=args
            ) if method in METHODS:
                names = args[1:] if method == "log" else args
                if len(names) != 1 or not is_event_name(names[0]):
                    yield f"{path.relative_to(SOURCES)}:{node.lineno}"


def is_event_name(node: ast.expr) -> bool:
    """Also a choice between two names is constant."""
    match node:
        case ast.Constant(value=str(name)):
            return EVENT_NAME.fullmatch(name) is not None
        case ast.IfExp(body=body, orelse=orelse):
            return is_event_name(body) and is_event_name(orelse)
        case _:
            return False
