"""FastQueue's own directories, looked at in the same way as turnlane's.

A block is an event; its offset is its byte position in the queue. What lies before the metadata's
reader offset counts as settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from turnlane.events import BASE_SCHEMA
from turnlane.queues.inspection.findings import Finding, FindingKind, Report
from turnlane.queues.inspection.slices import Offsets, Selection, Slice, ignore
from turnlane.queues.log.fastqueue import CHUNK_NAME, POSITION_HEADER, FastQueueDirectory
from turnlane.queues.log.files import Disk

_ADVICE = "export what can be read; turnlane never changes FastQueue's files"


class FastQueueInspection:
    """A FastQueue directory. Reads only."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        """Raises ``NotAQueue`` if it is none."""
        self.path = path
        self._directory = FastQueueDirectory.open(path, disk=disk)
        metadata = self._directory.metadata
        self.name = (metadata.name if metadata else "") or path.name
        self._reader = metadata.reader_offset if metadata else 0

    @property
    def size(self) -> int:
        """The bytes of all chunks."""
        chunks = [entry for entry in self.path.iterdir() if CHUNK_NAME.fullmatch(entry.name)]
        return sum(chunk.stat().st_size for chunk in chunks)

    @property
    def schema(self) -> pa.Schema:
        """The base columns: FastQueue knows no others."""
        return BASE_SCHEMA

    def slices(
        self, selection: Selection, advance: Callable[[int], None] = ignore
    ) -> Iterator[Slice]:
        """The blocks selected, as events, in batches."""
        first = selection.first or 0
        if not selection.settled:
            first = max(first, self._reader)
        for block in self._directory.blocks(start=first):
            offsets = _positions(block)
            advance(block.nbytes)
            bounds = [first, min(max(first, self._reader), selection.end), selection.end]
            cuts = np.searchsorted(offsets, bounds)
            for start, stop, settled in ((cuts[0], cuts[1], True), (cuts[1], cuts[2], False)):
                if start < stop:
                    piece = block.slice(int(start), int(stop - start))
                    yield Slice(offsets[start:stop], settled, piece)
            if len(offsets) and offsets[-1] >= selection.end:
                return

    @property
    def end(self) -> int:
        """The byte position after the last chunk."""
        chunks = [entry for entry in self.path.iterdir() if CHUNK_NAME.fullmatch(entry.name)]
        return max((int(chunk.name, 16) + chunk.stat().st_size for chunk in chunks), default=0)

    def unreadable(self, selection: Selection) -> int:
        """How many places of the selection cannot be read. Goes through all chunks."""
        first = selection.first if selection.first is not None else self._reader
        positions = [
            int(fault.file.name, 16) + fault.byte
            for fault in self._directory.faults()
            if CHUNK_NAME.fullmatch(fault.file.name)
        ]
        return sum(first <= position < selection.end for position in positions)

    def verify(self, advance: Callable[[int], None] = ignore) -> Report:
        """Check every block."""
        report = Report(self.name, "", None, bytes=self.size)
        report.chunks = sum(1 for entry in self.path.iterdir() if CHUNK_NAME.fullmatch(entry.name))
        for piece in self.slices(Selection(settled=True), advance):
            report.events += len(piece.offsets)
            report.frames = report.events
            report.pending += 0 if piece.settled else len(piece.offsets)
        for fault in self._directory.faults():
            report.findings.append(
                Finding(
                    FindingKind.FASTQUEUE,
                    fault=True,
                    file=fault.file.name,
                    byte=fault.byte,
                    what=fault.what,
                    todo=_ADVICE,
                )
            )
        return report


def _positions(block: pa.RecordBatch) -> Offsets:
    headers = block.column("headers").to_pylist()
    return np.array([int(dict(pairs or ())[POSITION_HEADER]) for pairs in headers], dtype=np.int64)
