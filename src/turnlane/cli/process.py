"""Signals that end a service: the first politely, the second at once, the third immediately.

SIGHUP, where it is wanted, ends nothing: it asks for the configuration to be read again.

The main thread sleeps in the reading end of a pipe. A signal writes to the other end before any
Python code runs (``set_wakeup_fd``), so one that comes just before the main thread falls asleep
wakes it all the same; a lock or a queue would sleep through it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from types import FrameType
from typing import Final

from turnlane.logs import get_logger
from turnlane.runtime import Closeable

ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class Signals(Closeable):
    """Catches SIGTERM and SIGINT while it is open; made and used by the main thread."""

    def __init__(self, *, hangup: bool = False) -> None:
        self._caught = deque[signal.Signals]()
        self._count = 0
        self._ringing = Lock()
        self._asleep, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._bell_before = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        self._before = {each: signal.signal(each, self._catch) for each in ENDING}
        self.hung_up = False
        """Whether SIGHUP came; whoever acts on it sets it back."""
        if hangup:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(128 + number)
        self._caught.append(signal.Signals(number))
        self._ring()

    def _hang_up(self, _number: int, _frame: FrameType | None) -> None:
        self.hung_up = True
        self._ring()

    def look(self, seconds: float) -> signal.Signals | None:
        """Sleep for so long at most; the signal that ends the service, if there is one."""
        if not self._caught:
            ready, _, _ = select.select([self._asleep], [], [], seconds)
            if ready:
                os.read(self._asleep, 64)
        return self._caught.popleft() if self._caught else None

    def wait(self) -> signal.Signals:
        """Sleep until there is one."""
        while not self._caught:
            os.read(self._asleep, 64)
        return self._caught.popleft()

    def wait_or(self, work: Callable[[], object]) -> bool:
        """Do some work; true once it is done, false if another signal came before."""
        outcome: list[BaseException | None] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again by the main thread
                outcome.append(error)
            else:
                outcome.append(None)
            self._ring()

        Thread(target=run, name="turnlane-stopping", daemon=True).start()
        while not outcome and not self._caught:
            os.read(self._asleep, 64)
        if outcome and outcome[0] is not None:
            raise outcome[0]
        if not outcome:
            self._caught.popleft()
        return bool(outcome)

    def _ring(self) -> None:
        with self._ringing:
            if self._bell < 0:
                return  # closed: the work has outlived it
            with contextlib.suppress(BlockingIOError):  # full: then it rings already
                os.write(self._bell, b"!")

    def close(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._bell_before)
        with self._ringing:
            bell, self._bell = self._bell, -1
            os.close(self._asleep)
            os.close(bell)


# ── supervisor ──
# Telling systemd how the service is; nothing happens without systemd.

log = get_logger(__name__)


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to whoever started this process, if it wants to know."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    if path.startswith("@"):  # an abstract socket
        path = "\0" + path[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), path)
    except OSError as error:
        log.warning("systemd.notify_failed", state=state, error=error)
