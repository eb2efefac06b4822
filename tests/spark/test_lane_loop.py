"""Lanes deliver in spite of bad destinations: real nodes and servers, without Spark."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from tests.contract.harness import wait_until
from tests.outputs.web_servers import Reply, run_server
from tests.ports import free_port
from tests.spark.destinations import Destination
from tests.spark.loop import Change, Loop, Pipe, with_payload
from tests.spark.nodes import Served, serving
from turnlane.client.node_client import RemoteNode
from turnlane.delivery.settings import DIRECT, DeliverySettings, FailoverSettings
from turnlane.errors import LaneTaken
from turnlane.node.flight.server import FlightPlane
from turnlane.node.metrics import collect_action_metrics
from turnlane.outputs.file import FileOutputSettings
from turnlane.outputs.http import HttpOutputSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.serving.auth import Authority
from turnlane.spark import lane
from turnlane.spark.lane import BlockedReason, BreakerPoller
from turnlane.spark.lane_shape import build_lane_step, build_main_steps
from turnlane.spark.nodes import BreakerClient, Nodes
from turnlane.spark.options import WriteOptions
from turnlane.spark.steps import DeliveryPath

PATIENCE = 60.0
SOON = {"backoff": 0.05, "max_backoff": 0.2, "breaker_failures": 3, "breaker_reset": 0.3}
BRIEFLY = {"max_time": 0.5}
"""Delivery settings for a destination that is away, with short waits."""


class Port(NamedTuple):
    """A port without a listener."""

    number: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.number}"


class World:
    """A node, and the destinations of a test."""

    def __init__(self, node: Served, place: Path, opened: ExitStack) -> None:
        self.node = node
        self.place = place
        self._opened = opened

    def destination(self, port: int = 0) -> Destination:
        return Destination(self._opened.enter_context(run_server(port=port)))

    def send(self, word: str, count: int, start: int = 0) -> list[bytes]:
        """Publish events with a word as key, by which they are routed."""
        numbers = range(start, start + count)
        values = [b"%s %d" % (word.encode(), number) for number in numbers]
        self.node.publish("main", values, keys=[f"{word}-{number % 3}" for number in numbers])
        return values

    def wait_until_empty(self, *queues: str) -> None:
        for name in ("main", *queues):
            queue = self.node.queue(name)
            wait_until(lambda queue=queue: queue.low == queue.end, f"{name} to drain", PATIENCE)  # type: ignore[misc]
        for each in self.node.node.queues().values():
            assert each.stats().ledger.adds_up, each.stats().ledger

    def file(self, name: str) -> list[bytes]:
        path = self.place / name
        return path.read_bytes().splitlines() if path.exists() else []

    def ledger(self, queue: str) -> Any:
        return self.node.queue(queue).stats().ledger


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    names = ["a", "b", "c"]
    queues = ["main", *names, *(f"{name}.dead" for name in names)]
    with ExitStack() as opened:
        node = opened.enter_context(serving(tmp_path / "data", {name: {} for name in queues}))
        yield World(node, tmp_path, opened)


def http(name: str, at: Destination | Port, *, queued: bool = True, **more: Any) -> ActionSettings:
    """Create an action that posts events with its name, or a given word, as key."""
    delivery = DeliverySettings.model_validate(SOON | more.pop("delivery", {}))
    queue = QueueSettings.of(kind="disk", name=name, path=Path(name)) if queued else None
    output = HttpOutputSettings(url=at.url, format="raw", timeout=20.0)
    settings = {"filter": name, **more}
    return ActionSettings(name=name, queue=queue, delivery=delivery, output=output, **settings)


def file(world: World, name: str, *, queued: bool = False, **more: Any) -> ActionSettings:
    queue = QueueSettings.of(kind="disk", name=name, path=Path(name)) if queued else None
    output = FileOutputSettings(type="file", path=world.place / name, format="raw")
    settings = {"filter": name, **more}
    return ActionSettings(name=name, queue=queue, output=output, **settings)


def assert_each_once(taken: list[bytes], values: list[bytes]) -> None:
    assert Counter(taken) == Counter(values)


def test_destination_gets_all_events_after_an_outage(world: World) -> None:
    """During the outage one probe at a time is sent, the reason is shown, and another lane runs."""
    away = world.destination()
    away.away()
    values = world.send("a", 5000)
    action = http("a", away, delivery={"max_time": 0.1})
    with Pipe(world.node.url, action, file(world, "b", queued=True)) as pipe:
        lane = pipe.lanes["a"]
        wait_until(lambda: lane.suspension() is not None, "the reason to be shown", PATIENCE)
        found = lane.suspension()
        assert found is not None
        assert "a: RetryLater" in str(found.why)
        refused = away.refused
        away.most = 0
        each_other = world.send("b", 100)
        wait_until(lambda: len(world.file("b")) == 100, "another lane", PATIENCE)
        assert sorted(world.file("b")) == sorted(each_other)
        wait_until(lambda: away.refused >= refused + 3, "probes", PATIENCE)
        assert away.most == 1, "one probe at a time"
        assert lane.batches[-1] <= 1000, "a probe is one request"
        assert world.ledger("a").delivered == 0
        away.back()
        world.wait_until_empty("a")
    assert_each_once(away.taken, values)


def read_counters(node: Served, *names: str) -> dict[str, float]:
    """Return some counters of the only action, as a scrape finds them, by name and error type."""
    return {
        "/".join([sample.name.removeprefix("turnlane_"), *list(sample.labels.values())[1:]]): (
            sample.value
        )
        for metric in collect_action_metrics(node.node.breakers)
        for sample in metric.samples
        if metric.name.removeprefix("turnlane_") in names
    }


def test_outage_over_many_tasks_and_two_runs_of_the_lane_is_counted(world: World) -> None:
    """Every task sends once, because the backoff is longer than the task."""
    away = world.destination()
    refusals = [*[Reply(503)] * 4, *[Reply(429)] * 2]
    away.refuse = lambda _: refusals.pop() if refusals else None
    values = world.send("a", 10)
    action = http("a", away, delivery={"max_time": 0.01, "breaker_reset": 0.05})
    with Pipe(world.node.url, action) as pipe:
        wait_until(lambda: away.refused >= 3, "three failures", PATIENCE)
    assert len(pipe.lanes["a"].batches) >= 3, "one failure in each batch"
    with Pipe(world.node.url, action):
        world.wait_until_empty("a")
    assert_each_once(away.taken, values)
    names = ("queue_retry", "queue_retry_success", "queue_retry_failure", "action_send_failures")
    assert read_counters(world.node, "action_sends", *names) == {
        "action_sends_total": 7,
        "action_send_failures_total/rate_limit": 2,
        "action_send_failures_total/server_error": 4,
        "queue_retry_total": 6,
        "queue_retry_success_total": 1,
        "queue_retry_failure_total/rate_limit": 1,
        "queue_retry_failure_total/server_error": 4,
    }
    more = world.send("a", 10, start=10)
    with Pipe(world.node.url, action):
        world.wait_until_empty("a")
    assert_each_once(away.taken, values + more)
    assert read_counters(world.node, "queue_retry") == {"queue_retry_total": 6}, "events are new"
    assert not world.node.node.breakers.of("a").destination.request_permit().failed


@pytest.fixture
def node_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Collect the calls to nodes, with their bodies."""
    found: list[tuple[str, dict[str, Any]]] = []
    act = RemoteNode.act

    def noted(node: RemoteNode, kind: str, **values: Any) -> dict[str, Any]:
        found.append((kind, values.get("body", values)))
        return act(node, kind, **values)

    monkeypatch.setattr(RemoteNode, "act", noted)
    return found


