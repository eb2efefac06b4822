"""A process that publishes for another one which was forked, and so cannot.

gRPC does not survive a fork: using it in the child ends the child. A fresh interpreter is free of
that, so a forked process hands its events to one over a pipe, a line of JSON each. The pipe's end
is the order to finish: whatever becomes of the sender, what it has written is published.
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

MAX_WAITING_EVENTS: Final = 4096
"""Events that wait here while the other process, or the node, is slow."""
_LEAVE_SECONDS: Final = 1.0
PERSISTED: Final = b"."
LATE: Final = b"!"
"""The answers to a flush."""


class ForkRelay:
    """The sender's end: takes events as a producer does."""

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
        """What the last answer was."""
        self._broken = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "turnlane.client.fork_relay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the sender; this one ends with its pipe
        )
        self._put(about, None)
        for work in (self._write, self._listen):
            threading.Thread(target=work, name="turnlane-relay", daemon=True).start()

    def publish(
        self, value: bytes, key: str | None, *, timeout: float | None = None, **event: Any
    ) -> bool:
        """Hand an event over; ``QueueFull`` if there is no room in time."""
        self._put([value.decode(), key, event], timeout)
        return True

    def try_publish(self, value: bytes, key: str | None, **event: Any) -> bool:
        """Hand an event over if there is room at this moment."""
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
                # Every question is answered, and those that nobody waits for any more come first.
                left = max(0.0, until - time.monotonic())
                self._answer.wait_for(lambda: self._answered >= self._asked, left)
                return self._answered == self._asked and self._persisted

    def close(self) -> None:
        """Let the other process finish by itself."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_LEAVE_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_SECONDS)

    def _put(self, frame: object, timeout: float | None) -> None:
        if self._broken:
            raise QueueClosed("the process that publishes for this one has ended")
        try:
            line = json.dumps(frame, default=str).encode() + b"\n"
            self._lines.put(line, block=timeout != 0, timeout=timeout)
        except queue.Full:
            raise QueueFull("the process that publishes for this one is behind") from None

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
    """The publishing end: publish every line until there are no more."""
    from turnlane.client.client import connect

    about = json.loads(lines.readline())
    with (
        connect(about["url"], **about["options"]) as client,
        client.queue(about["name"]) as node_queue,  # closed first, without waiting once more
    ):
        producer = node_queue.producer(ack=AckLevel.PERSISTED, on_ack=_ignore)
        for line in lines:
            _handle_frame(json.loads(line), producer, answers)
        producer.flush(about["exit_timeout"])


def _handle_frame(frame: Any, producer: Producer, answers: BinaryIO) -> None:  # noqa: ANN401 - JSON
    """Publish an event, or say whether everything before is persisted (a number: in time)."""
    if not isinstance(frame, list):
        answers.write(PERSISTED if producer.flush(frame) else LATE)
        answers.flush()
        return
    value, key, event = frame
    try:
        producer.publish(value.encode(), key, **event)
    except Exception as error:  # noqa: BLE001 - too large, say; those after it are to come
        sys.stderr.write(f"turnlane: a record of logger {key!r} is lost: {error}\n")


def _ignore(_ack: Ack) -> None:
    """Nothing is to be done for a single ack."""


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the sender is gone; what it wrote is published
        serve(sys.stdin.buffer, sys.stdout.buffer)
