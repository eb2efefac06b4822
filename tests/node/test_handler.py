"""Tests of the logging handler: it sends records and never delays or breaks the application."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from turnlane import ConfigError, Event, Queue, QueueClosed, open_queue
from turnlane.client import fork_relay
from turnlane.client.logging_handler import JsonFormatter, TurnlaneHandler, get_severity
from turnlane.config import loads
from turnlane.service import Service

PATIENCE = 60
LONG = 20.0
"""A wait in seconds that only a broken program needs."""


@pytest.fixture
def memory_queue() -> Iterator[Queue]:
    with open_queue(kind="memory") as queue:
        yield queue


@pytest.fixture
def small_queue() -> Iterator[Queue]:
    """A queue with room for one event."""
    with open_queue(kind="memory", size=1) as queue:
        yield queue


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Service]:
    planes = "flight: {listen: '127.0.0.1:0'}, http: {enabled: false}"
    text = f"node: {{data: '{tmp_path / 'data'}', {planes}}}\nqueues: {{logs: }}"
    with Service(loads(text)).start() as service:
        yield service


def build_url(node: Service) -> str:
    return node.url("flight")


@contextmanager
def log_to(handler: TurnlaneHandler, name: str = "app.orders") -> Iterator[logging.Logger]:
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        handler.close()


def read_events(queue: Queue, count: int) -> list[Event]:
    events: list[Event] = []
    while len(events) < count:
        with queue.get(timeout=PATIENCE) as batch:
            events += list(batch)
    return events


def read_values(queue: Queue, count: int) -> list[bytes | None]:
    return [event.value for event in read_events(queue, count)]


# ── records as events ────────────────────────────────────────────────────────────────────────────


def test_log_record_becomes_an_event(memory_queue: Queue) -> None:
    handler = TurnlaneHandler(memory_queue, exit_timeout=0, headers={"app": "shop"}, source="web-1")
    with log_to(handler) as logger:
        before = time.time_ns() // 1000
        logger.warning("%d left", 3)
        (event,) = read_events(memory_queue, 1)
    assert (event.value, event.key, event.severity) == (b"3 left", "app.orders", 4)
    assert (event.headers, event.source) == ({"app": "shop"}, "web-1")
    assert event.timestamp is not None
    assert before - 1000 <= event.timestamp <= time.time_ns() // 1000


@pytest.mark.parametrize(
    ("level", "severity"),
    [
        (logging.CRITICAL, 2),
        (logging.ERROR, 3),
        (logging.WARNING, 4),
        (25, 5),
        (logging.INFO, 6),
        (logging.DEBUG, 7),
        (1, 7),
        (100, 2),
    ],
)
def test_log_levels_become_syslog_severities(level: int, severity: int) -> None:
    assert get_severity(level) == severity


def test_formatter_makes_the_value(memory_queue: Queue) -> None:
    handler = TurnlaneHandler(memory_queue, exit_timeout=0)
    handler.setFormatter(JsonFormatter())
    with log_to(handler) as logger:
        try:
            raise ValueError("bad")  # noqa: TRY301
        except ValueError:
            logger.exception("failed for %s", "ann", extra={"user": 5, "path": Path("x")})
        (event,) = read_events(memory_queue, 1)
    entry = json.loads(event.value or b"")
    assert entry["message"] == "failed for ann"
    assert (entry["level"], entry["logger"]) == ("ERROR", "app.orders")
    assert (entry["user"], entry["path"]) == (5, "x")
    assert "ValueError: bad" in entry["exception"]


def test_headers_can_depend_on_the_record(memory_queue: Queue) -> None:
    handler = TurnlaneHandler(
        memory_queue, exit_timeout=0, headers=lambda record: {"line": str(record.lineno > 0)}
    )
    with log_to(handler) as logger:
        logger.info("x")
        (event,) = read_events(memory_queue, 1)
    assert event.headers == {"line": "True"}


def test_text_with_surrogates_is_sent(memory_queue: Queue) -> None:
    with log_to(TurnlaneHandler(memory_queue, exit_timeout=0), "app.\udc80") as logger:
        logger.info("file \udc80")
        (event,) = read_events(memory_queue, 1)
    assert (event.value, event.key) == (b"file \\udc80", "app.\\udc80")


def test_filters_and_levels_are_applied(memory_queue: Queue) -> None:
    handler = TurnlaneHandler(memory_queue, level=logging.WARNING, exit_timeout=0)
    handler.addFilter(lambda record: "secret" not in record.getMessage())
    with log_to(handler) as logger:
        logger.info("too low")
        logger.error("a secret")
        logger.error("told")
        assert read_values(memory_queue, 1) == [b"told"]


def test_records_of_turnlane_itself_are_not_sent(memory_queue: Queue) -> None:
    handler = TurnlaneHandler(memory_queue, exit_timeout=0)
    for name in ("turnlane", "turnlane.queues.proxy", "pyarrow.flight"):
        with log_to(TurnlaneHandler(memory_queue, exit_timeout=0), name) as logger:
            logger.error("no")
    with log_to(handler) as logger:
        logger.info("yes")
        assert read_values(memory_queue, 1) == [b"yes"]


def test_logging_from_within_the_handler_does_not_recurse(memory_queue: Queue) -> None:
    def format_and_log(record: logging.LogRecord) -> dict[str, str]:
        logging.getLogger("app.orders").warning("about %s", record.msg)
        return {}

    handler = TurnlaneHandler(memory_queue, exit_timeout=0, headers=format_and_log)
    with log_to(handler) as logger:
        logger.info("once")
        assert read_values(memory_queue, 1) == [b"once"]
        assert memory_queue.stats().ledger.accepted == 1


# ── full queues and errors ───────────────────────────────────────────────────────────────────────


def test_full_queue_drops_and_counts_without_blocking(small_queue: Queue) -> None:
    handler = TurnlaneHandler(small_queue, exit_timeout=0)
    with log_to(handler) as logger:
        for number in range(5):
            logger.info("%d", number)
        assert handler.dropped == 4
        assert read_values(small_queue, 1) == [b"0"]


def test_dropped_records_can_go_to_stderr(
    small_queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = TurnlaneHandler(small_queue, exit_timeout=0, on_full="stderr")
    with log_to(handler) as logger:
        logger.info("in")
        logger.info("beside")
        assert capsys.readouterr().err == "beside\n"
        assert handler.dropped == 1


def test_wait_for_room_ends_at_the_configured_time(small_queue: Queue) -> None:
    handler = TurnlaneHandler(small_queue, exit_timeout=0, block_for=0.2)
    with log_to(handler) as logger:
        logger.info("in")
        start = time.monotonic()
        logger.info("dropped")
        assert 0.2 <= time.monotonic() - start < LONG
        assert handler.dropped == 1


def test_record_is_sent_if_room_comes_in_time(small_queue: Queue) -> None:
    handler = TurnlaneHandler(small_queue, exit_timeout=0, block_for=LONG)
    with log_to(handler) as logger:
        logger.info("first")
        waiting = threading.Thread(target=logger.info, args=("second",))
        waiting.start()
        assert read_values(small_queue, 2) == [b"first", b"second"]
        waiting.join(PATIENCE)
        assert handler.dropped == 0


def test_waiting_threads_do_not_delay_each_other(small_queue: Queue) -> None:
    """All threads wait at the same time: ten take about as long as one."""
    handler = TurnlaneHandler(small_queue, exit_timeout=0, block_for=0.5)
    with log_to(handler) as logger:
        logger.info("in")
        threads = [threading.Thread(target=logger.info, args=("x",)) for _ in range(10)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert time.monotonic() - start < 10 * 0.5
        assert handler.dropped == 10


def test_errors_do_not_leave_the_handler(
    memory_queue: Queue, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = logging.makeLogRecord({"msg": "%d", "args": ("no number",)})
    handler = TurnlaneHandler(memory_queue, exit_timeout=0)
    handler.handle(broken)
    assert "--- Logging error ---" in capsys.readouterr().err
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler.handle(broken)
    assert capsys.readouterr().err == ""
    handler.close()


def test_closed_queue_causes_no_error(memory_queue: Queue) -> None:
    handler = TurnlaneHandler(memory_queue, exit_timeout=0)
    with log_to(handler) as logger:
        memory_queue.close()
        logger.info("too late")
        assert handler.dropped == 1


def test_closed_handler_sends_nothing(memory_queue: Queue) -> None:
    handler = TurnlaneHandler(memory_queue, exit_timeout=0)
    handler.close()
    handler.close()
    handler.handle(logging.makeLogRecord({"name": "x", "msg": "late"}))
    assert handler.dropped == 1
    assert memory_queue.stats().ledger.accepted == 0


def test_slow_flush_is_logged_once(memory_queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    handler = TurnlaneHandler(memory_queue, exit_timeout=0.05)
    with log_to(handler) as logger:
        logger.info("nobody reads it")
        handler.flush()  # like logging.shutdown()
        handler.close()
    errors = capsys.readouterr().err
    assert errors == "turnlane: records may be lost: not persisted within 0.05 s\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queue": "turnlane://localhost:1"}, "name: the URL .* needs the name of a queue"),
        ({"name": "x"}, "name: name and connection options are allowed only with a URL"),
        ({"on_full": "explode"}, "on_full: 'explode' is not one of drop, stderr"),
        ({"queue": "nonsense", "name": "x"}, "url: "),
    ],
)
def test_wrong_arguments_are_refused(
    memory_queue: Queue, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TurnlaneHandler(**{"queue": memory_queue, **arguments})


# ── ending ───────────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import logging, sys
from turnlane import TurnlaneHandler

logging.basicConfig(level="INFO", handlers=[TurnlaneHandler(sys.argv[1], "logs", exit_timeout=20)])
for number in range(1000):
    logging.getLogger("app").info("%d", number)
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_normal_exit_loses_nothing(node: Service) -> None:
    done = run(PROGRAM + "sys.exit(3)", build_url(node))
    assert (done.returncode, done.stderr) == (3, "")
    values = read_values(node.node.queue("logs"), 1000)
    assert values == [b"INFO:app:%d" % number for number in range(1000)]


def test_removed_but_open_handler_loses_nothing(node: Service) -> None:
    """``logging`` keeps only weak references to handlers, so the records would be lost."""
    removed = PROGRAM + "logging.getLogger().handlers.clear()\n"
    done = run(removed, build_url(node))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_values(node.node.queue("logs"), 1000)) == 1000


def test_closed_handler_is_forgotten(memory_queue: Queue) -> None:
    handler = TurnlaneHandler(memory_queue)
    handler.close()
    forgotten = weakref.ref(handler)
    del handler
    gc.collect()
    assert forgotten() is None


def test_local_disk_queue_has_everything_after_exit(tmp_path: Path) -> None:
    local = PROGRAM.replace("TurnlaneHandler(sys.argv[1], ", "TurnlaneHandler(queue, ").replace(
        '"logs", ', ""
    )
    opened = f"import turnlane\nqueue = turnlane.open_queue(kind='disk', path={str(tmp_path)!r})\n"
    done = run(opened + local)
    assert (done.returncode, done.stderr) == (0, "")
    with open_queue(kind="disk", path=tmp_path) as queue:
        assert len(read_values(queue, 1000)) == 1000


def test_unreachable_node_delays_the_exit_only_by_its_timeout() -> None:
    done = run(PROGRAM.replace("exit_timeout=20", "exit_timeout=0.2"), "turnlane://127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert "records may be lost: not persisted within 0.2 s" in done.stderr
    assert "Traceback" not in done.stderr


# ── forks ────────────────────────────────────────────────────────────────────────────────────────

FORKING = """
import logging, os, sys
from turnlane import TurnlaneHandler

