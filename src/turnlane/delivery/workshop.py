"""The workshop of an engine: threads that prepare and send, and the messages they leave."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from turnlane.clock import Clock
from turnlane.closing import Closing
from turnlane.delivery.crew import Crew
from turnlane.delivery.in_flight import IN_FLIGHT
from turnlane.delivery.piece import Piece
from turnlane.events import Block

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
