"""Queues: one contract, five kinds. ``docs/queues.md`` is the guide to them."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import ConfigError, DirectoryUnusable
from turnlane.memory import measure_process_memory, memory_limit
from turnlane.queues.api import Consumer, Queue, Transport
from turnlane.queues.settings import Kind, QueueSettings
from turnlane.storage.disk_io import Disk

if TYPE_CHECKING:
    from turnlane.queues.buffered import BufferedQueue
    from turnlane.queues.storage_api import Storage

# The kinds are imported when they are used: most processes use one or none.


def open_queue(
    settings: QueueSettings | None = None,
    *,
    consumer: Consumer | None = None,
    transport: Transport | None = None,
    producer_id: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
    disk: Disk | None = None,
    **knobs: Any,
) -> Queue:
    """Open a queue from settings or from knobs given by name; create it if it does not exist.

    ``consumer`` is for the ``direct`` kind, which calls it; ``transport`` and ``producer_id`` are
    for the ``proxy`` kind; ``clock`` and ``disk`` are for tests (see ``turnlane.testing``).
    """
    settings = _complete(settings, knobs)
    for name, kind, part in (
        ("consumer", Kind.DIRECT, consumer),
        ("transport", Kind.PROXY, transport),
    ):
        if settings.kind is kind and part is None:
            raise ConfigError(name, f"a {kind} queue needs one")
        if settings.kind is not kind and part is not None:
            raise ConfigError(name, f"is for a {kind} queue, not for {settings.kind}")
    if settings.kind is Kind.DIRECT:
        assert consumer is not None
        from turnlane.queues.direct import DirectQueue

        return DirectQueue(settings, consumer, clock=clock)
    if settings.kind is Kind.PROXY:
        assert transport is not None
        from turnlane.queues.buffered import BufferedQueue
        from turnlane.queues.proxy import RemoteStorage

        storage = RemoteStorage(settings, transport, producer_id=producer_id)
        return BufferedQueue(settings, storage, clock=clock)
    return open_buffered_queue(settings, clock=clock, disk=disk)


def open_buffered_queue(
    settings: QueueSettings | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    disk: Disk | None = None,
    **knobs: Any,
) -> BufferedQueue:
    """Open a queue of the ``memory``, ``disk`` or ``disk_assisted`` kind."""
    from turnlane.queues.buffered import BufferedQueue

    declared = _complete(settings, knobs)
    measure = partial(measure_available, declared, disk or Disk())
    settings = declared if declared.target_utilization is None else declared.with_bounds(measure())
    storage: Storage
    match settings.kind:
        case Kind.MEMORY:
            from turnlane.queues.storage_api import NoStorage

            storage = NoStorage()
        case Kind.DISK:
            from turnlane.queues.disk import DiskStorage

            storage = DiskStorage(settings, disk)
        case Kind.DISK_ASSISTED:
            from turnlane.queues.disk_assisted import SpillStorage

            storage = SpillStorage(settings, disk)
        case _:
            raise ConfigError("kind", f"a {settings.kind} queue needs open_queue()")
    return BufferedQueue(settings, storage, clock=clock, declared=declared, measure=measure)


def measure_available(settings: QueueSettings, disk: Disk) -> int:
    """Return the bytes that a queue has or could have: of disk space for ``disk``, else of memory.

    Raises ``DirectoryUnusable`` if the disk cannot be measured.
    """
    if settings.kind is not Kind.DISK:
        return max(0, memory_limit() - measure_process_memory())
    assert settings.path is not None, "the settings of a disk queue have a path"
    try:
        existing = next(
            path for path in (settings.path, *settings.path.absolute().parents) if path.exists()
        )
        held = 0
        for file in settings.path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # the queue removes chunks at any time
                held += file.stat().st_blocks * 512
        return disk.free_bytes(existing) + held
    except OSError as error:
        raise DirectoryUnusable(f"{settings.path}: {error.strerror or error}") from error


def _complete(settings: QueueSettings | None, knobs: dict[str, Any]) -> QueueSettings:
    if settings is None:
        return QueueSettings.of(**knobs)
    if not isinstance(settings, QueueSettings):
        raise ConfigError("kind", f"give knobs by name, as in open_queue(kind={settings!r})")
    return settings.replace(**knobs) if knobs else settings
