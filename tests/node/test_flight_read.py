"""Tests of reading by offset: ranges, waits, changed columns, and generic clients."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.contract.harness import Task, wait_until
from tests.node.conftest import Serve, ServedNode
from tests.queue_internals import state_of
from turnlane.events import BASE_SCHEMA, Block, block_of
from turnlane.node import event_refs
from turnlane.queues.api import AckLevel


def _publish(served: ServedNode, block: Block, queue: str = "disk") -> None:
    served.node.queue(queue).producer().publish_block(block)


def _read_numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def _build_ticket(**command: object) -> flight.Ticket:
    return flight.Ticket(json.dumps(command).encode())


def test_read_returns_a_range_and_settles_nothing(served: ServedNode) -> None:
    _publish(served, block_of(_read_numbers(0, 100)))
    for _ in range(2):
        table = served.flight().do_get(_build_ticket(read="disk", first=10, end=20)).read_all()
        assert table.column("value").to_pylist() == _read_numbers(10, 20)
    assert served.node.queue("disk").low == 0


def test_every_block_has_its_first_offset(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_refs, "READ_EVENTS", 30)
    _publish(served, block_of(_read_numbers(0, 100)))
    firsts = [
        json.loads(bytes(chunk.app_metadata or b""))["first"]
        for chunk in served.flight().do_get(_build_ticket(read="disk", first=5))
    ]
    assert firsts == [5, 35, 65, 95]


def test_settled_events_are_not_read(served: ServedNode) -> None:
    _publish(served, block_of(_read_numbers(0, 10)))
    served.act("settle", queue="disk", first=0, end=4)
    ends = served.client().wait("disk", 0, 0.0)
    assert (ends.end, ends.low) == (10, 4)
    found = [(first, block.num_rows) for first, block in served.client().read("disk")]
    assert found == [(4, 6)]


@pytest.mark.parametrize("columns", [None, ["value"]])
@pytest.mark.parametrize("queue", ["disk", "memory"])
def test_settled_events_behind_a_pending_one_are_not_read(
    served: ServedNode, queue: str, columns: list[str] | None
) -> None:
    _publish(served, block_of(_read_numbers(0, 10)), queue)
    _publish(served, block_of(_read_numbers(10, 20)), queue)
    for first, end in ((1, 3), (5, 6), (8, 12), (19, 20)):
        served.act("settle", queue=queue, first=first, end=end)
    blocks = list(served.client().node.read(queue, 0, 20, columns))
    assert [(first, block.num_rows) for first, block in blocks] == [(0, 1), (3, 2), (6, 2), (12, 7)]
    values = [value for _, block in blocks for value in block.column("value").to_pylist()]
    assert values == [b"%d" % number for number in (0, 3, 4, 6, 7, *range(12, 19))]
    assert list(served.client().node.read(queue, 8, 12, columns)) == []


def test_settled_events_behind_a_pending_one_are_read_on_request(served: ServedNode) -> None:
    _publish(served, block_of(_read_numbers(0, 10)))
    served.act("settle", queue="disk", first=3, end=8)
    found = served.client().node.read("disk", 0, 10, settled=True)
    assert [(first, block.num_rows) for first, block in found] == [(0, 10)]


def test_many_settled_events_between_pending_ones_are_skipped(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the pending events are read, however far they are apart."""
    _publish(served, block_of(_read_numbers(0, 200_000)))
    served.act("settle", queue="disk", first=1, end=199_999)
    queue = served.node.queue("disk")
    asked: list[int] = []
    read = queue.read

    def count(first: int, most: int) -> tuple[int, Block] | None:
        asked.append(most)
        return read(first, most)

    monkeypatch.setattr(queue, "read", count)
    found = [(first, block.num_rows) for first, block in served.client().read("disk")]
    assert found == [(0, 1), (199_999, 1)]
    assert asked == [1, 1]


def test_requested_columns_are_sent_in_few_blocks(served: ServedNode) -> None:
    for number in range(5):
        extra = pa.array([f"c{number}"])
        _publish(served, block_of([b"<%d>a" % number], keys=["k"]).append_column("colour", extra))
    columns = ["severity", "turnlane_priority", "colour", "unheard of"]
    ((first, block),) = served.client().node.read("disk", 1, 4, columns)
    assert first == 1
    assert block.schema.names == ["colour", "severity", "turnlane_priority"]
    assert block.column("turnlane_priority").to_pylist() == [1, 2, 3]
    assert block.column("colour").to_pylist() == ["c1", "c2", "c3"]
    assert block.column("severity").null_count == 3


@pytest.mark.parametrize("columns", [[], ["unheard of"]])
def test_events_without_requested_columns_are_still_counted(
    served: ServedNode, columns: list[str]
) -> None:
    _publish(served, block_of(_read_numbers(0, 100)))
    ((first, block),) = served.client().node.read("disk", 10, 20, columns)
    assert (first, block.num_rows, block.schema.names) == (10, 10, ["severity"])


def test_empty_range_is_a_stream_without_blocks(served: ServedNode) -> None:
    reader = served.flight().do_get(_build_ticket(read="disk", first=7, end=7))
    assert reader.schema == BASE_SCHEMA
    assert reader.read_all().num_rows == 0


