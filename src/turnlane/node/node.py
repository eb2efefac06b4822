"""A node: the queues of one data directory, and what belongs to them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import (
    ConfigError,
    DirectoryUnusable,
    EventsLost,
    NoSuchQueue,
    NotAQueue,
    QueueExists,
    StorageFailed,
)
from turnlane.events import BASE_SCHEMA
from turnlane.node.breakers import Breakers
from turnlane.node.commit_recovery import identity
from turnlane.node.commits import Commits
from turnlane.node.copy import Copying, CopyingEvents, CopyingPlaces
from turnlane.node.event_refs import can_refer
from turnlane.node.lanes import Lanes
from turnlane.node.leases import Leases
from turnlane.node.staging import Contents, Stage, Staging
from turnlane.queues import open_queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import ON_DISK, Kind, QueueSettings
from turnlane.runtime import Closing, give_back
from turnlane.storage.directory import QueueDirectory, lock
from turnlane.storage.disk_io import Disk
from turnlane.storage.inspect import Stretch, Walk
from turnlane.storage.offline import Inspection

# ── audit ──
# The audit: who has thrown what away, a line of JSON each, for whoever asks later.

log = logging.getLogger(__name__)

FILE: Final = "audit.jsonl"


class Audit:
    """Lines in a file of the node's data directory. Safe to use from any thread."""

    def __init__(self, data: Path) -> None:
        self.path = data / FILE
        self._lock = threading.Lock()

    def note(self, what: str, **about: Any) -> None:
        """Write a line, on the device once this returns. Raises ``StorageFailed``."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "what": what, **about}, ensure_ascii=False) + "\n"
        try:
            with self._lock, self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageFailed(f"cannot write {FILE}: {error.strerror or error}") from error
        log.warning("audit: %s", line.rstrip())


# ── dropped ──
# Dropped queues: what is in them must not come back, whenever the process ends.
#
# The node's list of queues says which are to go; then the directory gets a name that no queue
# has,
# and is deleted, which may take long. Whichever of this was not done, the next start does.


PREFIX: Final = ".dropped-"


class Dropped:
    """The directories of dropped queues, beside those of the others."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk
        self.ids: dict[str, str] = {}
        """By name, the identity of queues that are to go and whose directory may still be there."""

    def put_away(self, name: str) -> Path | None:
        """Let nobody find the queue again, if it is to go; returns what is left to delete.

        Raises ``StorageFailed``.
        """
        path = self._directory / name
        away = None
        if name not in self.ids:
            return None
        if _identity(path, self._disk) == self.ids[name]:  # else it is another one by now
            away = path.with_name(PREFIX + uuid.uuid4().hex)
            try:
                self._disk.rename(path, away)
                self._disk.sync_directory(self._directory)
            except OSError as error:
                message = f"cannot put {path} away: {error.strerror or error}"
                raise StorageFailed(message) from error
        del self.ids[name]
        return away

    def sweep(self) -> None:
        """Delete what an earlier process has put away and not deleted."""
        for path in self._directory.glob(PREFIX + "*"):
            delete(path)


def _identity(path: Path, disk: Disk) -> str | None:
    try:
        return QueueDirectory.read_only(path, disk).queue_id
    except NotAQueue:
        return None


