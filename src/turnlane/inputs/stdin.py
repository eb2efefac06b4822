"""Lines of the standard input: for ``some-program | turnlane serve …``, and for trying things out.

The input ends at the end of the file; :attr:`StdinInput.finished` is set once everything before it
has reached the ack level. A node that has nothing else to do ends then.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from turnlane.errors import ConfigError
from turnlane.formats.framing import Framing, find
from turnlane.inputs.api import Host, Input, InputSettings
from turnlane.inputs.publishers import OneWayPublisher
from turnlane.inputs.stream_server import Gathering, no_severities
from turnlane.queues.api import FlowControl
from turnlane.runtime import start_thread
from turnlane.units import Size

log = logging.getLogger(__name__)

READ_BYTES = 1 << 20
ACK_SECONDS = 1.0
"""How long to wait for acks before checking whether the input has to stop."""


class StdinSettings(InputSettings):
    """The settings of the standard input."""

    type: Literal["stdin"] = "stdin"
    flow: FlowControl = Field(
        FlowControl.FULL, description="How it yields before the queue is full."
    )
    max_line_bytes: Annotated[Size, Field(ge=1, le=16 << 20)] = Field(
        1 << 20,
        description="A longer line is cut into pieces of this length, and counted as invalid.",
    )


class StdinInput(Input):
    """Publishes every line of the standard input that is not empty, without its newline."""

    settings_type: ClassVar[type[InputSettings]] = StdinSettings
    settings: StdinSettings

    def __init__(self, settings: StdinSettings, host: Host, *, file: int | None = None) -> None:
        """``file`` is the descriptor to read instead of the standard input."""
        super().__init__(settings, host)
        self.finished: threading.Event = threading.Event()
        self._file = file
        self._rest = b""
        self._inside = 0
        self._publisher: OneWayPublisher | None = None
        self._stopping = threading.Event()
        self._waker, self._wake_end = os.pipe()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._file is None:
            self._file = _standard_input()
        publisher = self._publisher = OneWayPublisher(self)
        publisher.check_fits(self.settings.max_line_bytes, "max_line_bytes")
        self._thread = start_thread(
            f"turnlane-{self.settings.label}", self._run, self._file, publisher
        )

    def stop(self, timeout: float) -> None:
        if self._wake_end < 0:
            return
        deadline = time.monotonic() + timeout
        if self._publisher is not None:
            self._publisher.close(deadline)
        self._stopping.set()
        os.write(self._wake_end, b".")
        if self._thread is not None:
            self._thread.join()
        if self._publisher is not None:
            self._publisher.finish(deadline)
        os.close(self._waker)
        os.close(self._wake_end)
        self._wake_end = -1

    def _run(self, file: int, publisher: OneWayPublisher) -> None:
        try:
            self._read(file, publisher)
        except Exception:
            log.exception("input %s cannot go on", self.settings.label)
        else:
            if not publisher.failed:
                self.finished.set()

    def _read(self, file: int, publisher: OneWayPublisher) -> None:
        gathering = Gathering(READ_BYTES + 2 * self.settings.max_line_bytes, no_severities)
        ended = False
        while not ended and not publisher.failed:
            ended = not self._await(file)
            space = gathering.space(self._rest)
            kept = len(self._rest)
            try:
                count = 0 if ended else os.readv(file, [space[kept : kept + READ_BYTES]])
            except BlockingIOError:
                continue  # another process reads it, too
            except OSError as error:
                log.warning("input %s ends early: %s", self.settings.label, error)
                count = 0
            ended = not count
            self._find(gathering, space[: kept + count], count, last=ended)
            block = gathering.block()
            if block is not None:
                publisher.publish(block)
        while not self._stopping.is_set() and not publisher.failed:
            if publisher.flush(ACK_SECONDS):
                return

    def _await(self, file: int) -> bool:
        """Wait for something to read; false if the input has to stop first."""
        poll = select.poll()  # which, unlike epoll, takes files too
        poll.register(file, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        poll.poll()
        return not self._stopping.is_set()

    def _find(self, gathering: Gathering, buffer: memoryview, count: int, *, last: bool) -> None:
        longest = self.settings.max_line_bytes
        found = find(buffer, longest, Framing.NEWLINE, inside=self._inside, last=last)
        self._rest = bytes(buffer[found.used :])
        self._inside = found.inside
        gathering.take(found.starts, found.ends, found.used, "stdin")
        self.count(bytes=count, invalid=found.oversize)


def _standard_input() -> int:
    try:
        return sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # none, not a real one, closed
        raise ConfigError("type", "stdin: this process has no standard input") from None
