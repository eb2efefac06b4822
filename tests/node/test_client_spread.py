"""Tests of a client's queue that is spread over several nodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnlane
from tests.contract.harness import PATIENCE, Acks, Task, assert_never, wait_until
from tests.node.conftest import Serve, ServedNode, values
from tests.recovery.proxy_harness import impatience
from turnlane.client import connect
from turnlane.client.spread import SpreadQueue
from turnlane.errors import (
    NoSuchQueue,
    NotSupported,
    QueueClosed,
    QueueEmpty,
)
from turnlane.events import block_of
from turnlane.key_hash import find_node, find_nodes
from turnlane.queues.api import AckLevel


@pytest.fixture(autouse=True, scope="module")
def _shorten_waits() -> Iterator[None]:
    with impatience():
        yield


@pytest.fixture
def two_nodes(serve: Serve) -> tuple[ServedNode, ServedNode]:
    queues = {"q": {"kind": "memory"}}
    return serve(queues, name="one"), serve(queues, name="two")


@pytest.fixture
def connect_both(two_nodes: tuple[ServedNode, ServedNode]) -> Iterator[turnlane.Client]:
    one, two = two_nodes
    with connect(f"{one.url},{two.plane.address}") as client:
        yield client


def test_events_of_one_key_go_to_one_node(
    two_nodes: tuple[ServedNode, ServedNode], connect_both: turnlane.Client
) -> None:
    producer = connect_both.queue("q", shutdown_timeout=0).producer()
    keys = [f"key-{number % 20}" for number in range(200)]
    producer.publish_block(block_of([key.encode() for key in keys], keys=keys))
    for key in keys[:20]:
        producer.publish(key.encode(), key)
    wait_until(lambda: sum(each.node.queue("q").end for each in two_nodes) == 220)
    found = [values(each.node, "q") for each in two_nodes]
    assert not set(found[0]) & set(found[1])
    assert all(found)
    for place, here in enumerate(found):
        assert {find_node(value.decode(), 2) for value in here} == {place}
        for value in set(here):
            assert here.count(value) == 11


def test_events_without_keys_go_to_the_nodes_in_turn(
    two_nodes: tuple[ServedNode, ServedNode], connect_both: turnlane.Client
) -> None:
    producer = connect_both.queue("q", shutdown_timeout=0).producer()
    for _ in range(4):
        producer.publish_block(block_of([b"x"] * 10))
        producer.publish(b"y")
        producer.publish(b"z")
    wait_until(lambda: sum(each.node.queue("q").end for each in two_nodes) == 48)
    assert [each.node.queue("q").end for each in two_nodes] == [24, 24]


def test_get_reads_all_nodes_and_acks_come_from_all(
    two_nodes: tuple[ServedNode, ServedNode], connect_both: turnlane.Client
) -> None:
    queue = connect_both.queue("q")
    assert isinstance(queue, SpreadQueue)
    producer = queue.producer(ack="delivered", on_ack=(acks := Acks()))
    keys = [f"key-{number}" for number in range(50)]
    producer.publish_block(block_of([b"x"] * 50, keys=keys))
    found: list[str | None] = []
    while len(found) < 50:
        with queue.get(7, timeout=PATIENCE) as batch:
            assert len(batch) <= 7
            found += [event.key for event in batch]
    assert sorted(map(str, found)) == sorted(keys)
    acks.wait_for(50)
    assert producer.flush(PATIENCE)
    assert queue.stats().ledger.delivered == 50
    assert queue.stats().ledger.adds_up


def test_stats_of_several_nodes_are_added_up(connect_both: turnlane.Client) -> None:
    found = connect_both.queue("q").stats()
    single = connect_both._transport(connect_both.nodes[0], "q")
    with turnlane.open_queue(kind="proxy", name="q", transport=single) as one:
        assert {name: type(value) for name, value in found.as_dict().items()} == {
            name: type(value) for name, value in one.stats().as_dict().items()
        }
        assert found.max_size == 2 * (one.stats().max_size or 0)
    assert found.trouble == ""


def test_unreachable_node_delays_only_its_own_events(
    two_nodes: tuple[ServedNode, ServedNode], connect_both: turnlane.Client
) -> None:
    queue = connect_both.queue("q", batch_size=4, batches=1, shutdown_timeout=0)
    producer = queue.producer()
    here = next(f"k{n}" for n in range(100) if find_node(f"k{n}", 2) == 0)
    there = next(f"k{n}" for n in range(100) if find_node(f"k{n}", 2) == 1)
    two_nodes[1].plane.stop()
    for _ in range(20):
        producer.publish(b"x", here)
    got = 0
    while got < 20:
        with queue.get(timeout=PATIENCE) as batch:
            got += len(batch)
    for _ in range(100):
        if not producer.try_publish(b"y", there):
            break
    else:
        pytest.fail("the node that is away does not push back")
    assert producer.publish(b"x", here)


def test_get_from_several_nodes_times_out_and_close_wakes_it(connect_both: turnlane.Client) -> None:
    queue = connect_both.queue("q")
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.05)
    with pytest.raises(ValueError, match="max_events is 0"):
        queue.get(0)
    getting = Task(queue.get)
    assert_never(lambda: not getting.running)
    queue.close()
    with pytest.raises(QueueClosed):
        getting.result()
    with pytest.raises(QueueClosed):
        queue.get()


def test_batch_that_no_call_received_is_released_at_close(
    two_nodes: tuple[ServedNode, ServedNode], connect_both: turnlane.Client
) -> None:
    queue = connect_both.queue("q")
    for served in two_nodes:
        served.node.queue("q").producer().publish(b"x")
    first = queue.get(timeout=PATIENCE)
    wait_until(lambda: sum(len(each.node.leases) for each in two_nodes) <= 2)
    first.done()
    queue.close()
    wait_until(lambda: all(len(each.node.leases) == 0 for each in two_nodes))
    assert sum(each.node.queue("q").stats().ledger.pending for each in two_nodes) == 1


def test_get_with_a_smaller_maximum_returns_smaller_batches(
    two_nodes: tuple[ServedNode, ServedNode], connect_both: turnlane.Client
) -> None:
    queue = connect_both.queue("q")
    for served in two_nodes:
        served.node.queue("q").producer().publish_block(block_of([b"x"] * 10))
    taken = [queue.get(timeout=PATIENCE)]
    while sum(map(len, taken)) < 20:
        taken.append(queue.get(3, timeout=PATIENCE))
    assert all(len(batch) <= 3 for batch in taken[1:])
    for batch in taken:
        batch.done()


def test_error_of_one_of_several_nodes_is_raised(two_nodes: tuple[ServedNode, ServedNode]) -> None:
    two_nodes[1].node.create("other", kind="memory")
    with (
        connect(f"{two_nodes[0].url},{two_nodes[1].plane.address}") as client,
        pytest.raises(NoSuchQueue),
    ):
        client.queue("other", shutdown_timeout=0).get(timeout=PATIENCE)


def test_call_for_a_single_node_is_refused_for_several(connect_both: turnlane.Client) -> None:
    with pytest.raises(NotSupported, match="choose a node"):
        connect_both.stats()
    connect_both.create("new", kind="memory")
    assert [sorted(node.queues()) for node in connect_both.nodes] == [["new", "q"]] * 2
    assert sorted(connect_both.queues()) == ["new", "q"]
    connect_both.drop("new")
    producer = connect_both.queue("q", shutdown_timeout=0).producer()
    with pytest.raises(NotSupported):
        producer.publish_block(block_of([b"x"]), sequence=0)
    keys = [f"k{number}" for number in range(20)]
    with pytest.raises(NotSupported):
        producer.try_publish_block(block_of([b"x"] * 20, keys=keys))
    assert producer.try_publish_block(block_of([b"x"])) is not None
    with pytest.raises(TypeError):
        producer.publish(b"x", 5)  # type: ignore[arg-type]


def test_closed_producer_of_several_nodes_refuses_events(connect_both: turnlane.Client) -> None:
    producer = connect_both.queue("q").producer(ack=AckLevel.ACCEPTED)
    producer.close()
    with pytest.raises(QueueClosed):
        producer.publish(b"x")


# Keys


@given(st.lists(st.none() | st.text(max_size=40)), st.integers(1, 9), st.integers(0, 5))
def test_block_with_keys_is_spread_like_single_events(
    keys: list[str | None], nodes: int, skipped: int
) -> None:
    column = pa.array(keys, pa.string()).slice(skipped)
    expected = [-1 if key is None else find_node(key, nodes) for key in keys[skipped:]]
    assert find_nodes(column, nodes).tolist() == expected


def test_keys_are_spread_evenly() -> None:
    for template in ("{}", "user-{}", "{}@example.com"):
        keys = pa.array([template.format(number) for number in range(10_000)])
        counts = np.bincount(find_nodes(keys, 5))
        assert counts.min() > 1800
        assert counts.max() < 2200


def test_hash_of_a_key_never_changes() -> None:
    """Otherwise an update of the client would send events of one key to two nodes."""
    assert [find_node(key, 1000) for key in ("", "a", "user-1", "Straße")] == [0, 215, 999, 267]
