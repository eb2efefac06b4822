"""A transport that dies at a chosen step."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from turnlane.errors import TransportDown
from turnlane.events import Block
from turnlane.queues.api import Batch, Durability, NodeConnection, NodeProgress, Transport

IDLE_SECONDS = 0.005
"""How soon a connection that is to die while idle takes silence for idleness."""


class Step(enum.StrEnum):
    """Where a :class:`FlakyTransport` can die."""

    CONNECT = "connect"
    """Before a connection is made."""
    BEFORE_SEND = "before_send"
    """Before a block reaches the node."""
    WITHIN_SEND = "within_send"
    """Half of a block has reached the node, and the client does not know."""
    AFTER_SEND = "after_send"
    """A block has reached the node, and the client does not know."""
    RESEND = "resend"
    """Before a block reaches the node that was sent before."""
    ACCEPTED = "accepted"
    """The client knows of events that are accepted and not persisted."""
    PERSISTED = "persisted"
    """The client knows of events that are persisted and not delivered."""
    IDLE = "idle"
    """Nothing is going on."""
    CLOSE = "close"
    """While the client lets go."""


@dataclass(slots=True)
class _Death:
    """One planned end of a connection."""

    step: Step
    nth: int
    times: int | None
    crash: bool
    error: Exception
    seen: int = 0

    def meets(self, step: Step) -> bool:
        """Count a step, and say whether it is one to die at."""
        if step is not self.step:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class FlakyTransport:
    """A transport whose connections die where you tell them to. Safe to use from several threads.

    It goes round another one, ``transport``, which may be exchanged while no connection stands.
    ``crash`` is called by deaths that also end the node.
    """

    def __init__(self, transport: Transport, *, crash: Callable[[], object] | None = None) -> None:
        self.transport = transport
        self._crash = crash
        self._changed = threading.Condition()
        self._plans: list[_Death] = []
        self._deaths: Counter[Step] = Counter()
        self._sent: dict[str, int] = {}

    def die(
        self,
        step: Step | str,
        nth: int = 1,
        times: int | None = 1,
        *,
        crash: bool = False,
        error: Exception | None = None,
    ) -> None:
        """Die at the ``nth`` such step from now on, ``times`` times (``None``: until cleared).

        ``error`` is what the client gets to see, ``TransportDown`` if it is left out.
        """
        step = Step(step)
        error = error or TransportDown(f"died, as planned: {step}")
        with self._changed:
            self._plans.append(_Death(step, nth, times, crash, error))

    def clear(self) -> None:
        """Forget all plans."""
        with self._changed:
            self._plans.clear()

    @property
    def deaths(self) -> int:
        """How often it has died."""
        with self._changed:
            return self._deaths.total()

    def await_death(self, step: Step | str, times: int = 1, timeout: float = 10.0) -> bool:
        """Wait until it has died this many times at ``step``; false on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._deaths[Step(step)] >= times, timeout)

    def connect(self, producer_id: str) -> FlakyConnection:
        """Connect by the transport inside."""
        death = self.due(Step.CONNECT)
        if death is not None:
            raise self.carry_out(death)
        return FlakyConnection(self, producer_id, self.transport.connect(producer_id))

    def get(self, max_events: int | None, timeout: float) -> Batch:
        """Take a batch by the transport inside."""
        return self.transport.get(max_events, timeout)

    def expects(self, step: Step) -> bool:
        """Whether a death at this step is planned."""
        with self._changed:
            return any(plan.step is step for plan in self._plans)

    def due(self, step: Step) -> _Death | None:
        """Count a step, and say whether it is one to die at."""
        with self._changed:
            plans = [plan for plan in self._plans if plan.meets(step)]
        return plans[0] if plans else None

    def carry_out(self, death: _Death) -> Exception:
        """Let the node crash if that is planned; returns what the client gets to see."""
        if death.crash and self._crash is not None:
            self._crash()
        with self._changed:
            self._deaths[death.step] += 1
            self._changed.notify_all()
        return death.error

    def sends(self, producer_id: str, sequence: int, events: int) -> bool:
        """Note that events are sent; true if the first of them was sent before."""
        with self._changed:
            known = self._sent.get(producer_id, 0)
            self._sent[producer_id] = max(known, sequence + events)
            return sequence < known


class FlakyConnection:
    """A connection made by :meth:`FlakyTransport.connect`."""

    def __init__(self, flaky: FlakyTransport, producer_id: str, inner: NodeConnection) -> None:
        self._flaky = flaky
        self._producer_id = producer_id
        self._inner = inner
        self._error: Exception | None = None
        self._telling = threading.Lock()
        """Held while something happens that the listener must not tell of."""
        self._closing = threading.Lock()

    @property
    def resume_at(self) -> int:
        """As the transport inside has it."""
        return self._inner.resume_at

    @property
    def durability(self) -> Durability:
        """As the transport inside has it."""
        return self._inner.durability

    def send(self, sequence: int, block: Block) -> None:
        """Send by the connection inside, as far as planned."""
        self._check()
        if self._flaky.sends(self._producer_id, sequence, block.num_rows):
            self._die_if_due(Step.RESEND)
        self._die_if_due(Step.BEFORE_SEND)
        for step, events in ((Step.WITHIN_SEND, block.num_rows // 2), (Step.AFTER_SEND, None)):
            death = self._flaky.due(step)
            if death is not None:
                self._send_and_die(death, sequence, block.slice(0, events))
        self._inner.send(sequence, block)

    def _send_and_die(self, death: _Death, sequence: int, block: Block) -> NoReturn:
        with self._telling:
            if block.num_rows:
                self._inner.send(sequence, block)
            self._error = self._flaky.carry_out(death)
        raise self._error

    def urge(self) -> None:
        """Have the connection inside do it."""
        self._check()
        self._inner.urge()

    def progress(self, timeout: float) -> NodeProgress | None:
        """Hear what the connection inside hears."""
        self._check()
        idle = self._flaky.expects(Step.IDLE)
        progress = self._inner.progress(min(timeout, IDLE_SECONDS) if idle else timeout)
        with self._telling:
            self._check()
            if progress is None:
                self._die_if_due(Step.IDLE)
            else:
                self._die_after(progress)
        return progress

    def _die_after(self, progress: NodeProgress) -> None:
        """Die once the client has been told this."""
        for step, further, nearer in (
            (Step.ACCEPTED, progress.accepted, progress.persisted),
            (Step.PERSISTED, progress.persisted, progress.delivered),
        ):
            death = self._flaky.due(step) if further > nearer else None
            if death is not None:
                self._error = self._flaky.carry_out(death)

    def close(self) -> None:
        """Let go of the connection inside."""
        self._inner.close()
        if self._closing.acquire(blocking=False):
            self._die_if_due(Step.CLOSE)

    def _die_if_due(self, step: Step) -> None:
        death = self._flaky.due(step)
        if death is not None:
            self._error = self._flaky.carry_out(death)
            raise self._error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
