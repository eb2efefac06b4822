"""Lines of the standard input: for ``some-program | turnlane serve …``, and for trying things out.

The input ends at the end of the file; :attr:`StdinInput.finished` is set once all lines have
reached the ack level. Then a node without other work ends, too.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from turnlane.errors import ConfigError
from turnlane.formats.framing import Framing, find_messages
from turnlane.inputs.api import Host, Input, InputSettings
from turnlane.inputs.publishers import FireAndForgetPublisher, ReceiveBuffer
from turnlane.logs import get_logger
from turnlane.queues.api import FlowControl
from turnlane.runtime import start_thread
from turnlane.units import Size

log = get_logger(__name__)

READ_BYTES = 1 << 20
ACK_SECONDS = 1.0
"""How long to wait for acks before checking whether the input has to stop."""


class StdinSettings(InputSettings):
    """The settings of the standard input."""

    type: Literal["stdin"] = "stdin"
    flow: FlowControl = Field(
        FlowControl.FULL, description="How it slows down before the queue is full."
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
        self._publisher: FireAndForgetPublisher | None = None
        self._stopping = threading.Event()
        self._waker, self._wake_end = os.pipe()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._file is None:
            self._file = _get_standard_input()
        publisher = self._publisher = FireAndForgetPublisher(self)
        publisher.check_fits(self.settings.max_line_bytes, "max_line_bytes")
        self._thread = start_thread(
            f"turnlane-{self.settings.label}", self._run, self._file, publisher
        )

    def stop(self, timeout: float) -> None:
        if self._wake_end < 0:
            return
        deadline = time.monotonic() + timeout
        if self._publisher is not None:
            self._publisher.set_deadline(deadline)
        self._stopping.set()
        os.write(self._wake_end, b".")
        if self._thread is not None:
            self._thread.join()
        if self._publisher is not None:
            self._publisher.finish(deadline)
        os.close(self._waker)
        os.close(self._wake_end)
        self._wake_end = -1

    def _run(self, file: int, publisher: FireAndForgetPublisher) -> None:
        try:
            self._read(file, publisher)
        except Exception:
            log.exception("input.reader_failed", input=self.settings.label)
        else:
            if not publisher.has_failed:
                self.finished.set()

    def _read(self, file: int, publisher: FireAndForgetPublisher) -> None:
        buffer = ReceiveBuffer(READ_BYTES + 2 * self.settings.max_line_bytes)
        ended = False
        while not ended and not publisher.has_failed:
            ended = not self._wait_for_data(file)
            space = buffer.get_space(self._rest)
            kept = len(self._rest)
            try:
                count = 0 if ended else os.readv(file, [space[kept : kept + READ_BYTES]])
            except BlockingIOError:
                continue  # another process reads the same input
            except OSError as error:
                log.warning("stdin.read_failed", input=self.settings.label, error=error)
                count = 0
            ended = not count
            self._find_lines(buffer, space[: kept + count], count, last=ended)
            block = buffer.take_block()
            if block is not None:
                publisher.publish(block)
        while not self._stopping.is_set() and not publisher.has_failed:
            if publisher.flush(ACK_SECONDS):
                return

    def _wait_for_data(self, file: int) -> bool:
        """Wait for something to read; false if the input has to stop first."""
        poll = select.poll()  # unlike epoll, it also accepts regular files
        poll.register(file, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        poll.poll()
        return not self._stopping.is_set()

    def _find_lines(
        self, buffer: ReceiveBuffer, data: memoryview, count: int, *, last: bool
    ) -> None:
        longest = self.settings.max_line_bytes
        found = find_messages(data, longest, Framing.NEWLINE, inside=self._inside, last=last)
        self._rest = bytes(data[found.used :])
        self._inside = found.inside
        buffer.add(found.starts, found.ends, found.used, "stdin")
        self.count(bytes=count, invalid=found.oversize)


def _get_standard_input() -> int:
    try:
        return sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # missing, not a file, closed
        raise ConfigError("type", "stdin: this process has no standard input") from None
