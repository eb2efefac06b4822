"""Tests of leases: a batch returns to the queue if its consumer dies."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.contract.harness import NOTICEABLE, Task, wait_until
from tests.node.conftest import Serve, ServedNode
from tests.queue_internals import state_of
from turnlane.client.transport import LeasedBatch
from turnlane.errors import NoSuchLease, QueueClosed, QueueEmpty, TransportDown
from turnlane.events import block_of
from turnlane.node.flight import read
from turnlane.node.flight.actions import Caller
from turnlane.node.flight.messages import ConsumeCommand
from turnlane.node.flight.server import FlightPlane
from turnlane.node.leases import Leases
from turnlane.queues import open_buffered_queue


def _publish(served: ServedNode, *values: bytes, queue: str = "disk") -> None:
    served.node.queue(queue).producer().publish_block(block_of(values))


def _consume(served: ServedNode, **command: object) -> list[flight.FlightStreamChunk]:
    ticket = flight.Ticket(json.dumps({"consume": "disk", **command}).encode())
    return list(served.flight().do_get(ticket))


def _parse_metadata(chunk: flight.FlightStreamChunk) -> dict[str, object]:
    about: dict[str, object] = json.loads(bytes(chunk.app_metadata or b""))
    return about


def test_batch_has_a_lease_that_settles_it(served: ServedNode) -> None:
    _publish(served, b"a", b"b")
    (chunk,) = _consume(served)
    about = _parse_metadata(chunk)
    assert (about["first"], about["attempt"]) == (0, 1)
    assert chunk.data is not None
    assert chunk.data.column("value").to_pylist() == [b"a", b"b"]
    assert served.act("done", lease=about["lease"]) == {}
    assert served.node.queue("disk").stats().ledger.delivered == 2
    assert _consume(served) == []


def test_partly_filled_batch_is_returned(serve: Serve) -> None:
    """This holds for any length of the client's waits."""
    slow = {"kind": "memory", "minimum_batch_size": 10, "minimum_batch_timeout": "1s"}
    served = serve({"slow": slow})
    _publish(served, b"a", queue="slow")
    with served.client().queue("slow").get(timeout=10) as batch:
        assert len(batch) == 1


def test_ended_leases_use_no_memory() -> None:
    queue = open_buffered_queue(kind="memory", size=10)
    with queue, Leases() as leases:
        queue.producer().publish(b"x")
        held = leases.take(queue, 1, 0, 86_400, "a day")
        for _ in range(5000):
            leases.extend(held.id)
        assert len(leases._due) < 2500
        leases.done(held.id)


def test_timeout_is_a_stream_without_blocks(served: ServedNode) -> None:
    assert _consume(served, wait=0.01) == []


def test_batch_that_arrives_during_the_wait_is_returned(served: ServedNode) -> None:
    waiting = Task(lambda: _consume(served, wait=60))
    wait_until(lambda: bool(state_of(served.node.queue("disk")).waiting_readers))
    _publish(served, b"a")
    assert len(waiting.result()) == 1


def test_blocks_of_a_batch_with_different_columns_share_a_schema(served: ServedNode) -> None:
    _publish(served, b"a")
    served.node.queue("disk").producer().publish_block(
        block_of([b"b"]).append_column("user", pa.array([1]))
    )
    chunks = _consume(served)
    rows = [row for chunk in chunks if chunk.data for row in chunk.data.to_pylist()]
    assert [(row["value"], row["user"]) for row in rows] == [(b"a", None), (b"b", 1)]
    assert [_parse_metadata(chunk)["first"] for chunk in chunks] == list(range(len(chunks)))


def test_released_batch_returns_with_a_higher_attempt(served: ServedNode) -> None:
    _publish(served, b"a")
    served.act("release", lease=_parse_metadata(_consume(served)[0])["lease"])
    assert _parse_metadata(_consume(served)[0])["attempt"] == 2


