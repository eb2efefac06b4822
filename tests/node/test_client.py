"""Tests of a client's queue whose node dies, is unreachable, or refuses events."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

import turnlane
from tests.contract.harness import PATIENCE, Acks, Task, assert_never, wait_until
from tests.node.conftest import Serve, ServedNode, values
from tests.node.killed_process import QUEUES, run_killed_node
from tests.recovery.proxy_harness import impatience
from turnlane.client import connect, node_client, transport
from turnlane.client.transport import FlightConnection
from turnlane.errors import (
    ConfigError,
    EventTooLarge,
    Never,
    NoSuchQueue,
    NoSuchStage,
    NotSupported,
    QueueClosed,
    QueueExists,
    QueueFull,
    SchemaMismatch,
    TransportDown,
)
from turnlane.events import block_of, get_values
from turnlane.node.node import Node


@pytest.fixture(autouse=True, scope="module")
def _shorten_waits() -> Iterator[None]:
    with impatience():
        yield


# ── a killed node ────────────────────────────────────────────────────────────────────────────────


def test_killed_node_has_each_persisted_event_once(
    tmp_path: Path,
) -> None:
    """Four producers publish while the node is killed repeatedly: every event is in order."""
    data, total, rng = tmp_path / "data", 2000, random.Random(7)
    acked = [0] * 4

    def publish(number: int) -> None:
        with connect(node.url) as client:
            queue = client.queue("main", batch_size=64, shutdown_timeout="20s")
            acks = Acks()
            producer = queue.producer(ack="persisted", on_ack=acks)
            for first in range(0, total, 50):
                producer.publish_block(
                    block_of([b"%d-%d" % (number, each) for each in range(first, first + 50)])
                )
            assert producer.flush(PATIENCE)
            acks.wait_for(total)
            acked[number] = acks.count

    with run_killed_node(data) as node:
        tasks = [Task(partial(publish, number)) for number in range(4)]
        for _ in range(3):
            time.sleep(rng.uniform(0.02, 0.2))
            node.kill()
            node.start()
        for task in tasks:
            task.thread.join(60)
            task.result()
    assert acked == [total] * 4
    with Node(data, QUEUES) as survivor:
        found = values(survivor, "main")
    for number in range(4):
        mine = [value for value in found if value.startswith(b"%d-" % number)]
        assert mine == [b"%d-%d" % (number, each) for each in range(total)]


@pytest.mark.parametrize("kind", ["memory", "disk_assisted"])
def test_killed_node_gets_again_what_the_level_of_each_producer_promises(
    tmp_path: Path, kind: str
) -> None:
    """Many times what the proxy may keep waits in the node at ``accepted``, before the kill."""
    with run_killed_node(tmp_path) as process, connect(process.url) as client:
        queue = client.queue(kind, resend_bytes="64Ki", max_event_bytes="1Ki")
        accepted = queue.producer()
        persisted = queue.producer(ack="persisted", on_ack=(acks := Acks()))
        for number in range(2000):
            assert accepted.publish(b"a" * 500, timeout=PATIENCE)
            if number % 100 == 0:
                assert persisted.publish(b"p%d" % number, timeout=PATIENCE)
        watching = client.queue(kind)
        wait_until(lambda: queue.stats().size == 0, "everything in the node")
        process.kill()
        process.start()
        with watching.get(timeout=PATIENCE) as batch:
            assert get_values([batch.block]) == [b"p%d" % number for number in range(0, 2000, 100)]
        acks.wait_for(20)
        wait_until(lambda: queue.stats().ledger.pending == 0, "the end of all events")
        assert queue.stats().ledger.dropped == {"missing": 2000}


def test_consumer_continues_after_the_node_was_killed(tmp_path: Path) -> None:
    """Every event is delivered at least once; settled events do not return."""
    with run_killed_node(tmp_path / "data") as node, connect(node.url) as client:
        queue = client.queue("main")
        queue.producer(ack="persisted").publish_block(block_of([b"%d" % n for n in range(10)]))
        batch = queue.get(4, timeout=PATIENCE)
        done = [event.value for event in batch]
        batch.done()
        held = queue.get(3, timeout=PATIENCE)
        node.kill()
        node.start()
        with pytest.raises(turnlane.TurnlaneError):
            held.done()  # its lease ended with the node
        rest: list[bytes | None] = []
        while len(rest) < 6:
            with queue.get(timeout=PATIENCE) as batch:
                rest += [event.value for event in batch]
        assert done + rest == [b"%d" % n for n in range(10)]


def test_frozen_node_delays_publishers_but_not_close(tmp_path: Path) -> None:
    """The connections stay open without any answer."""
    with run_killed_node(tmp_path / "data") as node, connect(node.url) as client:
        queue = client.queue("main", batch_size=1000)
        producer = queue.producer(ack="persisted", on_ack=(acks := Acks()))
        producer.publish(b"first")
        acks.wait_for(1)
        node.freeze(frozen=True)
        for _ in range(3):
            producer.publish_block(block_of([bytes(10_000)] * 1000))  # more than gRPC buffers
        assert_never(lambda: acks.count > 1)
        left = client.queue("main", batch_size=1000)
        left.producer().publish_block(block_of([bytes(10_000)] * 1000))
        started = time.monotonic()
        left.close()
        assert time.monotonic() - started < PATIENCE / 2
        node.freeze(frozen=False)
        acks.wait_for(3001)


def test_waiting_publisher_causes_an_early_sync(served: ServedNode) -> None:
    """The same holds for a local queue: its writer syncs early for a waiting publisher."""
    queue = served.client().queue("slow")
    waiting = queue.producer(ack="persisted")
    for number in range(3):
        assert waiting.publish(b"%d" % number, timeout=PATIENCE)
    following = queue.producer(ack="persisted", on_ack=(acks := Acks()))
    following.publish(b"later")
    wait_until(lambda: served.node.queue("slow").end == 4)
    assert_never(lambda: acks.count > 0)
    assert following.flush(PATIENCE)


# ── an unreachable node ──────────────────────────────────────────────────────────────────────────


def test_client_can_be_created_before_its_node_starts(serve: Serve, unused_port: int) -> None:
    with connect(f"turnlane://127.0.0.1:{unused_port}") as client:
        queue = client.queue("disk")
        producer = queue.producer(ack="persisted", on_ack=(acks := Acks()))
        producer.publish(b"early")
        served = serve(port=unused_port)
        acks.wait_for(1)
        assert values(served.node, "disk") == [b"early"]


def test_publishing_without_the_node_buffers_then_blocks(unused_port: int) -> None:
    with connect(f"turnlane://127.0.0.1:{unused_port}") as client:
        queue = client.queue("disk", batch_size=2, batches=2, shutdown_timeout=0)
        producer = queue.producer()
        for _ in range(4):
            producer.publish(b"x")
        assert not producer.try_publish(b"y")
        blocked = Task(lambda: producer.publish(b"y"))
        assert_never(lambda: not blocked.running)
        queue.close()
        with pytest.raises(QueueClosed):
            blocked.result()


@pytest.mark.parametrize(
    ("knobs", "dropped"),
    [({"full_behavior": "drop_newest"}, {"newest": 1}), ({"full_timeout": "10ms"}, {})],
)
def test_publishing_without_the_node_refuses_as_configured(
    unused_port: int, knobs: dict[str, Any], dropped: dict[str, int]
) -> None:
    with connect(f"turnlane://127.0.0.1:{unused_port}") as client:
        queue = client.queue("disk", batch_size=2, batches=2, shutdown_timeout=0, **knobs)
        producer = queue.producer()
        for _ in range(4):
            producer.publish(b"x")
        if dropped:
            assert not producer.publish(b"y")
        else:
            with pytest.raises(QueueFull):
                producer.publish(b"y")
        assert queue.stats().ledger.dropped == dropped


def test_get_without_the_node_waits_for_it(serve: Serve, unused_port: int) -> None:
    with connect(f"turnlane://127.0.0.1:{unused_port}") as client:
        queue = client.queue("disk")
        with pytest.raises(TransportDown):
            queue.get(timeout=0.05)
        getting = Task(lambda: queue.get(timeout=PATIENCE))
        served = serve(port=unused_port)
        served.node.queue("disk").producer().publish(b"late")
        batch = getting.result()
        assert [event.value for event in batch] == [b"late"]
        batch.done()


def test_client_reconnects_after_the_node_was_stopped(serve: Serve) -> None:
    before = serve(name="same")
    client = before.client()
    queue = client.queue("disk")
    producer = queue.producer(ack="persisted", on_ack=(acks := Acks()))
    producer.publish(b"a")
    acks.wait_for(1)
    port = before.plane.address.port
    started = time.monotonic()
    before.plane.stop()
    assert time.monotonic() - started < 0.9, "a client of ours does not have to be cut off"
    before.node.close()
    producer.publish(b"b")
    after = serve(name="same", port=port)
    acks.wait_for(2)
    assert values(after.node, "disk") == [b"a", b"b"]


def test_outage_is_logged_once(unused_port: int, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "turnlane.queues.proxy"),
        connect(f"turnlane://127.0.0.1:{unused_port}") as client,
    ):
        client.queue("disk")
        wait_until(lambda: len(caplog.records) >= 3)
    levels = [record.levelno for record in caplog.records]
    assert levels[0] == logging.WARNING
    assert logging.WARNING not in levels[1:]


def test_call_to_a_silent_node_times_out(monkeypatch: pytest.MonkeyPatch, silent_port: int) -> None:
    monkeypatch.setattr(node_client, "OPTIONS", [("grpc.min_reconnect_backoff_ms", 200)])
    with connect(f"turnlane://127.0.0.1:{silent_port}") as client:
        with pytest.raises(TransportDown):
            transport.FlightConnection(client.nodes[0], "disk", "p")
        with pytest.raises(TransportDown):
            client.nodes[0].ping(timeout=0.2)


class _SilentServer(flight.FlightServerBase):
    """A server that accepts calls and answers only on request."""

    def __init__(self) -> None:
        self.speak = threading.Event()
        super().__init__("grpc+tcp://127.0.0.1:0")

    def do_exchange(self, *_: object) -> None:
        self.speak.wait(PATIENCE)


def test_stream_to_a_silent_node_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "GREETING_SECONDS", 0.1)
    with _SilentServer() as mute, connect(f"turnlane://127.0.0.1:{mute.port}") as client:
        with pytest.raises(TransportDown, match=r"did not answer in 0\.1 s"):
            transport.FlightConnection(client.nodes[0], "disk", "p")
        with pytest.raises(NotSupported, match="not a turnlane node"):
            client.nodes[0].ping()
        mute.speak.set()


# ── a node that refuses ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("queue", "error"),
    [("missing", NoSuchQueue), ("typed", SchemaMismatch), ("tiny", EventTooLarge)],
)
def test_permanent_refusal_fails_the_queue(serve: Serve, queue: str, error: type[Never]) -> None:
    """Every attempt would be refused: publishers get the reason, and nothing is acked."""
    served = serve(
        {"typed": {"kind": "memory"}, "tiny": {"kind": "memory", "max_event_bytes": 100}}
    )
    typed = block_of([b"x"]).append_column("user", pa.array([1]))
    served.node.queue("typed").producer().publish_block(typed)
    acks = Acks()
    with served.client() as client:
        failing = client.queue(queue)
        wrong = block_of([bytes(200)]).append_column("user", pa.array(["one"]))
        calls: list[Callable[[], object]] = [
            lambda: failing.producer(ack="persisted").publish_block(wrong),
            lambda: failing.producer(ack="persisted", on_ack=acks).publish(b"more"),
            lambda: failing.producer().try_publish(b"more"),
        ]
        for call in calls:
            with pytest.raises(error):
                call()
        started = time.monotonic()
        failing.close(drain=True)
        assert time.monotonic() - started < 3
        assert acks.received == []
        assert failing.stats().ledger.adds_up
    assert values(served.node, "typed") == [b"x"]


def test_failed_queue_can_still_be_read(serve: Serve) -> None:
    served = serve({"tiny": {"kind": "memory", "max_event_bytes": 100}})
    served.node.queue("tiny").producer().publish(b"x")
    queue = served.client().queue("tiny")
    with pytest.raises(EventTooLarge):
        queue.producer(ack="persisted").publish(bytes(200))
    with queue.get(timeout=5) as batch:
        assert [event.value for event in batch] == [b"x"]


def test_call_raises_the_error_of_the_node(served: ServedNode) -> None:
    client = served.client()
    with pytest.raises(NoSuchQueue, match="there is no queue 'nope'"):
        client.wait("nope", 0, 0.0)
    with pytest.raises(NoSuchQueue):
        list(client.read("nope", 0, 1))
    with pytest.raises(QueueExists):
        client.create("memory", kind="memory", size=5)
    with pytest.raises(ConfigError) as wrong:
        client.create("new", syze=5)
    assert wrong.value.knob == "syze"
    with pytest.raises(NoSuchStage):
        client.commit(["nope"])
    with pytest.raises(NoSuchQueue):
        client.queue("nope").get(timeout=5)


def test_other_server_at_the_address_is_refused(silent_port: int) -> None:
    with connect(f"turnlane://127.0.0.1:{silent_port}") as client, pytest.raises(TransportDown):
        client.nodes[0].ping(timeout=0.2)


# ── commits of a lane ────────────────────────────────────────────────────────────────────────────


def test_commit_publishes_stages_and_settles_their_range(served: ServedNode) -> None:
    client = served.client()
    served.node.queue("disk").producer().publish_block(block_of([b"a", b"b", b"c"]))
    with client.stage("slow", block_of([]).schema) as stage:
        for _, block in client.read("disk", 0, 3):
            stage.write(block)
        stage_id = stage.finish()
    assert client.commit([stage_id], [("disk", 0, 3)], writer="lane", epoch=4)
    assert not client.commit(["gone"], [("disk", 0, 3)], writer="lane", epoch=4)
    assert client.nodes[0].epoch("lane") == 4
    assert client.nodes[0].epoch("other") is None
    assert client.wait("disk", 0, 0.0)[:2] == (3, 3)
    assert values(served.node, "slow") == [b"a", b"b", b"c"]


def test_lane_commits_to_a_node_that_it_did_not_read(served: ServedNode) -> None:
    """A node may get events that were read from others while its own range is settled."""
    client = served.client()
    served.node.queue("disk").producer().publish_block(block_of([b"a"]))
    node = client.nodes[0]
    node.plan("lane", "1", "disk", [(0, 1)])

    def stage_values(value: bytes) -> str:
        with client.stage("slow", block_of([]).schema) as stage:
            stage.write(block_of([value]))
            return stage.finish()

    first, second = stage_values(b"a"), stage_values(b"of another node")
    assert node.commit([first], lane="lane", run="1")
    assert not node.commit([first], lane="lane", run="1"), "a repeat"
    assert node.commit([second], lane="lane", run="1")
    assert values(served.node, "slow") == [b"a", b"of another node"]


def test_commit_of_an_aborted_stage_is_refused(served: ServedNode) -> None:
    client = served.client()
    with client.stage("disk", block_of([]).schema) as stage:
        stage.write(block_of([b"a"]))
        stage_id = stage.finish()
    client.abort([stage_id])
    with pytest.raises(NoSuchStage):
        client.commit([stage_id])


def test_unfinished_stage_has_no_id(served: ServedNode) -> None:
    with served.client().stage("disk", block_of([]).schema) as stage:
        stage.write(block_of([b"a"]))
    assert stage.ids is None
    assert len(served.node.staging) == 0
    assert values(served.node, "disk") == []


def test_failed_stage_raises_only_its_own_error(served: ServedNode) -> None:
    with (
        pytest.raises(SchemaMismatch),
        served.client().stage("disk", pa.schema([("value", pa.int64())])) as stage,
    ):
        stage.finish()
    assert len(served.node.staging) == 0


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (block_of([b"x" * 1000]), EventTooLarge),
        (block_of([b"x", b"y"], severities=[1, 9]), ValueError),
        (block_of([b"x"]).append_column("n", pa.array(["a"])), SchemaMismatch),
    ],
)
def test_event_that_the_queue_never_takes_is_refused_before_the_commit(
    serve: Serve, block: pa.RecordBatch, error: type[Exception]
) -> None:
    served = serve({"small": {"max_event_bytes": 900}})
    served.node.queue("small").check_columns(pa.schema([("n", pa.int64())]))
    stage = served.client().stage("small", block.schema)
    with contextlib.suppress(error):
        stage.write(block)  # the node may refuse before the end
    with pytest.raises(error):
        stage.finish()
    assert len(served.node.staging) == 0


# Restarts and columns


def test_node_restart_between_two_streams_is_noticed(serve: Serve) -> None:
    """The node may have lost events of the first stream: a new connection sends them again."""
    node = serve({"memory": {"kind": "memory"}})
    client = node.client()
    connection = FlightConnection(client.nodes[0], "memory", "p")
    connection.send(0, block_of([b"lost"]))
    opened = connection._opened

    def restarted() -> Any:
        node.plane.stop()
        node.node.close()
        serve({"memory": {"kind": "memory"}}, port=node.plane.address.port)
        return opened()

    connection._opened = restarted  # type: ignore[method-assign]
    with pytest.raises(TransportDown, match="restarted"):
        connection.send(1, block_of([b"next"]).append_column("wider", pa.array([1])))
    connection.close()


def test_blocks_with_changing_columns_arrive_in_order(served: ServedNode) -> None:
    producer = served.client().queue("disk").producer(ack="persisted", on_ack=(acks := Acks()))
    plain = block_of([b"0"])
    for number in range(12):
        block = block_of([b"%d" % number])
        if number % 3:
            block = block.append_column(f"c{number % 3}", pa.array([number]))
        if number % 5 == 4:
            block = block.append_column("late", pa.array(["x"]))
        producer.publish_block(block)
    assert producer.flush(PATIENCE)
    wait_until(lambda: acks.count == 12, "all acks")
    assert plain.num_rows == 1
    table = pa.Table.from_batches([each for _, each in served.client().read("disk")])
    assert table.column("value").to_pylist() == [b"%d" % number for number in range(12)]
    assert table.column("c1").to_pylist() == [n if n % 3 == 1 else None for n in range(12)]
    assert table.column("late").to_pylist() == ["x" if n % 5 == 4 else None for n in range(12)]
