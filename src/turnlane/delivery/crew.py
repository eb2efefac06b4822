"""Threads that prepare and send: they do as they are told and say how it went.

They are daemons: a send that never returns must not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from turnlane.closing import Closing

Job = Callable[[], None]


class Crew(Closing):
    """As many threads as there were jobs at a time. Safe to use from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._closed = False

    def do(self, job: Job) -> None:
        """Do a job, which must not raise, on some thread, at once."""
        with self._lock:
            assert not self._closed
            if self._idle:
                self._idle -= 1
            else:
                self._threads += 1
                name = f"turnlane-{self._name}-{self._threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put(job)

    def close(self) -> None:
        """Let the threads end, each after its job; a second call is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = self._threads
        for _ in range(threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._idle += 1
