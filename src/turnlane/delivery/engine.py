"""The engine: delivers blocks to an output, whatever the output's destination does.

Every row ends in exactly one way: delivered, dead, or kept for another time. A run never waits long
for a destination that is away: what cannot be delivered soon is kept.
"""

from __future__ import annotations

import heapq
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Final

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.delivery.batching import Cutter, Piece, Tracks, place_of
from turnlane.delivery.breaker import Backoff
from turnlane.delivery.destination import Gate, Liaison, Quota
from turnlane.delivery.error_policy import Judgement, News, judge_prepare, judge_send, said_when
from turnlane.delivery.limits import burst_of, concurrency_of
from turnlane.delivery.outcome import Fate, Outcome, Tally
from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.delivery.workers import (
    IN_FLIGHT,
    Destination,
    Mailbox,
    Message,
    Prepared,
    Send,
    Sent,
    Stop,
    Wake,
    Workshop,
)
from turnlane.events import Block
from turnlane.runtime import Closing

# ── dispatch ──
# One run of an engine: decides what is prepared, sent, tried again, kept; others do the work.
#
# All state belongs to the thread that runs it. Preparers and senders get jobs and put what came
# of
# them into one mailbox; so do those who want the run to stop.

PATIENCE: Final = 1.5
"""Waits up to this are sat out; for longer ones the events are kept, and the task ends.

That of an open breaker never is: if some tasks of a batch sat it out and others did not, those few
would have the destination to themselves afterwards. Whoever plans tasks plans the probe, too.
"""
PREPARERS: Final = 2
CHANNEL: Final = 2
"""So many pieces are prepared beyond those that can be sent at a time."""
SHARE_SECONDS: Final = 0.25
"""So often a run looks whether it has a share, where others have it all."""
MOST_BLOCKS: Final = 64
"""So many blocks are open at a time: one whose events have to wait does not stop the others."""


