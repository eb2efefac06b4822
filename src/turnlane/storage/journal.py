"""The journal: what was settled, told to the disk before anyone who acked is told so.

Two preallocated files take turns. A record is appended with one small write and no sync; when a
file is nearly full, the whole state goes as a snapshot into the other one. So acks need no space on
a full disk, and opening reads at most a file, however old the queue is.

A file is taken over in this order: blank its header, write the payload and zeros behind it, sync,
write the header, sync. At every moment one of the two files is whole, and a file with a blank
header is worth nothing, so that an interrupted change needs no repair.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from turnlane.ledger import Outcome
from turnlane.storage import journal_records
from turnlane.storage.directory import Quarantine
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import Position, Stamp
from turnlane.storage.journal_records import (
    HEADER_SIZE,
    RECORD_SIZE,
    JournalState,
    encode_snapshot,
    parse_header,
    parse_payload,
    records_start,
    sign,
)
from turnlane.storage.producer_sequences import Accepted, Unstamped

NAMES = ("journal.a", "journal.b")

FILE_SIZE = 1 << 20
"""Room for some 21,000 records: a change of files is rare, and replaying one takes 0.1 s."""

RESERVE = 64 * RECORD_SIZE
"""What is left free when files are changed, so that acks go on if the change fails at first."""

_BLANK = bytes(HEADER_SIZE)
_REPLAY_BYTES = 16384 * RECORD_SIZE

_log = logging.getLogger(__name__)


class Journal:
    """One queue's journal. Thread-safe, except that nothing else may run during :meth:`close`.

    Every verb appends with one write. It raises ``OSError`` if that fails: then the state is
    unchanged, and it may be called again; if the process dies first, the record may yet turn out to
    be there. A record survives the death of the process at once, a power cut after the next
    :meth:`sync`.
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
        """Use :meth:`open`; a journal made by hand has no active file until :meth:`snapshot`."""
        self.syncs = 0
        """How many times a file was synced."""
        self.unstamped = Unstamped()
        """Numbered events whose settling is recorded together with their numbers."""
        self._disk = disk
        self._queue_id = queue_id
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._fds = fds  # the active file's comes first
        self._file_size = file_size
        self._state = state
        self._generation = generation
        self._seed = journal_records.seed(generation)
        self._recorded = 0
        """How many records were written, ever."""
        self._synced = 0
        """How many of them are on the device."""
        self._end = 0
        self._limit = 0
        self._suspect = False
        self._half_taken = False

    @classmethod
    def open(
        cls, directory: Path, disk: Disk, queue_id: str, *, file_size: int = FILE_SIZE
    ) -> tuple[Journal, JournalState]:
        """Read the journal, or make a new one; returns it and what it says (a copy).

        Whatever is in the files, this succeeds: what cannot be read goes to ``quarantine/`` with a
        warning. Raises ``OSError`` if the disk does not let them be read and written.
        """
        read = [_read(directory / name, disk, queue_id) for name in NAMES]
        for name, content in zip(NAMES, read, strict=True):
            if content.unreadable:
                Quarantine(directory, disk).move(directory / name)
        active = _newer(read)
        state, generation, _ = read[active]
        if not state.found and any(name.endswith(".chunk") for name in disk.listing(directory)):
            _log.warning("%s: no journal; what was settled will come again", directory)
        with contextlib.ExitStack() as opened:
            fds = []
            for index in (active, 1 - active):
                fd = _create(directory / NAMES[index], disk, file_size)
                opened.callback(disk.close, fd)
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
            # Never appends to what it found: behind the first record that is not valid there may be
            # valid ones, which would come to life again once the hole is filled.
            journal.snapshot()
            opened.pop_all()
        return journal, state.copy()

    @staticmethod
    def read(directory: Path, disk: Disk, queue_id: str) -> JournalState:
        """What the journal says, for those who only look: writes, moves and locks nothing."""
        read = [_read(directory / name, disk, queue_id) for name in NAMES]
        return read[_newer(read)].state

    # The verbs

    def settled(self, first: int, end: int, size: int, outcome: Outcome) -> None:
        """Record that ``[first, end)``, ``size`` bytes in all, left the queue.

        With the numbers of numbered events that are not in the log yet, in the same write.
        """
        body = journal_records.settled(first, end, size, outcome)
        with self._lock:
            # What a close gave up is for its producer to send again: it must not seem a repeat.
            if self.unstamped and outcome is not Outcome.CLOSED:
                self._settle_numbered(body, first, end)
            else:
                self._append(body)
            self._state.settle(first, end, size, outcome)

    def unsafe_end(self, first: int, end: int) -> int:
        """How far the log has to be safe for ``[first, end)`` to be settled with all its numbers.

        0 if that may be recorded now.
        """
        if not self.unstamped:
            return 0
        with self._lock:
            return self.unstamped.unsafe_end(first, end, self._settled_with(first, end))

    def _settled_with(self, first: int, end: int) -> Callable[[int], int]:
        return lambda offset: self._state.settled_to(offset, (first, end))

    def _settle_numbered(self, body: bytes, first: int, end: int) -> None:
        stamps, complete = self.unstamped.due(first, end, self._settled_with(first, end))
        # The stamps last: a number must never be found without its events' settlement.
        self._append_all([body, *map(journal_records.stamped, stamps)])
        for stamp in stamps:
            self._state.stamp(stamp)
        self.unstamped.noted(complete)

    def returned(self, first: int, end: int, attempt: int) -> None:
        """Record that ``[first, end)`` was given back and is to be handed out as ``attempt``."""
        body = journal_records.returned(first, end, attempt)
        with self._lock:
            self._append(body)
            self._state.give_back(first, end, attempt)

    def advanced(
        self, position: Position, unsettled_bytes: int, stamps: Sequence[Stamp] = ()
    ) -> None:
        """Record how far the log has come, and what its producers have published with it."""
        # The position last: recovery looks for stamps only in frames after it, so it must never
        # be found without them.
        bodies = [journal_records.stamped(stamp) for stamp in stamps]
        bodies.append(journal_records.advanced(position, unsettled_bytes))
        with self._lock:
            self._append_all(bodies)
            self._state.advance(position, unsettled_bytes, stamps)

    def stamped(self, stamps: Sequence[Stamp]) -> None:
        """Record what producers have published."""
        with self._lock:
            self._append_all([journal_records.stamped(stamp) for stamp in stamps])
            for stamp in stamps:
                self._state.stamp(stamp)

    def dropped(self, outcome: Outcome, events: int) -> None:
        """Record that events were dropped before they got an offset."""
        body = journal_records.dropped(outcome, events)
        with self._lock:
            self._append(body)
            self._state.drop(outcome, events)

    def remember(self, producers: Mapping[bytes, Accepted]) -> None:
        """Know which numbers of producers are taken; on disk with the next :meth:`snapshot`."""
        with self._lock:
            for producer, accepted in producers.items():
                for first, end in accepted:
                    self._state.stamp(Stamp(producer, end, first))

    # Keeping

    def sync(self) -> None:
        """Return once all that was recorded so far is on the device. Blocks no other call.

        All who wait while one sync runs share the next. After a failure the file is never synced
        again, for the kernel may have dropped what it could not write: the next call writes
        everything anew, to the other file.
        """
        mine = self._recorded
        # One at a time: the kernel tells of a failure once, and two callers would share one answer.
        with self._syncing:
            with self._lock:
                if self._synced >= mine:
                    return
                if self._suspect:
                    self._change_files()
                    return
                fd, recorded = self._fds[0], self._recorded
            try:
                self._disk.sync(fd)
            except OSError:
                self._suspect = True
                raise
            with self._lock:
                self.syncs += 1
                self._synced = max(self._synced, recorded)

    def snapshot(self) -> None:
        """Change files now: everything is on the device, and the next opening is quick."""
        with self._lock:
            self._change_files()

    def state(self) -> JournalState:
        """What the journal says at this moment (a copy)."""
        with self._lock:
            return self._state.copy()

    def close(self) -> None:
        """Close the files as they are; :meth:`snapshot` should go before. Twice is harmless."""
        with self._lock:
            fds, self._fds = self._fds, [-1, -1]
        for fd in fds:
            if fd >= 0:
                self._disk.close(fd)

    # Appending; the lock is held from here on

    def _append(self, body: bytes) -> None:
        if self._end + RECORD_SIZE > self._limit:
            self._make_room()
        self._disk.write(self._fds[0], (sign(self._seed, body),), self._end)
        self._end += RECORD_SIZE
        self._recorded += 1

    def _append_all(self, bodies: Sequence[bytes]) -> None:
        length = RECORD_SIZE * len(bodies)
        if self._end + length > self._limit:
            self._make_room()
        records = b"".join([sign(self._seed, body) for body in bodies])
        self._disk.write(self._fds[0], (records,), self._end)
        self._end += length
        self._recorded += len(bodies)

    def _make_room(self) -> None:
        if self._half_taken:
            self._blank()
        try:
            self._change_files()
        except OSError as error:
            if self._half_taken:
                raise
            # The reserve, and then the file's growth, carry on; the change is tried again.
            self._limit = self._end + RESERVE
            _log.warning("the journal could not change files: %s", error)

    # Changing files

    def _change_files(self) -> None:
        generation = self._generation + 1
        header, payload = encode_snapshot(self._state, self._queue_id, generation)
        fd = self._fds[1]
        start = HEADER_SIZE + len(payload)
        size = self._sized(fd, start)
        # Zeros to the end, or records that an earlier life of the file left there might fit again.
        self._disk.write(fd, [_BLANK, payload, bytes(size - start)], 0)
        self._sync(fd)
        self._take_over(fd, header)
        self._fds.reverse()
        self._generation = generation
        self._seed = journal_records.seed(generation)
        self._end = start
        self._limit = size - RESERVE
        self._suspect = False
        self._synced = self._recorded

    def _sized(self, fd: int, start: int) -> int:
        """Bring the file to its size; a large snapshot, unlike many records, makes it larger."""
        wanted = self._file_size
        if wanted - start < 4 * RESERVE:
            wanted += start
        size = self._disk.size(fd)
        if size < wanted:
            self._disk.allocate(fd, wanted)
        elif size > wanted:
            self._disk.truncate(fd, wanted)
        return wanted

    def _take_over(self, fd: int, header: bytes) -> None:
        # From the first byte of the header on, the next opening may find this file the newer one.
        # Unless it really takes over, it must not stay so while records go to the other.
        self._half_taken = True
        self._limit = 0
        try:
            self._disk.write(fd, [header], 0)
            self._sync(fd)
        except OSError:
            self._blank()
            raise
        self._half_taken = False

    def _blank(self) -> None:
        """Undo half a change of files; until that succeeds, nothing may be appended."""
        fd = self._fds[1]
        self._disk.write(fd, [_BLANK], 0)
        self._sync(fd)
        self._half_taken = False

    def _sync(self, fd: int) -> None:
        self._disk.sync(fd)
        self.syncs += 1


