"""What an input is, so that anyone can write one.

An input listens, or reads, and publishes blocks into the queues of its host. It tells its sender
that events are safe no earlier than its ``ack`` level says, and under pressure it does what its
sender can bear: wait, ask to be tried again later, or drop and count.
"""

from __future__ import annotations

import abc
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from turnlane.plugins import PluginRegistry
from turnlane.queues.api import AckLevel, FlowControl
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import Closeable


class Host(Protocol):
    """What an input may ask of the node it runs in."""

    data: Path

    def queue(self, name: str) -> BufferedQueue:
        """The queue of this name. Raises ``NoSuchQueue``."""


class InputSettings(BaseModel):
    """The settings that every input has; one of its own adds to them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    type: str = Field(description="Which input this is.")
    name: str | None = Field(None, description="Its name in logs and metrics; default: its type.")
    queue: str = Field(description="The queue that its events go to.")
    ack: AckLevel = Field(
        AckLevel.PERSISTED, description="How far events must have come before the sender is told."
    )
    flow: FlowControl = Field(
        FlowControl.LIGHT, description="How it yields before the queue is full."
    )

    @property
    def label(self) -> str:
        """What the input is called in logs and metrics."""
        return self.name or self.type


@dataclass(slots=True)
class Counters:
    """What an input has seen. Written by its own threads, read by anyone."""

    events: int = 0
    """Events taken into a queue."""
    bytes: int = 0
    """Bytes received."""
    refused: int = 0
    """Requests or connections that were told to come back later."""
    invalid: int = 0
    """Requests or messages that made no sense."""
    dropped: int = 0
    """Events dropped because the queue was full, by inputs that cannot wait."""
    connections: int = 0
    """Connections open at this moment."""


class Input(Closeable):
    """A way in. Made when the node starts, started once its queues are open, closed first."""

    settings_type: ClassVar[type[InputSettings]] = InputSettings
    finished: threading.Event | None = None
    """Set when nothing more will ever come and all that came is acked; ``None``: it has no end."""

    def __init__(self, settings: InputSettings, host: Host) -> None:
        self.settings = settings
        self.host = host
        self.counters = Counters()
        self._counting = threading.Lock()

    def count(self, **amounts: int) -> None:
        """Add to the counters, from any thread."""
        with self._counting:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    @property
    def address(self) -> str | None:
        """Where it listens, the port as it really is; ``None`` if it does not listen."""
        return None

    @abc.abstractmethod
    def start(self) -> None:
        """Begin; returns once it listens. Raises ``ConfigError`` or ``AddressTaken``."""

    @abc.abstractmethod
    def stop(self, timeout: float) -> None:
        """Stop taking events. Events already taken are published and acked, within ``timeout``."""

    def close(self) -> None:
        """Stop at once."""
        self.stop(0.0)


# ── registry ──
# The inputs that are installed.

_PLUGINS = PluginRegistry("turnlane.inputs", Input, "input")  # type: ignore[type-abstract]

types = _PLUGINS.types
load = _PLUGINS.load
