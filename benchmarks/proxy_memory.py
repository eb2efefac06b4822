"""The memory that a proxy queue saves while events wait in the node.

Client and node share a process. The result is the private memory of that process according to the
operating system, after the allocators have returned free memory. Every block from client to node is
copied, as a network would copy it.
"""

from __future__ import annotations

import gc
import multiprocessing
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from benchmarks.process_memory import get_own_bytes
from turnlane.errors import TransportDown
from turnlane.events import Block
from turnlane.memory import release_free_memory
from turnlane.queues.api import NodeProgress

SIZE = 1_000
_LOOK_SECONDS = 0.05
_REST_SECONDS = 0.5
"""The time after which all threads are idle. Events wait for long, so the memory then counts."""

_CHILDREN = multiprocessing.get_context("forkserver")


def copy_block(block: Block) -> Block:
    """Return a block in memory of its own, as it arrives over a network."""
    return pa.ipc.read_record_batch(pa.py_buffer(block.serialize().to_pybytes()), block.schema)


class CopyingConnection:
    """A stream into a queue of the same process."""

    resume_at = 0

    def __init__(self, node: turnlane.Queue, producer_id: str) -> None:
        self.durability = turnlane.Durability.INTERVAL
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._producer = node.producer(
            ack="persisted", on_ack=lambda ack: self._news.put(ack.end), producer_id=producer_id
        )
        self._accepted = 0
        self._persisted = 0
        self._closed = False

    def send(self, sequence: int, block: Block) -> None:
        if self._closed:
            raise TransportDown("closed")
        self._producer.publish_block(copy_block(block), sequence=sequence)
        self._accepted = sequence + block.num_rows
        self._news.put(0)

    def progress(self, timeout: float) -> NodeProgress | None:
        if self._closed:
            raise TransportDown("closed")
        try:
            self._persisted = max(self._persisted, self._news.get(timeout=timeout))
        except queue.Empty:
            return None
        return NodeProgress(self._accepted, self._persisted, 0)

    def urge(self) -> None:
        """Do nothing: the node syncs every second."""

    def close(self) -> None:
        self._closed = True


class CopyingTransport:
    """A transport to a queue of the same process."""

    def __init__(self, node: turnlane.Queue) -> None:
        self._node = node

    def connect(self, producer_id: str) -> CopyingConnection:
        return CopyingConnection(self._node, producer_id)

    def get(self, max_events: int | None, timeout: float) -> turnlane.Batch:
        return self._node.get(max_events, timeout)


def _open_node(directory: Path, kind: str) -> turnlane.Queue:
    knobs: dict[str, Any] = {"max_bytes": "4Gi", "size": 1_000_000}
    if kind != "memory":
        knobs |= {"path": directory / "node", "memory_bytes": "4Gi", "durability": "interval"}
    return turnlane.open_queue(kind=kind, **knobs)


def _wait_for(node: turnlane.Queue, events: int) -> None:
    idle = threading.Event()
    while node.stats().ledger.accepted < events:
        idle.wait(_LOOK_SECONDS)
    if node.stats().kind == "disk":
        node.producer(ack="persisted").publish(b"the end")


def _publish(client: turnlane.Queue, events: int) -> None:
    producer = client.producer()
    for line in make_log_lines(events, SIZE):
        producer.publish(line)


def publish_through_proxy(kind: str, directory: Path, events: int) -> list[object]:
    """Publish through a proxy queue until the node has all events; returns the queues."""
    node = _open_node(directory, kind)
    client = turnlane.open_queue(kind="proxy", transport=CopyingTransport(node))
    _publish(client, events)
    _wait_for(node, events)
    idle = threading.Event()
    while client.stats().size:  # the proxy has not heard of the last batches
        idle.wait(_LOOK_SECONDS)
    return [client, node]


def publish_through_own_queue(kind: str, directory: Path, events: int) -> list[object]:
    """Publish through a client's own queue, which keeps events until they are acked."""
    node = _open_node(directory, kind)
    client = turnlane.open_queue(kind="memory", size=events, max_bytes="4Gi")
    _publish(client, events)
    sent = []
    producer = node.producer()
    for _ in range(-(-events // 1024)):
        batch = client.get(timeout=10)
        producer.publish_block(copy_block(batch.block))
        sent.append(batch)
    _wait_for(node, events)
    return [client, node, sent]


def publish_into_node(kind: str, directory: Path, events: int) -> list[object]:
    """Publish into the node directly, for comparison."""
    node = _open_node(directory, kind)
    _publish(node, events)
    _wait_for(node, events)
    return [node]


def measure_own_bytes() -> int:
    """Return the private memory (USS) of this process, without free memory of its allocators."""
    gc.collect()
    release_free_memory()
    return get_own_bytes("self")


Holding = Callable[[Path, int], list[object]]


def _measure(hold: Holding, directory: Path, events: int, results: Connection) -> None:
    make_log_lines(1, SIZE)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        before = measure_own_bytes()
        held = hold(Path(place), events)
        time.sleep(_REST_SECONDS)
        results.send(measure_own_bytes() - before)
        for each in held:
            if isinstance(each, turnlane.Queue):
                each.close()


def measure_memory(hold: Holding, effort: Effort, events: int) -> float:
    """Return the bytes by which a new process grows until all events wait in the node."""
    receiving, sending = _CHILDREN.Pipe(duplex=False)
    child = _CHILDREN.Process(target=_measure, args=(hold, effort.directory, events, sending))
    child.start()
    sending.close()
    taken: int = receiving.recv()
    child.join()
    receiving.close()
    return float(taken)


def run(effort: Effort) -> Outcome:
    """Compare a proxy in front of a node with two queues that both have all events."""
    events = effort.events(100_000, 200_000)
    figures: list[Figure] = []
    rows: dict[str, list[Cell | None]] = {}
    for kind in ("disk", "memory", "disk_assisted"):
        ways: dict[str, Holding] = {
            "proxy and node": partial(publish_through_proxy, kind),
            "client queue and node": partial(publish_through_own_queue, kind),
        }
        found = alternate(
            {name: partial(measure_memory, hold, effort, events) for name, hold in ways.items()},
            effort.rounds,
        )
        alone = partial(measure_memory, partial(publish_into_node, kind), effort, events)
        found |= alternate({"node alone": alone}, effort.few_rounds)
        series = {name: Series(each) for name, each in found.items()}
        rows |= {
            f"{name}, {kind}": [Cell.of(each.map(lambda size: size / 1e6))]
            for name, each in series.items()
        }
        ratio = series["proxy and node"].over(series["client queue and node"])
        how = (
            f"{events:,} events of 1 KB, published at `accepted`, waiting in the memory of a "
            f"node's `{kind}` queue: growth of the private memory (USS) with a proxy in front of "
            "the node / with a second full queue there"
        )
        name = "proxy_memory_ratio" if kind == "disk" else f"proxy_memory_ratio_{kind}"
        figures.append(make_figure(name, ratio, how, unit="×", at_most=0.6))
    about = "The same, by the kind of the node's queue."
    return Outcome(
        figures, [Table("Memory while events wait in the node", "MB", ("memory",), rows, about)]
    )
