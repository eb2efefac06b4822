"""turnlane: a durable event queue and delivery pipeline."""

from __future__ import annotations

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
from turnlane.queues import open_queue
from turnlane.queues.contract import (
    Ack,
    AckLevel,
    Batch,
    Durability,
    FlowControl,
    FullBehavior,
    Producer,
    Published,
    Queue,
)
from turnlane.queues.ledger import Ledger
from turnlane.queues.settings import QueueSettings
from turnlane.queues.stats import Stats
from turnlane.queues.workers import WorkerPool

__version__ = "0.1.0"

__all__ = [
    "Ack",
    "AckLevel",
    "Batch",
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
    "WorkerPool",
    "block_of",
    "open_queue",
]
