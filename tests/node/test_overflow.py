"""Do commits go on while a queue of dead letters is full, and is nothing lost uncounted?"""

from __future__ import annotations

from typing import Any

import pytest

from tests.node.conftest import Serve, Served, values
from turnlane.client.remote import RemoteNode
from turnlane.errors import QueueFull
from turnlane.events import block_of
from turnlane.node.metrics import NodeCollector
from turnlane.node.overflow import Overflow

QUEUES: dict[str, dict[str, Any]] = {"alerts": {}, "alerts.dead": {"size": 10}}


@pytest.fixture
def full(serve: Serve) -> Served:
    """A node whose dead letters have no room left, and whose lane has something to settle."""
    served = serve(QUEUES)
    served.node.queue("alerts").producer(ack="persisted").publish_block(block_of([b"x"] * 100))
    dead = served.node.queue("alerts.dead")
    dead.producer(ack="persisted").publish_block(block_of([b"old %d" % n for n in range(10)]))
    return served


def committed(node: RemoteNode, first: int, count: int, spare: int) -> None:
    """A batch of a lane all of which is dead."""
    numbers = range(first, first + count)
    with node.stage("alerts.dead", block_of([]).schema, spare) as stage:
        stage.write(block_of([b"new %d" % number for number in numbers]))
        stage_id = stage.finish()
    span = [(first, first + count)]
    node.plan("alerts", "1", "alerts", span)
    node.commit([stage_id], lane="alerts", run="1", dead=span)


def adds_up(served: Served) -> bool:
    return all(queue.stats().ledger.adds_up for queue in served.node.queues().values())


def test_without_spare_room_a_commit_waits(full: Served) -> None:
    with pytest.raises(QueueFull, match="no room for 5 staged events"):
        committed(full.client().nodes[0], 0, 5, spare=0)
    assert full.node.queue("alerts").low == 0


def test_letters_wait_in_memory_until_there_is_room(full: Served) -> None:
    committed(full.client().nodes[0], 0, 5, spare=100)
    assert full.node.queue("alerts").low == 5, "the lane goes on"
    assert full.node.queue("alerts").stats().ledger.dead == 5
    overflow = full.node.commits.overflow
    assert overflow.events() == {"alerts.dead": 5}
    assert overflow.drain() == 0
    full.node.queue("alerts.dead").settle(0, 3)
    assert overflow.drain() == 3, "as many as there is room for"
    assert overflow.events() == {"alerts.dead": 2}
    full.node.queue("alerts.dead").settle(3, 10)
    assert overflow.drain() == 2
    assert values(full.node, "alerts.dead") == [b"new %d" % number for number in range(5)]
    assert overflow.events() == {}
    assert len(full.node.staging) == 0
    assert adds_up(full)


def test_letters_wait_also_if_the_commit_settles_nothing(full: Served) -> None:
    node = full.client().nodes[0]
    with node.stage("alerts.dead", block_of([]).schema, 100) as stage:
        stage.write(block_of([b"new"]))
        stage_id = stage.finish()
    node.commit([stage_id])
    assert full.node.commits.overflow.events() == {"alerts.dead": 1}
    assert len(full.node.staging) == 0


def test_beyond_their_bound_the_oldest_are_dropped_and_counted(full: Served) -> None:
    node = full.client().nodes[0]
    committed(node, 0, 6, spare=8)
    committed(node, 6, 6, spare=8)
    overflow = full.node.commits.overflow
    assert overflow.events() == {"alerts.dead": 8}
    assert overflow.dropped == {"alerts.dead": 4}
    assert full.node.queue("alerts.dead").stats().ledger.dropped == {"newest": 4}
    (metric,) = [
        each
        for each in NodeCollector(full.node).collect()
        if each.name == "turnlane_dead_letters_dropped"
    ]
    assert [(each.labels, each.value) for each in metric.samples] == [
        ({"queue": "alerts.dead"}, 4.0)
    ]
    full.node.queue("alerts.dead").settle(0, 10)
    overflow.drain()
    assert values(full.node, "alerts.dead") == [b"new %d" % number for number in range(4, 12)]
    assert adds_up(full)


def test_they_take_no_more_memory_than_the_node_allows(full: Served) -> None:
    """However many events a client says may wait, and for whichever queue."""
    blocks = [block_of([bytes(1000)] * 100) for _ in range(10)]
    room = 5 * blocks[0].nbytes
    overflow = Overflow(full.node.queue, room)
    overflow.take("alerts.dead", blocks, 1 << 61)
    assert overflow.events() == {"alerts.dead": 500}
    overflow.take("alerts", blocks[:2], 1 << 61)
    assert overflow.events() == {"alerts.dead": 300, "alerts": 200}, "who has most gives way"
    assert overflow.dropped == {"alerts.dead": 700}


def test_what_finds_no_room_before_the_node_closes_is_counted(full: Served, serve: Serve) -> None:
    committed(full.client().nodes[0], 0, 5, spare=100)
    full.close()
    again = serve(QUEUES)
    ledger = again.node.queue("alerts.dead").stats().ledger
    assert ledger.dropped == {"newest": 5}
    assert ledger.adds_up
    assert again.node.queue("alerts").low == 5
