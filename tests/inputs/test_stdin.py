"""The standard input as an input: lines, the end of the file, stopping."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import await_values, read_events
from turnlane.errors import ConfigError
from turnlane.inputs.stdin import StdinInput, StdinSettings
from turnlane.node.node import Node


def settings(**knobs: object) -> StdinSettings:
    return StdinSettings.model_validate({"queue": "main", **knobs})


def test_end_of_file_persists_every_line(host: Node, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\n\nsecond\r\n" + b"5 <third>\n" + b"last, without an end")
    with path.open("rb") as file, StdinInput(settings(), host, file=file.fileno()) as source:
        source.start()
        assert source.finished.wait(20)
        events = read_events(host.queue("main"))
        source.stop(5.0)
    assert [event.value for event in events] == [
        b"first",
        b"second\r",
        b"5 <third>",
        b"last, without an end",
    ]
    assert {event.source for event in events} == {"stdin"}
    assert {event.severity for event in events} == {None}


def test_lines_are_published_while_they_are_written(host: Node) -> None:
    reading, writing = os.pipe()
    with StdinInput(settings(max_line_bytes=10), host, file=reading) as source:
        source.start()
        os.write(writing, b"one\ntw")
        assert await_values(host.queue("main"), 1) == [b"one"]
        os.write(writing, b"o\n" + b"x" * 25 + b"\n")
        assert await_values(host.queue("main"), 5)[1:] == [b"two", b"x" * 10, b"x" * 10, b"x" * 5]
        assert not source.finished.is_set()
        os.write(writing, b"the rest")
        wait_until(lambda: source.counters.bytes == 42)
        source.stop(5.0)
        assert source.finished.is_set()
    assert await_values(host.queue("main"), 6)[-1] == b"the rest"
    assert source.counters.invalid == 1
    os.close(reading)
    os.close(writing)


def test_full_queue_makes_it_wait_until_stopped(host: Node) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"".join(b"%d\n" % number for number in range(100)))
    with StdinInput(settings(queue="narrow", ack="accepted"), host, file=reading) as source:
        source.start()
        wait_until(lambda: source.counters.bytes > 0)
        source.stop(0.1)
    assert source.counters.events + source.counters.dropped == 100
    os.close(reading)
    os.close(writing)


def test_unreadable_file_ends_the_input(
    host: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    with StdinInput(settings(), host, file=directory) as source:
        source.start()
        assert source.finished.wait(20)
    assert "stdin.read_failed" in caplog.text
    os.close(directory)


def test_file_emptied_by_another_reader_is_awaited(
    host: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fails = os.readv, [BlockingIOError()]

    def readv(*arguments: Any) -> int:
        if fails:
            raise fails.pop()
        return real(*arguments)

    monkeypatch.setattr(os, "readv", readv)
    reading, writing = os.pipe()
    with StdinInput(settings(), host, file=reading) as source:
        source.start()
        os.write(writing, b"one\n")
        assert await_values(host.queue("main"), 1) == [b"one"]
        source.stop(5.0)
    os.close(reading)
    os.close(writing)


def test_missing_standard_input_is_reported(host: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with StdinInput(settings(), host) as source, pytest.raises(ConfigError, match="no standard"):
        source.start()
