"""Keeps all promises of a queue over many restarts, and fails when one is broken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tests.recovery.killed_process import (
    EVERY_LIFE,
    NUMBERED,
    Closed,
    Failed,
    Got,
    Identity,
    Opened,
    Orders,
    Persisted,
    Releasing,
    Report,
    Settled,
    Settling,
)


class Oracle:
    """Hears the reports of one life after the other, in order.

    With ``keeps_offsets``, an offset that was settled is never given to another event: true of
    the disk kind. A disk-assisted queue forgets in a crash all events that were not on its
    disk, and their offsets.
    """

    def __init__(self, *, keeps_offsets: bool) -> None:
        self._keeps_offsets = keeps_offsets
        self.at: dict[int, Identity] = {}
        """The event last seen at each offset."""
        self.seen: dict[Identity, int] = {}
        """The offset at which each event was last seen."""
        self.settling: dict[int, Identity] = {}
        """Events for which ``done()`` was called, even if it did not return."""
        self.settled: dict[int, Identity] = {}
        self.gone: set[Identity] = set()
        """Events for which ``done()`` has returned."""
        self.maybe_gone: set[Identity] = set()
        self.persisted: dict[tuple[int, int], int] = defaultdict(int)
        """By life and producer: how many of its first events are persisted."""
        self.recoveries: list[float] = []
        self._written = 0
        self._recent: set[Identity] = set()
        self._resent: set[Identity] = set()

    @property
    def resend_from(self) -> int:
        """The first number that the numbered producer has to send again."""
        return self.persisted[EVERY_LIFE, NUMBERED]

    @property
    def persisted_total(self) -> int:
        """How many events were acked as persisted."""
        return sum(self.persisted.values())

    def is_persisted(self, event: Identity) -> bool:
        """Whether the producer of the event got an ack for it."""
        return event.number < self.persisted[event.life, event.producer]

    def is_here_to_stay(self, event: Identity) -> bool:
        """Whether the event was promised the offset at which it was seen.

        An event that its producer sends again may be persisted at another offset by now.
        """
        return event.life != EVERY_LIFE and self.is_persisted(event)

    def hear(self, orders: Orders, reports: Iterable[Report]) -> None:
        """Check the reports of one life."""
        self._out: set[int] = set()
        self._fresh = -1
        for report in reports:
            match report:
                case Opened(seconds, low, end, written, ledger):
                    self.recoveries.append(seconds)
                    self._opened(low, end, ledger)
                    self._forget(written)
                case Persisted(producer, total):
                    self._persisted(orders, producer, total)
                case Got(first, attempt, events):
                    self._got(first, attempt, events)
                case Settling(first, end):
                    self._settling(first, end)
                case Settled(first, end):
                    self._settled(first, end)
                case Releasing(first, end):
                    self._out.difference_update(range(first, end))
                case Closed(ledger):
                    self._balanced(ledger)
                case Failed(trace):
                    raise AssertionError(f"life {orders.life} ({orders.plan}): {trace}")

    def _opened(self, low: int, end: int, ledger: dict[str, Any]) -> None:
        self._balanced(ledger)
        if self._keeps_offsets:
            assert end >= max(self.settled, default=-1) + 1
            kept = [
                offset
                for offset, event in self.at.items()
                if offset not in self.settling and self.is_here_to_stay(event)
            ]
            assert low <= min(kept, default=end), "what nobody has settled counts as settled"
        else:
            # Events above the end were only in memory and are lost. Later events get their offsets,
            # perhaps fewer of them, so the order of events must not be checked by the old ones.
            self.at = {
                offset: event
                for offset, event in self.at.items()
                if offset < end or self.is_here_to_stay(event)
            }

    def _balanced(self, ledger: dict[str, Any]) -> None:
        assert ledger["adds_up"], ledger
        assert set(ledger["dropped"]) <= {"missing"}, ledger
        if self._keeps_offsets:
            settled = ledger["delivered"] + ledger["dead"]
            assert len(self.settled) <= settled <= len(self.settling), ledger
            assert ledger["accepted"] >= self.persisted_total, ledger

    def _persisted(self, orders: Orders, producer: int, total: int) -> None:
        if producer == NUMBERED:
            life, total = EVERY_LIFE, orders.resend_from + total
        else:
            life = orders.life
        self.persisted[life, producer] = max(total, self.persisted[life, producer])

    def _got(self, first: int, attempt: int, events: list[Identity]) -> None:
        if attempt == 1:
            assert first > self._fresh, f"{first} was handed out after {self._fresh}"
            self._fresh = first + len(events) - 1
        for offset, event in enumerate(events, first):
            assert offset not in self._out, f"offset {offset} was handed out twice at once"
            if event in self._resent:
                self._resent.remove(event)
                self.gone.remove(event)
            assert event not in self.gone, (
                f"{event}, settled at {self.seen[event]}, came back at {offset}"
            )
            self._place(offset, event)
            self._out.add(offset)

    def _forget(self, written: int) -> None:
        """Forget events that were settled before they were written: they may be sent again.

        Only in a disk-assisted queue, which loses everything that is only in memory.
        """
        self._written = max(self._written, written)
        if not self._keeps_offsets:
            self._resent |= {event for event in self._recent if self.seen[event] >= self._written}
        self._recent.clear()

    def _place(self, offset: int, event: Identity) -> None:
        """Record that an event has an offset. The pair is fixed once either is promised."""
        other = self.at.get(offset, event)
        if other != event:
            assert not self.is_here_to_stay(other) or other in self.maybe_gone, (
                f"{event} is at offset {offset}, where {other} was persisted"
            )
            if self._keeps_offsets:
                assert offset not in self.settled, f"{event} is at settled offset {offset}"
        former = self.seen.get(event, offset)
        if former != offset:
            assert event.life == EVERY_LIFE, f"{event} is at both {former} and {offset}"
        self.at[offset] = event
        self.seen[event] = offset

    def _settling(self, first: int, end: int) -> None:
        for offset in range(first, end):
            self.settling[offset] = self.at[offset]
            self.maybe_gone.add(self.at[offset])

    def _settled(self, first: int, end: int) -> None:
        for offset in range(first, end):
            self.settled[offset] = self.at[offset]
            self.gone.add(self.at[offset])
            if self.at[offset].life == EVERY_LIFE:
                self._recent.add(self.at[offset])
        self._out.difference_update(range(first, end))

    # The end

    def check_all_there(self) -> None:
        """Every promised event was settled, or came at the last drain, in order."""
        for (life, producer), total in self.persisted.items():
            for number in range(total):
                event = Identity(life, producer, number)
                assert event in self.gone or event in self.maybe_gone, f"{event} is lost"

    def check_order(self) -> None:
        """In offset order, the events of each producer are in publish order.

        For an event that was sent again only its last offset counts, once that is fixed.
        """
        last: dict[int, Identity] = {}
        for offset, event in sorted(self.at.items()):
            final = event.life != EVERY_LIFE or self.is_persisted(event)
            if not final or self.seen[event] != offset:
                continue
            before = last.get(event.producer, event)
            assert before <= event, f"{event} comes after {before}"
            last[event.producer] = event
