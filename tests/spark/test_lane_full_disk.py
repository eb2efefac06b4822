"""While the node's disk is full, a lane keeps events that it can neither deliver nor bury.

Real nodes, real servers, but no Spark.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.outputs.web_servers import Reply, run_server
from tests.spark.destinations import Destination
from tests.spark.loop import Loop, Pipe
from tests.spark.nodes import Served, serving
from turnlane.delivery.settings import DeadLetterSettings, DeliverySettings
from turnlane.errors import StorageFailed
from turnlane.outputs.http import HttpOutputSettings
from turnlane.pipeline.settings import ActionSettings
from turnlane.queues.settings import QueueSettings
from turnlane.testing import FaultyDisk

POISON = {b"3", b"7"}
KEEPING = DeadLetterSettings()
VALUES = [b"%d" % number for number in range(10)]


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def node(tmp_path: Path, disk: FaultyDisk) -> Iterator[Served]:
    queues = ("main", "a", "a.dead")
    with serving(tmp_path / "data", {name: {} for name in queues}, disk=disk) as found:
        yield found


@pytest.fixture
def refusing_destination() -> Iterator[Destination]:
    with ExitStack() as opened:
        found = Destination(opened.enter_context(run_server()))
        found.refuse = lambda values: Reply(400) if POISON.intersection(values) else None
        yield found


def lane(node: Served, at: Destination, letters: DeadLetterSettings = KEEPING) -> Loop:
    action = ActionSettings(
        name="a",
        queue=QueueSettings.of(kind="disk", name="a", path=Path("a")),
        delivery=DeliverySettings(backoff=0.001, max_backoff=0.001, dead_letters=letters),
        output=HttpOutputSettings(url=at.url, format="raw"),
    )
    return Pipe(node.url, action).lanes["a"]


def count_unsettled(node: Served) -> list[tuple[int, int]]:
    return list(node.queue("a").filter_unsettled([(0, 10)]))


@pytest.mark.parametrize("fault", ["write", "sync"])
def test_events_of_dead_letters_stay_in_the_queue_while_the_disk_is_full(
    node: Served, disk: FaultyDisk, refusing_destination: Destination, fault: str
) -> None:
    node.publish("a", VALUES)
    disk.fail(fault, error=errno.ENOSPC, match=".stage", times=None)
    for _ in range(3):
        with pytest.raises(StorageFailed, match="dead letters: cannot stage: No space left"):
            lane(node, refusing_destination).turn()
        assert count_unsettled(node) == [(3, 4), (7, 8)], "delivered events are settled"
        assert node.values("a.dead") == []
    disk.clear()
    assert lane(node, refusing_destination).turn()
    assert count_unsettled(node) == []
    assert set(node.values("a.dead")) == POISON
    assert Counter(refusing_destination.taken) == Counter(set(VALUES) - POISON), "each once"
    for name, dead in (("a", 2), ("a.dead", 0)):
        ledger = node.queue(name).stats().ledger
        assert ledger.adds_up
        assert ledger.dead == dead


def test_batch_that_cannot_be_committed_is_repeated(
    node: Served, disk: FaultyDisk, refusing_destination: Destination
) -> None:
    node.publish("a", VALUES)
    disk.fill()
    with pytest.raises(StorageFailed, match="No space left"):
        lane(node, refusing_destination).turn()
    assert count_unsettled(node) == [(0, 10)]
    disk.unfill()
    assert lane(node, refusing_destination).turn()
    assert set(node.values("a.dead")) == POISON
    assert set(refusing_destination.taken) == set(VALUES) - POISON
    assert node.queue("a").stats().ledger.adds_up


def test_lane_continues_with_dead_letters_in_memory(
    node: Served, disk: FaultyDisk, refusing_destination: Destination
) -> None:
    node.publish("a", VALUES)
    disk.fill()
    going_on = DeadLetterSettings(on_disk_error="memory")
    assert lane(node, refusing_destination, going_on).turn()
    assert count_unsettled(node) == []
    assert node.node.commits.overflow.events() == {"a.dead": 2}
    disk.unfill()
    assert node.node.commits.overflow.drain() == 2
    assert set(node.values("a.dead")) == POISON
    assert Counter(refusing_destination.taken) == Counter(set(VALUES) - POISON), "each once"
    ledger = node.queue("a").stats().ledger
    assert (ledger.delivered, ledger.dead, ledger.pending) == (8, 2, 0)
    assert ledger.adds_up
