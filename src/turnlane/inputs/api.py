"""The interface of inputs: turnlane's own, and inputs that users write.

An input listens, or reads, and publishes blocks into the queues of its host. It tells its sender
that events are safe no earlier than its ``ack`` level allows. While a queue is full it does what
its senders can handle: let them wait, ask them to retry later, or drop and count.
"""

from __future__ import annotations

import abc
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from turnlane.plugins import PluginRegistry
from turnlane.queues.api import AckLevel, FlowControl
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import Closeable


class Host(Protocol):
    """The part of a node that its inputs use."""

    data: Path

    def queue(self, name: str) -> BufferedQueue:
        """Return the queue of this name. Raises ``NoSuchQueue``."""


class InputSettings(BaseModel):
    """The settings that every input has; each type of input adds its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    type: str = Field(description="The type of the input.")
    name: str | None = Field(None, description="The name in logs and metrics; default: its type.")
    queue: str = Field(description="The queue that its events go to.")
    ack: AckLevel = Field(
        AckLevel.PERSISTED,
        description="The level that events reach before the sender is answered.",
    )
    flow: FlowControl = Field(
        FlowControl.LIGHT, description="How it slows down before the queue is full."
    )

    @property
    def label(self) -> str:
        """The name of the input in logs and metrics."""
        return self.name or self.type


@dataclass(slots=True)
class Counters:
    """The counts of an input. Its own threads write them, any thread may read them."""

    events: int = 0
    """Events accepted by a queue."""
    bytes: int = 0
    """Bytes received."""
    refused: int = 0
    """Requests or connections that were refused and should be tried again."""
    invalid: int = 0
    """Requests or messages that were malformed or too large."""
    dropped: int = 0
    """Events dropped because the queue was full, by inputs that cannot wait."""
    connections: int = 0
    """Connections open at this moment."""
    invalid_reasons: Counter[str] = field(default_factory=Counter)
    """The part of ``invalid`` whose reason the input tells, by reason."""


class Input(Closeable):
    """A source of events. The node starts it once its queues are open, and closes it first."""

    settings_type: ClassVar[type[InputSettings]] = InputSettings
    finished: threading.Event | None = None
    """Set when the input has ended and all its events are acked; ``None``: it has no end."""

    def __init__(self, settings: InputSettings, host: Host) -> None:
        self.settings = settings
        self.host = host
        self.counters = Counters()
        self._counters_lock = threading.Lock()

    def count(self, **amounts: int) -> None:
        """Add to the counters, from any thread."""
        with self._counters_lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def count_invalid(self, reason: str, amount: int = 1) -> None:
        """Add to the counters of invalid requests or messages, from any thread."""
        if amount:
            with self._counters_lock:
                self.counters.invalid += amount
                self.counters.invalid_reasons[reason] += amount

    @property
    def address(self) -> str | None:
        """The address with the real port; ``None`` if it does not listen."""
        return None

    @abc.abstractmethod
    def start(self) -> None:
        """Start; returns once it listens. Raises ``ConfigError`` or ``AddressTaken``."""

    @abc.abstractmethod
    def stop(self, timeout: float) -> None:
        """Accept no more events; publish and ack the received ones within ``timeout`` seconds."""

    def close(self) -> None:
        """Stop at once."""
        self.stop(0.0)


# The registry of the installed inputs.
_PLUGINS = PluginRegistry("turnlane.inputs", Input, "input")  # type: ignore[type-abstract]

types = _PLUGINS.types
load = _PLUGINS.load