def test_dead_batch_is_counted_as_dead(served: ServedNode) -> None:
    _publish(served, b"a")
    served.act("dead", lease=_parse_metadata(_consume(served)[0])["lease"])
    assert served.node.queue("disk").stats().ledger.dead == 1


def test_expired_lease_gives_the_batch_to_another_consumer(served: ServedNode) -> None:
    _publish(served, b"a")
    lost = _parse_metadata(_consume(served, lease=0.05)[0])["lease"]
    (again,) = _consume(served, wait=20)
    assert _parse_metadata(again)["attempt"] == 2
    with pytest.raises(flight.FlightServerError, match="turnlane:NoSuchLease"):
        served.act("done", lease=lost)
    assert served.node.leases.expired == 1


def test_extended_lease_does_not_expire(served: ServedNode) -> None:
    _publish(served, b"a")
    lease = _parse_metadata(_consume(served, lease=0.2)[0])["lease"]
    served.act("extend", lease=lease, seconds=60)
    assert _consume(served, wait=0.4) == []
    assert served.act("done", lease=lease) == {}


def test_client_that_leaves_during_a_batch_releases_it(serve: Serve) -> None:
    """It cannot settle events that it did not get, so the lease ends at once."""
    served = serve({"disk": {"durability": "never", "dequeue_batch_size": 1000}})
    big = bytes(1 << 20)
    for _ in range(40):
        _publish(served, big)
    ticket = flight.Ticket(b'{"consume": "disk", "lease": 3600}')
    reader = served.flight().do_get(ticket)
    reader.read_chunk()
    reader.cancel()
    wait_until(lambda: len(served.node.leases) == 0, "the lease to be given back")
    assert served.node.queue("disk").stats().in_flight == 0


