"""Publishing for senders that hear nothing (syslog, sockets, pipes): wait for room, or drop.

See ``answering`` for senders that can be told to come back later.
"""

from __future__ import annotations

import logging
import time

from turnlane.errors import ConfigError, EventTooLarge, Never, QueueFull, RetryLater
from turnlane.events import Block
from turnlane.inputs.contract import Input
from turnlane.queues.contract import Ack, AckLevel, FlowControl, Published

log = logging.getLogger(__name__)

OVERHEAD = 1_024
"""What the other columns of an event may take, amply."""
PATIENCE = 1.0
"""How long to wait for room before looking whether the input is to be stopped."""
WARN_SECONDS = 10.0
"""How often at most to warn: of dropped events, which are counted anyway, or of waiting."""
PAUSE = 0.1
"""How long to leave a queue alone that failed for another reason than being full."""


class OneWayPublisher:
    """Publishes what an input received. What does not get in is counted as dropped."""

    def __init__(self, owner: Input, flow: FlowControl | None = None) -> None:
        """Open the input's queue; ``flow`` if it is another than in the settings."""
        settings = owner.settings
        self._owner = owner
        self.queue = owner.host.queue(settings.queue)
        self._flow = settings.flow if flow is None else flow
        # With a callback, publishing does not wait for the ack; flush() does.
        on_ack = None if settings.ack is AckLevel.ACCEPTED else _heard
        self._producer = self.queue.producer(ack=settings.ack, on_ack=on_ack, flow=self._flow)
        self._deadline = float("inf")
        self._warned = float("-inf")
        self.failed = False
        """Whether the queue takes no more events and never will."""

    def check_fits(self, longest: int, knob: str) -> None:
        """Raise ``ConfigError`` if messages of ``longest`` bytes can never go into the queue."""
        settings = self.queue.settings
        bounds = (settings.max_event_bytes, settings.max_bytes)
        largest = min(bound for bound in bounds if bound is not None) - OVERHEAD
        if longest > largest:
            raise ConfigError(
                knob, f"is {longest}, but queue {self.queue.name!r} takes events of {largest} bytes"
            )

    def publish(self, block: Block) -> None:
        """Put a block in, waiting for room if the flow control class allows for it."""
        while block.num_rows and self._may_wait():
            try:
                self._count(self._producer.publish_block(block, timeout=self._patience()))
                return
            except QueueFull as error:
                self._owner.count(events=error.accepted)
                block = block.slice(error.accepted)
            except RetryLater as error:
                self._warn(f"it waits: {error}")
                time.sleep(PAUSE)
            except Never as error:
                self._fail(error)
        self._offer(block)

    def _may_wait(self) -> bool:
        if self.failed or self._flow is FlowControl.NONE:
            return False
        return time.monotonic() < self._deadline

    def _offer(self, block: Block) -> None:
        """Put in what there is room for at this moment; the rest is dropped."""
        size = block.num_rows
        while size and block.num_rows and not self.failed:
            published = self._try(block.slice(0, size))
            if published is None:
                size //= 2
            else:
                self._count(published)
                block = block.slice(size)
        if block.num_rows:
            self._drop(block.num_rows)

    def _try(self, block: Block) -> Published | None:
        try:
            return self._producer.try_publish_block(block)
        except EventTooLarge:
            return None  # more events than the queue holds; fewer will do
        except RetryLater:
            return None
        except Never as error:
            self._fail(error)
            return None

    def _fail(self, error: Never) -> None:
        self.failed = True
        log.error("input %s cannot publish any more: %s", self._owner.settings.label, error)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was published has reached the input's ack level."""
        return self._producer.flush(max(0.0, timeout))

    def finish(self, deadline: float) -> None:
        """The same at the end of the input, until ``deadline`` (monotonic); says what it missed."""
        if not self.failed and not self.flush(deadline - time.monotonic()):
            level, name = self._owner.settings.ack, self._owner.settings.label
            log.warning("input %s: not all its events are %s yet; the queue has them", name, level)

    def close(self, deadline: float) -> None:
        """From ``deadline`` (monotonic) on, nothing waits for room any more."""
        self._deadline = deadline

    def _patience(self) -> float:
        return min(PATIENCE, max(0.0, self._deadline - time.monotonic()))

    def _count(self, published: Published) -> None:
        self._owner.count(events=published.accepted)

    def _drop(self, events: int) -> None:
        self._owner.count(dropped=events)
        self._warn(f"{events} events dropped: no room in queue {self.queue.name!r}")

    def _warn(self, what: str) -> None:
        if time.monotonic() >= self._warned + WARN_SECONDS:
            self._warned = time.monotonic()
            log.warning("input %s: %s", self._owner.settings.label, what)


def _heard(ack: Ack) -> None:
    """Nobody can be told over a plain socket; :meth:`OneWayPublisher.flush` waits for the last."""
