"""turnlane: a durable event queue and delivery pipeline."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from turnlane import memory as _memory  # noqa: F401 - before anything that imports Arrow
from turnlane.errors import (
    ConfigError,
    EventTooLarge,
    Never,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    RetryLater,
    TurnlaneError,
)
from turnlane.events import Event, block_of
from turnlane.ledger import Ledger
from turnlane.queues import open_queue
from turnlane.queues.api import (
    Ack,
    AckLevel,
    Batch,
    Durability,
    FlowControl,
    FullBehavior,
    Producer,
    Published,
    Queue,
    Stats,
)
from turnlane.queues.settings import QueueSettings
from turnlane.queues.worker_pool import WorkerPool

if TYPE_CHECKING:
    from turnlane.client import Client, connect
    from turnlane.client.logging_handler import TurnlaneHandler

__version__ = "0.1.0"

__all__ = [
    "Ack",
    "AckLevel",
    "Batch",
    "Client",
    "ConfigError",
    "Durability",
    "Event",
    "EventTooLarge",
    "FlowControl",
    "FullBehavior",
    "Ledger",
    "Never",
    "Producer",
    "Published",
    "Queue",
    "QueueClosed",
    "QueueEmpty",
    "QueueFull",
    "QueueSettings",
    "RetryLater",
    "Stats",
    "TurnlaneError",
    "TurnlaneHandler",
    "WorkerPool",
    "block_of",
    "connect",
    "open_queue",
]

_LATER = {
    "Client": "turnlane.client",
    "TurnlaneHandler": "turnlane.client.logging_handler",
    "connect": "turnlane.client",
}
"""Imported when they are first asked for: local queues start without Flight."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever it is
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found