def test_client_that_left_during_the_wait_gets_no_lease(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise late events would be unavailable until the lease expires."""
    callers: list[Caller] = []

    def record_call(self: FlightPlane, context: Any) -> Caller:
        callers.append(caller(self, context))
        return callers[-1]

    caller = FlightPlane.get_caller
    monkeypatch.setattr(FlightPlane, "get_caller", record_call)
    monkeypatch.setattr(read, "POLL_SECONDS", 60.0)  # the client does not notice by itself
    queue = served.node.queue("disk")
    node = served.client().nodes[0]
    with pytest.raises(flight.FlightTimedOutError):
        list(node.get({"consume": "disk", "wait": 60.0, "lease": 3600.0}, 0.5))
    wait_until(lambda: bool(state_of(queue).waiting_readers) and callers[0].is_abandoned())
    _publish(served, b"a")
    wait_until(lambda: queue.stats().releases == 1, "the batch to be given back")
    assert (len(served.node.leases), queue.stats().in_flight) == (0, 0)


def test_unread_batch_is_released(served: ServedNode) -> None:
    """Flight may drop a stream before it asks for a block."""
    _publish(served, b"a")
    command = ConsumeCommand(consume="disk", lease=3600.0)
    ended: list[str] = []
    with contextlib.ExitStack() as call:
        call.callback(ended.append, "the call")
        stream = read.consume_stream(
            served.node.leases,
            served.node.queue("disk"),
            command,
            read.AbortableWait(0.0, lambda: False),
            call,
        )
    assert len(served.node.leases) == 1
    assert not ended
    del stream
    gc.collect()
    assert len(served.node.leases) == 0
    assert ended


# ── batches of a client ──────────────────────────────────────────────────────────────────────────


def test_batches_of_a_client_follow_the_contract(served: ServedNode) -> None:
    queue = served.client().queue("disk")
    _publish(served, b"a", b"b")
    batch = queue.get(timeout=5)
    assert [event.value for event in batch] == [b"a", b"b"]
    batch.release()
    again = queue.get(timeout=5)
    assert again.attempt == 2
    again.free()
    again.done()
    again.done()
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.01)


def test_batch_of_a_live_client_does_not_expire(served: ServedNode) -> None:
    queue = served.client(lease="300ms").queue("disk")
    _publish(served, b"a")
    batch = queue.get(timeout=5)
    lease = served.node.leases.find(_take_lease(batch))
    before = lease.expires
    wait_until(lambda: lease.expires > before + 0.5, "a lease extended twice")
    batch.done()
    assert served.node.leases.expired == 0


def test_garbage_collected_batch_is_returned_again(served: ServedNode) -> None:
    queue = served.client(lease="100ms").queue("disk")
    _publish(served, b"a")
    batch = queue.get(timeout=5)
    del batch
    gc.collect()
    assert queue.get(timeout=10).attempt == 2


def test_batches_of_a_closed_client_return_at_once(served: ServedNode) -> None:
    client = served.client(lease=3600)
    batch = client.queue("disk", shutdown_timeout=0.1)
    _publish(served, b"a")
    held = batch.get(timeout=5)
    assert held.attempt == 1
    client.close()
    assert len(served.node.leases) == 0
    assert served.node.queue("disk").get(timeout=5).attempt == 2


DYING = """
import os, sys, turnlane
queue = turnlane.connect(sys.argv[1], lease="500ms").queue("disk")
print(len(queue.get(timeout=10)), flush=True)
os.kill(os.getpid(), 9)
"""


def test_batches_of_a_killed_client_return(served: ServedNode) -> None:
    _publish(served, b"a", b"b", b"c")
    run = subprocess.run(
        [sys.executable, "-c", DYING, served.url], capture_output=True, text=True, check=False
    )
    assert run.stdout == "3\n", run.stderr
    batch = served.client().queue("disk").get(timeout=10)
    assert (len(batch), batch.attempt) == (3, 2)
    batch.done()


def test_settling_an_expired_batch_raises(
    served: ServedNode, caplog: pytest.LogCaptureFixture
) -> None:
    queue = served.client().queue("disk")
    _publish(served, b"a")
    batch = queue.get(timeout=5)
    served.node.leases.release(_take_lease(batch))
    with pytest.raises(NoSuchLease):
        batch.done()
    batch.done()  # it has ended


def test_failed_extension_of_a_lease_is_logged(
    served: ServedNode, caplog: pytest.LogCaptureFixture
) -> None:
    queue = served.client(lease="200ms").queue("disk")
    _publish(served, b"a")
    batch = queue.get(timeout=5)
    with caplog.at_level(logging.WARNING):
        served.node.leases.release(_take_lease(batch))
        wait_until(lambda: "lease.expired" in caplog.text, "a warning")


def test_done_is_repeated_after_a_lost_answer(served: ServedNode) -> None:
    """The node has settled the batch; the second call finds no lease, which is not an error."""
    queue = served.client().queue("disk")
    _publish(served, b"a")
    batch = queue.get(timeout=5)
    assert isinstance(batch, LeasedBatch)
    act = batch._node.act

    def lose_the_answer(kind: str, **body: Any) -> dict[str, Any]:
        act(kind, **body)
        batch._node.act = act  # type: ignore[method-assign]
        raise TransportDown("the answer was lost")

    batch._node.act = lose_the_answer  # type: ignore[method-assign]
    with pytest.raises(TransportDown):
        batch.done()
    batch.done()
    assert served.node.queue("disk").stats().ledger.delivered == 1


def _take_lease(batch: object) -> str:
    assert isinstance(batch, LeasedBatch)
    return batch.lease


# ── leases of a node ─────────────────────────────────────────────────────────────────────────────


def test_closed_node_releases_its_batches() -> None:
    queue = open_buffered_queue(kind="memory")
    queue.producer().publish(b"a")
    leases = Leases()
    leases.take(queue, None, 1.0, 60.0, "somebody")
    leases.close()
    leases.close()
    assert queue.get(timeout=1).attempt == 2
    with pytest.raises(QueueEmpty):
        leases.take(queue, None, NOTICEABLE, 60.0, "somebody")
    queue.producer().publish(b"b")
    with pytest.raises(QueueClosed):
        leases.take(queue, None, 1.0, 60.0, "somebody")
    queue.close()
