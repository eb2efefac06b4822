"""The client of one or more nodes: ``connect(url)`` returns a client, a client returns queues."""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from turnlane.client.address import NodeUrl
from turnlane.client.node_client import Credentials, QueueEnds, RemoteNode, StageWriter
from turnlane.client.spread import SpreadQueue
from turnlane.client.transport import FlightTransport, LeaseKeeper
from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import ConfigError, NotSupported
from turnlane.events import Block
from turnlane.queues.api import Queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.proxy import RemoteStorage
from turnlane.queues.settings import Kind, QueueSettings
from turnlane.runtime import Closeable
from turnlane.units import parse_duration

if TYPE_CHECKING:
    from turnlane.client.table import RemoteTable

LEASE_SECONDS = 30.0
"""How long a node waits for a silent consumer. This client extends a lease three times as often."""


def connect(
    url: str,
    *,
    token: str | None = None,
    tls_ca: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    lease: str | float = LEASE_SECONDS,
) -> Client:
    """Return a client of the node at ``turnlane://host:port``, or ``turnlanes://`` with TLS.

    With several nodes, separated by commas, queues are spread over all of them. This call sends
    nothing; the client waits for a node that is down when it needs it. ``tls_ca`` is the authority
    of the node's certificate, if the system does not know it. ``tls_cert`` and ``tls_key`` belong
    to the client. ``lease`` is the time after which other consumers get the batches of a client
    that has died. Raises ``ConfigError``.
    """
    where = NodeUrl.parse(url)
    files = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    paths = {knob: Path(each) for knob, each in files.items() if each is not None}
    if paths and not where.tls:
        knob = next(iter(paths))
        raise ConfigError(knob, f"{url!r} does not use TLS; write turnlanes://")
    try:
        seconds = float(parse_duration(lease))
    except ValueError as error:
        raise ConfigError("lease", str(error)) from None
    return Client(where, Credentials(token, **paths), seconds)


class Client(Closeable):
    """The queues of one or more nodes. Safe to use from any thread; closes all its queues.

    Calls to a single node (:meth:`read`, :meth:`commit`, …) go to ``nodes[0]`` if there is only one
    node. With several nodes choose one: ``client.nodes[1].read(…)``.
    """

    def __init__(self, url: NodeUrl, credentials: Credentials, lease: float) -> None:
        self.nodes: Sequence[RemoteNode] = [
            RemoteNode(place, location, credentials)
            for place, location in zip(url.places, url.locations(), strict=True)
        ]
        self._lease = lease
        # One for each node: a node that does not answer must not let the leases of others expire.
        self._keepers = {node.place: LeaseKeeper(lease) for node in self.nodes}
        self._holder = f"{os.uname().nodename}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._queues: list[Queue] = []
        self._closed = False
        self._process = os.getpid()
        # Without this a program that just ends would lose events that are not sent yet.
        atexit.register(self.close)

    def queue(
        self,
        name: str,
        *,
        producer_id: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
        **knobs: Any,
    ) -> Queue:
        """Return a queue of the node, with the contract of a local queue.

        ``knobs`` are the settings of the ``proxy`` kind. With the same ``producer_id`` after a
        restart, the node recognizes events that were sent before and not acked. The default is a
        new id. Two open queues must not use the same id.
        """
        settings = QueueSettings.of(kind=Kind.PROXY, name=name, **knobs)
        queues = [
            BufferedQueue(
                settings,
                RemoteStorage(settings, self._transport(node, name), producer_id=producer_id),
                clock=clock,
            )
            for node in self.nodes
        ]
        queue: Queue = queues[0] if len(queues) == 1 else SpreadQueue(queues)
        self._queues = [each for each in self._queues if not each.closed] + [queue]
        return queue

    def table(self, name: str) -> RemoteTable:
        """Return a queue table that the nodes serve, to receive its events."""
        # Most clients use no tables and start faster without the import.
        from turnlane.client.table import RemoteTable

        return RemoteTable(self.nodes, name)

    def _transport(self, node: RemoteNode, queue: str) -> FlightTransport:
        keeper = self._keepers[node.place]
        return FlightTransport(node, queue, lease=self._lease, holder=self._holder, keeper=keeper)

    def close(self) -> None:
        """Wait until published events are persisted, close all queues, release held batches.

        Waits at most the ``shutdown_timeout`` of each queue. A program that ends without this call
        does it at its exit. May be called again.
        """
        atexit.unregister(self.close)
        if self._closed or os.getpid() != self._process:  # not in a forked child
            return
        self._closed = True
        for queue in self._queues:
            queue.close(drain=True)
        for keeper in self._keepers.values():
            keeper.close()
            for batch in keeper.list_batches():
                batch.give_back()
        for node in self.nodes:
            node.close()

    # ── all nodes ────────────────────────────────────────────────────────────────────────────────

    def create(self, queue: str, **knobs: Any) -> None:
        """Create a queue on every node. Does nothing where it exists with the same settings."""
        for node in self.nodes:
            node.create(queue, **knobs)

    def drop(self, queue: str) -> None:
        """Delete a queue with all its events from every node."""
        for node in self.nodes:
            node.drop(queue)

    def queues(self) -> dict[str, dict[str, Any]]:
        """Return the queues of all nodes, with the settings that were given."""
        found: dict[str, dict[str, Any]] = {}
        for node in self.nodes:
            found |= node.queues()
        return found

    # ── a single node ────────────────────────────────────────────────────────────────────────────

    @property
    def node(self) -> RemoteNode:
        """The only node. Raises ``NotSupported`` if there are several."""
        if len(self.nodes) > 1:
            places = ", ".join(node.place for node in self.nodes)
            raise NotSupported(f"choose a node: client.nodes has {places}")
        return self.nodes[0]

    def stats(self, queue: str | None = None) -> dict[str, Any]:
        """Return the stats of a queue, or of all queues, by name."""
        return self.node.stats(queue)

    def read(
        self, queue: str, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Block]]:
        """See :meth:`RemoteNode.read`."""
        return self.node.read(queue, first, end)

    def wait(self, queue: str, beyond: int, timeout: float) -> QueueEnds:
        """See :meth:`RemoteNode.wait`."""
        return self.node.wait(queue, beyond, timeout)

    def settle(self, queue: str, first: int, end: int, queue_id: str | None = None) -> bool:
        """See :meth:`RemoteNode.settle`."""
        return self.node.settle(queue, first, end, queue_id)

    def stage(self, queue: str, schema: pa.Schema) -> StageWriter:
        """See :meth:`RemoteNode.stage`."""
        return self.node.stage(queue, schema)

    def commit(
        self,
        stages: Sequence[str] = (),
        ranges: Sequence[tuple[str, int, int]] = (),
        *,
        writer: str | None = None,
        epoch: int = 0,
    ) -> bool:
        """See :meth:`RemoteNode.commit`."""
        return self.node.commit(stages, ranges, writer=writer, epoch=epoch)

    def abort(self, stages: Sequence[str]) -> None:
        """See :meth:`RemoteNode.abort`."""
        self.node.abort(stages)
