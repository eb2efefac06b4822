"""A queue's directory, looked at from outside: running, stopped or damaged, and never changed.

Chunks are listed first and the journal is read after them. The queue does it the other way round
(journal first, then a chunk goes), so whatever has vanished in between is known to be settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from turnlane.errors import SchemaMismatch
from turnlane.events import BASE_SCHEMA
from turnlane.queues.inspection.account import Account, account
from turnlane.queues.inspection.findings import Report
from turnlane.queues.inspection.holder import holder
from turnlane.queues.inspection.slices import Selection, Slice, ignore
from turnlane.queues.inspection.survey import survey
from turnlane.queues.inspection.verification import Verification
from turnlane.queues.inspection.walk import Stretch, Walk
from turnlane.queues.log.directory import QueueDirectory
from turnlane.queues.log.files import Disk
from turnlane.queues.log.journal import Journal
from turnlane.queues.log.journal_state import JournalState
from turnlane.queues.ranges import Ranges


class Inspection:
    """One look at a directory. Takes no lock, writes nothing."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``NotAQueue`` if there is no queue, or one of an unknown format."""
        self.path = path
        self.disk = disk or Disk()
        directory = QueueDirectory.read_only(path, self.disk)
        self.name = directory.name
        self.queue_id = directory.queue_id
        self.running = holder(path)
        """The process that has the queue open, if one has."""
        self.chunks = survey(path, self.disk, self.queue_id)
        self.state = self.journal()
        self.settled = self.settled_by(self.state)
        self._seen = Ranges()

    def journal(self) -> JournalState:
        """What the journal says at this moment."""
        return Journal.read(self.path, self.disk, self.queue_id)

    def low(self, state: JournalState) -> int:
        """Everything below is settled; without a journal, as the queue itself would assume."""
        if state.found:
            return state.low
        return next((chunk.first for chunk in self.chunks if not chunk.foreign), 0)

    def settled_by(self, state: JournalState) -> Ranges:
        """All offsets that are settled."""
        return Ranges([(0, self.low(state)), *state.settled])

    @property
    def size(self) -> int:
        """The bytes of all chunks."""
        return sum(chunk.size for chunk in self.chunks)

    @property
    def schema(self) -> pa.Schema:
        """All columns of all chunks, base columns first.

        Raises ``SchemaMismatch`` if a column has one type here and another there.
        """
        schemas = [chunk.schema.schema for chunk in self.chunks if chunk.schema]
        try:
            return pa.unify_schemas([BASE_SCHEMA, *schemas])
        except pa.ArrowException as error:
            raise SchemaMismatch(f"{self.path}: chunks have different types: {error}") from None

    def slices(
        self, selection: Selection, advance: Callable[[int], None] = ignore
    ) -> Iterator[Slice]:
        """The events selected that can be read, oldest first, a frame at a time."""
        first, end, everything = self._bounds(selection), selection.end, selection.settled
        self._seen = Ranges()

        def wanted(start: int, stop: int) -> bool:
            needed = everything or not self.settled.covers(start, stop)
            return needed and start < end and stop > first

        chunks = [chunk for chunk in self.chunks if chunk.limit > first]
        for item in Walk(self.disk, chunks, wanted):
            if item.first >= end:
                return
            if isinstance(item, Stretch):
                advance(item.stored)
                self._seen.add(item.first, item.end)
                yield from self._cut(item, max(first, item.first), min(end, item.end), everything)

    def _bounds(self, selection: Selection) -> int:
        if selection.first is not None:
            return selection.first
        return 0 if selection.settled else self.low(self.state)

    def _cut(self, item: Stretch, first: int, end: int, everything: bool) -> Iterator[Slice]:  # noqa: FBT001
        """The part ``[first, end)``, cut where settled and unsettled events meet."""
        if item.block is None:
            return
        pieces = [(start, stop, False) for start, stop in self.settled.missing(first, end)]
        if everything:
            pieces += [(start, stop, True) for start, stop in self.settled.within(first, end)]
        for start, stop, settled in sorted(pieces):
            block = item.block.slice(start - item.first, stop - start)
            yield Slice(np.arange(start, stop, dtype=np.int64), settled, block)

    @property
    def end(self) -> int:
        """The next offset, by the log as far as it was read, and by the journal."""
        return max(self._seen.end, self.state.floor, self.low(self.state))

    def unreadable(self, selection: Selection) -> int:
        """How many unsettled events of the selection the last ``slices()`` could not read.

        Only as far as that one came. What a running queue has settled meanwhile does not count.
        """
        settled = self.settled_by(self.journal())
        known = self._seen.end
        if self.state.position and self.running is None:
            known = max(known, self.state.position.end)
        gone = self._seen.missing(self._bounds(selection), min(known, selection.end))
        return sum(end - first - settled.overlap(first, end) for first, end in gone)

    def verify(self, advance: Callable[[int], None] = ignore) -> Report:
        """Check every frame of every chunk, the journal, and the queue's identity."""
        return Verification(self).run(advance)

    def account(self) -> Account:
        """The ledger, from the journal and the headers of all frames."""
        return account(self)
