"""The way in: ``connect(url)`` gives a client, a client gives queues."""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from turnlane.client.address import Url
from turnlane.client.leased_batch import Keeper
from turnlane.client.node_client import Credentials, Ends, RemoteNode, StageWriter
from turnlane.client.spread import SpreadQueue
from turnlane.client.transport import FlightTransport
from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import ConfigError, NotSupported
from turnlane.events import Block
from turnlane.queues.api import Queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.proxy import RemoteStorage
from turnlane.queues.settings import Kind, QueueSettings
from turnlane.runtime import Closing
from turnlane.units import parse_duration

if TYPE_CHECKING:
    from turnlane.client.table import RemoteTable

LEASE_SECONDS = 30.0
"""How long a node waits for a consumer that says nothing. Ours says something three times."""


def connect(
    url: str,
    *,
    token: str | None = None,
    tls_ca: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    lease: str | float = LEASE_SECONDS,
) -> Client:
    """A client of the node at ``turnlane://host:port``, or with TLS ``turnlanes://host:port``.

    Several nodes, separated by commas, make queues that are spread over all of them. Nothing is
    sent yet: a node that is away is waited for when it is needed. ``tls_ca`` is the authority that
    the node's certificate is of, if it is not one that everybody knows; ``tls_cert`` and
    ``tls_key`` are the client's own. ``lease`` is how long the batches of a client that has died
    stay away. Raises ``ConfigError``.
    """
    where = Url.parse(url)
    files = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    paths = {knob: Path(each) for knob, each in files.items() if each is not None}
    if paths and not where.tls:
        knob = next(iter(paths))
        raise ConfigError(knob, f"{url!r} is without TLS; write turnlanes://")
    try:
        seconds = float(parse_duration(lease))
    except ValueError as error:
        raise ConfigError("lease", str(error)) from None
    return Client(where, Credentials(token, **paths), seconds)


class Client(Closing):
    """Queues of one node or several. Safe to use from any thread; closes what it has given out.

    Calls that concern one node (:meth:`read`, :meth:`commit`, …) are those of ``nodes[0]`` if there
    is no other. With several, say which: ``client.nodes[1].read(…)``.
    """

    def __init__(self, url: Url, credentials: Credentials, lease: float) -> None:
        self.nodes: Sequence[RemoteNode] = [
            RemoteNode(place, location, credentials)
            for place, location in zip(url.places, url.locations(), strict=True)
        ]
        self._lease = lease
        # One for each: a node that does not answer must not let the leases of others run out.
        self._keepers = {node.place: Keeper(lease) for node in self.nodes}
        self._holder = f"{os.uname().nodename}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._queues: list[Queue] = []
        self._closed = False
        self._process = os.getpid()
        # What was published and not sent yet would be lost with a program that just ends.
        atexit.register(self.close)

    def queue(
        self,
        name: str,
        *,
        producer_id: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
        **knobs: Any,
    ) -> Queue:
        """A queue of the node, with the contract of a local one.

        The knobs are those of the ``proxy`` kind. With a ``producer_id`` that is the same after a
        restart, what was sent before and not acked is known by the node; without one it gets a new
        one. Two queues at a time must not use the same.
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
        """A queue table that the nodes serve, to receive its events."""
        # Most clients know of no tables, and start without them.
        from turnlane.client.table import RemoteTable

        return RemoteTable(self.nodes, name)

    def _transport(self, node: RemoteNode, queue: str) -> FlightTransport:
        keeper = self._keepers[node.place]
        return FlightTransport(node, queue, lease=self._lease, holder=self._holder, keeper=keeper)

    def close(self) -> None:
        """Close all queues, after what was published is persisted; give held batches back.

        Waits for each queue's ``shutdown_timeout`` at most. A program that ends without it does it
        then. A second call is harmless.
        """
        atexit.unregister(self.close)
        if self._closed or os.getpid() != self._process:  # a forked child has no part in it
            return
        self._closed = True
        for queue in self._queues:
            queue.close(drain=True)
        for keeper in self._keepers.values():
            keeper.close()
            for batch in keeper.held():
                batch.give_back()
        for node in self.nodes:
            node.close()

    # ── all nodes ────────────────────────────────────────────────────────────────────────────────

    def create(self, queue: str, **knobs: Any) -> None:
        """Make a queue on every node; one that is there with the same settings is fine."""
        for node in self.nodes:
            node.create(queue, **knobs)

    def drop(self, queue: str) -> None:
        """Delete a queue from every node, with everything in it."""
        for node in self.nodes:
            node.drop(queue)

    def queues(self) -> dict[str, dict[str, Any]]:
        """The queues there are, with the knobs that were set."""
        found: dict[str, dict[str, Any]] = {}
        for node in self.nodes:
            found |= node.queues()
        return found

    # ── the one node ─────────────────────────────────────────────────────────────────────────────

    @property
    def node(self) -> RemoteNode:
        """The node. Raises ``NotSupported`` if there are several."""
        if len(self.nodes) > 1:
            places = ", ".join(node.place for node in self.nodes)
            raise NotSupported(f"say which node: client.nodes has {places}")
        return self.nodes[0]

    def stats(self, queue: str | None = None) -> dict[str, Any]:
        """What a queue says of itself, by its name; or all."""
        return self.node.stats(queue)

    def read(
        self, queue: str, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Block]]:
        """See :meth:`RemoteNode.read`."""
        return self.node.read(queue, first, end)

    def wait(self, queue: str, beyond: int, timeout: float) -> Ends:
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
