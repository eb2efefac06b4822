"""The journal: which events are settled, recorded before a consumer hears that its ack is stored.

Two preallocated files take turns. A record is appended with one small write and no sync. When a
file is nearly full, the whole state goes as a snapshot into the other file. So acks need no space
on a full disk, and opening reads at most one file, however old the queue is.

The order when files change: blank the header of the other file, write the payload and zeros after
it, sync, write the header, sync. At every moment one of the two files is complete. A file with a
blank header is ignored, so an interrupted change needs no repair.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.storage.directory import Quarantine
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import LogPosition, ProducerSequence
from turnlane.storage.journal_records import (
    HEADER_SIZE,
    JOURNAL_FILES,
    RECORD_SIZE,
    JournalState,
    apply_records,
    compute_seed,
    encode_dropped,
    encode_position,
    encode_returned,
    encode_sequence,
    encode_settled,
    encode_snapshot,
    get_records_start,
    parse_header,
    parse_payload,
    sign_record,
)
from turnlane.storage.producer_sequences import AcceptedSequences, UnwrittenSequences

JOURNAL_FILE_SIZE = 1 << 20
"""Room for about 21,000 records: files rarely change, and replaying one takes 0.1 s."""

RESERVE_BYTES = 64 * RECORD_SIZE
"""Free bytes at which files are changed, so that acks go on if the change fails at first."""

_BLANK_HEADER = bytes(HEADER_SIZE)
_REPLAY_BYTES = 16384 * RECORD_SIZE

log = get_logger(__name__)


class Journal:
    """The journal of one queue. Thread-safe, but nothing else may run during :meth:`close`.

    Every ``record_`` method appends with one write. It raises ``OSError`` if that fails: then the
    state is unchanged, and the call may be repeated; if the process dies first, the record may
    still be in the file. A record survives the death of the process at once, and a power cut after
    the next :meth:`sync`.
    """

    def __init__(
        self,
        disk: Disk,
        fds: list[int],
        *,
        queue_id: str,
        state: JournalState,
        generation: int,
        file_size: int,
    ) -> None:
        """Use :meth:`open`; a journal made here has no active file before :meth:`snapshot`."""
        self.syncs = 0
        """How many times a file was synced."""
        self.unwritten_sequences = UnwrittenSequences()
        """Events with sequence numbers that are recorded together with their settlement."""
        self._disk = disk
        self._queue_id = queue_id
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._fds = fds  # the active file comes first
        self._file_size = file_size
        self._state = state
        self._generation = generation
        self._seed = compute_seed(generation)
        self._recorded = 0
        """How many records were written in all."""
        self._synced = 0
        """How many of them are on the device."""
        self._end = 0
        self._limit = 0
        self._sync_failed = False
        self._half_changed = False
        """The header of the other file may be valid, although this file is still the active one."""

    @classmethod
    def open(
        cls, directory: Path, disk: Disk, queue_id: str, *, file_size: int = JOURNAL_FILE_SIZE
    ) -> tuple[Journal, JournalState]:
        """Read the journal, or create one; return it and a copy of its state.

        This succeeds for any content: files that cannot be read go to ``quarantine/`` with a
        warning. Raises ``OSError`` if the disk fails to read or write them.
        """
        files = [_read_file(directory / name, disk, queue_id) for name in JOURNAL_FILES]
        for name, file in zip(JOURNAL_FILES, files, strict=True):
            if file.is_unreadable:
                Quarantine(directory, disk).move(directory / name)
        active = _find_newer(files)
        state, generation, _ = files[active]
        if not state.found and any(name.endswith(".chunk") for name in disk.listing(directory)):
            log.warning("journal.missing", directory=directory, hint="settled events come again")
        with contextlib.ExitStack() as opened:
            fds = []
            for index in (active, 1 - active):
                fd = disk.open(directory / JOURNAL_FILES[index], create=True)
                opened.callback(disk.close, fd)
                if disk.size(fd) < file_size:
                    disk.allocate(fd, file_size)
                fds.append(fd)
            disk.sync_directory(directory)
            journal = cls(
                disk,
                fds,
                queue_id=queue_id,
                state=state,
                generation=generation,
                file_size=file_size,
            )
            # Never append to the files as found: after the first invalid record there may be valid
            # ones, which would become valid again once the gap is filled.
            journal.snapshot()
            opened.pop_all()
        return journal, state.copy()

    @staticmethod
    def read(directory: Path, disk: Disk, queue_id: str) -> JournalState:
        """Return the state on disk for tools that only look: writes, moves and locks nothing."""
        files = [_read_file(directory / name, disk, queue_id) for name in JOURNAL_FILES]
        return files[_find_newer(files)].state

    # Recording

    def record_settled(self, first: int, end: int, size: int, outcome: Outcome) -> None:
        """Record that ``[first, end)``, ``size`` bytes in all, left the queue.

        The same write records the sequence numbers of events that are not in the log yet.
        """
        body = encode_settled(first, end, size, outcome)
        with self._lock:
            # Events that a close gave up are sent again by their producer: they are no repeats.
            if self.unwritten_sequences and outcome is not Outcome.CLOSED:
                sequences, complete = self.unwritten_sequences.collect_due(
                    first, end, self._find_settled_end_with(first, end)
                )
                # The sequences last: replay must never find a number without the settlement.
                self._append([body, *map(encode_sequence, sequences)])
                for sequence in sequences:
                    self._state.add_sequence(sequence)
                self.unwritten_sequences.remove(complete)
            else:
                self._append((body,))
            self._state.settle(first, end, size, outcome)

    def find_unsafe_end(self, first: int, end: int) -> int:
        """Return how far the log must be safe before ``[first, end)`` can be settled.

        0 if the settlement can be recorded now, with all its sequence numbers.
        """
        if not self.unwritten_sequences:
            return 0
        with self._lock:
            return self.unwritten_sequences.find_unsafe_end(
                first, end, self._find_settled_end_with(first, end)
            )

    def _find_settled_end_with(self, first: int, end: int) -> Callable[[int], int]:
        return lambda offset: self._state.find_settled_end(offset, (first, end))

    def record_returned(self, first: int, end: int, attempt: int) -> None:
        """Record that a consumer returned ``[first, end)``, which comes next as ``attempt``."""
        body = encode_returned(first, end, attempt)
        with self._lock:
            self._append((body,))
            self._state.give_back(first, end, attempt)

    def record_position(
        self,
        position: LogPosition,
        unsettled_bytes: int,
        sequences: Sequence[ProducerSequence] = (),
    ) -> None:
        """Record how far the log has come, and the sequence numbers up to there."""
        # The position last: recovery looks for sequences only in frames after it, so replay must
        # never find the position without them.
        bodies = [encode_sequence(sequence) for sequence in sequences]
        bodies.append(encode_position(position, unsettled_bytes))
        with self._lock:
            self._append(bodies)
            self._state.advance(position, unsettled_bytes, sequences)

    def record_sequences(self, sequences: Sequence[ProducerSequence]) -> None:
        """Record the sequence numbers that producers have published."""
        with self._lock:
            self._append([encode_sequence(sequence) for sequence in sequences])
            for sequence in sequences:
                self._state.add_sequence(sequence)

    def record_dropped(self, outcome: Outcome, events: int) -> None:
        """Record that events were dropped before they got an offset."""
        body = encode_dropped(outcome, events)
        with self._lock:
            self._append((body,))
            self._state.drop(outcome, events)

    def remember_sequences(self, producers: Mapping[bytes, AcceptedSequences]) -> None:
        """Add sequence numbers to the state; the next :meth:`snapshot` writes them."""
        with self._lock:
            for producer, accepted in producers.items():
                for first, end in accepted:
                    self._state.add_sequence(ProducerSequence(producer, end, first))

    # Durability

    def sync(self) -> None:
        """Return once all earlier records are on the device. Blocks no other call.

        All callers that wait while one sync runs share the next one. After a failure the file is
        never synced again, because the kernel may have dropped pages that it could not write: the
        next call writes the whole state to the other file.
        """
        recorded = self._recorded
        # One sync at a time: the kernel reports a failure once, so two callers would miss it.
        with self._sync_lock:
            with self._lock:
                if self._synced >= recorded:
                    return
                if self._sync_failed:
                    self._change_files()
                    return
                fd, recorded = self._fds[0], self._recorded
            try:
                self._disk.sync(fd)
            except OSError:
                self._sync_failed = True
                raise
            with self._lock:
                self.syncs += 1
                self._synced = max(self._synced, recorded)

    def snapshot(self) -> None:
        """Change files now: then everything is on the device, and the next opening is fast."""
        with self._lock:
            self._change_files()

    def state(self) -> JournalState:
        """Return a copy of the current state."""
        with self._lock:
            return self._state.copy()

    def close(self) -> None:
        """Close the files as they are; call :meth:`snapshot` first. Twice is harmless."""
        with self._lock:
            fds, self._fds = self._fds, [-1, -1]
        for fd in fds:
            if fd >= 0:
                self._disk.close(fd)

    # Appending. The caller holds the lock in all methods below.

    def _append(self, bodies: Sequence[bytes]) -> None:
        length = RECORD_SIZE * len(bodies)
        if self._end + length > self._limit:
            self._make_room()
        records = b"".join([sign_record(self._seed, body) for body in bodies])
        self._disk.write(self._fds[0], (records,), self._end)
        self._end += length
        self._recorded += len(bodies)

    def _make_room(self) -> None:
        if self._half_changed:
            self._blank_other_header()
        try:
            self._change_files()
        except OSError as error:
            if self._half_changed:
                raise
            # Records go into the reserve, and then beyond the file's end; the change is retried.
            self._limit = self._end + RESERVE_BYTES
            log.warning("journal.change_of_files_failed", error=error, hint="retried later")

    # Changing files

    def _change_files(self) -> None:
        generation = self._generation + 1
        header, payload = encode_snapshot(self._state, self._queue_id, generation)
        fd = self._fds[1]
        start = HEADER_SIZE + len(payload)
        size = self._resize(fd, start)
        # Zeros to the end: records of an earlier generation might become valid again.
        self._disk.write(fd, [_BLANK_HEADER, payload, bytes(size - start)], 0)
        self._sync_file(fd)
        # From the header's first byte on, the next opening may take this file for the newer one. If
        # the change fails, this must not last while records go to the active file.
        self._half_changed = True
        self._limit = 0
        try:
            self._disk.write(fd, [header], 0)
            self._sync_file(fd)
        except OSError:
            self._blank_other_header()
            raise
        self._half_changed = False
        self._fds.reverse()
        self._generation = generation
        self._seed = compute_seed(generation)
        self._end = start
        self._limit = size - RESERVE_BYTES
        self._sync_failed = False
        self._synced = self._recorded

    def _resize(self, fd: int, start: int) -> int:
        """Bring the file to its size, which is larger after a large snapshot; return it."""
        wanted = self._file_size
        if wanted - start < 4 * RESERVE_BYTES:
            wanted += start
        size = self._disk.size(fd)
        if size < wanted:
            self._disk.allocate(fd, wanted)
        elif size > wanted:
            self._disk.truncate(fd, wanted)
        return wanted

    def _blank_other_header(self) -> None:
        """Undo half a change of files; until this succeeds, nothing may be appended."""
        fd = self._fds[1]
        self._disk.write(fd, [_BLANK_HEADER], 0)
        self._sync_file(fd)
        self._half_changed = False

    def _sync_file(self, fd: int) -> None:
        self._disk.sync(fd)
        self.syncs += 1


class _JournalFile(NamedTuple):
    """The content of a journal file."""

    state: JournalState
    generation: int
    is_unreadable: bool


def _find_newer(files: Sequence[_JournalFile]) -> int:
    return max(range(len(files)), key=lambda index: files[index].generation)


def _read_file(path: Path, disk: Disk, queue_id: str) -> _JournalFile:
    """Read a file; a new state and generation 0 if it is missing, blank or unreadable."""
    try:
        with disk.open_file(path) as fd:
            start = bytes(disk.read(fd, HEADER_SIZE, 0))
            file = _read_snapshot(fd, start, disk, queue_id)
    except FileNotFoundError:
        return _JournalFile(JournalState(), 0, is_unreadable=False)
    return file or _JournalFile(JournalState(), 0, is_unreadable=any(start))


def _read_snapshot(fd: int, start: bytes, disk: Disk, queue_id: str) -> _JournalFile | None:
    header = parse_header(start)
    if header is None:
        return None
    generation, length, checksum = header
    # Only the header claims this length: never allocate more than the file has.
    if length > disk.size(fd) - HEADER_SIZE:
        return None
    state = parse_payload(bytes(disk.read(fd, length, HEADER_SIZE)), checksum, queue_id)
    if state is None:
        return None
    at, seed = get_records_start(length), compute_seed(generation)
    while True:  # in pieces, because a file may have become large
        data = bytes(disk.read(fd, _REPLAY_BYTES, at))
        size = apply_records(data, seed, state) * RECORD_SIZE
        at += size
        if size < _REPLAY_BYTES:
            return _JournalFile(state, generation, is_unreadable=False)
