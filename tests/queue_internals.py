"""Access to the private parts of a queue, for the tests that need them."""

from __future__ import annotations

from turnlane.queues.api import Queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.disk import LogStorage
from turnlane.queues.proxy import RemoteStorage
from turnlane.queues.state import QueueState
from turnlane.storage.store import Store


def state_of(queue: Queue) -> QueueState:
    """Return the parts of a queue and their lock."""
    assert isinstance(queue, BufferedQueue)
    return queue._state


def log_storage_of(queue: Queue) -> LogStorage:
    """Return the storage of a queue with a disk."""
    storage = state_of(queue).storage
    assert isinstance(storage, LogStorage)
    return storage


def store_of(queue: Queue) -> Store:
    """Return the log and the journal of a queue with a disk."""
    return log_storage_of(queue).store


def remote_storage_of(queue: Queue) -> RemoteStorage:
    """Return the storage of a proxy queue."""
    storage = state_of(queue).storage
    assert isinstance(storage, RemoteStorage)
    return storage
