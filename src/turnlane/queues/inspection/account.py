"""The ledger of a queue that is not open here: what the journal says against what the log holds.

The journal alone always adds up. So what is pending is counted in the log, frame by frame; then an
event that is neither settled nor there makes a difference, and the difference is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from turnlane.queues.contract import Outcome
from turnlane.queues.inspection.walk import Stretch, Walk
from turnlane.queues.ledger import Ledger, Totals
from turnlane.queues.ranges import Ranges

if TYPE_CHECKING:
    from turnlane.queues.inspection.inspection import Inspection

_RUNNING = "what process {pid} holds only in memory, and drops that it has not yet noted"
_STOPPED = "events that were accepted but not yet written when their process was killed"


@dataclass(frozen=True, slots=True)
class Account:
    """A ledger and what there is to say about it."""

    ledger: Ledger
    in_memory: int
    """Of the pending events: those that a running queue has not written yet."""
    unaccounted: int
    """Events that are neither settled nor in the log."""
    not_included: str
    """What no ledger made from files can know."""
    notes: list[str]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            **self.ledger.as_dict(),
            "in_memory": self.in_memory,
            "unaccounted": self.unaccounted,
            "not_included": self.not_included,
            "notes": self.notes,
        }


def account(queue: Inspection) -> Account:
    """Count. Reads the headers of all frames that may hold unsettled events."""
    present = _present(queue)
    # Read after the log: whatever of the log has gone meanwhile is settled in here.
    state = queue.journal()
    settled = queue.settled_by(state)
    written = max(present.end, state.position.end if state.position else 0)
    end = max(written, state.floor)
    pending = sum(_unsettled(settled, first, stop) for first, stop in present)
    waiting = _unsettled(settled, written if queue.running is None else present.end, end)
    never_written = waiting if queue.running is None else 0
    totals = Totals(state.totals)
    totals.add(Outcome.MISSING, never_written)
    ledger = totals.ledger(end, pending + waiting - never_written)
    unaccounted = ledger.accepted - ledger.settled - ledger.pending
    notes = [] if state.found or not queue.chunks else ["no journal: what was settled is not known"]
    if never_written:
        notes.append(f"{never_written} missing were in memory when their process was killed")
    if unaccounted:
        notes.append(f"{unaccounted} unaccounted for: turnlane queue verify says where")
    return Account(
        ledger=replace(ledger, dropped=dict(ledger.dropped)),
        in_memory=waiting - never_written,
        unaccounted=unaccounted,
        not_included=_not_included(queue.running),
        notes=notes,
    )


def _present(queue: Inspection) -> Ranges:
    present = Ranges()
    low = queue.low(queue.state)
    chunks = [chunk for chunk in queue.chunks if chunk.limit > low]
    for item in Walk(queue.disk, chunks, lambda _first, _end: False):
        if isinstance(item, Stretch):
            present.add(item.first, item.end)
    return present


def _unsettled(settled: Ranges, first: int, end: int) -> int:
    return max(0, end - first) - settled.overlap(first, end) if end > first else 0


def _not_included(running: int | None) -> str:
    return _STOPPED if running is None else _RUNNING.format(pid=running)
