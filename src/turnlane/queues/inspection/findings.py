"""What a verification says: every finding with its place, its meaning, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


class FindingKind(enum.StrEnum):
    """What was found."""

    CORRUPT_PAYLOAD = "corrupt_payload"
    CORRUPT_HEADER = "corrupt_header"
    UNDECODABLE = "undecodable"
    TRUNCATED = "truncated"
    SCHEMA = "schema"
    FOREIGN = "foreign"
    MISSING = "missing"
    REPEAT = "repeat"
    TORN_TAIL = "torn_tail"
    NEVER_WRITTEN = "never_written"
    JOURNAL = "journal"
    IDENTITY = "identity"
    LEFTOVER = "leftover"
    QUARANTINE = "quarantine"
    FASTQUEUE = "fastqueue"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. A fault calls for repair, a note does not.

    A fault costs unsettled events, lets settled ones come again, or is a file that the next open
    has to replace or put aside: ``queue.json``, another queue's chunk.
    """

    kind: FindingKind
    fault: bool
    file: str
    byte: int
    what: str
    todo: str
    length: int | None = None
    """How many bytes are concerned, where that is known."""
    first: int | None = None
    end: int | None = None
    """Offsets ``[first, end)``, where they are known."""
    events: int = 0
    """Unsettled events among them that cannot be read."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(slots=True)
class Report:
    """What a verification has found."""

    name: str
    queue_id: str
    running: int | None
    """The process that has the queue open."""
    chunks: int = 0
    frames: int = 0
    events: int = 0
    """Events that can be read, settled or not."""
    pending: int = 0
    """Events that can be read and are not settled."""
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def faults(self) -> Sequence[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.fault]

    @property
    def clean(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    @property
    def lost(self) -> int:
        """Unsettled events that cannot be read."""
        return sum(finding.events for finding in self.faults)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "name": self.name,
            "queue_id": self.queue_id,
            "running": self.running,
            "clean": self.clean,
            "chunks": self.chunks,
            "frames": self.frames,
            "events": self.events,
            "pending": self.pending,
            "bytes": self.bytes,
            "lost": self.lost,
            "findings": [finding.as_dict() for finding in self.findings],
        }