def test_closed_port_gets_all_events_after_it_opens(world: World) -> None:
    """Connections are refused, so there is no error response."""
    port = Port(free_port())
    with Pipe(world.node.url, http("a", port, delivery={"max_time": 0.1})) as pipe:
        values = world.send("a", 500)
        lane = pipe.lanes["a"]
        wait_until(lambda: lane.suspension() is not None, "the reason to be shown", PATIENCE)
        assert "refused" in str(lane.suspension())
        assert world.ledger("a").delivered == 0
        there = world.destination(port.number)
        world.wait_until_empty("a")
    assert_each_once(there.taken, values)
    assert world.ledger("a").delivered == 500


def test_idle_lane_makes_one_call(
    world: World, node_calls: list[tuple[str, dict[str, Any]]]
) -> None:
    lane = Pipe(world.node.url, http("a", world.destination())).lanes["a"]
    assert not lane.turn()
    assert [kind for kind, _ in node_calls] == ["unsettled"]


def test_suspended_lane_reads_no_more_than_a_probe(
    world: World, node_calls: list[tuple[str, dict[str, Any]]]
) -> None:
    away = world.destination()
    away.away()
    world.node.publish("a", [b"%d" % number for number in range(500)])
    knobs = {"max_time": 0.1, "batch_events": 100, "breaker_reset": 600.0}
    lane = Pipe(world.node.url, http("a", away, delivery=knobs)).lanes["a"]
    while lane.turn():
        pass
    node_calls.clear()
    assert not lane.turn()
    assert [(kind, body.get("events")) for kind, body in node_calls] == [
        ("unsettled", 100),
        ("breakers", None),
    ]


