"""A node that accepts connections but does not answer: the others continue without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from tests.contract.harness import wait_until
from tests.node.killed_process import KilledProcess, run_killed_node
from tests.spark.nodes import Served, numbers, serving
from turnlane.client import node_client
from turnlane.client.node_client import Credentials
from turnlane.errors import LaneTaken, NoSuchQueue, TransportDown
from turnlane.events import block_of
from turnlane.spark import nodes
from turnlane.spark import nodes as nodes_module
from turnlane.spark.batch_planning import QueryPosition
from turnlane.spark.nodes import BreakerClient, LaneNodes, Nodes
from turnlane.spark.queue_reader import QuerySettler
from turnlane.spark.steps import LaneStep

pytestmark = pytest.mark.timeout(20)  # Less than the time that a node has to answer.
PATIENCE = 10.0


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[KilledProcess]:
    with run_killed_node(tmp_path / "hung") as process:
        yield process
        process.freeze(frozen=False)


@pytest.fixture
def healthy(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "healthy", {"main": {}}) as served:
        yield served


@pytest.fixture
def both(hung: KilledProcess, healthy: Served, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Both nodes; the first one will hang."""
    monkeypatch.setattr(nodes_module, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(nodes, "PLAN_SECONDS", 0.3)
    made = Nodes(f"{hung.url},{healthy.plane.address}", Credentials())
    for node in range(2):
        publish(made, node, 10)
    return made


class Late(Future[int]):
    """An answer that another lane reads just before this one."""

    look: Callable[[], object] | None = None

    def done(self) -> bool:
        look, self.look = self.look, None
        if look is not None:
            look()
        return super().done()


class Away(set[int]):
    """A set from which another lane removes the node just after this one has looked."""

    def __contains__(self, node: object) -> bool:
        found = super().__contains__(node)
        self.clear()
        return found


def test_two_lanes_may_notice_at_once_that_a_node_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "GRACE_SECONDS", 0.0)
    nodes, late = Nodes("turnlane://127.0.0.1:1,127.0.0.1:2", Credentials()), Late()
    with pytest.raises(TransportDown):
        nodes.collect({0: late}, 0.0)
    answer: Future[int] = Future()
    answer.set_result(7)
    late.set_result(1)
    late.look = partial(nodes.collect, {0: answer}, 0.0)
    assert nodes.collect({0: answer}, 0.0) == {0: 7}
    monkeypatch.setattr(nodes, "_away", Away({0}))
    assert nodes.collect({0: answer}, 0.0) == {0: 7}


def publish(nodes: Nodes, node: int, count: int) -> None:
    block = block_of(numbers(0, count))
    with nodes[node].stage("main", block.schema) as stage:
        stage.write(block)
        nodes[node].commit([stage.finish()])


def make_lane(nodes: Nodes) -> LaneNodes:
    return LaneNodes(nodes, "main", "r")


def spans(nodes: Nodes) -> dict[int, list[tuple[int, int]]]:
    return {
        node: each.spans
        for node, each in make_lane(nodes).find_pending("main", 100, 0, 0.0).items()
    }


def test_lane_plans_and_commits_without_a_hung_node_and_with_it_later(
    hung: KilledProcess, healthy: Served, both: Nodes
) -> None:
    assert spans(both) == {0: [(0, 10)], 1: [(0, 10)]}
    hung.freeze(frozen=True)
    for count in range(1, 20):  # More calls than there are threads for the node.
        assert spans(both) == {1: [(10 * count - 10, 10 * count)]}
        assert make_lane(both).plan_batch("main", spans(both), count) == spans(both)
        make_lane(both).commit({}, {}, {})
        publish(both, 1, 10)
    hung.freeze(frozen=False)
    wait_until(lambda: 0 in spans(both), "it to be back", PATIENCE)
    make_lane(both).plan_batch("main", spans(both), 20)
    wait_until(lambda: commit(both), "it to settle", PATIENCE)
    assert both[0].unsettled("main", 100).spans == []


def commit(nodes: Nodes) -> bool:
    make_lane(nodes).commit({}, {}, {})
    return not any(spans(nodes).values())