def test_blocks_with_different_columns_get_one_schema(served: ServedNode) -> None:
    """Columns are matched by name; missing columns are null."""
    _publish(served, block_of([b"a"]))
    _publish(served, block_of([b"b"]).append_column("user", pa.array([1])))
    _publish(served, block_of([b"c"]).append_column("city", pa.array(["Bonn"])))
    table = served.flight().do_get(_build_ticket(read="disk")).read_all()
    assert table.column("value").to_pylist() == [b"a", b"b", b"c"]
    assert table.column("user").to_pylist() == [None, 1, None]
    assert table.column("city").to_pylist() == [None, None, "Bonn"]


def test_columns_are_known_after_a_restart(serve: Serve) -> None:
    before = serve(name="same")
    _publish(before, block_of([b"b"]).append_column("user", pa.array([1])))
    before.close()
    after = serve(name="same")
    table = after.flight().do_get(_build_ticket(read="disk")).read_all()
    assert table.column("user").to_pylist() == [1]


def test_new_column_during_a_read_is_read_by_the_next_request(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turnlane client does that by itself."""
    monkeypatch.setattr(event_refs, "READ_EVENTS", 2)
    _publish(served, block_of([b"a"] * 4))
    reading = served.client().read("disk", 0, 5)
    first, _ = next(reading)
    assert first == 0
    _publish(served, block_of([b"b"]).append_column("user", pa.array([1])))
    rest = list(reading)
    assert sum(block.num_rows for _, block in rest) == 3
    assert rest[-1][1].column("user").to_pylist() == [1]


def test_wait_ends_when_an_event_arrives(served: ServedNode) -> None:
    wait = Task(lambda: served.client().wait("disk", 0, 60.0))
    wait_until(lambda: bool(state_of(served.node.queue("disk")).waiting_readers))
    served.node.queue("disk").producer().publish(b"x")
    assert wait.result()[:2] == (1, 0)


def test_wait_without_events_times_out(served: ServedNode) -> None:
    assert served.client().wait("disk", 0, 0.01)[:2] == (0, 0)


def _get_queue_id(served: ServedNode, queue: str) -> str:
    return served.client().wait(queue, -1, 0.0).queue_id


def test_recreated_queue_has_a_new_id(served: ServedNode) -> None:
    for knobs in ({}, {"kind": "memory"}, {"kind": "disk_assisted"}):
        served.node.create("late", **knobs)
        before = _get_queue_id(served, "late")
        assert _get_queue_id(served, "late") == before
        served.node.drop("late")
        served.node.create("late", **knobs)
        assert _get_queue_id(served, "late") != before
        served.node.drop("late")


def test_disk_queue_keeps_its_id_after_a_restart(serve: Serve) -> None:
    before = serve(name="same")
    ids = {queue: _get_queue_id(before, queue) for queue in ("disk", "slow", "memory")}
    before.close()
    after = serve(name="same")
    same = {queue for queue in ids if _get_queue_id(after, queue) == ids[queue]}
    assert same == {"disk", "slow"}, "what was in memory is no more"


def test_settle_with_the_id_of_a_dropped_queue_changes_nothing(served: ServedNode) -> None:
    client = served.client()
    served.node.create("late")
    before = _get_queue_id(served, "late")
    served.node.drop("late")
    served.node.create("late")
    _publish(served, block_of(_read_numbers(0, 10)), "late")
    assert not client.settle("late", 0, 5, before)
    assert served.node.queue("late").low == 0
    assert client.settle("late", 0, 5, _get_queue_id(served, "late"))
    assert client.settle("late", 5, 6), "without an id, whichever it is"
    assert served.node.queue("late").low == 6


def test_generic_flight_client_can_list_and_read_queues(served: ServedNode) -> None:
    _publish(served, block_of([b"a"] * 3).append_column("user", pa.array([1, 2, 3])))
    client = served.flight()
    infos = {(info.descriptor.path or [b""])[0]: info for info in client.list_flights()}
    assert set(infos) == {b"disk", b"slow", b"memory"}
    assert infos[b"disk"].total_records == 3
    info = client.get_flight_info(flight.FlightDescriptor.for_path("disk"))
    assert info.schema.names == [*BASE_SCHEMA.names, "user"]
    (endpoint,) = info.endpoints
    assert client.do_get(endpoint.ticket).read_all().num_rows == 3
    by_command = flight.FlightDescriptor.for_command(b'{"read": "disk"}')
    assert client.get_flight_info(by_command).schema == info.schema
    actions: list[Any] = list(client.list_actions())
    assert {"wait", "commit", "done"} <= {action.type for action in actions}
    assert all(action.description for action in actions)


def test_queues_are_created_listed_and_dropped(served: ServedNode) -> None:
    client = served.client()
    client.create("new", kind="memory", size=7)
    client.create("new", kind="memory", size=7)
    assert client.queues()["new"] == {"kind": "memory", "name": "new", "size": 7}
    client.queue("new").producer(ack=AckLevel.ACCEPTED).publish(b"x")
    wait_until(lambda: client.stats("new")["new"]["ledger"]["pending"] == 1)
    assert set(client.stats()) == {"disk", "slow", "memory", "new"}
    client.drop("new")
    assert "new" not in client.queues()