class Dispatch:
    """One run. Only ``mailbox`` may be used by other threads."""

    def __init__(
        self,
        workshop: Workshop,
        settings: DeliverySettings,
        gate: Gate,
        *,
        clock: Clock,
        chance: Callable[[], float],
        grace: float,
        takes_apart: bool,
    ) -> None:
        self.mailbox: Mailbox = queue.SimpleQueue()
        self._workshop = workshop
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._grace = grace
        self._backoff = Backoff.of(settings)
        now = clock.monotonic()
        self._deadline = now + settings.max_time
        self._over_at: float | None = None
        """Once stopping: when sends that have not ended are given up."""
        burst, most = burst_of(settings), settings.batch_events
        self._quota = None if burst is None else Quota(gate, clock)
        self._cutter = Cutter(settings, min(most, burst or most), takes_apart=takes_apart)
        self._liaison = Liaison(gate, clock)
        strict = settings.ordering is Ordering.STRICT
        one = settings.model_copy(update={"concurrency": 1})
        self._concurrency = concurrency_of(
            one if strict else settings, self._liaison.permit.concurrency
        )
        self._tracks = Tracks()
        self._tallies: deque[Tally] = deque()
        self._waiting: list[Piece] = []
        self._ready: list[Piece] = []
        self._delayed: list[tuple[float, Piece]] = []
        self._preparing: set[Piece] = set()
        self._in_flight: set[Send] = set()
        self._rate_wait = 0.0
        self._most: int | None = None
        """More events than this at a time were too large lately."""
        self._exhausted = False
        self._rejected = workshop.rejected
        """Before this run."""

    def run(self, blocks: Iterable[Block]) -> Iterator[Outcome]:
        """Deliver blocks; the outcome of each comes in their order."""
        source = iter(blocks)
        try:
            while True:
                self._feed(source)
                self._start()
                while self._tallies and not self._tallies[0].open:
                    yield self._counted(self._tallies.popleft().outcome())
                if self._tallies:
                    self._hear()
                elif self._exhausted:
                    return
        finally:
            self._liaison.count(rejected=self._workshop.rejected - self._rejected)
            self._liaison.end(self._concurrency.limit)

    # ── in and out ───────────────────────────────────────────────────────────────────────────────

    def _feed(self, source: Iterator[Block]) -> None:
        """Take blocks while there is not enough to do; once stopping, one at a time to keep it."""
        while not self._exhausted and self._wants_more():
            block = next(source, None)
            if block is None:
                self._exhausted = True
                return
            tally = Tally(block)
            self._tallies.append(tally)
            if self._over_at is not None:
                tally.settle(range(block.num_rows), Fate.KEPT)
                continue
            for piece in self._cutter.cut(tally, self._liaison.permit.attempts, self._most):
                self._go(self._tracks.enter(piece))

    def _wants_more(self) -> bool:
        if self._over_at is not None:
            return not self._tallies
        busy = len(self._waiting) + len(self._ready) + len(self._preparing) + len(self._tracks)
        return busy < 2 * self._concurrency.limit + CHANNEL and len(self._tallies) < MOST_BLOCKS

    def _counted(self, outcome: Outcome) -> Outcome:
        dead = sum(len(letter.numbers) for letter in outcome.dead)
        self._liaison.count(delivered=outcome.delivered, dead=dead, kept=len(outcome.kept))
        return outcome

    # ── what begins ──────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """Begin all that can begin now."""
        now = self._clock.monotonic()
        if self._over_at is None and not self._is_hopeless(now):
            self._begin(now)
        if self._over_at is None and self._is_hopeless(now):  # perhaps by what the gate has said
            self.stop()
        if self._over_at is not None:
            self._keep_waiting(now)

    def _begin(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            self._go(heapq.heappop(self._delayed)[1])
        if self._settings.pipelined:
            self._start_preparing()
        self._start_sending(self._ready if self._settings.pipelined else self._waiting)

    def _is_hopeless(self, now: float) -> bool:
        """Whether nothing more can be sent in the time that a task may take."""
        if now >= self._deadline or self._liaison.is_shut_out:
            return True
        return self._liaison.not_before > min(self._deadline, now + PATIENCE)

    def _start_preparing(self) -> None:
        room = self._concurrency.limit + CHANNEL - len(self._ready)
        while self._waiting and len(self._preparing) < min(PREPARERS, room):
            piece = heapq.heappop(self._waiting)
            self._preparing.add(piece)
            self._workshop.prepare(piece, self.mailbox)

    def _start_sending(self, pieces: list[Piece]) -> None:
        while pieces and self._may_send(pieces[0]):
            piece = heapq.heappop(pieces)
            count = piece.prepared or piece.search.trial
            send = Send(piece, count, self._liaison.sending())
            self._in_flight.add(send)
            self._concurrency.started(len(self._in_flight))
            if self._quota is not None:
                self._quota.take(count)
            self._workshop.send(send, self.mailbox)

    def _may_send(self, piece: Piece) -> bool:
        self._rate_wait = 0.0
        if not self._liaison.may_send(self._concurrency.limit, len(self._in_flight)):
            return False
        if self._quota is not None:
            count = piece.prepared or piece.search.trial
            self._rate_wait = self._quota.wait(count, self._deadline)
            if self._rate_wait > 0:
                return False
        return IN_FLIGHT.take(self._settings.max_in_flight, self._wake)

    def _wake(self) -> None:
        self.mailbox.put(Wake())

    # ── what is heard ────────────────────────────────────────────────────────────────────────────

    def _hear(self) -> None:
        """Wait for mail, but not beyond the next moment at which something is due; read it all."""
        try:
            self._read(self.mailbox.get(timeout=self._seconds_to_next()))
            while True:
                self._read(self.mailbox.get_nowait())
        except queue.Empty:
            pass

    def _seconds_to_next(self) -> float:
        now = self._clock.monotonic()
        if self._over_at is not None:
            return max(0.0, self._over_at - now)
        moments = [self._deadline]
        if self._liaison.not_before > now:
            moments.append(self._liaison.not_before)
        if self._delayed:
            moments.append(self._delayed[0][0])
        if self._rate_wait:
            moments.append(now + self._rate_wait)
        if self._liaison.share == 0:
            moments.append(now + SHARE_SECONDS)
        return max(0.0, min(moments) - now)

    def _read(self, message: Message) -> None:
        match message:
            case Prepared():
                self._take_prepared(message)
            case Sent():
                self._take_sent(message)
            case Stop() if self._over_at is None:
                self.stop()

    def _take_prepared(self, message: Prepared) -> None:
        piece = message.piece
        if piece not in self._preparing:
            return
        self._preparing.remove(piece)
        if message.error is None:
            piece.payload, piece.prepared = message.payload, message.count
            heapq.heappush(self._ready, piece)
        else:
            judgement = judge_prepare(piece, message.count, message.error)
            if judgement.news is News.FAILED:
                self._liaison.failed(self._liaison.unused_probe, message.error)
            self._follow(piece, judgement)

    def _take_sent(self, message: Sent) -> None:
        send, error = message.send, message.error
        if send not in self._in_flight:
            return
        self._in_flight.remove(send)
        piece, token = send.piece, send.token
        if message.unprepared and error is not None:
            judgement = judge_prepare(piece, send.count, error)
            self._tell(judgement, token, message.seconds)
            self._follow(piece, judgement)
            return
        if piece.retries:
            self._liaison.retried(error)
        judgement = judge_send(piece, send.count, error, self._settings.max_attempts)
        self._tell(judgement, token, message.seconds)
        if error is None:
            self._most = piece.search.most or self._most
        self._concurrency.finished(
            self._clock.monotonic(),
            message.seconds if judgement.news in (News.ANSWERED, News.PARTLY) else None,
            pushed_back=judgement.later is not None,
        )
        self._follow(piece, judgement)

    def _tell(self, judgement: Judgement, token: str | None, seconds: float) -> None:
        match judgement.news:
            case News.FAILED if judgement.error is not None:
                self._liaison.failed(token, judgement.error)
            case News.PARTLY if judgement.error is not None:
                self._liaison.answered_partly(token, seconds, judgement.error)
            case News.ANSWERED:
                self._liaison.answered(token, seconds)
            case _:
                self._liaison.unsaid(token)

    # ── what becomes of pieces ───────────────────────────────────────────────────────────────────

    def _follow(self, piece: Piece, judgement: Judgement) -> None:
        """Do as judged."""
        later, onward = judgement.later, judgement.onward
        if later is None and onward is None:
            self._forget(piece)
            self._go(self._tracks.leave(piece))
            return
        if later is not None:
            if onward is not None:
                self._go(self._tracks.put_back(onward))
            self._try_later(later, judgement.error)
        else:
            self._go(onward)

    def _go(self, piece: Piece | None) -> None:
        """A piece may go on at once."""
        if piece is not None:
            heapq.heappush(self._waiting, piece)

    def _try_later(self, piece: Piece, error: BaseException | None) -> None:
        """Try a piece again after a short wait, or keep it if the wait is long."""
        piece.retries += 1
        self._note_unknown(piece)
        now = self._clock.monotonic()
        due = self._liaison.not_before
        if due <= now:
            said = None if error is None else said_when(error)
            due = now + self._backoff.wait(piece.retries, self._chance(), said)
        if self._over_at is not None or due > min(self._deadline, now + PATIENCE):
            self._keep(piece)
        else:
            heapq.heappush(self._delayed, (due, piece))

    def _note_unknown(self, piece: Piece) -> None:
        """Let the gate remember, by where a piece begins, how often nobody knew what was wrong."""
        self._forget(piece)
        place = place_of(piece.block) if piece.unknown else None
        if place is not None:
            piece.places = {place}
            self._liaison.remember(place, piece.unknown)

    def _forget(self, piece: Piece) -> None:
        for place in piece.places:
            self._liaison.remember(place, 0)
        piece.places = set()

    def _keep(self, piece: Piece) -> None:
        """Leave a piece to another time, and with it what must not go before it."""
        self._note_unknown(piece)
        self._tracks.block(piece)
        piece.settle(Fate.KEPT)
        if self._settings.ordering is Ordering.STRICT and self._over_at is None:
            self.stop()
        self._go(self._tracks.leave(piece))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Begin nothing more; what is under way may end. On the run's own thread, or before it."""
        self._over_at = self._clock.monotonic() + self._grace

    def _keep_waiting(self, now: float) -> None:
        """Keep all that is not under way; and that too once its time is over."""
        assert self._over_at is not None
        delayed = [piece for _, piece in self._delayed]
        idle = [*self._waiting, *self._ready, *delayed, *self._tracks.drain()]
        self._waiting, self._ready, self._delayed = [], [], []
        if now >= self._over_at:
            idle += [*self._preparing, *(send.piece for send in self._in_flight)]
            if self._in_flight:
                self._workshop.cancel()
            self._preparing, self._in_flight = set(), set()
        for piece in idle:
            self._note_unknown(piece)
            piece.settle(Fate.KEPT)


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