def delete(path: Path) -> None:
    """Delete what was put away. If that cannot be, it is said, and left to the next start."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("a dropped queue is left to be deleted by the next start: %s", error)


# ── forgotten ──
# Queues that a node has on disk and does not open: no longer configured, or of another kind now.
#
# Nobody reads what waits in them, and nothing would ever say so.


class Forgotten(NamedTuple):
    """A queue that is not open and still holds events."""

    path: Path
    pending: int


def forgotten(directory: Path, opened: Collection[Path], disk: Disk) -> Iterator[Forgotten]:
    """The queues below ``directory`` that hold events, those that are open left out."""
    try:
        names = disk.listing(directory)
    except FileNotFoundError:
        return  # no queue was ever on disk
    for path in sorted(directory / name for name in names):
        if path in opened or not path.is_dir() or path.name.startswith(PREFIX):
            continue
        try:
            pending = _pending(Inspection(path, disk))
        except (NotAQueue, OSError) as error:
            log.warning("cannot tell whether events wait in %s: %s", path, error)
            continue
        if pending:
            yield Forgotten(path, pending)


def _pending(queue: Inspection) -> int:
    """How many events are not settled. Reads one chunk, however many there are."""
    low = queue.low(queue.state)
    end = max(queue.state.floor, _end(queue))
    return end - low - queue.settled.overlap(low, end) if end > low else 0


def _end(queue: Inspection) -> int:
    """The end of the log: offsets are consecutive, so the last chunk knows it."""
    last = [chunk for chunk in queue.chunks if chunk.is_last]
    walk = Walk(queue.disk, last, lambda _first, _end: False)
    return max((item.end for item in walk if isinstance(item, Stretch)), default=0)


# ── housekeeping ──
# What a node does now and then: forget old stages, place dead letters, give memory back.


INTERVAL: Final = 2.0
DRAIN_SECONDS: Final = 5.0
"""How often dead letters that wait in memory are offered to their queues."""
STAGE_SECONDS: Final = 24 * 3600.0
"""A stage that was neither committed nor aborted after so long belongs to a task that died. It may
have to wait for the slowest task of its batch, which takes hours longer."""


class Housekeeping(Closing):
    """A thread that tidies up until it is closed."""

    def __init__(
        self,
        staging: Staging,
        queues: Callable[[], Iterable[BufferedQueue]],
        drain: Callable[[], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._staging = staging
        self._queues = queues
        self._drain = drain
        self._clock = clock
        self._drained_at = clock.monotonic()
        self._tidied_at = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turnlane-housekeeping", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL):
            try:
                self.tidy()
            except OSError as error:
                log.warning("could not tidy up, trying again: %s", error)
            except Exception:
                log.exception("could not tidy up, trying again")

    def tidy(self) -> None:
        """Do it now."""
        if self._clock.monotonic() - self._drained_at >= DRAIN_SECONDS:
            self._drained_at = self._clock.monotonic()
            self._drain()
        gone = self._staging.discard_older(STAGE_SECONDS)
        if gone:
            log.warning("%d stages were given up: nobody committed them", gone)
        moved = sum(queue.end + queue.low for queue in self._queues())
        if moved != self._tidied_at:
            self._tidied_at = moved
            give_back()


REGISTRY = "queues.json"
"""The queues made at run time, so that they are there again after a restart."""
DROPPED = "dropped"
"""In place of a queue's knobs: it is to go, and this is its identity."""
BY_PIPELINE = "by_pipeline"
"""Beside a queue's knobs: it was made for an action, and nobody else is known to read it."""


