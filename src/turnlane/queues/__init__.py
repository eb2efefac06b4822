"""Queues: one contract, five kinds. ``docs/queues.md`` is the guide to them."""

from __future__ import annotations

from typing import Any

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import ConfigError
from turnlane.queues.api import Consumer, Queue, Transport
from turnlane.queues.knobs import Kind
from turnlane.queues.settings import QueueSettings
from turnlane.storage.disk_io import Disk


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
    """Open a queue, made if it does not exist, from settings or from knobs given by name.

    ``consumer`` is for the ``direct`` kind, which calls it; ``transport`` and ``producer_id`` are
    for the ``proxy`` kind; ``clock`` and ``disk`` are for tests (see ``turnlane.testing``).
    """
    settings = _settled(settings, knobs)
    _check_parts(settings, consumer=consumer, transport=transport)
    match settings.kind:
        case Kind.DIRECT:
            assert consumer is not None
            from turnlane.queues.direct import DirectQueue

            return DirectQueue(settings, consumer, clock=clock)
        case Kind.PROXY:
            assert transport is not None
            from turnlane.queues.proxy import ProxyQueue

            return ProxyQueue(settings, transport, clock=clock, producer_id=producer_id)
        case Kind.DISK:
            from turnlane.queues.disk import DiskQueue

            return DiskQueue(settings, clock=clock, disk=disk)
        case Kind.DISK_ASSISTED:
            from turnlane.queues.disk_assisted import DiskAssistedQueue

            return DiskAssistedQueue(settings, clock=clock, disk=disk)
        case Kind.MEMORY:
            from turnlane.queues.memory import MemoryQueue

            return MemoryQueue(settings, clock=clock)


def _settled(settings: QueueSettings | None, knobs: dict[str, Any]) -> QueueSettings:
    if settings is None:
        return QueueSettings.of(**knobs)
    if not isinstance(settings, QueueSettings):
        raise ConfigError("kind", f"give knobs by name, as in open_queue(kind={settings!r})")
    return settings.replace(**knobs) if knobs else settings


_PARTS = {"consumer": Kind.DIRECT, "transport": Kind.PROXY}


def _check_parts(settings: QueueSettings, **parts: object) -> None:
    """A direct queue needs its consumer and a proxy its transport; no other kind takes them."""
    for name, kind in _PARTS.items():
        if settings.kind is kind and parts[name] is None:
            raise ConfigError(name, f"a {kind} queue needs one")
        if settings.kind is not kind and parts[name] is not None:
            raise ConfigError(name, f"is for a {kind} queue, not for {settings.kind}")
