"""A node that is a plain list, and persists and delivers when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from turnlane.errors import NotSupported, TransportDown
from turnlane.events import Block, get_values
from turnlane.queues.api import AckLevel, Durability, NodeProgress


class ModelNode:
    """A node as small as can be: a list of events, and how far it is persisted and delivered.

    It is a transport itself. Nothing is persisted or delivered before you say so, unless it is
    ``eager`` to do it at once; ``crash()`` loses what was only accepted, and every connection. With
    ``size``, sending blocks while so many events are not delivered. Safe to use from several
    threads.
    """

    def __init__(
        self,
        *,
        eager: AckLevel | str = AckLevel.ACCEPTED,
        size: int | None = None,
        durability: Durability = Durability.ALWAYS,
    ) -> None:
        self.durability = durability
        self.repeats = 0
        """Events that came again and were not taken twice."""
        self.connects = 0
        self._eager = AckLevel(eager)
        self._size = size
        self._away = False
        self._changed = threading.Condition()
        self._events: list[tuple[str, int, bytes]] = []
        self._ends = dict.fromkeys(AckLevel, 0)
        self._sequences: dict[AckLevel, dict[str, int]] = {level: {} for level in AckLevel}
        self._connections: dict[str, ModelConnection] = {}

    # What a test commands

    def persist(self, events: int | None = None) -> None:
        """Persist the next ``events`` accepted ones, or all."""
        self._advance(AckLevel.PERSISTED, AckLevel.ACCEPTED, events)

    def deliver(self, events: int | None = None) -> None:
        """Deliver the next ``events`` persisted ones, or all."""
        self._advance(AckLevel.DELIVERED, AckLevel.PERSISTED, events)

    def become_eager(self, level: AckLevel | str) -> None:
        """Bring all there is, and all to come, to ``level`` at once."""
        with self._changed:
            self._eager = AckLevel(level)
            self._hurry()

    def crash(self, *, away: bool = False) -> None:
        """Lose events that are only accepted, and every connection; with ``away``, stay down."""
        with self._changed:
            self._away = away
            del self._events[self._ends[AckLevel.PERSISTED] :]
            self._ends[AckLevel.ACCEPTED] = len(self._events)
            self._sequences[AckLevel.ACCEPTED] = dict(self._sequences[AckLevel.PERSISTED])
            self._disconnect()

    def leave(self) -> None:
        """Be unreachable, and lose nothing."""
        with self._changed:
            self._away = True
            self._disconnect()

    def come_back(self) -> None:
        """Be reachable again."""
        with self._changed:
            self._away = False

    def values(self, level: AckLevel | str = AckLevel.ACCEPTED) -> list[bytes]:
        """The received events, in order."""
        with self._changed:
            return [value for _, _, value in self._events[: self._ends[AckLevel(level)]]]

    def wait_for(self, condition: Callable[[], bool], timeout: float = 10.0) -> bool:
        """Wait until something changes that makes the condition true; false on timeout."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    # What a proxy queue calls

    def connect(self, producer_id: str) -> ModelConnection:
        """Open a stream; an earlier one of the same producer is at an end."""
        with self._changed:
            if self._away:
                raise TransportDown("the node is away")
            self.connects += 1
            self._drop(producer_id)
            resume_at = self._sequences[AckLevel.ACCEPTED].get(producer_id, 0)
            connection = ModelConnection(self, producer_id, resume_at)
            self._connections[producer_id] = connection
            self._changed.notify_all()
            return connection

    def get(self, max_events: int | None, timeout: float) -> NoReturn:
        """Not of use here: what came is in :meth:`values`."""
        del max_events, timeout
        raise NotSupported("a model node has no consumers; look at its values()")

    def accept(self, connection: ModelConnection, sequence: int, block: Block) -> None:
        """Take a block over a connection, except what came before."""
        producer = connection.producer_id
        with self._changed:
            self._changed.wait_for(lambda: connection.closed or self._has_room())
            connection.check()
            known = self._sequences[AckLevel.ACCEPTED].get(producer, 0)
            for at, value in enumerate(get_values([block]), sequence):
                if at >= known:
                    self._events.append((producer, at, value or b""))
                else:
                    self.repeats += 1
            self._ends[AckLevel.ACCEPTED] = len(self._events)
            end = max(known, sequence + block.num_rows)
            self._sequences[AckLevel.ACCEPTED][producer] = end
            self._hurry()

    def await_progress(
        self, connection: ModelConnection, told: NodeProgress | None, timeout: float
    ) -> NodeProgress | None:
        """Wait for something that was not told yet."""
        with self._changed:
            self._changed.wait_for(
                lambda: connection.closed or self._progress(connection.producer_id) != told, timeout
            )
            connection.check()
            progress = self._progress(connection.producer_id)
            return None if progress == told else progress

    def hang_up(self, connection: ModelConnection) -> None:
        """A client lets go."""
        with self._changed:
            connection.closed = True
            self._changed.notify_all()

    # How it goes on, under the lock

    def _has_room(self) -> bool:
        waiting = len(self._events) - self._ends[AckLevel.DELIVERED]
        return self._size is None or waiting < self._size

    def _progress(self, producer_id: str) -> NodeProgress:
        return NodeProgress(*(self._sequences[level].get(producer_id, 0) for level in AckLevel))

    def _hurry(self) -> None:
        if self._eager is not AckLevel.ACCEPTED:
            self.persist()
        if self._eager is AckLevel.DELIVERED:
            self.deliver()
        self._changed.notify_all()

    def _advance(self, level: AckLevel, behind: AckLevel, events: int | None) -> None:
        with self._changed:
            first, most = self._ends[level], self._ends[behind]
            end = most if events is None else min(most, first + events)
            for producer, sequence, _ in self._events[first:end]:
                self._sequences[level][producer] = sequence + 1
            self._ends[level] = end
            self._changed.notify_all()

    def _disconnect(self) -> None:
        for producer_id in list(self._connections):
            self._drop(producer_id)
        self._changed.notify_all()

    def _drop(self, producer_id: str) -> None:
        connection = self._connections.pop(producer_id, None)
        if connection is not None:
            connection.closed = True


class ModelConnection:
    """A stream to a :class:`ModelNode`, whose lock guards it."""

    def __init__(self, node: ModelNode, producer_id: str, resume_at: int) -> None:
        self.producer_id = producer_id
        self.resume_at = resume_at
        self.durability = node.durability
        self.closed = False
        self._node = node
        self._told: NodeProgress | None = None

    def send(self, sequence: int, block: Block) -> None:
        """Hand a block to the node; blocks while that is full."""
        self._node.accept(self, sequence, block)

    def urge(self) -> None:
        """Nothing: a model persists when it is told to."""

    def progress(self, timeout: float) -> NodeProgress | None:
        """Wait for the node to come further."""
        progress = self._node.await_progress(self, self._told, timeout)
        self._told = progress or self._told
        return progress

    def close(self) -> None:
        """Let go."""
        self._node.hang_up(self)

    def check(self) -> None:
        """Raise ``TransportDown`` if it is at an end."""
        if self.closed:
            raise TransportDown("the connection is at an end")
