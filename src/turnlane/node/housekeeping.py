"""What a node does now and then: forget old stages, place dead letters, give memory back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.closing import Closing
from turnlane.memory import give_back
from turnlane.node.staging import Staging
from turnlane.queues.holding import HoldingQueue

log = logging.getLogger(__name__)

INTERVAL: Final = 2.0
DRAIN_SECONDS: Final = 5.0
"""How often dead letters that wait in memory are offered to their queues."""
STAGE_SECONDS: Final = 24 * 3600.0
"""A stage that was neither committed nor aborted after so long belongs to a task that died. It may
have to wait for the slowest task of its batch, which takes hours longer."""


class Housekeeping(Closing):
    """A thread that tidies up until it is closed."""

    def __init__(
        self,
        staging: Staging,
        queues: Callable[[], Iterable[HoldingQueue]],
        drain: Callable[[], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._staging = staging
        self._queues = queues
        self._drain = drain
        self._clock = clock
        self._drained_at = clock.monotonic()
        self._tidied_at = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turnlane-housekeeping", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL):
            try:
                self.tidy()
            except OSError as error:
                log.warning("could not tidy up, trying again: %s", error)
            except Exception:
                log.exception("could not tidy up, trying again")

    def tidy(self) -> None:
        """Do it now."""
        if self._clock.monotonic() - self._drained_at >= DRAIN_SECONDS:
            self._drained_at = self._clock.monotonic()
            self._drain()
        gone = self._staging.discard_older(STAGE_SECONDS)
        if gone:
            log.warning("%d stages were given up: nobody committed them", gone)
        moved = sum(queue.end + queue.low for queue in self._queues())
        if moved != self._tidied_at:
            self._tidied_at = moved
            give_back()
