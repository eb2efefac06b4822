"""The workshop of an engine: threads that prepare and send, and the messages they leave."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from turnlane.clock import Clock
from turnlane.delivery.batching import Piece
from turnlane.events import Block
from turnlane.runtime import Closing

# ── crew ──
# Threads that prepare and send: they do as they are told and say how it went.
#
# They are daemons: a send that never returns must not keep the process from ending.

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


# ── in_flight ──
# The sends under way in this process, all actions together, so that there are not too many.
#
# Tasks in other processes have shares of their own: ``shares.py``.


class InFlight:
    """Counts sends. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return self._count

    def take(self, most: int, wake: Callable[[], object]) -> bool:
        """Count one more, unless there are ``most``; then ``wake`` is called once there are fewer.

        ``wake`` is called on the thread that gives back, once, and must not block.
        """
        with self._lock:
            if self._count < most:
                self._count += 1
                return True
            if wake not in self._waiting:
                self._waiting.append(wake)
            return False

    def give_back(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


IN_FLIGHT = InFlight()
"""Those of this process."""


log = logging.getLogger(__name__)


class Destination(Protocol):
    """What an engine needs of an output. All are called by several threads at a time."""

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Make of a block what :meth:`send` takes."""

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        """Deliver, or raise."""

    def cancel(self) -> None:
        """Have sends that are under way fail, as far as possible."""

    @property
    def rejected(self) -> int:
        """Records inside of delivered events that were refused for good, so far."""


@dataclass(eq=False, slots=True)
class Send:
    """The first rows of a piece, under way."""

    piece: Piece
    count: int
    token: str | None
    """Set if this is the breaker's probe."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A piece's first rows are prepared, or cannot be."""

    piece: Piece
    count: int
    payload: Any
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A send has ended; or could not begin, for what was to be sent could not be prepared."""

    send: Send
    seconds: float
    error: BaseException | None = None
    unprepared: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is to end: no more sends."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Something outside has changed."""


Message: TypeAlias = Prepared | Sent | Stop | Wake
Mailbox: TypeAlias = "queue.SimpleQueue[Message]"


class Workshop(Closing):
    """Does the work on an output. Safe to use from any thread."""

    def __init__(self, output: Destination, clock: Clock) -> None:
        self._output = output
        self._clock = clock
        self._preparers = Crew("preparer")
        self._senders = Crew("sender")

    def prepare(self, piece: Piece, mailbox: Mailbox) -> None:
        """Prepare what a piece wants to send next; the mailbox hears of it."""
        count = piece.search.trial
        rows = piece.block.slice(0, count)

        def job() -> None:
            try:
                payload = self._output.prepare(rows)
            except BaseException as error:  # noqa: BLE001 - judged by who reads the mail
                mailbox.put(Prepared(piece, count, None, error))
            else:
                mailbox.put(Prepared(piece, count, payload))

        self._preparers.do(job)

    def send(self, send: Send, mailbox: Mailbox) -> None:
        """Send, and prepare before if that has not been done; the mailbox hears of it.

        The send has been counted as one in flight; it gives that back.
        """
        piece = send.piece
        rows = piece.block.slice(0, send.count)
        ready, payload = bool(piece.prepared), piece.payload

        def job() -> None:
            message = self._sent(send, (lambda: payload) if ready else self._preparing(rows))
            IN_FLIGHT.give_back()
            mailbox.put(message)

        try:
            self._senders.do(job)
        except BaseException:
            IN_FLIGHT.give_back()
            raise

    @property
    def rejected(self) -> int:
        """Records that the output was not rid of though it has delivered their events, so far."""
        return self._output.rejected

    def cancel(self) -> None:
        """Nobody waits for the sends under way any more: have their threads end soon."""
        try:
            self._output.cancel()
        except Exception:
            log.exception("sends that were given up could not be cancelled")

    def close(self) -> None:
        """Let the threads end, each after what it is doing."""
        self._preparers.close()
        self._senders.close()

    def _preparing(self, rows: Block) -> Callable[[], Any]:
        return lambda: self._output.prepare(rows)

    def _sent(self, send: Send, payload: Callable[[], Any]) -> Sent:
        try:
            prepared = payload()
        except BaseException as error:  # noqa: BLE001 - judged by who reads the mail
            return Sent(send, 0.0, error, unprepared=True)
        began = self._clock.monotonic()
        try:
            self._output.send(prepared)
        except BaseException as error:  # noqa: BLE001 - judged by who reads the mail
            return Sent(send, self._clock.monotonic() - began, error)
        return Sent(send, self._clock.monotonic() - began)