def _create(path: Path, disk: Disk, size: int) -> int:
    """Open a journal file, made and preallocated if need be."""
    fd = disk.open(path, create=True)
    try:
        if disk.size(fd) < size:
            disk.allocate(fd, size)
    except OSError:
        disk.close(fd)
        raise
    return fd


class _Content(NamedTuple):
    """What is in a journal file."""

    state: JournalState
    generation: int
    unreadable: bool


def _newer(contents: Sequence[_Content]) -> int:
    return max(range(len(contents)), key=lambda index: contents[index].generation)


def _read(path: Path, disk: Disk, queue_id: str) -> _Content:
    """Read a file; a fresh state and generation 0 if it is absent, blank or unreadable."""
    try:
        fd = disk.open(path, write=False)
    except FileNotFoundError:
        return _Content(JournalState(), 0, unreadable=False)
    try:
        start = bytes(disk.read(fd, HEADER_SIZE, 0))
        content = _read_snapshot(fd, start, disk, queue_id)
    finally:
        disk.close(fd)
    return content or _Content(JournalState(), 0, unreadable=any(start))


def _read_snapshot(fd: int, start: bytes, disk: Disk, queue_id: str) -> _Content | None:
    header = parse_header(start)
    if header is None:
        return None
    generation, length, checksum = header
    # Only the header vouches for the length: nothing is allocated that the file does not have.
    if length > disk.size(fd) - HEADER_SIZE:
        return None
    state = parse_payload(bytes(disk.read(fd, length, HEADER_SIZE)), checksum, queue_id)
    if state is None:
        return None
    _replay(fd, records_start(length), disk, journal_records.seed(generation), state)
    return _Content(state, generation, unreadable=False)


def _replay(fd: int, at: int, disk: Disk, seed: int, state: JournalState) -> None:
    """Apply the records from byte ``at`` on, piece by piece, for a file may have grown large."""
    while True:
        data = bytes(disk.read(fd, _REPLAY_BYTES, at))
        count = journal_records.replay(data, seed, state)
        at += count * RECORD_SIZE
        if count * RECORD_SIZE < _REPLAY_BYTES:
            return