class Node(Closing):
    """The queues of one data directory, held by one process.

    ``instance`` is new at every start: a client that sees another one knows that whatever was
    accepted and not persisted may be gone.
    """

    def __init__(
        self,
        data: Path,
        queues: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk | None = None,
    ) -> None:
        """Open the directory and its queues, and finish what a crash has interrupted.

        ``queues`` are those of the configuration, knobs by name; ``disk`` is their default kind.
        """
        self.data = data
        self.instance = uuid.uuid4().hex
        self.closing = False
        self._clock = clock
        self._disk = disk or Disk()
        self._lock = threading.RLock()
        self._queues: dict[str, BufferedQueue] = {}
        self._configured = frozenset(queues or ())
        self._by_pipeline: set[str] = set()
        self._dropped = Dropped(data / "queues", self._disk)
        with contextlib.ExitStack() as opened:
            opened.callback(self._disk.close, self._held(data))
            self.staging = Staging(data / "staging", self._disk)
            self.commits = Commits(data / "commits", self._disk, self.staging, self.queue)
            opened.callback(self.commits.close)  # it ends once the queues have
            opened.callback(self._close_queues)
            registered = self._registered()
            self._dropped.sweep()
            for name, knobs in {**registered, **(queues or {})}.items():
                self._open(self._placed(name, knobs))
            self.lanes = Lanes()
            self.breakers = Breakers()
            self.audit = Audit(data)
            recovered = self.commits.recover()
            self.leases = opened.enter_context(Leases())
            opened.callback(self.commits.overflow.close)
            opened.enter_context(
                Housekeeping(
                    self.staging, lambda: self.queues().values(), self.commits.overflow.drain, clock
                )
            )
            self._let_go = opened.pop_all().close
        self._tell_forgotten()
        log.info("node %s: %d queues, %d commits finished", data, len(self._queues), recovered)

    def _tell_forgotten(self) -> None:
        opened = [queue.settings.path for queue in self._queues.values() if queue.settings.path]
        for path, pending in forgotten(self.data / "queues", opened, self._disk):
            log.warning(
                "%s holds %d events that nobody reads: there is no queue %r on disk in the "
                "configuration; add it to read them, or delete the directory",
                path,
                pending,
                path.name,
            )

    def without_action(self) -> Iterator[tuple[str, int]]:
        """The queues with events that pipelines have made and the configuration does not name."""
        for name in sorted(self._by_pipeline - self._configured):
            if name in self._queues and (pending := self._queues[name].stats().ledger.pending):
                yield name, pending

    def _held(self, data: Path) -> int:
        try:
            data.mkdir(parents=True, exist_ok=True)
            return lock(data, self._disk)
        except OSError as error:
            raise DirectoryUnusable(f"{data}: {error.strerror or error}") from error

    # ── queues ───────────────────────────────────────────────────────────────────────────────────

    def queue(self, name: str) -> BufferedQueue:
        """The queue of this name. Raises ``NoSuchQueue``."""
        queue = self._queues.get(name)
        if queue is None:
            known = ", ".join(sorted(self._queues)) or "none"
            raise NoSuchQueue(f"there is no queue {name!r}; there are: {known}")
        return queue

    def queues(self) -> dict[str, BufferedQueue]:
        """All queues by name."""
        with self._lock:
            return dict(self._queues)

    def create(self, name: str, **knobs: Any) -> BufferedQueue:
        """Make a queue and remember it; one that is there with the same settings is fine.

        Raises ``QueueExists``, ``ConfigError``, ``StorageFailed``.
        """
        return self._create(name, knobs, by_pipeline=False)

    def create_for_action(self, name: str, **knobs: Any) -> BufferedQueue:
        """The same for a pipeline, whose action may be gone one day while events still wait."""
        return self._create(name, knobs, by_pipeline=True)

    def _create(self, name: str, knobs: Mapping[str, Any], *, by_pipeline: bool) -> BufferedQueue:
        settings = self._placed(name, knobs)
        away = None
        with self._lock:
            queue = self._queues.get(name)
            if queue is not None and queue.settings != settings:
                raise QueueExists(f"there is a queue {name!r} with other settings")
            if queue is None:
                away = self._dropped.put_away(name)
                queue = self._open(settings)
                (self._by_pipeline.add if by_pipeline else self._by_pipeline.discard)(name)
                try:
                    self._remember()
                except StorageFailed:
                    del self._queues[name]
                    queue.close()
                    raise
        if away is not None:
            delete(away)
        return queue

    def drop(self, name: str) -> None:
        """Close a queue made at run time and delete it with everything in it.

        A commit that was under way goes on without it. Raises ``NoSuchQueue``, ``ConfigError``,
        ``StorageFailed``.
        """
        with self._lock:
            queue = self.queue(name)
            if name in self._configured:
                raise ConfigError("queues", f"{name!r} is in the configuration: remove it there")
            del self._queues[name]
            if queue_id := identity(queue):
                self._dropped.ids[name] = queue_id
            try:
                self._remember()
            except StorageFailed:
                self._queues[name] = queue
                self._dropped.ids.pop(name, None)
                raise
            with contextlib.suppress(EventsLost):  # that is what was asked for
                queue.close()
            away = self._dropped.put_away(name)
        if away is not None:
            delete(away)  # without the lock: there may be much of it

    def stage(
        self, name: str, schema: pa.Schema, spare: int = 0, *, diskless: bool = False
    ) -> Stage:
        """Begin to stage blocks for a queue; what it could never take is refused here.

        If it is full when they are committed, ``spare`` of them may wait in memory; ``diskless``:
        if the disk is full or fails, too. Raises ``NoSuchQueue``, ``SchemaMismatch``,
        ``StorageFailed``.
        """
        vet = self.queue(name).producer().check_publishable
        ready = vet(pa.RecordBatch.from_pylist([], schema))
        return self.staging.stage(name, ready.schema, vet, spare, diskless=diskless)

    def copying(self, source: BufferedQueue, into: Sequence[str]) -> Copying:
        """Begin to copy events of a queue: by their places, where it is sure to keep them.

        Raises ``NoSuchQueue``.
        """
        abort = self.commits.abort
        if all(can_refer(source, self.queue(name)) for name in into):
            return CopyingPlaces(source, into, self._refer, abort)
        return CopyingEvents(source, into, self.stage, abort)

    def _refer(self, name: str, source: BufferedQueue) -> Stage:
        self.queue(name).check_columns(BASE_SCHEMA)
        contents = Contents(name, BASE_SCHEMA, 0, 0, source=source.name, source_id=identity(source))
        return self.staging.begun(contents)

    def _placed(self, name: str, knobs: Mapping[str, Any]) -> QueueSettings:
        """Settings with a place below the data directory, for kinds that have one."""
        if "path" in knobs:
            raise ConfigError("path", "a node keeps its queues below its own data directory")
        settings = QueueSettings.of(kind=Kind.MEMORY, name=name)  # the name, before a path
        kind = str(knobs.get("kind", Kind.DISK))
        place = {"path": self.data / "queues" / settings.name} if kind in ON_DISK else {}
        return QueueSettings.of(**{**knobs, "name": name, "kind": kind, **place})

    def _open(self, settings: QueueSettings) -> BufferedQueue:
        if settings.kind not in (Kind.MEMORY, *ON_DISK):
            raise ConfigError("kind", f"a node has no {settings.kind} queues")
        queue = open_queue(settings, clock=self._clock, disk=self._disk)
        assert isinstance(queue, BufferedQueue)
        self._queues[settings.name] = queue
        return queue

    def _registered(self) -> dict[str, dict[str, Any]]:
        """The queues made at run time; those that were being dropped are, now."""
        path = self.data / REGISTRY
        try:
            entries: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise NotAQueue(f"{path}: {error}; move it away to start without its queues") from None
        gone = {name: entry[DROPPED] for name, entry in entries.items() if DROPPED in entry}
        self._dropped.ids.update(gone)
        for name in gone:
            self._dropped.put_away(name)
        found = {name: entry for name, entry in entries.items() if name not in gone}
        self._by_pipeline = {name for name, entry in found.items() if entry.pop(BY_PIPELINE, False)}
        return found

    def _remember(self) -> None:
        entries = {
            name: queue.settings.model_dump(
                mode="json", exclude_unset=True, exclude={"path", "name"}
            )
            | ({BY_PIPELINE: True} if name in self._by_pipeline else {})
            for name, queue in self._queues.items()
            if name not in self._configured
        }
        entries |= {name: {DROPPED: queue_id} for name, queue_id in self._dropped.ids.items()}
        try:
            self._disk.write_whole(self.data / REGISTRY, json.dumps(entries, indent=1).encode())
        except OSError as error:
            raise StorageFailed(f"cannot write {REGISTRY}: {error.strerror or error}") from error

    # ── closing ──────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Give leased batches back and close the queues; what is in them stays."""
        self.closing = True
        self.commits.stop()
        self._let_go()

    def _close_queues(self) -> None:
        for queue in self.queues().values():
            try:
                queue.close()
            except Exception:
                log.exception("queue %s did not close well", queue.name)
