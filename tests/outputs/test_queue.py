"""Do events get into the queue of another node, also if the node is unavailable or full?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import read_events
from tests.outputs.blocks import make_block, make_values
from tests.ports import free_port
from tests.spark.nodes import Served, serving
from turnlane.errors import PayloadTooLarge, RetryLater, TransportDown
from turnlane.events import Block
from turnlane.node.flight.server import FlightPlane
from turnlane.node.node import Node
from turnlane.outputs.queue import QueueOutput, QueueOutputSettings
from turnlane.serving.address import Address
from turnlane.serving.auth import Authority, TlsSettings, TokenSettings

QUEUES: dict[str, dict[str, Any]] = {
    "orders": {"durability": "always"},
    "memory": {"kind": "memory"},
    "assisted": {"kind": "disk_assisted"},
    "small": {"kind": "memory", "size": 5, "light_delay_mark": None},
    "narrow": {"max_bytes": "100Ki"},
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", QUEUES) as served:
        yield served


def make_output(endpoint: str, queue: str = "orders", **knobs: Any) -> QueueOutput:
    given = {"type": "queue", "endpoint": endpoint, "queue": queue, **knobs}
    return QueueOutput(QueueOutputSettings.model_validate(given))


def send(output: QueueOutput, block: Block) -> None:
    output.send(output.prepare(block))


@pytest.mark.parametrize("queue", ["orders", "memory", "assisted"])
def test_events_arrive_with_all_columns(node: Served, queue: str) -> None:
    block = make_block(
        make_values(0, 3),
        100,
        key=pa.array(["a", None, "c"]),
        severity=pa.array([3, 4, 5], pa.int64()),  # the type that Spark may use
        message=pa.array(["x", "y", None]),
    )
    with make_output(node.url, queue) as output:
        output.check()
        send(output, block)
        send(output, make_block([]))
        send(output, make_block(make_values(3, 5)))
    found = read_events(node.queue(queue))
    assert [event.value for event in found] == make_values(0, 5)
    assert [event.key for event in found[:3]] == ["a", None, "c"]
    assert [event.severity for event in found[:3]] == [3, 4, 5]
    assert found[0].timestamp == 1_795_000_000_123_456
    stored = node.queue(queue).read(0, 10)
    assert stored is not None
    assert stored[1].column("message").to_pylist()[:3] == ["x", "y", None]
    assert not {"partition", "offset", "queue", "payload"} & set(stored[1].schema.names)


def test_repeated_events_with_a_producer_are_dropped(node: Served) -> None:
    """The offsets have gaps, where events became dead letters."""
    whole = make_block(make_values(0, 20))
    with make_output(node.url, producer="shop") as output:
        send(output, whole.slice(0, 10))
    with make_output(node.url, producer="shop") as output:  # another task, after a crash
        send(output, whole.slice(0, 5))
        send(output, whole.take(pa.array([5, 6, 11, 12, 15])))
        send(output, whole.slice(15))
    values = [event.value for event in read_events(node.queue("orders"))]
    wanted = [*range(10), 11, 12, *range(15, 20)]
    assert values == [b"event %d" % number for number in wanted]


def test_events_of_two_nodes_have_separate_sequences(node: Served) -> None:
    block = make_block(make_values(0, 4), partition=pa.array([0, 0, 1, 1], pa.int32()))
    again = make_block(make_values(0, 2), partition=pa.array([1, 1], pa.int32()))
    with make_output(node.url, producer="shop") as output:
        for _ in range(2):
            send(output, block)
            send(output, again)
    # Offsets 0 and 1 of node 1 arrive after its 2 and 3: out of order, each once.
    assert len(read_events(node.queue("orders"))) == 6


def test_several_rows_of_one_event_have_separate_sequences(node: Served) -> None:
    offsets, rows = pa.array([0, 1, 1, 2]), pa.array([0, 0, 1, 0])
    block = make_block(make_values(0, 4), offset=offsets, turnlane_row=rows)
    with make_output(node.url, producer="shop") as output:
        for part in (block.slice(0, 2), block.slice(2), block):
            send(output, part)
    stored = node.queue("orders").read(0, 4)
    assert stored is not None
    assert "turnlane_row" not in stored[1].schema.names
    assert [event.value for event in read_events(node.queue("orders"))] == make_values(0, 4)


def test_repeated_events_without_a_producer_are_stored_again(node: Served) -> None:
    with make_output(node.url) as output:
        for _ in range(2):
            send(output, make_block(make_values(0, 4)))
    assert len(read_events(node.queue("orders"))) == 8


def test_unavailable_node_is_retryable_and_works_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    endpoint = f"turnlane://127.0.0.1:{port}"
    with make_output(endpoint) as output:
        with pytest.raises(RetryLater):
            output.check()
        with pytest.raises(RetryLater):
            send(output, make_block(make_values(0, 2)))
        for first in (0, 2):
            with run_node_at(tmp_path / "data", port):
                wait_until(partial(try_send, output, first), "the node to be found again")
        with run_node_at(tmp_path / "data", port) as there:
            assert [event.value for event in read_events(there.queue("orders"))] == make_values(
                0, 4
            )


def try_send(output: QueueOutput, first: int) -> bool:
    """Return whether the send worked. gRPC reconnects only some time after a failure."""
    try:
        send(output, make_block(make_values(first, first + 2)))
    except TransportDown:
        return False
    return True


@contextmanager
def run_node_at(
    data: Path,
    port: int,
    tokens: tuple[TokenSettings, ...] = (),
    tls: TlsSettings | None = None,
) -> Iterator[Node]:
    with Node(data, {"orders": {"durability": "always"}}) as node:
        plane = FlightPlane(node, Authority(tokens), Address("127.0.0.1", port), tls=tls)
        plane.start()
        try:
            yield node
        finally:
            plane.stop(5.0)


def test_full_queue_is_retryable(node: Served) -> None:
    with make_output(node.url, "small", timeout="1s", producer="shop") as output:
        send(output, make_block(make_values(0, 5)))
        with pytest.raises(RetryLater):
            send(output, make_block(make_values(5, 8), 5))
        with node.queue("small").get() as batch:
            batch.done()
        send(output, make_block(make_values(5, 8), 5))
    assert [event.value for event in read_events(node.queue("small"))] == make_values(5, 8)


def test_event_too_large_for_the_queue_raises_payload_too_large(node: Served) -> None:
    with make_output(node.url, "narrow") as output, pytest.raises(PayloadTooLarge):
        send(output, make_block([b"x" * 200_000]))


def test_mistakes_that_a_person_can_correct_are_retryable(node: Served) -> None:
    with make_output(node.url, "missing") as output:
        with pytest.raises(RetryLater, match="missing"):
            send(output, make_block(make_values(0, 1)))
        with pytest.raises(RetryLater, match="missing"):
            output.check()
    with make_output(node.url) as output:
        send(output, make_block(make_values(0, 1), level=pa.array([1])))
        with pytest.raises(RetryLater, match="level"):
            send(output, make_block(make_values(1, 2), level=pa.array(["one"])))
    unset = "TURNLANE_TEST_UNSET"
    with make_output(node.url, token_env=unset) as output, pytest.raises(RetryLater, match=unset):
        output.check()


def test_token_and_mutual_tls_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = Certificates(tmp_path)
    secured = TlsSettings(**certificates.server_knob(mutual=True))
    monkeypatch.setenv("TURNLANE_TEST_TOKEN", "s3cret")
    right = TokenSettings.model_validate(
        {"name": "shop", "secret_env": "TURNLANE_TEST_TOKEN", "rights": {"orders": ["publish"]}}
    )
    port = free_port()
    mine = certificates.client_knob()
    with run_node_at(tmp_path / "data", port, (right,), secured) as there:
        endpoint = f"turnlanes://127.0.0.1:{port}"
        with make_output(endpoint, tls=mine, token_env="TURNLANE_TEST_TOKEN") as output:
            output.check()
            send(output, make_block(make_values(0, 3)))
        with make_output(endpoint, tls=mine) as output, pytest.raises(RetryLater):
            send(output, make_block(make_values(3, 4)))
        unknown = {"ca": certificates.ca}
        with (
            make_output(endpoint, tls=unknown, token_env="TURNLANE_TEST_TOKEN") as output,
            pytest.raises(RetryLater),
        ):
            send(output, make_block(make_values(3, 4)))
        missing = {"ca": tmp_path / "missing.pem"}
        with (
            make_output(endpoint, tls=missing) as output,
            pytest.raises(RetryLater, match="missing"),
        ):
            output.check()
        assert [event.value for event in read_events(there.queue("orders"))] == make_values(0, 3)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"endpoint": "http://a:1"}, "is not the URL of a node"),
        ({"endpoint": "turnlane://a:1,b:1"}, "must name one node, not 2"),
        ({"tls": {"ca": "x"}}, "begins with turnlanes://"),
        ({"endpoint": "turnlanes://a:1", "tls": {"verify": False}}, "always checked"),
    ],
)
def test_impossible_settings_are_refused(knobs: dict[str, Any], message: str) -> None:
    given = {"type": "queue", "endpoint": "turnlane://a:1", "queue": "orders"}
    with pytest.raises(ValidationError, match=message):
        QueueOutputSettings.model_validate({**given, **knobs})
