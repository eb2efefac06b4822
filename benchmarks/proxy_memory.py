"""What a proxy queue saves: the memory of a client and its node while events wait in the node.

Client and node share a process here, which is measured from outside: what the operating system
says it has for itself, once its allocators have given back what is free. Every block that goes from
one to the other is copied, as a network would copy it.
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

import pyarrow as pa

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import log_lines
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, figure
from benchmarks.resident import own_bytes
from turnlane.errors import TransportDown
from turnlane.events import Block
from turnlane.memory import release_free_memory
from turnlane.queues.api import NodeProgress

SIZE = 1_000
_LOOK_SECONDS = 0.05
_REST_SECONDS = 0.5
"""Events wait for long: what counts is the memory taken once everybody has come to rest."""

_CHILDREN = multiprocessing.get_context("forkserver")


def copied(block: Block) -> Block:
    """The block as it arrives at the other end of a network: in memory of its own."""
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
        self._producer.publish_block(copied(block), sequence=sequence)
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
        """The node syncs every second, as it always does."""

    def close(self) -> None:
        self._closed = True


class CopyingTransport:
    """The way to a queue of the same process."""

    def __init__(self, node: turnlane.Queue) -> None:
        self._node = node

    def connect(self, producer_id: str) -> CopyingConnection:
        return CopyingConnection(self._node, producer_id)

    def get(self, max_events: int | None, timeout: float) -> turnlane.Batch:
        return self._node.get(max_events, timeout)


def _node(directory: Path) -> turnlane.Queue:
    return turnlane.open_queue(
        kind="disk", path=directory / "node", memory_bytes="4Gi", durability="interval"
    )


def _wait_for(node: turnlane.Queue, events: int) -> None:
    idle = threading.Event()
    while node.stats().ledger.accepted < events:
        idle.wait(_LOOK_SECONDS)
    node.producer(ack="persisted").publish(b"the end")


def _publish(client: turnlane.Queue, events: int) -> None:
    producer = client.producer()
    for line in log_lines(events, SIZE):
        producer.publish(line)


def through_proxy(directory: Path, events: int) -> list[object]:
    """Publish into a proxy queue before a node that has everything; returns what holds it."""
    node = _node(directory)
    client = turnlane.open_queue(kind="proxy", transport=CopyingTransport(node))
    _publish(client, events)
    # Once this is acked, the proxy has heard that everything before is safe with the node.
    last = client.producer(ack="persisted", on_ack=lambda _: None)
    last.publish(b"the end")
    _wait_for(node, events + 1)
    last.flush()
    return [client, node]


def two_full_queues(directory: Path, events: int) -> list[object]:
    """The same with a queue of its own in the client, which holds events until they are acked."""
    node = _node(directory)
    client = turnlane.open_queue(kind="memory", size=events, max_bytes="4Gi")
    _publish(client, events)
    sent = []
    producer = node.producer()
    for _ in range(-(-events // 1024)):
        batch = client.get(timeout=10)
        producer.publish_block(copied(batch.block))
        sent.append(batch)
    _wait_for(node, events)
    return [client, node, sent]


def node_alone(directory: Path, events: int) -> list[object]:
    """Only the node, for comparison."""
    node = _node(directory)
    _publish(node, events)
    _wait_for(node, events)
    return [node]


def tidy_bytes() -> int:
    """What this process has for itself alone (its USS), what its allocators keep free left out."""
    gc.collect()
    release_free_memory()
    return own_bytes("self")


Holding = Callable[[Path, int], list[object]]


def _measure(hold: Holding, directory: Path, events: int, results: Connection) -> None:
    log_lines(1, SIZE)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        before = tidy_bytes()
        held = hold(Path(place), events)
        time.sleep(_REST_SECONDS)
        results.send(tidy_bytes() - before)
        for each in held:
            if isinstance(each, turnlane.Queue):
                each.close()


def memory_of(hold: Holding, effort: Effort, events: int) -> float:
    """Bytes that a new process takes for it, once all events wait in the node."""
    receiving, sending = _CHILDREN.Pipe(duplex=False)
    child = _CHILDREN.Process(target=_measure, args=(hold, effort.directory, events, sending))
    child.start()
    sending.close()
    taken: int = receiving.recv()
    child.join()
    receiving.close()
    return float(taken)


def run(effort: Effort) -> Outcome:
    """The proxy before a node, against two queues that both hold everything."""
    events = effort.events(100_000, 200_000)
    ways: dict[str, Holding] = {
        "proxy and node": through_proxy,
        "client queue and node": two_full_queues,
    }
    found = alternate(
        {name: partial(memory_of, hold, effort, events) for name, hold in ways.items()},
        effort.rounds,
    )
    alone = partial(memory_of, node_alone, effort, events)
    found |= alternate({"node alone": alone}, effort.few_rounds)
    series = {name: Series(each) for name, each in found.items()}
    rows = {name: [Cell.of(each.map(lambda size: size / 1e6))] for name, each in series.items()}
    ratio = series["proxy and node"].over(series["client queue and node"])
    how = (
        f"{events:,} events of 1 KB waiting in the node's memory: growth of the process's own "
        "memory (USS) with a proxy in front of the node / with a second full queue there"
    )
    return Outcome(
        [figure("proxy_memory_ratio", ratio, how, unit="×", at_most=0.6)],
        [Table("Memory while events wait in the node", "MB", ("memory",), rows, how + ".")],
    )
