"""The node of ``turnlane run``: a process of its own that ends with this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from turnlane.cli.console import ExitCode
from turnlane.retry import Backoff
from turnlane.runtime import Closeable, start_thread

RESTART_BACKOFF: Final = Backoff(0.5, 15.0)
"""Seconds between attempts to start."""
HEALTHY_AFTER: Final = 60.0


class NodeProcess(Closeable):
    """Starts the node, and starts it again whenever it dies.

    The node holds the reading end of a pipe whose other end only this process has: once that is
    closed, be it by a kill, the node stops. (A signal at the parent's death, which the kernel
    offers, may come twice if the parent has threads, and the second one means haste.)

    Every start has the configuration of the first start, because the file may have changed: it
    may be invalid now, or name another data directory. It is handed over in a file
    without a name, as it is written: nothing can change it or clean it away, and no secret that a
    variable stands for is in it.
    """

    def __init__(self, config: Path, text: str, options: Sequence[str] = ()) -> None:
        """``text`` is what the file ``config`` said, which is not read: only its place counts."""
        self._text = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._text.write(text.encode())
        self._text.flush()
        self._place = tempfile.TemporaryDirectory(prefix="turnlane-run-")
        self._ready_file = Path(self._place.name) / "ready.json"
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
        """What the node says of itself, once everything listens."""
        self.starts = 0

    def start(self) -> None:
        """Start it; that it is ready is known later."""
        self._ready_file.unlink(missing_ok=True)
        self.ready = None
        self.starts += 1
        self._started = time.monotonic()
        # What systemd wants to know is for this process to tell.
        environment = {name: text for name, text in os.environ.items() if name != "NOTIFY_SOCKET"}
        # In a session of its own: Ctrl-C is for this process, which stops the lanes first.
        self._process = subprocess.Popen(  # noqa: S603
            [*self._command, *(["--again"] if self.starts > 1 else [])],
            start_new_session=True,
            env=environment,
            pass_fds=[self._lifeline[0], self._text.fileno()],
        )

    def look(self) -> int | None:
        """See how it is; its exit code if it has died, once for each time."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            self._process = None
            self.ready = None
            lived = time.monotonic() - self._started
            self._failures = 1 if lived > HEALTHY_AFTER else self._failures
            return code
        if self.ready is None and self._ready_file.exists():
            self.ready = json.loads(self._ready_file.read_text(encoding="utf-8"))
        return None

    def start_again(self) -> bool:
        """Start it again if it has died and the pause is over; whether that was done."""
        pause = RESTART_BACKOFF.get_wait(self._failures)
        if self._process is not None or time.monotonic() < self._started + pause:
            return False
        self._failures += 1
        self.start()
        return True

    def stop(self, timeout: float) -> bool:
        """Stop it in order; true if that was done in time."""
        process = self._process  # close() may run at the same time
        if process is None:
            return True
        process.terminate()
        try:
            return process.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            return False

    def close(self) -> None:
        """End it, if it still runs: politely for a moment, then not."""
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
        self._place.cleanup()


def ends_for_good(code: int) -> bool:
    """Whether starting a node again would end in the same way."""
    return code in (ExitCode.CONFIG, 2)


def end_with(life: int) -> None:
    """End this process, in order, when the other end of this pipe is closed."""

    def watch() -> None:
        os.read(life, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    start_thread("turnlane-parent", watch)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    from turnlane.cli import main

    main()
