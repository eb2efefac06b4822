"""Dispatch: which receiver gets which event. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turnlane.table.event import TableEvent
from turnlane.table.shards import WHOLE_KEYSPACE, KeyRange


@dataclass(slots=True, eq=False)
class ReceiverSlot:
    """A receiver, as dispatch sees it."""

    capacity: int
    """The most events it may have."""
    load: int = 0
    """How many it has and did not settle."""
    key_range: KeyRange = WHOLE_KEYSPACE

    @property
    def room(self) -> int:
        """How many more events it takes."""
        return max(0, self.capacity - self.load)


@dataclass(slots=True)
class Assignment:
    """What dispatch decided."""

    given: list[tuple[ReceiverSlot, list[TableEvent]]] = field(default_factory=list)
    left: list[TableEvent] = field(default_factory=list)
    """For these no receiver has room."""
    homeless: list[TableEvent] = field(default_factory=list)
    """These lie in nobody's key range."""


def assign_events(
    events: Sequence[TableEvent], seats: Sequence[ReceiverSlot], key: Callable[[TableEvent], int]
) -> Assignment:
    """Give every event to the least busy of the seats whose key range covers it."""
    if all(seat.key_range.is_everything for seat in seats):
        return _spread(events, seats)
    return _by_range(events, seats, key)


def _spread(events: Sequence[TableEvent], seats: Sequence[ReceiverSlot]) -> Assignment:
    """Deal in slices: a level is found up to which the seats are filled."""
    result = Assignment()
    at = 0
    for seat, share in zip(seats, _shares(len(events), seats), strict=True):
        if share:
            result.given.append((seat, list(events[at : at + share])))
            at += share
    result.left = list(events[at:])
    return result


def _shares(count: int, seats: Sequence[ReceiverSlot]) -> list[int]:
    """How many each seat gets, so that the loads end as equal as they can."""
    low, high = 0, max((seat.load + seat.room for seat in seats), default=0)
    while low < high:
        level = (low + high + 1) // 2
        if sum(_up_to(seat, level) for seat in seats) <= count:
            low = level
        else:
            high = level - 1
    shares = [_up_to(seat, low) for seat in seats]
    rest = count - sum(shares)
    for at, seat in enumerate(seats):
        if rest and shares[at] < seat.room and seat.load + shares[at] <= low:
            shares[at] += 1
            rest -= 1
    return shares


def _up_to(seat: ReceiverSlot, level: int) -> int:
    return max(0, min(seat.room, level - seat.load))


def _by_range(
    events: Sequence[TableEvent], seats: Sequence[ReceiverSlot], key: Callable[[TableEvent], int]
) -> Assignment:
    """One by one: events of different ranges have different seats to choose from."""
    result = Assignment()
    given: list[list[TableEvent]] = [[] for _ in seats]
    for event in events:
        keyspace_id = key(event)
        covering = [at for at, seat in enumerate(seats) if seat.key_range.contains(keyspace_id)]
        free = [at for at in covering if len(given[at]) < seats[at].room]
        if free:
            given[min(free, key=lambda at: seats[at].load + len(given[at]))].append(event)
        else:
            (result.left if covering else result.homeless).append(event)
    result.given = [(seat, mine) for seat, mine in zip(seats, given, strict=True) if mine]
    return result
