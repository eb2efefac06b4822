"""Streams of a node that may hang: its machine still takes what is sent, and nobody answers.

Flight's own time limits are for a whole stream, which may well take long. These are for its next
step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, TypeVar

from turnlane.errors import TransportDown

Answer = TypeVar("Answer")

STEP_SECONDS: Final = 30.0
"""How long a node may take over the next block of what it reads."""
STORE_SECONDS: Final = 120.0
"""The same of what it has to bring to its disk."""
_LOOK_SECONDS: Final = 1.0


def within(place: str, step: Callable[[], Answer], seconds: float = STORE_SECONDS) -> Answer:
    """Take a step that cannot be cancelled, on a thread of its own. Raises ``TransportDown``.

    If it takes too long the thread is left behind, until the connection ends.
    """
    done: Future[Answer] = Future()

    def run() -> None:
        try:
            done.set_result(step())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="turnlane-step", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        raise _hangs(place, seconds) from None


class Watch:
    """Cancels streams whose next step takes too long. One for a process, from any thread.

    Looks only while there is something to look at; costs next to nothing for each step.
    """

    def __init__(self) -> None:
        self._steps: dict[object, tuple[float, Callable[[], None]]] = {}
        """By stream: when to cancel the step that is being taken, and how."""
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def step(self, place: str, cancel: Callable[[], None], seconds: float) -> Iterator[None]:
        """A step within. Raises ``TransportDown`` if it had to be cancelled."""
        self._begin()
        token = object()
        self._steps[token] = time.monotonic() + seconds, cancel
        self._some.set()
        try:
            yield
        except Exception:
            if token not in self._steps:
                raise _hangs(place, seconds) from None
            raise
        finally:
            self._steps.pop(token, None)

    def _begin(self) -> None:
        """Have a thread; one that a fork has left behind is none."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="turnlane-watch", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while self._some.wait():
            self._some.clear()
            while self._steps:
                time.sleep(_LOOK_SECONDS)
                now = time.monotonic()
                for token, (deadline, cancel) in list(self._steps.items()):
                    if now > deadline and self._steps.pop(token, None) is not None:
                        cancel()


WATCH: Final = Watch()


def _hangs(place: str, seconds: float) -> TransportDown:
    return TransportDown(f"{place}: nothing has come of it in {seconds:g} seconds")
