"""A helper process that publishes events for a forked process.

gRPC does not survive a fork: its use in the child ends the child. A new interpreter does not have
this problem, so a forked process sends its events to one through a pipe, one line of JSON each. The
end of the pipe tells the helper to finish. All complete lines are published, even if the sender
dies.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

from turnlane.errors import QueueClosed, QueueFull
from turnlane.queues.api import Ack, AckLevel, Producer
from turnlane.runtime import start_thread

MAX_WAITING_EVENTS: Final = 4096
"""The most events that wait here while the other process, or the node, is slow."""
_CLOSE_SECONDS: Final = 1.0
PERSISTED: Final = b"."
LATE: Final = b"!"
"""The answers to a flush."""


class ForkRelay:
    """The end of the sender: takes events like a producer."""

    def __init__(
        self, url: str, name: str, options: Mapping[str, Any], exit_timeout: float
    ) -> None:
        about = {"url": url, "name": name, "options": options, "exit_timeout": exit_timeout}
        self._lines = queue.Queue[bytes | None](MAX_WAITING_EVENTS)
        self._flushing = threading.Lock()
        self._asked = 0
        self._answered = 0
        self._answer = threading.Condition()
        self._persisted = False
        """Whether the last answer was ``PERSISTED``."""
        self._broken = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "turnlane.client.fork_relay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends only the sender; the helper ends with its pipe
        )
        self._put(about, None)
        for work in (self._write, self._listen):
            start_thread("turnlane-relay", work)

    def publish(
        self, value: bytes, key: str | None, *, timeout: float | None = None, **event: Any
    ) -> bool:
        """Send an event. Raises ``QueueFull`` if there is no room in time."""
        self._put([value.decode(), key, event], timeout)
        return True

    def try_publish(self, value: bytes, key: str | None, **event: Any) -> bool:
        """Send an event if there is room now."""
        try:
            return self.publish(value, key, timeout=0, **event)
        except QueueFull:
            return False

    def flush(self, timeout: float) -> bool:
        """Wait until the node has persisted everything; false on timeout."""
        until = time.monotonic() + timeout
        with self._flushing:
            try:
                self._put(timeout, timeout)
            except (QueueFull, QueueClosed):
                return False
            self._asked += 1
            with self._answer:
                # Every flush is answered in order, also flushes that timed out before.
                left = max(0.0, until - time.monotonic())
                self._answer.wait_for(lambda: self._answered >= self._asked, left)
                return self._answered == self._asked and self._persisted

    def close(self) -> None:
        """Close the pipe; the other process finishes by itself."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)

    def _put(self, frame: object, timeout: float | None) -> None:
        if self._broken:
            raise QueueClosed("the process that publishes for this one has ended")
        try:
            line = json.dumps(frame, default=str).encode() + b"\n"
            self._lines.put(line, block=timeout != 0, timeout=timeout)
        except queue.Full:
            raise QueueFull("the process that publishes for this one is too slow") from None

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                if self._lines.empty():
                    pipe.flush()
        self._broken = True

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            while answer := answers.read(1):
                with self._answer:
                    self._answered += 1
                    self._persisted = answer == PERSISTED
                    self._answer.notify_all()


def serve(lines: BinaryIO, answers: BinaryIO) -> None:
    """Publish every line until the end of the pipe: the main function of the helper."""
    from turnlane.client.client import connect

    about = json.loads(lines.readline())
    with (
        connect(about["url"], **about["options"]) as client,
        client.queue(
            about["name"]
        ) as node_queue,  # closed before the client, so that the client does not wait again
    ):
        producer = node_queue.producer(ack=AckLevel.PERSISTED, on_ack=_ignore)
        for line in lines:
            _handle_frame(json.loads(line), producer, answers)
        producer.flush(about["exit_timeout"])


def _handle_frame(frame: Any, producer: Producer, answers: BinaryIO) -> None:  # noqa: ANN401 - JSON
    """Publish an event (a list), or flush within the given seconds (a number) and answer."""
    if not isinstance(frame, list):
        answers.write(PERSISTED if producer.flush(frame) else LATE)
        answers.flush()
        return
    value, key, event = frame
    try:
        producer.publish(value.encode(), key, **event)
    except Exception as error:  # noqa: BLE001 - such as too large; publish the next ones
        sys.stderr.write(f"turnlane: a record of logger {key!r} is lost: {error}\n")


def _ignore(_ack: Ack) -> None:
    """Ignore an ack: ``flush`` waits for all of them."""


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the sender has died; its lines are published
        serve(sys.stdin.buffer, sys.stdout.buffer)
