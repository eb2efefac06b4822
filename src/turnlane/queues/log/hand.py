"""A second pair of hands: does one thing on a thread of its own while the caller does the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Hand:
    """Does one call at a time. For one thread; its own begins with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def begin(self, call: Callable[[], None]) -> None:
        """Have it done; :meth:`finish` has to follow."""
        self._calls.put(call)
        if self._thread is None:
            self._start()

    def finish(self) -> None:
        """Wait until it is done. Raises what the call has raised."""
        outcome = self._outcomes.get()
        if outcome is not None:
            raise outcome

    def _start(self) -> None:
        # A daemon, as the queue's writer is: what matters is synced before a close returns.
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # When a program ends, or has too many, there are no more threads: do it here.
            self._calls.put(None)
            self._run()
        else:
            self._thread = thread

    def stop(self) -> None:
        """End the thread. A call afterwards begins another."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  whoever waits for it is told
                self._outcomes.put(error)
            else:
                del call  # and with it what was written: its memory is for the next frame
                self._outcomes.put(None)