def test_empty_batch_is_committed(both: Nodes) -> None:
    """Spark's first batch is empty if there are no events."""
    assert make_lane(both).plan_batch("main", {}, 1) == {}
    make_lane(both).commit({}, {}, {})
    with pytest.raises(TransportDown, match="no node that answers has planned this batch"):
        make_lane(both).commit({1: ["stage"]}, {}, {})


def test_plan_that_arrives_late_settles_nothing(
    hung: KilledProcess, healthy: Served, both: Nodes
) -> None:
    """The node hangs while a batch is planned: the batch has none of its events."""
    waiting = spans(both)
    hung.freeze(frozen=True)
    assert make_lane(both).plan_batch("main", waiting, 1) == {1: [(0, 10)]}
    hung.freeze(frozen=False)
    wait_until(lambda: has_plan(both), "it to hear of the batch", PATIENCE)
    make_lane(both).commit({}, {}, {})
    assert spans(both)[1] == []
    assert both[0].unsettled("main", 100).spans == [(0, 10)]


def has_plan(nodes: Nodes) -> bool:
    """Whether the first node has received the plan; before, it does not know the run."""
    try:
        return nodes[0].planned("main", "r") == 2
    except LaneTaken:
        return False


def test_breakers_are_read_from_another_node(hung: KilledProcess, both: Nodes) -> None:
    hung.freeze(frozen=True)
    for _ in range(20):
        assert BreakerClient(both).get_states(["a"]) == {}
    with BreakerClient(both).open_destination(
        "a", LaneStep(action="a", source_queue="main"), lambda: (0, 0)
    ) as gate:
        gate.request_permit()
    assert set(BreakerClient(both).get_states(["a"])) == {"a"}


def test_other_nodes_are_settled_while_one_hangs(
    hung: KilledProcess, healthy: Served, both: Nodes
) -> None:
    hung.freeze(frozen=True)
    settling = QuerySettler(both, "main")
    for end in range(1, 11):
        settling.settle(QueryPosition({0: end, 1: end}))
    assert healthy.queue("main").low == 10
    hung.freeze(frozen=False)
    wait_until(lambda: has_settled(settling, both), "the other", PATIENCE)


def has_settled(settling: QuerySettler, nodes: Nodes) -> bool:
    settling.settle(QueryPosition({0: 10, 1: 10}))
    return nodes[0].wait("main", -1, 0.0).low == 10


def test_reading_from_a_hung_node_ends(
    hung: KilledProcess, both: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_client, "STEP_SECONDS", 0.1)
    assert sum(block.num_rows for _, block in both.read(0, "main", 0, 10)) == 10
    hung.freeze(frozen=True)
    with pytest.raises(TransportDown, match=r"no answer within 0\.1 seconds"):
        list(both.read(0, "main", 0, 10))


def test_stream_is_cancelled_if_its_next_step_takes_too_long() -> None:
    cancelled = threading.Event()

    def step() -> None:
        with node_client.StepWatchdog().step("here", cancelled.set, 0.1):
            assert cancelled.wait(PATIENCE)
            raise OSError("cancelled")

    with pytest.raises(TransportDown, match=r"here: no answer within 0\.1 seconds"):
        step()


def test_staging_on_a_hung_node_ends(
    hung: KilledProcess, both: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        node_client, "run_with_timeout", partial(node_client.run_with_timeout, seconds=0.1)
    )
    block = block_of(numbers(0, 10))
    stage = both[0].stage("main", block.schema)
    stage.write(block)
    hung.freeze(frozen=True)
    with pytest.raises(TransportDown, match=r"no answer within 0\.1 seconds"):
        stage.finish()


def test_error_is_raised_once_and_the_next_call_asks_again(healthy: Served) -> None:
    nodes = Nodes(healthy.url, Credentials())
    with pytest.raises(NoSuchQueue):
        nodes.wait_for_events("later", {0: -1}, 0.0)
    healthy.node.create("later")
    assert nodes.wait_for_events("later", {0: -1}, 0.0)[0].end == 0
