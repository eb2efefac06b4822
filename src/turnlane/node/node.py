"""The node: one process that owns a data directory with its queues.

A node opens the configured queues and the queues that were created at run time
(``queues.json``), finishes the commits of an earlier process, and holds leases, lanes and breakers.

A dropped queue must not come back, even if the process ends during the drop. So ``queues.json``
names the queue as dropped first. Then its directory is renamed to a name that no queue has, and is
deleted, which may take long. The next start does the steps that are missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import google_crc32c
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
    TurnlaneError,
)
from turnlane.events import BASE_SCHEMA
from turnlane.logs import get_logger
from turnlane.memory import compute_memory_share, measure_process_memory, release_free_memory
from turnlane.node.breakers import Breakers
from turnlane.node.commits import Commits
from turnlane.node.event_refs import CopyByReference, CopyByValue, QueueCopy, can_stage_references
from turnlane.node.lanes import Lanes
from turnlane.node.leases import Leases
from turnlane.node.staging import Stage, StageContents, Staging
from turnlane.queues import open_buffered_queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import ON_DISK, Kind, QueueSettings
from turnlane.runtime import Closeable, PeriodicThread
from turnlane.serving.body_budget import BodyBudget
from turnlane.storage.directory import LOCK_FILE, Quarantine, QueueDirectory, lock_directory
from turnlane.storage.disk_io import Disk, get_file_mode, share_with_group
from turnlane.storage.inspection import QueueInspection
from turnlane.storage.walk import IntactFrame, SegmentWalk

log = get_logger(__name__)

AUDIT_FILE: Final = "audit.jsonl"
DROPPED_PREFIX: Final = ".dropped-"
"""The prefix of the directories of dropped queues."""
REGISTRY = "queues.json"
"""The queues that were created at run time, so that a restart opens them again."""
REGISTRY_CHECKSUM = "queues.json.crc"
"""The CRC-32C of ``queues.json``, 8 hex digits. Without this file the content is not checked."""
DROPPED = "dropped"
"""The key of an entry for a dropped queue. Its value is the id of the queue."""
BY_PIPELINE = "by_pipeline"
"""The key of an entry for a queue of an action, which may have no other reader."""

INTERVAL: Final = 2.0
"""Seconds between two runs of the housekeeping."""
DRAIN_SECONDS: Final = 5.0
"""How often dead letters that wait in memory are offered to their queues."""
STAGE_SECONDS: Final = 24 * 3600.0
"""After this time a stage that was neither committed nor aborted belongs to a dead task. A stage
may have to wait hours for the slowest task of its batch."""


class AuditLog:
    """A file of the data directory that records who has purged events, one JSON line each.

    Safe to use from any thread.
    """

    def __init__(self, data: Path) -> None:
        self.path = data / AUDIT_FILE
        self._lock = threading.Lock()

    def record(self, what: str, **about: Any) -> None:
        """Write a line and sync it. Raises ``StorageFailed``."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "what": what, **about}, ensure_ascii=False) + "\n"
        try:
            with self._lock, open(self.path, "a", encoding="utf-8", opener=_open_private) as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageFailed(f"cannot write {AUDIT_FILE}: {error.strerror or error}") from error
        log.warning("audit.recorded", what=what, **about)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, get_file_mode(Path(path).parent))


