"""The engine: delivers blocks to an output, whatever the output's destination does.

Every row ends in exactly one way: delivered, dead, or kept for another time. A run never waits long
for a destination that is away: what cannot be delivered soon is kept.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Final

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.closing import Closing
from turnlane.delivery.dispatch import Dispatch
from turnlane.delivery.gate import Gate
from turnlane.delivery.outcome import Outcome
from turnlane.delivery.settings import DeliverySettings
from turnlane.delivery.workshop import Destination, Stop, Workshop
from turnlane.events import Block

GRACE: Final = 30.0
"""How long sends under way may take once a run is to end. To be more than an output's timeout."""


class Engine(Closing):
    """Delivers blocks to an output, one run at a time.

    The output is the caller's to close, after the engine. ``grace`` is how long sends under way
    may take once a run is to end: those that take longer are given up, and their events kept.
    ``takes_apart`` says that the output may take some events of a send, and want others later.
    """

    def __init__(
        self,
        output: Destination,
        settings: DeliverySettings,
        gate: Gate,
        *,
        clock: Clock = SYSTEM_CLOCK,
        chance: Callable[[], float] = random.random,
        grace: float = GRACE,
        takes_apart: bool = False,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._clock = clock
        self._chance = chance
        self._grace = grace
        self._takes_apart = takes_apart
        self._workshop = Workshop(output, clock)
        self._lock = threading.Lock()
        self._dispatch: Dispatch | None = None
        self._stopped = self._closed = False

    def deliver(self, block: Block) -> Outcome:
        """Deliver one block. Blocks for ``max_time`` and ``grace`` at most."""
        (outcome,) = self.run([block])
        return outcome

    def run(self, blocks: Iterable[Block]) -> Generator[Outcome]:
        """Deliver blocks: all together for ``max_time`` at most, after which the rest is kept.

        There is an outcome for every block, in their order. Blocks are taken when there is room.
        Close it if you do not go on to its end.
        """
        dispatch = Dispatch(
            self._workshop,
            self._settings,
            self._gate,
            clock=self._clock,
            chance=self._chance,
            grace=self._grace,
            takes_apart=self._takes_apart,
        )
        with self._lock:
            assert self._dispatch is None, "one run at a time"
            self._dispatch = dispatch
            if self._stopped:
                dispatch.stop()
        try:
            yield from dispatch.run(blocks)
        finally:
            with self._lock:
                self._dispatch = None
                closed = self._closed
            if closed:
                self._workshop.close()

    def stop(self) -> None:
        """Begin no more sends, in this run and later ones. Any thread may call it."""
        with self._lock:
            self._stopped = True
            if self._dispatch is not None:
                self._dispatch.mailbox.put(Stop())

    def close(self) -> None:
        """Stop, and let the threads end; does not wait for sends under way.

        A run that is under way on another thread ends as if stopped, and with it the threads.
        """
        self.stop()
        with self._lock:
            self._closed = True
            running = self._dispatch is not None
        if not running:
            self._workshop.close()