def test_breakers_of_all_lanes_are_read_in_one_call(
    world: World,
    node_calls: list[tuple[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "POLL_SECONDS", 3600.0)
    poller = BreakerPoller(
        BreakerClient(Nodes.from_options(WriteOptions.from_spark({"endpoint": world.node.url})))
    )
    lanes = [
        BlockedReason(poller, paths)
        for paths in ([[DeliveryPath(action="a")]], [[DeliveryPath(action="b")]], [])
    ]
    assert [lane() for lane in lanes] == [None] * 3
    assert node_calls == [("breakers", {"actions": ["a", "b"]})]


def test_failing_destination_gets_one_request_at_a_time(world: World) -> None:
    """The breaker never opens here: the number of failures is enough."""
    away = world.destination()
    away.away()
    values = world.send("a", 5000)
    patient = {"max_time": 0.1, "breaker_failures": 1_000_000, "batch_events": 100}
    with Pipe(world.node.url, http("a", away, delivery=patient)) as pipe:
        lane = pipe.lanes["a"]
        wait_until(lambda: len(lane.batches) >= 4, "several batches", PATIENCE)
        assert all(events <= 100 for events in lane.batches[1:]), lane.batches
        away.back()
        world.wait_until_empty("a")
    assert_each_once(away.taken, values)
    assert max(lane.batches[1:]) > 100, "then batches grow again"


def test_flapping_destination_loses_no_events(world: World) -> None:
    flapping = world.destination()
    turn = iter(range(1_000_000))
    flapping.refuse = lambda _: Reply(500) if next(turn) % 3 == 1 else None
    values = world.send("a", 8000)
    with Pipe(world.node.url, http("a", flapping, delivery={"batch_events": 100})):
        world.wait_until_empty("a")
    assert_each_once(flapping.taken, values)
    assert world.ledger("a").delivered == 8000


def test_bad_events_become_dead_letters_with_their_reason(world: World) -> None:
    picky = world.destination()
    poison = {b"a 17", b"a 617", b"a 618"}
    picky.refuse = lambda values: Reply(400, b"no") if poison & set(values) else None
    values = world.send("a", 1000)
    with Pipe(world.node.url, http("a", picky)):
        world.wait_until_empty("a")
    assert_each_once(picky.taken, [value for value in values if value not in poison])
    assert set(world.node.values("a.dead")) == poison
    assert (world.ledger("a").delivered, world.ledger("a").dead) == (997, 3)
    found = world.node.queue("a.dead").read(0, 10)
    assert found is not None
    letter = next(each for each in found[1].to_pylist() if each["value"] == b"a 617")
    assert letter["key"] == "a-2"
    assert (letter["dead_action"], letter["dead_reason"]) == ("a", "Never")
    assert "HTTP 400: no" in letter["dead_error"]
    assert not {"payload", "queue", "offset", "partition", DIRECT} & set(letter)


def test_retry_after_of_a_destination_is_respected(world: World) -> None:
    busy = world.destination()
    node_calls: list[float] = []

    def refuse(_: list[bytes]) -> Reply | None:
        node_calls.append(time.monotonic())
        return Reply(429, headers={"Retry-After": "2"}) if len(node_calls) <= 2 else None

    busy.refuse = refuse
    values = world.send("a", 50)
    with Pipe(world.node.url, http("a", busy, delivery={"max_attempts": 1})):
        world.wait_until_empty("a")
    assert_each_once(busy.taken, values)
    assert node_calls[1] - node_calls[0] >= 2
    assert node_calls[2] - node_calls[1] >= 2
    assert world.node.values("a.dead") == [], "events that may be retried never become dead letters"


@pytest.mark.parametrize("ordering", ["strict", "key"])
def test_order_is_kept_across_failures(world: World, ordering: str) -> None:
    slow = world.destination()
    turn = iter(range(1_000_000))
    slow.refuse = lambda _: Reply(503) if next(turn) % 4 == 2 else None
    values = world.send("a", 90)
    lane = LaneSettings(worker_minimum_events=20)
    delivery = {"ordering": ordering, "batch_events": 5}
    with Pipe(world.node.url, http("a", slow, delivery=delivery, lane=lane)):
        world.wait_until_empty("a")
    assert_each_once(slow.taken, values)
    if ordering == "strict":
        assert slow.taken == values
    for key in range(3):
        mine = [value for value in slow.taken if int(value.split()[1]) % 3 == key]
        assert mine == values[key::3]


def test_second_output_is_used_until_the_first_is_back(world: World) -> None:
    first = world.destination()
    first.away()
    second = FileOutputSettings(type="file", path=world.place / "second", format="raw")
    failover = FailoverSettings(output=second, after=0.5)
    values = world.send("a", 200)
    with Pipe(world.node.url, http("a", first, delivery={"failover": failover, **BRIEFLY})):
        world.wait_until_empty("a")
        assert sorted(world.file("second")) == sorted(values)
        first.back()
        status = world.node.node.breakers.of("a").destination.get_status
        more: list[bytes] = []
        while status().state != "closed":  # Until one of them is the probe.
            more += world.send("a", 1, start=1000 + len(more))
            world.wait_until_empty("a")
        last = world.send("a", 10, start=5000)
        world.wait_until_empty("a")
    assert set(last) <= set(first.taken)
    assert_each_once(first.taken + world.file("second"), values + more + last)


def test_new_events_are_delivered_during_a_backlog(world: World) -> None:
    slow = world.destination()
    values = world.send("a", 3000)
    fresh: list[bytes] = []
    hurried = threading.Event()

    def refuse(given: list[bytes]) -> None:
        if not fresh and len(slow.taken) > 500:
            fresh.extend(world.send("a", 20, start=9000))
        if fresh and set(fresh) & set(given) and len(slow.taken) < 2500:
            hurried.set()

    slow.refuse = refuse
    lane = LaneSettings(max_events=200, workers=1)
    with Pipe(
        world.node.url,
        http("a", slow, delivery={"batch_events": 20, "concurrency": 1}, lane=lane),
        lane=LaneSettings(max_events=10_000),
    ):
        world.wait_until_empty("a")
    assert_each_once(slow.taken, values + fresh)
    assert hurried.is_set(), "new events were delivered before the end of the backlog"


def test_try_direct_queues_events_that_fail(world: World) -> None:
    tried = world.destination()
    values = world.send("a", 50)
    with Pipe(world.node.url, http("a", tried, delivery={"mode": "try_direct", **BRIEFLY})):
        world.wait_until_empty("a")
        assert world.node.queue("a").end == 0, "the queue was not needed"
        assert_each_once(tried.taken, values)
        tried.away()
        more = world.send("a", 50, start=50)
        wait_until(lambda: world.node.queue("a").end == 50, "the queue to take it", PATIENCE)
        world.wait_until_empty()
        tried.back()
        world.wait_until_empty("a")
    assert_each_once(tried.taken, values + more)


def test_action_takes_over_from_a_suspended_action(world: World) -> None:
    first = world.destination()
    values = world.send("a", 20)
    instead = file(world, "b", filter="a", delivery=DeliverySettings(only_when_suspended=True))
    with Pipe(world.node.url, http("a", first, queued=False, delivery=BRIEFLY), instead):
        world.wait_until_empty()
        assert_each_once(first.taken, values)
        assert world.file("b") == []
        first.away()
        more = world.send("a", 20, start=20)
        world.wait_until_empty()
        assert_each_once(world.file("b"), more)
        first.back()


def test_queue_takes_over_from_a_suspended_action(world: World) -> None:
    first = world.destination()
    first.away()
    values = world.send("a", 20)
    settings = DeliverySettings(only_when_suspended=True)
    spare = file(world, "b", queued=True, filter="a", delivery=settings)
    with Pipe(world.node.url, http("a", first, queued=False, delivery=BRIEFLY), spare):
        world.wait_until_empty("b")
    assert_each_once(world.file("b"), values)
    assert world.node.queue("b").end == 20


def test_direct_action_defers_only_its_own_events(world: World) -> None:
    """An event that it refuses for good is a dead letter; others arrive once."""
    blocking = world.destination()
    blocking.away()
    values = world.send("a", 30)
    copies = file(world, "b", queued=True, filter="a")
    with Pipe(world.node.url, http("a", blocking, queued=False), copies) as pipe:
        main = pipe.lanes["main"]
        wait_until(lambda: main.suspension() is not None, "suspension", PATIENCE)
        assert world.node.queue("b").end == 0, (
            "an event is not queued before all direct actions have it"
        )
        blocking.refuse = lambda given: Reply(400) if b"a 7" in given else None
        world.wait_until_empty("b")
    assert_each_once(blocking.taken, [value for value in values if value != b"a 7"])
    assert_each_once(world.file("b"), values)
    assert world.node.values("a.dead") == [b"a 7"]
    assert world.ledger("main").dead == 1


def make_three_rows(**routes: list[list[str]]) -> Change:
    """Make three rows of each event, with the routes in these columns."""

    def change(rows: pa.RecordBatch) -> pa.RecordBatch:
        events = rows.num_rows
        rows = rows.take(pa.array([at for at in range(events) for _ in range(3)]))
        values = [b"%s.%d" % (v, at % 3) for at, v in enumerate(rows.column("value").to_pylist())]
        rows = rows.set_column(rows.schema.get_field_index("value"), "value", pa.array(values))
        for name, three in routes.items():
            rows = rows.drop_columns([name] if name in rows.schema.names else [])
            rows = rows.append_column(name, pa.array(three * events, pa.list_(pa.string())))
        return with_payload(rows)

    return change


@pytest.mark.parametrize("cut", [None, 1, 2, 5])
def test_rows_of_a_deferred_event_are_queued_once(world: World, cut: int | None) -> None:
    """Spark may cut between the rows."""
    blocking = world.destination()
    blocking.away()
    world.node.publish("main", [b"x", b"y"])
    actions = (http("a", blocking, queued=False, delivery=BRIEFLY), file(world, "b", queued=True))
    steps = build_main_steps(PipelineSettings(actions=actions))
    change = make_three_rows(queue=[["b"], [], ["b"]], **{DIRECT: [[], ["a"], []]})
    lane = Loop(world.node.url, "main", LaneSettings(), steps, change, into=["b"], cut=cut)
    wait_until(lambda: lane.turn() and len(lane.batches) >= 3, "several batches", PATIENCE)
    assert (world.node.queue("main").low, world.node.queue("b").end) == (0, 0)
    blocking.back()
    wait_until(lambda: lane.turn() and world.node.queue("main").low == 2, "the rest", PATIENCE)
    assert_each_once(world.node.values("b"), [b"x.0", b"x.2", b"y.0", b"y.2"])
    assert set(blocking.taken) == {b"x.1", b"y.1"}


@pytest.mark.parametrize("cut", [None, 1, 2])
def test_dead_row_of_a_deferred_event_has_one_dead_letter(world: World, cut: int | None) -> None:
    back = threading.Event()
    picky = world.destination()

    def refuse(given: list[bytes]) -> Reply | None:
        if b"x.1" in given:
            return Reply(400)
        return None if back.is_set() else Reply(503)

    picky.refuse = refuse
    world.node.publish("a", [b"x"])
    step = build_lane_step(http("a", picky, delivery={"batch_events": 1, **BRIEFLY}))
    lane = Loop(world.node.url, "a", LaneSettings(), [step], make_three_rows(), cut=cut)
    wait_until(lambda: lane.turn() and len(lane.batches) >= 3, "several batches", PATIENCE)
    assert world.node.values("a.dead") == []
    back.set()
    wait_until(lambda: lane.turn() and world.node.queue("a").low == 1, "the rest", PATIENCE)
    assert len(world.node.values("a.dead")) == 1
    assert set(picky.taken) == {b"x.0", b"x.2"}


def test_full_queue_causes_no_repeated_delivery(tmp_path: Path) -> None:
    """The main lane reads no more events than all queues have room for."""
    queues: dict[str, dict[str, Any]] = {
        "main": {},
        "b": {"size": 50},
        **{f"{name}.dead": {} for name in "ab"},
    }
    with ExitStack() as opened:
        node = opened.enter_context(serving(tmp_path / "data", queues))
        world = World(node, tmp_path, opened)
        away = world.destination()
        away.away()
        values = world.send("a", 120)
        direct, queued = file(world, "a"), http("b", away, filter="a", delivery=BRIEFLY)
        with Pipe(node.url, direct, queued) as pipe:
            main = pipe.lanes["main"]
            wait_until(lambda: sum(main.batches) >= 50, "the queue to be full", PATIENCE)
            wait_until(lambda: pipe.lanes["b"].suspension() is not None, "it to be away", PATIENCE)
            assert len(set(world.file("a"))) == len(world.file("a")) == 50
            wait_until(lambda: why(main) == "queue 'b' is full", "it to be said", PATIENCE)
            away.back()
            world.wait_until_empty("b")
            wait_until(lambda: why(main) is None, "it to be said no more", PATIENCE)
        assert_each_once(world.file("a"), values)
        assert_each_once(away.taken, values)
        assert not pipe.errors


def why(lane: Loop) -> str | None:
    found = lane.suspension()
    return None if found is None else found.why


def test_slow_destination_gets_small_batches(world: World) -> None:
    slow = world.destination()

    def refuse(_: list[bytes]) -> None:
        time.sleep(0.05)

    slow.refuse = refuse
    values = world.send("a", 600)
    settings = {"max_time": 0.3, "batch_events": 10, "concurrency": 1}
    with Pipe(world.node.url, http("a", slow, delivery=settings)) as pipe:
        world.wait_until_empty("a")
    assert_each_once(slow.taken, values)
    assert pipe.lanes["a"].batches[1] < 600


def test_superseded_run_settles_nothing(world: World) -> None:
    """Another driver has run the batch, because this one was taken for dead."""
    taken = world.destination()
    action = http("a", taken)
    world.node.publish("a", [b"a 0"], keys=["a-0"])
    late, other = Pipe(world.node.url, action).lanes["a"], Pipe(world.node.url, action).lanes["a"]

    def meanwhile(rows: pa.RecordBatch) -> pa.RecordBatch:
        assert other.turn()
        return rows

    late.change = meanwhile
    with pytest.raises(LaneTaken, match="was restarted"):
        late.turn()
    assert world.ledger("a").delivered == 1
    assert set(taken.taken) == {b"a 0"}, "a destination may get it twice"


def test_node_that_is_away_delays_only_its_events(tmp_path: Path) -> None:
    """Its events arrive once when it is back; until then, the other node keeps the breakers."""
    queues: dict[str, dict[str, Any]] = {name: {} for name in ("main", "a", "a.dead")}
    with ExitStack() as opened:
        nodes = [opened.enter_context(serving(tmp_path / name, queues)) for name in "xy"]
        at = Destination(opened.enter_context(run_server()))
        url = ",".join([nodes[0].url, nodes[1].url.removeprefix("turnlane://")])
        loop = Pipe(url, http("a", at)).lanes["a"]
        for number, node in enumerate(nodes):
            node.publish("a", [b"%d" % number] * 10, keys=["a-0"] * 10)
        while loop.turn():
            pass
        assert Counter(at.taken) == {b"0": 10, b"1": 10}
        place = nodes[0].plane.address
        nodes[0].plane.stop(1.0)
        for number, node in enumerate(nodes):
            node.publish("a", [b"again %d" % number] * 10, keys=["a-0"] * 10)
        wait_until(lambda: loop.turn() and b"again 1" in at.taken, "the other one", PATIENCE)
        assert b"again 0" not in at.taken
        back = FlightPlane(nodes[0].node, Authority(()), place)
        back.start()
        opened.callback(back.stop, 1.0)
        wait_until(lambda: loop.turn() and b"again 0" in at.taken, "the one", PATIENCE)
        while loop.turn():
            pass
        assert Counter(at.taken) == dict.fromkeys([b"0", b"1", b"again 0", b"again 1"], 10)
        assert all(node.queue("a").low == 20 for node in nodes)