logging.basicConfig(level="INFO", handlers=[TurnlaneHandler(sys.argv[1], "logs", exit_timeout=20)])
log = logging.getLogger("app")
log.info("parent, before")
child = os.fork()
if child == 0:
    log.info("child")
    sys.exit()
os.waitpid(child, 0)
log.info("parent, after")
"""

MULTIPROCESSING = """
import logging, multiprocessing, sys
from turnlane import TurnlaneHandler

def work():
    logging.getLogger("app").info("child")

if __name__ == "__main__":
    handler = TurnlaneHandler(sys.argv[1], "logs", exit_timeout=20)
    logging.basicConfig(level="INFO", handlers=[handler])
    logging.getLogger("app").info("parent, before")
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    logging.getLogger("app").info("parent, after")
"""


@pytest.mark.parametrize("program", [FORKING, MULTIPROCESSING], ids=["fork", "multiprocessing"])
def test_forked_process_sends_its_own_records(node: Service, program: str) -> None:
    done = run(program, build_url(node))
    assert (done.returncode, done.stderr) == (0, "")
    values = read_values(node.node.queue("logs"), 3)
    assert sorted(map(str, values)) == [
        "b'INFO:app:child'",
        "b'INFO:app:parent, after'",
        "b'INFO:app:parent, before'",
    ]


FORKING_WITH_A_QUEUE = """
import os, sys, turnlane

