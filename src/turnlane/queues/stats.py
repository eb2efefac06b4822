"""What a queue says of itself: the ledger, gauges, counters."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from turnlane.queues.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Stats:
    """A consistent picture of one queue at one moment. Gauges unless said otherwise."""

    name: str
    kind: str
    ledger: Ledger
    size: int
    """Events that count against the bound."""
    bytes: int
    """Bytes that count against the bound."""
    max_size: int | None
    max_bytes: int | None
    in_flight: int
    """Events handed out and not yet settled."""
    blocked_publishers: int
    """Those that wait for room, or above a delay mark."""
    memory_blocks: int
    """Blocks held in memory, not handed out."""
    pushes: int
    """Counter: publish calls that put something into the queue."""
    full_waits: int
    """Counter: times a publisher found the queue full."""
    releases: int
    """Counter: batches given back to be read again."""
    disk_bytes: int = 0
    """Bytes of chunk files."""
    disk_available_bytes: int | None = None
    """What the file system still has free."""
    disk_full: int = 0
    """Counter: times a write found no space."""
    disk_errors: int = 0
    """Counter: other failures to write or sync."""
    syncs: int = 0
    """Counter: chunk syncs."""
    meta_syncs: int = 0
    """Counter: journal syncs."""
    rotations: int = 0
    """Counter: chunks started."""
    flushes: int = 0
    """Counter: times blocks went from memory to the disk."""
    quarantined: int = 0
    """Counter: unreadable pieces set aside."""

    trouble: str = ""
    """Why the queue cannot write to its disk; empty if it can."""

    @property
    def utilization(self) -> float:
        """How full the queue is, 0 to 1, by whichever bound is nearer."""
        ratios = [
            used / limit
            for used, limit in ((self.size, self.max_size), (self.bytes, self.max_bytes))
            if limit
        ]
        return min(1.0, max(ratios, default=0.0))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"ledger": self.ledger.as_dict(), "utilization": self.utilization}
