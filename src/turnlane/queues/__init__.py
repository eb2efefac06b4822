"""Queues: one contract, five kinds. ``docs/queues.md`` is the guide to them."""

from __future__ import annotations

from typing import Any

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import ConfigError
from turnlane.queues.contract import Consumer, Queue
from turnlane.queues.direct import DirectQueue
from turnlane.queues.disk import DiskQueue
from turnlane.queues.disk_assisted import DiskAssistedQueue
from turnlane.queues.kinds import Kind
from turnlane.queues.log.files import Disk
from turnlane.queues.memory import MemoryQueue
from turnlane.queues.proxy import ProxyQueue
from turnlane.queues.settings import QueueSettings
from turnlane.queues.transport import Transport


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
    if settings is None:
        settings = QueueSettings.of(**knobs)
    elif knobs:
        settings = settings.replace(**knobs)
    match settings.kind:
        case Kind.DIRECT:
            if consumer is None:
                raise ConfigError("kind", "a direct queue needs the consumer that it is to call")
            return DirectQueue(settings, consumer, clock=clock)
        case Kind.PROXY:
            if transport is None:
                raise ConfigError("kind", "a proxy queue needs the transport to its node")
            return ProxyQueue(settings, transport, clock=clock, producer_id=producer_id)
        case Kind.DISK:
            return DiskQueue(settings, clock=clock, disk=disk)
        case Kind.DISK_ASSISTED:
            return DiskAssistedQueue(settings, clock=clock, disk=disk)
        case Kind.MEMORY:
            return MemoryQueue(settings, clock=clock)