class DroppedQueues:
    """The directories of dropped queues, in the directory of all queues."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk
        self.ids: dict[str, str] = {}
        """The ids of dropped queues, by name, whose directories may still exist."""

    def set_aside(self, name: str) -> Path | None:
        """Rename the directory of a dropped queue; return the path to delete, if there is one.

        Raises ``StorageFailed``.
        """
        path = self._directory / name
        away = None
        if name not in self.ids:
            return None
        if _read_queue_id(path, self._disk) == self.ids[name]:  # else it is a newer queue
            away = path.with_name(DROPPED_PREFIX + uuid.uuid4().hex)
            try:
                self._disk.rename(path, away)
                self._disk.sync_directory(self._directory)
            except OSError as error:
                message = f"cannot rename {path} to {away.name}: {error.strerror or error}"
                raise StorageFailed(message) from error
        del self.ids[name]
        return away

    def sweep(self) -> None:
        """Delete the dropped queues of an earlier process."""
        for path in self._directory.glob(DROPPED_PREFIX + "*"):
            delete_dropped_queue(path)


def load_registry(data: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of ``queues.json`` as they are, and what is wrong with the file."""
    try:
        text = (data / REGISTRY).read_bytes()
    except FileNotFoundError:
        is_lost = (data / REGISTRY_CHECKSUM).exists()
        return {}, ["the file is missing"] if is_lost else []
    except OSError as error:
        return {}, [str(error.strerror or error)]
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, [str(error)]
    if not isinstance(entries, dict):
        return {}, ["the file is no JSON object"]
    try:
        checksum = (data / REGISTRY_CHECKSUM).read_bytes()
    except OSError:
        checksum = None
    is_wrong = checksum is not None and checksum != compute_registry_crc(text)
    return entries, ["the checksum is wrong"] if is_wrong else []


def compute_registry_crc(data: bytes) -> bytes:
    """Return the content of ``queues.json.crc``."""
    return b"%08x\n" % google_crc32c.value(data)


def _read_queue_id(path: Path, disk: Disk) -> str | None:
    try:
        return QueueDirectory.read_only(path, disk).queue_id
    except NotAQueue:
        return None