queue = turnlane.open_queue(kind="disk", path=sys.argv[1])
queue.producer().publish(b"one")
child = os.fork()
if child == 0:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
queue.producer().publish(b"two")
queue.close()
"""


def test_ending_forked_process_does_not_close_the_parents_queue(tmp_path: Path) -> None:
    done = run(FORKING_WITH_A_QUEUE, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    with open_queue(kind="disk", path=tmp_path) as queue:
        assert read_values(queue, 2) == [b"one", b"two"]
        assert queue.stats().ledger.accepted == 2


def test_relay_publishes_until_its_pipe_ends(
    node: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"url": build_url(node), "name": "logs", "options": {}, "exit_timeout": PATIENCE}
    event = {"headers": {"a": "b"}, "timestamp": 5, "severity": 6, "source": "web-1"}
    large = "x" * (65 << 20)
    frames = [about, ["one", "app", event], PATIENCE, [large, "app", event], ["two", None, event]]
    answers = io.BytesIO()
    fork_relay.serve(io.BytesIO("\n".join(map(json.dumps, frames)).encode()), answers)
    assert answers.getvalue() == b"."
    assert "a record of logger 'app' is lost: 1 events of 68" in capsys.readouterr().err
    one, two = read_events(node.node.queue("logs"), 2)
    assert (one.value, one.key, one.headers, one.timestamp) == (b"one", "app", {"a": "b"}, 5)
    assert (two.value, two.key, two.severity, two.source) == (b"two", None, 6, "web-1")


def test_refused_record_does_not_end_the_relay(
    node: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"url": build_url(node), "name": "logs", "options": {}, "exit_timeout": PATIENCE}
    wrong = [{"headers": {"a": 1}}, {"headers": "a"}, {"severity": 9}, {"timestamp": 1 << 80}]
    frames = [about, *(["bad", "app", each] for each in wrong), ["good", "app", {}]]
    fork_relay.serve(io.BytesIO("\n".join(map(json.dumps, frames)).encode()), io.BytesIO())
    assert capsys.readouterr().err.count("a record of logger 'app' is lost") == len(wrong)
    assert read_values(node.node.queue("logs"), 1) == [b"good"]


def test_late_answer_is_not_mistaken_for_the_next_one(
    node: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nread about; read one; read two; echo . ; sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    sending = fork_relay.ForkRelay(build_url(node), "logs", {}, 0.1)
    assert not sending.flush(0.01)
    assert not sending.flush(0.5), "the answer was to the first"
    sending._process.kill()
    sending.close()


def test_ended_relay_refuses_records_without_an_error(
    node: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    sending = fork_relay.ForkRelay(build_url(node), "logs", {}, 0.1)
    assert sending._process.wait(PATIENCE) == 1
    assert not sending.flush(0.1)

    def publish_until_refused() -> None:
        for _ in range(10_000):
            sending.publish(b"x" * 1000, None, timeout=PATIENCE)

    with pytest.raises(QueueClosed, match="has ended"):
        publish_until_refused()
    sending.close()


def test_forked_process_does_not_use_the_parents_queue(small_queue: Queue) -> None:
    handler = TurnlaneHandler(small_queue, exit_timeout=0, on_full="stderr")
    reader, writer = os.pipe()
    with log_to(handler) as logger:
        child = os.fork()
        if child == 0:  # pragma: no cover - another process
            os.dup2(writer, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            logger.info("child")
            os._exit(0 if handler.dropped == 1 else 1)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        with os.fdopen(reader) as errors:
            assert errors.read() == "child\n"
        logger.info("parent")
        assert read_values(small_queue, 1) == [b"parent"]
