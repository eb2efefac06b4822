"""The files that are followed: found by scans, known from before, saved with their positions."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable

from turnlane.inputs.files.publisher import LinePublisher
from turnlane.inputs.files.state import (
    Entry,
    FileKey,
    FilesSettings,
    Mark,
    PositionsFile,
    Progress,
    StartAt,
    base_id,
    fresh_id,
    latest_id,
)
from turnlane.inputs.files.tail import Sight, Tail, Watch, find_inode

log = logging.getLogger(__name__)


class Roster:
    """All tails, and the entries of files that are not followed at the moment. For one thread."""

    def __init__(
        self, settings: FilesSettings, watch: Watch, publisher: LinePublisher, file: PositionsFile
    ) -> None:
        self.tails: dict[FileKey, Tail] = {}
        self._settings = settings
        self._watch = watch
        self._publisher = publisher
        self._file = file
        self._entries: dict[FileKey, Entry] = {entry.key: entry for entry in file.load()}
        self._first_scan = True
        self._unsaved: set[Tail] = set()
        """Tails that know who they are, and may publish once that is saved."""
        self._moved: set[Tail] = set()
        """Tails whose acked position has moved since it was saved."""
        self._moving = threading.Lock()
        self._retired: list[Tail] = []
        """Tails that are no longer followed, while acks for them are still to come."""
        self._save_failed = False

    # ── scanning ─────────────────────────────────────────────────────────────────────────────────

    def scan(self) -> None:
        """Find new files, renamed files, and files without a name."""
        found = self._watch.scan()
        if self._first_scan:
            self._rekey(found)
        for key, sight in found.items():
            tail = self.tails.get(key)
            if tail is None:
                tail = self._adopt(sight)
            if tail is not None:
                tail.sighted(sight)
        for tail in [tail for key, tail in self.tails.items() if key not in found]:
            self._miss(tail)
        if self._first_scan:
            self._look_for(set(self._entries) - set(found))
        self._first_scan = False

    def _rekey(self, found: dict[FileKey, Sight]) -> None:
        """Device numbers may change with every boot; then path and inode tell, and the content."""
        places = {
            (entry.path, key.inode): key for key, entry in self._entries.items() if key not in found
        }
        for key, sight in found.items():
            old = places.get((sight.path, key.inode))
            if key not in self._entries and old is not None:
                entry = self._entries.pop(old)
                entry.key = key
                self._entries[key] = entry

    def _adopt(self, sight: Sight) -> Tail | None:
        entry = self._entries.get(sight.key)
        if entry is not None:
            return self._resume(entry, sight.path)
        older = self._settings.ignore_older
        if older is not None and time.time() - sight.status.st_mtime > older:
            return None
        source = sight.path.encode(errors="surrogateescape").decode(errors="replace")
        tail = Tail(sight.key, sight.path, source)
        tail.recover = self._first_scan and not self._file.complete
        fresh = self._first_scan and not self._file.found and not self._file.spoilt
        if fresh and self._settings.start_at is StartAt.END:
            tail.position = sight.status.st_size
        self.tails[tail.key] = tail
        return tail

    def _resume(self, entry: Entry, path: str) -> Tail:
        tail = Tail(entry.key, path, entry.source)
        tail.position = self._publisher.position(entry)
        tail.id, tail.head, tail.claim = entry.id, entry.head, entry
        tail.progress = Progress(entry.offset, entry.before)
        self.tails[tail.key] = tail
        return tail

    def _miss(self, tail: Tail) -> None:
        """The file has no name: renamed or deleted. An open file is read to its end."""
        if tail.nameless_since is None:
            tail.nameless_since = time.monotonic()
        if tail.fd is None:
            directory = os.path.dirname(tail.path)  # noqa: PTH120 - paths are text here
            # Of a file that had no line yet nothing is known by which to tell it again.
            strange = tail.id is None and tail.read_at is not None
            path = None if strange else find_inode(directory, tail.key.inode)
            if path is None:
                self.drop(tail)
            else:
                tail.path = path

    def _look_for(self, missing: Iterable[FileKey]) -> None:
        """Files that were renamed between two scans: the rest of them has to be read."""
        for key in missing:
            entry = self._entries[key]
            directory = os.path.dirname(entry.path)  # noqa: PTH120 - paths are text here
            path = find_inode(directory, key.inode)
            if path is not None:
                self._resume(entry, path).nameless_since = time.monotonic()

    def drop(self, tail: Tail, *, forget: bool = False) -> None:
        """Follow a file no longer; ``forget`` it if it does not exist any more."""
        tail.close()
        self.tails.pop(tail.key, None)
        self._publisher.forget(tail)
        if forget:
            self._entries.pop(tail.key, None)
        elif not tail.progress.settled:
            self._retired.append(tail)

    # ── who a file is ────────────────────────────────────────────────────────────────────────────

    def introduce(self, tail: Tail, head: Mark) -> None:
        """Give a tail its id, from its first line. It publishes once that is saved."""
        queue = self._publisher.queue
        base = base_id(self._settings.label, tail.key, head)
        known = latest_id(base, queue) if tail.recover and queue.has_numbered_producers else None
        tail.recover = False
        tail.head = head
        tail.id = known or fresh_id(base, queue)
        entry = self._entry(tail)
        if known is not None:
            tail.position = self._publisher.position(entry)
            log.info("%s: the queue has it up to byte %d", tail.path, tail.position)
        tail.stand_at(tail.position)
        tail.progress = Progress(tail.position, Mark.of(tail.before))
        self._entries[tail.key] = self._entry(tail)
        self._unsaved.add(tail)

    def may_publish(self, tail: Tail) -> bool:
        """Whether the tail's id is saved."""
        return tail.id is not None and tail not in self._unsaved

    def _entry(self, tail: Tail) -> Entry:
        assert tail.id is not None
        return Entry(
            tail.key,
            tail.id,
            tail.path,
            tail.source,
            tail.head,
            tail.progress.offset,
            tail.progress.before,
            time.time(),
        )

    # ── saving ───────────────────────────────────────────────────────────────────────────────────

    def moved(self, tail: Tail) -> None:
        """A tail's acked position has moved. From any thread."""
        with self._moving:
            self._moved.add(tail)

    @property
    def must_save(self) -> bool:
        """Whether a file waits for being saved before it can publish."""
        return bool(self._unsaved) or not self._file.found

    @property
    def has_moved(self) -> bool:
        """Whether there is anything new to save."""
        return bool(self._moved or self._unsaved)

    def save(self) -> bool:
        """Write the positions file; false if that fails, which is tried again."""
        with self._moving:
            moved, self._moved = self._moved, set()
        self._refresh()
        try:
            # A file that the queue may know stays to be asked about after a restart, too.
            asked = not self._first_scan and not any(t.recover for t in self.tails.values())
            self._file.save(list(self._entries.values()), complete=asked)
        except OSError as error:
            with self._moving:
                self._moved |= moved
            if not self._save_failed:
                log.warning("input %s cannot save positions: %s", self._settings.label, error)
            self._save_failed = True
            return False
        self._save_failed = False
        self._unsaved.clear()
        return True

    def _refresh(self) -> None:
        for tail in (*self._retired, *self.tails.values()):
            # A file that was not compared with its entry yet leaves the entry alone.
            if tail.id is not None and tail.claim is None:
                self._entries[tail.key] = self._entry(tail)
        self._retired = [tail for tail in self._retired if not tail.progress.settled]
        oldest = time.time() - self._settings.forget_after
        for key, entry in list(self._entries.items()):
            if entry.seen < oldest and key not in self.tails:
                del self._entries[key]