def delete_dropped_queue(path: Path) -> None:
    """Delete the directory of a dropped queue. After an error the next start tries it again."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning(
            "queue.delete_failed", path=path, error=error, hint="the next start tries it again"
        )


def warn_of_orphan_queues(directory: Path, opened: Collection[Path], disk: Disk) -> None:
    """Warn about the queues in ``directory`` that hold events and are not among ``opened``.

    Such a queue is not in the configuration any more, or has another kind now.
    """
    try:
        names = disk.listing(directory)
    except FileNotFoundError:
        return  # no queue was ever on disk
    for path in sorted(directory / name for name in names):
        if path in opened or not path.is_dir() or path.name.startswith(DROPPED_PREFIX):
            continue
        try:
            pending = _count_pending(QueueInspection(path, disk))
        except (NotAQueue, OSError) as error:
            log.warning("queue.orphan_unreadable", path=path, error=error)
            continue
        if pending:
            log.warning(
                "queue.orphan_found",
                path=path,
                events=pending,
                hint=f"no queue reads these events: configure a queue {path.name!r} on disk, or "
                "delete the directory",
            )


def _count_pending(queue: QueueInspection) -> int:
    """Return the number of unsettled events.

    Offsets are consecutive, so only the last segment has to be read.
    """
    last = [segment for segment in queue.segments if segment.is_last]
    walk = SegmentWalk(queue.disk, last, lambda _first, _end: False)
    ends = [item.end for item in walk if isinstance(item, IntactFrame)]
    low, end = queue.low(queue.state), max(queue.state.floor, *ends, 0)
    return end - low - queue.settled.overlap(low, end) if end > low else 0


class Housekeeping(Closeable):
    """A thread for periodic work: discard old stages, place dead letters, free memory."""

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
        self._is_above_limit = False
        self._unmeasured: set[str] = set()
        """The queues whose bounds could not be computed at the last attempt."""
        self._thread = PeriodicThread("turnlane-housekeeping", self._try_to_tidy, INTERVAL)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.close()

    def _try_to_tidy(self) -> None:
        try:
            self.tidy()
        except OSError as error:
            log.warning("housekeeping.failed", error=error, retry_seconds=INTERVAL)
        except Exception:
            log.exception("housekeeping.failed", retry_seconds=INTERVAL)

    def tidy(self) -> None:
        """Do the work now. Raises ``OSError``."""
        if self._clock.monotonic() - self._drained_at >= DRAIN_SECONDS:
            self._drained_at = self._clock.monotonic()
            self._drain()
            for queue in self._queues():
                self._update_bounds(queue)
        gone = self._staging.discard_older(STAGE_SECONDS)
        if gone:
            log.warning("staging.stages_expired", stages=gone, hint="no task committed them")
        for queue in self._queues():
            queue.stats()  # a sample for the rates in and out
        moved = sum(queue.end + queue.low for queue in self._queues())
        if moved != self._tidied_at:
            self._tidied_at = moved
            release_free_memory()
            self._check_memory()

    def _update_bounds(self, queue: BufferedQueue) -> None:
        """Compute the bounds of a queue; log once in an outage that its disk is not measured."""
        try:
            queue.update_bounds()
        except TurnlaneError as error:
            if queue.name not in self._unmeasured:
                hint = "the queue keeps its bounds until its disk can be measured"
                log.warning("queue.bounds_not_updated", queue=queue.name, error=error, hint=hint)
            self._unmeasured.add(queue.name)
        else:
            self._unmeasured.discard(queue.name)

    def _check_memory(self) -> None:
        """Log when the process passes its memory limit, each time."""
        used, limit = measure_process_memory(), compute_memory_share(1.0)
        if used > limit and not self._is_above_limit:
            log.warning(
                "node.memory_above_limit",
                used=used,
                limit=limit,
                hint="the limit is node.memory_limit, or that of the system: lower the limits of "
                "the queues, or node.flight.max_memory and node.http.max_memory",
            )
        self._is_above_limit = used > limit


class Node(Closeable):
    """The queues of one data directory, which one process owns.

    ``instance`` is new at every start. A client that sees another instance knows that events that
    were accepted and not persisted may be lost.
    """

    def __init__(
        self,
        data: Path,
        queues: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk | None = None,
        group: str | None = None,
    ) -> None:
        """Open the directory and its queues, and finish the commits that a crash interrupted.

        ``queues`` has the settings of the configured queues by name; the default kind is ``disk``.
        ``group`` may read the data directory; by default nobody but its owner may.
        """
        self.data = data
        self.instance = uuid.uuid4().hex
        self.closing = False
        self.body_budget = BodyBudget()
        self._clock = clock
        self._disk = disk or Disk()
        self._lock = threading.RLock()
        self._queues: dict[str, BufferedQueue] = {}
        self._configured = frozenset(queues or ())
        self._by_pipeline: set[str] = set()
        self._unopened: dict[str, tuple[Mapping[str, Any], str]] = {}
        """Queues that were created at run time and cannot be opened: their knobs, and why."""
        self._is_registry_damaged = False
        self._dropped = DroppedQueues(data / "queues", self._disk)
        with contextlib.ExitStack() as opened:
            try:
                self._create_directories(group)
                opened.callback(self._disk.close, lock_directory(data, self._disk))
            except OSError as error:
                raise DirectoryUnusable(f"{data}: {error.strerror or error}") from error
            self.staging = Staging(data / "staging", self._disk)
            self.commits = Commits(data / "commits", self._disk, self.staging, self.queue)
            opened.callback(self.commits.close)  # after the queues are closed
            opened.callback(self._close_queues)
            registered = self._read_registry()
            self._dropped.sweep()
            for name, knobs in {**registered, **(queues or {})}.items():
                try:
                    self._open(self._build_settings(name, knobs))
                except (TurnlaneError, OSError) as error:
                    if name in self._configured:
                        raise
                    self._keep_unopened(name, knobs, error)
            if self._is_registry_damaged:
                self._replace_registry()
            self.lanes = Lanes()
            self.breakers = Breakers()
            self.audit = AuditLog(data)
            recovered = self.commits.recover()
            self.leases = opened.enter_context(Leases())
            opened.callback(self.commits.overflow.close)
            opened.enter_context(
                Housekeeping(
                    self.staging, lambda: self.queues().values(), self.commits.overflow.drain, clock
                )
            )
            self._close_all = opened.pop_all().close
        paths = [queue.settings.path for queue in self._queues.values() if queue.settings.path]
        paths += [data / "queues" / name for name in self._unopened]
        warn_of_orphan_queues(data / "queues", paths, self._disk)
        log.info("node.started", data=data, queues=len(self._queues), recovered_commits=recovered)

    def _create_directories(self, group: str | None) -> None:
        parts = [self.data / name for name in ("queues", "staging", "commits")]
        try:
            for each in (self.data, *parts):
                self._disk.create_directory(each)
                if group is not None:
                    share_with_group(each, group)
        except (LookupError, PermissionError) as error:
            if group is None:
                raise
            what = f"{self.data} cannot get the group {group!r}: {error}"
            hint = "name a group of this machine that the user of the node belongs to"
            raise ConfigError("node.group", f"{what}; {hint}") from None
        for each in parts:  # Older versions let everybody read them.
            if each.stat().st_mode & 0o007:
                each.chmod(0o700)

    def list_queues_without_action(self) -> Iterator[tuple[str, int]]:
        """Yield the queues with events that a pipeline created and the configuration lacks."""
        for name in sorted(self._by_pipeline - self._configured):
            if name in self._queues and (pending := self._queues[name].stats().ledger.pending):
                yield name, pending

    # ── queues ───────────────────────────────────────────────────────────────────────────────────

    def queue(self, name: str) -> BufferedQueue:
        """Return the queue of this name. Raises ``NoSuchQueue``.

        Raises ``StorageFailed`` for a queue that could not be opened when the node started.
        """
        queue = self._queues.get(name)
        if queue is None and name in self._unopened:
            raise StorageFailed(
                f"queue {name!r} could not be opened: {self._unopened[name][1]}; correct this and "
                "restart the node, or drop the queue"
            )
        if queue is None:
            known = ", ".join(sorted(self._queues)) or "none"
            raise NoSuchQueue(f"there is no queue {name!r}; there are: {known}")
        return queue

    def queues(self) -> dict[str, BufferedQueue]:
        """Return all queues by name."""
        with self._lock:
            return dict(self._queues)

    def create(self, name: str, **knobs: Any) -> BufferedQueue:
        """Create a queue that survives a restart, or return the one with the same settings.

        Raises ``QueueExists``, ``ConfigError``, ``StorageFailed``: also for a queue that could not
        be opened when the node started.
        """
        return self._create(name, knobs, by_pipeline=False)

    def create_for_action(self, name: str, **knobs: Any) -> BufferedQueue:
        """Create a queue for an action of a pipeline; see :meth:`list_queues_without_action`."""
        return self._create(name, knobs, by_pipeline=True)

    def _create(self, name: str, knobs: Mapping[str, Any], *, by_pipeline: bool) -> BufferedQueue:
        settings = self._build_settings(name, knobs)
        away = None
        with self._lock:
            queue = self.queue(name) if name in self._unopened else self._queues.get(name)
            if queue is not None and queue.settings != settings:
                raise QueueExists(f"queue {name!r} exists with other settings")
            if queue is None:
                away = self._dropped.set_aside(name)
                queue = self._open(settings)
                (self._by_pipeline.add if by_pipeline else self._by_pipeline.discard)(name)
                try:
                    self._write_registry()
                except StorageFailed:
                    del self._queues[name]
                    queue.close()
                    raise
        if away is not None:
            delete_dropped_queue(away)
        return queue

    def drop(self, name: str) -> None:
        """Close a queue that was created at run time, and delete it with all its events.

        A commit that is in progress continues without it. The directory of a queue that could not
        be opened is moved to ``quarantine/`` instead. Raises ``NoSuchQueue``, ``ConfigError``,
        ``StorageFailed``, and ``DirectoryLocked`` if a tool works on such a directory.
        """
        with self._lock:
            if name in self._unopened:
                self._drop_unopened(name)
                return
            queue = self.queue(name)
            if name in self._configured:
                raise ConfigError("queues", f"{name!r} is in the configuration: remove it there")
            del self._queues[name]
            if queue_id := queue.stored_id:
                self._dropped.ids[name] = queue_id
            try:
                self._write_registry()
            except StorageFailed:
                self._queues[name] = queue
                self._dropped.ids.pop(name, None)
                raise
            with contextlib.suppress(EventsLost):  # the caller wants to lose them
                queue.close()
            away = self._dropped.set_aside(name)
        if away is not None:
            delete_dropped_queue(away)  # without the lock: this can take long

    def _drop_unopened(self, name: str) -> None:
        """Keep the directory in ``quarantine/``, then forget the queue.

        In this order: if the process ends in between, the next start finds an empty queue.
        """
        knobs, _ = kept = self._unopened[name]
        path = self.data / "queues" / name
        with contextlib.ExitStack() as locked:
            try:
                if (path / LOCK_FILE).exists():
                    locked.callback(self._disk.close, lock_directory(path, self._disk))
                if knobs.get("kind", Kind.DISK) in ON_DISK and os.path.lexists(path):
                    Quarantine(self.data, self._disk).move(path)
            except OSError as error:
                message = f"cannot move {path} to quarantine/: {error.strerror or error}"
                raise StorageFailed(f"{message}; move it out of queues/ yourself") from error
        del self._unopened[name]
        try:
            self._write_registry()
        except StorageFailed:
            self._unopened[name] = kept
            raise

    def stage(
        self, name: str, schema: pa.Schema, spare: int = 0, *, diskless: bool = False
    ) -> Stage:
        """Begin a stage for a queue. The stage refuses blocks that the queue could never take.

        If the queue is full at the commit, ``spare`` events may wait in memory; with ``diskless``
        also if the disk is full or fails. Raises ``NoSuchQueue``, ``SchemaMismatch``,
        ``StorageFailed``.
        """
        check = self.queue(name).producer().check_publishable
        ready = check(pa.RecordBatch.from_pylist([], schema))
        contents = StageContents(
            name,
            ready.schema,
            max_events_in_memory=spare,
            has_memory_copy=diskless and spare > 0,
        )
        return self.staging.stage(contents, check)

    def copy(self, source: BufferedQueue, into: Sequence[str]) -> QueueCopy:
        """Begin to copy events of a queue, by reference where the source keeps them safely.

        Raises ``NoSuchQueue``.
        """
        if all(can_stage_references(source, self.queue(name)) for name in into):
            return CopyByReference(source, into, self._begin_reference_stage)
        return CopyByValue(source, into, self.stage)

    def _begin_reference_stage(self, name: str, source: BufferedQueue) -> Stage:
        self.queue(name).check_columns(BASE_SCHEMA)
        return self.staging.stage(
            StageContents(name, BASE_SCHEMA, source=source.name, source_id=source.stored_id)
        )

    def _build_settings(self, name: str, knobs: Mapping[str, Any]) -> QueueSettings:
        """Return the settings of a queue; kinds on disk get a path in the data directory."""
        if "path" in knobs:
            raise ConfigError("path", "remove it: a node keeps its queues in its data directory")
        settings = QueueSettings.of(kind=Kind.MEMORY, name=name)  # check the name before its use
        kind = str(knobs.get("kind", Kind.DISK))
        place = {"path": self.data / "queues" / settings.name} if kind in ON_DISK else {}
        settings = QueueSettings.of(**{**knobs, "name": name, "kind": kind, **place})
        if settings.kind not in (Kind.MEMORY, *ON_DISK):
            raise ConfigError("kind", f"a node cannot have {settings.kind} queues")
        return settings

    def _open(self, settings: QueueSettings) -> BufferedQueue:
        queue = open_buffered_queue(settings, clock=self._clock, disk=self._disk)
        self._queues[settings.name] = queue
        self._unopened.pop(settings.name, None)
        return queue

    def _keep_unopened(self, name: str, knobs: Mapping[str, Any], error: Exception) -> None:
        """Go on without a queue that was created at run time; the registry keeps it."""
        self._unopened[name] = knobs, str(error)
        log.error(
            "queue.not_opened",
            queue=name,
            path=self.data / "queues" / name,
            error=error,
            hint="the node runs without it; correct this and restart, or drop the queue",
        )

    def _read_registry(self) -> dict[str, dict[str, Any]]:
        """Return the queues that were created at run time, and finish interrupted drops.

        A damaged file costs settings, never events: the node opens the queues that are on disk.
        """
        entries, problems = load_registry(self.data)
        found: dict[str, dict[str, Any]] = {}
        for name, entry in entries.items():
            try:
                knobs = dict(entry)
                is_dropped, by_pipeline = DROPPED in knobs, knobs.pop(BY_PIPELINE, False)
                settings = self._build_settings(name, {} if is_dropped else knobs)
            except (ConfigError, TypeError, ValueError) as error:
                problems.append(f"{name!r}: {error}")
                continue
            if is_dropped:
                self._dropped.ids[name] = str(knobs[DROPPED])
                self._dropped.set_aside(name)
            elif problems and settings.path and not settings.path.exists():
                problems.append(f"{name!r}: there is no such queue on disk")
            else:
                found[name] = knobs
                if by_pipeline:
                    self._by_pipeline.add(name)
        if problems:
            self._is_registry_damaged = True
            log.error(
                "node.registry_damaged",
                file=self.data / REGISTRY,
                error="; ".join(problems),
                hint="the node opens the queues that are on disk; look at their settings",
            )
            found = {name: {} for name in self._list_queues_on_disk()} | found
        return found

    def _list_queues_on_disk(self) -> Iterator[str]:
        """Yield the queues that are on disk and not in the configuration."""
        directory = self.data / "queues"
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            is_candidate = path.name not in self._configured and path.is_dir()
            if is_candidate and not path.name.startswith(DROPPED_PREFIX):
                if _read_queue_id(path, self._disk):
                    yield path.name
                else:
                    log.error("queue.not_opened", path=path, hint="run turnlane queue verify on it")

    def _replace_registry(self) -> None:
        """Keep the damaged file in ``quarantine/`` and write a new one."""
        try:
            if (self.data / REGISTRY).exists():
                Quarantine(self.data, self._disk).move(self.data / REGISTRY)
            self._write_registry()
        except (OSError, StorageFailed) as error:
            log.warning("node.registry_not_replaced", file=self.data / REGISTRY, error=error)

    def _write_registry(self) -> None:
        knobs = {
            name: queue.settings.model_dump(
                mode="json", exclude_unset=True, exclude={"path", "name"}
            )
            for name, queue in self._queues.items()
            if name not in self._configured
        }
        knobs |= {name: dict(each) for name, (each, _) in self._unopened.items()}
        entries: dict[str, dict[str, Any]] = {
            name: each | ({BY_PIPELINE: True} if name in self._by_pipeline else {})
            for name, each in knobs.items()
        }
        entries |= {name: {DROPPED: queue_id} for name, queue_id in self._dropped.ids.items()}
        data = json.dumps(entries, indent=1).encode()
        try:
            self._disk.write_whole(self.data / REGISTRY, data)
            self._disk.write_whole(self.data / REGISTRY_CHECKSUM, compute_registry_crc(data))
        except OSError as error:
            raise StorageFailed(f"cannot write {REGISTRY}: {error.strerror or error}") from error

    # ── closing ──────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Release the leased batches and close the queues. Their events stay on the disk."""
        was_open, self.closing = not self.closing, True
        self.commits.stop()
        self._close_all()
        if was_open:
            log.info("node.stopped", data=self.data)

    def _close_queues(self) -> None:
        for queue in self.queues().values():
            try:
                queue.close()
            except Exception:
                log.exception("queue.close_failed", queue=queue.name)
