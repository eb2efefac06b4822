"""Repairing a queue: open it as it opens itself, read all that is pending, settle what is lost.

Nothing here knows how to mend a file. Recovery cuts what is torn, the reader copies what it cannot
read to quarantine, and the journal counts what is gone: repair only makes all of it happen now, and
says what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from turnlane.errors import ConfigError, DirectoryLocked
from turnlane.queues.contract import Outcome
from turnlane.queues.inspection.findings import Finding, FindingKind, Report
from turnlane.queues.inspection.inspection import Inspection
from turnlane.queues.inspection.journal_check import JournalCheck
from turnlane.queues.inspection.slices import ignore
from turnlane.queues.log.files import Disk
from turnlane.queues.log.log import Found
from turnlane.queues.log.quarantine import Quarantine
from turnlane.queues.ranges import Ranges
from turnlane.queues.settings import QueueSettings
from turnlane.queues.store import Store

_DONE_AT_OPEN = (FindingKind.TORN_TAIL, FindingKind.NEVER_WRITTEN)
"""What costs nothing more than it has already, and is dealt with all the same."""


@dataclass(slots=True)
class Repaired:
    """What a repair has done."""

    saved: int = 0
    """Unsettled events that can be read."""
    lost: dict[str, int] = field(default_factory=dict)
    """Unsettled events that cannot, by the reason under which the ledger now counts them."""
    recovered_acks: int = 0
    """Records behind a damaged one of the journal that were taken over."""
    set_aside: list[str] = field(default_factory=list)
    """Files in which unreadable bytes were kept."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "saved": self.saved,
            "lost": self.lost,
            "recovered_acks": self.recovered_acks,
            "set_aside": self.set_aside,
        }


class Repair:
    """One repair of one directory, which nobody may have open."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``DirectoryLocked`` if somebody seems to have it open, or ``NotAQueue``."""
        self._path = path
        self._disk = disk or Disk()
        self._queue = Inspection(path, self._disk)
        if self._queue.running is not None:
            raise DirectoryLocked(f"{path}: held by process {self._queue.running}")

    def plan(self, advance: Callable[[int], None] = ignore) -> Report:
        """What there is to repair; changes nothing."""
        return self._queue.verify(advance)

    def run(self, advance: Callable[[int], None] = ignore) -> Repaired:
        """Repair. Raises ``DirectoryLocked`` if somebody has opened it meanwhile."""
        before = self._kept()
        check = JournalCheck(self._path, self._disk, self._queue.queue_id)
        store = Store.open(self._settings(), self._disk)
        try:
            repaired = Repaired()
            self._take_over(store, check, repaired)
            self._read_through(store, repaired, advance)
            store.journal.snapshot()
        finally:
            store.close()
        repaired.set_aside = sorted(self._kept() - before)
        return repaired

    def _settings(self) -> QueueSettings:
        """As a queue of this name; the name matters only if ``queue.json`` has to be written."""
        try:
            return QueueSettings.of(kind="disk", path=self._path, name=self._queue.name)
        except ConfigError:
            return QueueSettings.of(kind="disk", path=self._path)

    def _kept(self) -> set[str]:
        """The files that turnlane has set aside."""
        names = {name for name in self._disk.listing(self._path) if name.endswith(".foreign")}
        quarantine = self._path / "quarantine"
        if quarantine.is_dir():
            names |= {f"quarantine/{name}" for name in self._disk.listing(quarantine)}
        return names

    def _take_over(self, store: Store, check: JournalCheck, repaired: Repaired) -> None:
        """What the journal as it was found says, and opening alone would not believe."""
        later = check.later()
        if later:
            # Before anything is recorded: the journal will write over this file.
            Quarantine(self._path, self._disk).keep(check.active)
        for record in later:
            store.journal.settled(*record)
        repaired.recovered_acks = len(later)
        if not self._queue.state.found:
            # Chunks go only when all in them is settled; so does the queue itself assume.
            store.journal.settled(0, store.log.start, 0, Outcome.DELIVERED)

    def _read_through(
        self, store: Store, repaired: Repaired, advance: Callable[[int], None]
    ) -> None:
        state = store.journal.state()
        unsettled = Ranges([(0, state.low), *state.settled]).missing(0, store.log.end)
        pending = sum(end - first for first, end in unsettled)
        each = store.unsettled_bytes() // max(1, pending)
        for first, end in unsettled:
            at = first
            while at < end:
                found = store.fetch(at, end)
                if isinstance(found, Found):
                    stop = at + found.block.num_rows
                    repaired.saved += stop - at
                    advance(found.block.nbytes)
                else:
                    stop = min(found.end, end)
                    store.journal.settled(at, stop, each * (stop - at), found.outcome)
                    reason = found.outcome.value
                    repaired.lost[reason] = repaired.lost.get(reason, 0) + stop - at
                at = stop


def is_repairable(finding: Finding) -> bool:
    """Whether a repair does something about it."""
    return finding.fault or finding.kind in _DONE_AT_OPEN
