"""Processes of the commands: signals, systemd, the end, and the node process of ``turnlane run``.

The first SIGTERM or SIGINT ends a service in order, the second at once, the third immediately.
SIGHUP, where it is wanted, asks for the configuration to be read again.

The main thread sleeps in the reading end of a pipe. A signal writes to the other end before any
Python code runs (``set_wakeup_fd``), so a signal that comes just before the main thread falls
asleep wakes it too. With a lock or a queue, the main thread would sleep on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from turnlane.logs import get_logger
from turnlane.pacing import Backoff
from turnlane.runtime import Closeable, call_in_thread, remove_scratch_directories, start_thread

log = get_logger(__name__)

ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
RESTART_BACKOFF: Final = Backoff(0.5, 15.0)
"""Seconds between attempts to start the node."""
HEALTHY_AFTER: Final = 60.0
"""A node that has run this many seconds has started well: the next failure counts as the first."""

# ── signals ──────────────────────────────────────────────────────────────────────────────────────


class Signals(Closeable):
    """Catches SIGTERM and SIGINT while it is open. Only the main thread may use it."""

    def __init__(self, *, hangup: bool = False) -> None:
        self._caught = deque[signal.Signals]()
        self._count = 0
        self.last: signal.Signals | None = None
        """The signal that :meth:`poll`, :meth:`wait` or :meth:`wait_or` has noticed last."""
        self._pipe_lock = threading.Lock()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._handlers_before = {each: signal.signal(each, self._catch) for each in ENDING_SIGNALS}
        self.hung_up = False
        """Whether SIGHUP came; the code that acts on it resets it."""
        if hangup:
            self._handlers_before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(128 + number)
        self._caught.append(signal.Signals(number))
        self._wake()

    def _hang_up(self, _number: int, _frame: FrameType | None) -> None:
        self.hung_up = True
        self._wake()

    def poll(self, seconds: float) -> signal.Signals | None:
        """Sleep at most this long; return the signal that ends the service, if it came."""
        if not self._caught:
            ready, _, _ = select.select([self._read_end], [], [], seconds)
            if ready:
                os.read(self._read_end, 64)
        return self._take() if self._caught else None

    def wait(self) -> signal.Signals:
        """Sleep until a signal ends the service, and return it."""
        while not self._caught:
            os.read(self._read_end, 64)
        return self._take()

    def _take(self) -> signal.Signals:
        self.last = self._caught.popleft()
        return self.last

    def wait_or(self, work: Callable[[], object]) -> bool:
        """Do some work on a thread; true once it is done, false if a signal came before."""
        done = call_in_thread("turnlane-stopping", work)
        done.add_done_callback(lambda _: self._wake())
        while not done.done() and not self._caught:
            os.read(self._read_end, 64)
        if not done.done():
            self._take()
            return False
        done.result()
        return True

    def _wake(self) -> None:
        with self._pipe_lock:
            if self._write_end < 0:
                return  # closed: the work ran longer than this object exists
            with contextlib.suppress(BlockingIOError):  # the pipe is full: the reader wakes anyway
                os.write(self._write_end, b"!")

    def close(self) -> None:
        for each, handler in self._handlers_before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        with self._pipe_lock:
            write_end, self._write_end = self._write_end, -1
            os.close(self._read_end)
            os.close(write_end)


def notify_systemd(state: str) -> None:
    """Send a state such as ``READY=1`` to systemd. Does nothing without systemd."""
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


def exit_if_stuck(code: int) -> None:
    """End the process if a thread that did not stop in time would keep it from ending."""
    main = threading.main_thread()
    if any(each is not main and not each.daemon for each in threading.enumerate()):
        exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    remove_scratch_directories()
    os._exit(code)


# ── the node of ``turnlane run`` ─────────────────────────────────────────────────────────────────


class NodeProcess(Closeable):
    """Starts the node as a process, and starts it again whenever it dies.

    The node holds the reading end of a pipe whose other end only this process has. When this
    process ends, even by a kill, the pipe is closed and the node stops. (The kernel can send a
    signal when a parent dies, but may send it twice to a parent with threads, and the second signal
    means "at once".)

    Every start uses the text of the configuration that the first start used: the file may have
    changed, may be invalid now, or may name another data directory. The node gets the text in a
    file without a name, which nothing can change or remove. Variables are not replaced in it, so it
    has no secrets.
    """

    def __init__(self, config: Path, text: str, options: Sequence[str] = ()) -> None:
        """``text`` is the text of the file ``config``, which is not read: only its path counts."""
        self._text = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._text.write(text.encode())
        self._text.flush()
        self._directory = tempfile.TemporaryDirectory(prefix="turnlane-run-")
        self._ready_file = Path(self._directory.name) / "ready.json"
        self._lifeline = [*os.pipe()]
        self._command = [
            *(sys.executable, "-m", __name__, str(self._lifeline[0]), "serve", str(config)),
            *(f"--ready-file={self._ready_file}", f"--text-fd={self._text.fileno()}", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._failures = 1
        """How often in a row it has died, if it dies now."""
        self.ready: dict[str, Any] | None = None
        """The content of the node's ready file, once everything listens."""
        self.starts = 0

    def start(self) -> None:
        """Start the process, without waiting until the node is ready."""
        self._ready_file.unlink(missing_ok=True)
        self.ready = None
        self.starts += 1
        self._started = time.monotonic()
        # This process, not the node, reports to systemd.
        environment = {name: text for name, text in os.environ.items() if name != "NOTIFY_SOCKET"}
        # In a session of its own: Ctrl-C is for this process, which stops the lanes first.
        self._process = subprocess.Popen(  # noqa: S603
            [*self._command, *(["--again"] if self.starts > 1 else [])],
            start_new_session=True,
            env=environment,
            pass_fds=[self._lifeline[0], self._text.fileno()],
        )

    def poll(self) -> int | None:
        """Update :attr:`ready`; return the exit code if the process has died, once per death."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            self._process = None
            self.ready = None
            if time.monotonic() - self._started > HEALTHY_AFTER:
                self._failures = 1
            return code
        if self.ready is None and self._ready_file.exists():
            self.ready = json.loads(self._ready_file.read_text(encoding="utf-8"))
        return None

    def restart_if_due(self) -> bool:
        """Start the process again if it has died and the pause is over; return whether it did."""
        pause = RESTART_BACKOFF.get_wait(self._failures)
        if self._process is not None or time.monotonic() < self._started + pause:
            return False
        self._failures += 1
        self.start()
        return True

    def stop(self, timeout: float) -> bool:
        """Stop the node in order; return whether that was done in time."""
        process = self._process  # close() may run at the same time
        if process is None:
            return True
        process.terminate()
        try:
            return process.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            return False

    def close(self) -> None:
        """End the process if it still runs: by a signal, after five seconds by a kill."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()  # the second signal for a node that is stopping: it hurries
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while self._lifeline:
            os.close(self._lifeline.pop())
        self._text.close()
        self._directory.cleanup()


def end_with_parent(lifeline: int) -> None:
    """End this process, in order, when the other end of this pipe is closed."""

    def watch() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    start_thread("turnlane-parent", watch)


if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    from turnlane.cli import main

    main()
