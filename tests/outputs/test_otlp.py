"""Does the output ``otlp`` send telemetry unchanged and other events as log records?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.inputs.otlp_senders import (
    make_log_records,
    make_logs_request,
    make_measurements,
    make_spans,
)
from tests.inputs.web_inputs import SECRET, TOKENS, open_node, read_events, run_web_input
from tests.outputs.web_blocks import NOON, deliver, make_events, make_output, set_column
from tests.outputs.web_servers import Handler, Reply, Server, get_unused_url, run_server
from turnlane.delivery.destination import LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.results import BlockResult
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import Never, PartlyDelivered, PayloadTooLarge, RetryLater
from turnlane.events import Block, Event, block_of, get_values
from turnlane.formats.otlp import (
    PROTOBUF,
    SEVERITIES,
    Signal,
    SplitUnit,
    build_request_block,
    count_records,
    decode,
    encode_logs_request,
    encode_response,
    joined,
)
from turnlane.node.node import Node

SDK: dict[Signal, Any] = {
    Signal.LOGS: encode_logs(make_log_records("one", "two")),
    Signal.METRICS: encode_metrics(make_measurements()),
    Signal.TRACES: encode_spans(make_spans()),
}
"""Export requests as OpenTelemetry's SDK makes them."""


@pytest.fixture
def server() -> Iterator[Server]:
    with run_server() as found:
        yield found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with open_node(tmp_path / "node") as found:
        yield found


def make_sdk_events(signal: Signal, unit: SplitUnit = SplitUnit.RECORD) -> list[Event]:
    """Return the events of an SDK request."""
    block = build_request_block(signal, SDK[signal], unit=unit)
    headers = [dict(each.as_py()) for each in block.column("headers")]
    values = block.column("value").to_pylist()
    return [Event(value, headers=head) for value, head in zip(values, headers, strict=True)]


def deliver_blocks(
    blocks: list[Block], server: Server, **knobs: Any
) -> tuple[list[BlockResult], LocalDestinationState]:
    """Deliver blocks as a lane does; return the results and the destination state."""
    settings = DeliverySettings(backoff=0.001, max_backoff=0.01, max_time=60.0, **knobs)
    state = LocalDestinationState(settings)
    with (
        make_output("otlp", url=server.url) as output,
        Engine(output, settings, state, can_deliver_partly=output.can_deliver_partly) as engine,
    ):
        return list(engine.run(blocks)), state


def make_block(found: list[Event]) -> Block:
    """Return a block of these events, with positions."""
    block = block_of(
        [event.value or b"" for event in found],
        keys=[event.key for event in found],
        headers=[event.headers for event in found],
        severities=[event.severity for event in found],
    )
    columns = {
        "partition": pa.array([0] * len(found), pa.int32()),
        "offset": list(range(len(found))),
    }
    for name, column in columns.items():
        block = set_column(block, name, column)
    return block


def make_telemetry(unit: SplitUnit = SplitUnit.RECORD) -> Block:
    """Return events of all three signals, mixed, as the input stores them."""
    found: list[Event] = []
    for signal in SDK:
        found += make_sdk_events(signal, unit)
    return make_block(found[::2] + found[1::2])


def get_records(server: Server) -> list[Any]:
    """Return the log records that a server received."""
    [request] = server.requests
    request = decode(Signal.LOGS, request.body)
    return [
        record
        for resource in request.resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]


def get_attributes(record: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in record.attributes
    }


def get_names(request: Any) -> set[str]:
    """Return the names or bodies of all records of a request."""
    return {
        getattr(record, "name", "") or record.body.string_value
        for _, resources in request.ListFields()
        for resource in resources
        for field, scopes in resource.ListFields()
        if field.name.startswith("scope_")
        for scope in scopes
        for inner, found in scope.ListFields()
        if inner.name in {"log_records", "metrics", "spans"}
        for record in found
    }


# ── telemetry ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("unit", list(SplitUnit))
def test_telemetry_is_sent_unchanged_in_one_request_per_signal(
    server: Server, unit: SplitUnit
) -> None:
    deliver("otlp", make_telemetry(unit), url=server.url)
    assert {request.path for request in server.requests} == {
        "/v1/logs",
        "/v1/metrics",
        "/v1/traces",
    }
    for request in server.requests:
        signal = Signal(request.path.removeprefix("/v1/"))
        assert request.headers["content-type"] == PROTOBUF
        assert request.headers["content-encoding"] == "gzip"
        assert request.headers["idempotency-key"]
        assert get_names(decode(signal, request.body)) == get_names(SDK[signal])


def test_telemetry_through_own_input_equals_the_sdk_request(node: Node) -> None:
    sent = make_telemetry()
    with run_web_input("otlp", node) as found:
        deliver("otlp", sent, url=f"http://{found.address}")
    got = read_events(node)
    assert sorted(event.value or b"" for event in got) == sorted(get_values([sent]))
    for signal, request in SDK.items():
        values = [e.value or b"" for e in got if e.headers and e.headers["signal"] == signal]
        assert get_names(decode(signal, joined(values))) == get_names(request)


# ── other events ─────────────────────────────────────────────────────────────────────────────────


def test_events_without_telemetry_become_log_records(server: Server) -> None:
    block = make_events(
        [b"disk full", b"\xff\xfe", b""],
        first=5,
        keys=["k", None, None],
        sources=["host-1", None, "ü"],
        severities=[2, None, 7],
        headers=[{"a": "1", "b": ""}, None, {}],
    )
    block = set_column(block, "pid", [17, None, -1])
    block = set_column(block, "load", [0.5, None, 2.0])
    block = set_column(block, "up", [True, None, False])
    block = set_column(block, "tags", [["x"], None, []])
    deliver("otlp", block, url=server.url, resource={"service.name": "shop"})
    first, second, third = get_records(server)
    assert first.body.string_value == "disk full"
    assert second.body.bytes_value == b"\xff\xfe"
    assert third.body.WhichOneof("value") == "string_value"
    assert (first.severity_number, first.severity_text) == (18, "crit")
    assert (second.severity_number, second.severity_text) == (0, "")
    assert [each.time_unix_nano for each in (first, second, third)] == [
        NOON * 1000, NOON * 1000 + 1000, NOON * 1000 + 2000,
    ]  # fmt: skip
    assert get_attributes(first) == {
        "key": "k", "source": "host-1", "headers.a": "1", "headers.b": "",
        "pid": 17, "load": 0.5, "up": True,
        "log.record.uid": "alerts/0/5-2023-11-14T22:13:20.000000Z",
    }  # fmt: skip
    assert get_attributes(second) == {"log.record.uid": "alerts/0/6-2023-11-14T22:13:20.000001Z"}
    assert get_attributes(third)["pid"] == -1
    request = decode(Signal.LOGS, server.requests[0].body)
    assert get_attributes(request.resource_logs[0].resource) == {"service.name": "shop"}
    assert request.resource_logs[0].scope_logs[0].scope.name == "turnlane"


def test_internal_columns_are_not_sent_as_attributes(server: Server) -> None:
    """The row number of an event is part of its id."""
    block = set_column(make_events([b"one", b"two"]), "turnlane_row", [0, 1])
    deliver("otlp", block, url=server.url)
    for record, row in zip(get_records(server), ("", ".1"), strict=True):
        assert get_attributes(record).keys() == {"log.record.uid"}
        assert row in get_attributes(record)["log.record.uid"]


def test_severities_survive_the_round_trip(server: Server) -> None:
    deliver("otlp", make_events([b"x"] * 8, severities=list(range(8))), url=server.url)
    assert [SEVERITIES[each.severity_number] for each in get_records(server)] == list(range(8))


def test_block_with_telemetry_and_other_events_is_sent_in_one_request(node: Node) -> None:
    request = make_logs_request("telemetry")
    values = [b"plain", request.SerializeToString(), b"text"]
    heads = [None, {"signal": "logs", "content-type": PROTOBUF}, {"signal": "logs"}]
    with run_web_input("otlp", node) as found:
        deliver("otlp", make_events(values, headers=heads), url=f"http://{found.address}")
    found_names = set().union(
        *(get_names(decode(Signal.LOGS, e.value or b"")) for e in read_events(node))
    )
    assert found_names == {"plain", "telemetry", "text"}


def test_missing_columns_are_left_out() -> None:
    block = make_events([b"a", b"b"]).select(["value"])
    request = decode(Signal.LOGS, encode_logs_request(block, resource={}))
    assert get_names(request) == {"a", "b"}
    nothing = decode(Signal.LOGS, encode_logs_request(block.select([]), resource={}))
    assert len(nothing.resource_logs[0].scope_logs[0].log_records) == 2


TEXT = st.text(st.characters(codec="utf-8"), max_size=200)


@given(
    st.lists(
        st.tuples(
            st.binary(max_size=300),
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.none() | st.floats(allow_nan=False),
            st.none() | st.dictionaries(TEXT, TEXT, max_size=3),
            st.none() | st.integers(-128, 127),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_log_records_equal_those_of_protobuf(rows: list[Any]) -> None:
    values, numbers, reals, headers, severities = (
        list(column) for column in zip(*rows, strict=True)
    )
    block = block_of(values, headers=headers, severities=severities, timestamps=NOON)
    block = set_column(block, "number", pa.array(numbers, pa.int64()))
    block = set_column(block, "real", pa.array(reals, pa.float64()))
    request = decode(Signal.LOGS, encode_logs_request(block, resource={}))
    found: list[LogRecord] = list(request.resource_logs[0].scope_logs[0].log_records)
    for record, (value, number, real, header, severity) in zip(found, rows, strict=True):
        assert (record.body.bytes_value or record.body.string_value.encode()) == value
        named = {f"headers.{name}": text for name, text in (header or {}).items()}
        wanted = {**named, "number": number, "real": real}
        assert get_attributes(record) == {
            name: each for name, each in wanted.items() if each is not None
        }
        known = severity is not None and 0 <= severity < 8
        assert (record.severity_number != 0) == known


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def test_partly_rejected_export_counts_as_delivered(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.set_replies(Reply(200, encode_response(Signal.LOGS, rejected=2, why="too old")))
    with make_output("otlp", url=server.url) as output:
        output.send(output.prepare(make_events([b"a", b"b", b"c"])))
        assert output.rejected == 2
    assert 'records=2 reason="too old"' in caplog.text
    assert len(server.requests) == 1


@pytest.mark.parametrize("signal", Signal)
def test_fully_rejected_export_makes_all_events_dead(server: Server, signal: Signal) -> None:
    block = make_block(make_sdk_events(signal))
    records = count_records(signal, SDK[signal])
    server.set_replies(Reply(200, encode_response(signal, rejected=records, why="too old")))
    (result,), state = deliver_blocks([block], server)
    assert (result.delivered, len(server.requests)) == (0, 1)
    (letter,) = result.dead
    assert (len(letter.numbers), letter.error) == (block.num_rows, "Never")
    assert letter.text.endswith("rejected for good: too old")
    assert state.get_status().totals["rejected"] == 0


def test_rejected_records_are_reported_to_the_destination_state(server: Server) -> None:
    replies = [Reply(200, encode_response(Signal.LOGS, rejected=1, why="too old"))] * 2
    server.set_replies(*replies)
    results, state = deliver_blocks(
        [make_events([b"a", b"b"]), make_events([b"c", b"d"])], server, batch_events=2
    )
    assert [result.delivered for result in results] == [2, 2]
    assert state.get_status().totals["rejected"] == 2


def test_ordered_events_of_different_signals_do_not_overtake_each_other(server: Server) -> None:
    """Spans could be delivered while earlier logs wait, so each event is sent alone."""
    spans, logs = make_sdk_events(Signal.TRACES), make_sdk_events(Signal.LOGS)
    block = make_block([*spans, *logs, *spans])
    busy = [Reply(503)]
    paths: list[str] = []

    def behave(handler: Handler) -> Reply:
        path = handler.read().path
        if path.endswith("logs") and busy:
            return busy.pop()
        paths.append(path)
        return Reply(200, b"")

    server.behave = behave
    (result,), _ = deliver_blocks([block], server, ordering="strict")
    assert result.delivered == block.num_rows
    traces = ["/v1/traces"] * len(spans)
    assert (paths, busy) == ([*traces, *(["/v1/logs"] * len(logs)), *traces], [])


def test_warning_of_a_collector_is_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    kind = {"Content-Type": "application/json; charset=utf-8"}
    server.set_replies(Reply(200, b'{"partialSuccess": {"errorMessage": "slow down"}}', kind))
    with caplog.at_level(logging.WARNING):
        deliver("otlp", make_events([b"a"]), url=server.url)
    assert "slow down" in caplog.text


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b"<html>", {"Content-Type": "text/html"}),
        Reply(200, b"\xff\xff\xff", {"Content-Type": PROTOBUF}),
        Reply(200, b"[]", {"Content-Type": "application/json"}),
        Reply(200, b"x" * 100_000, {"Content-Type": PROTOBUF}),
    ],
)
def test_malformed_response_delivers_nothing(server: Server, reply: Reply) -> None:
    server.set_replies(reply)
    with pytest.raises(RetryLater, match="not a response of OTLP"):
        deliver("otlp", make_events([b"a"]), url=server.url)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, Never), (413, PayloadTooLarge), (404, RetryLater), (502, RetryLater)]
)
def test_error_status_applies_to_all_records(
    server: Server, status: int, kind: type[Exception]
) -> None:
    server.set_replies(Reply(status))
    with pytest.raises(kind):
        deliver("otlp", make_events([b"a", b"b"]), url=server.url)


def test_collector_without_one_signal_gets_the_others(server: Server) -> None:
    def behave(handler: Any) -> Reply:
        request = handler.read()
        return Reply(404 if request.path == "/v1/metrics" else 200)

    server.behave = behave
    block = make_telemetry()
    with pytest.raises(PartlyDelivered) as raised:
        deliver("otlp", block, url=server.url)
    heads: list[Any] = block.column("headers").to_pylist()
    missed = {row for row, head in enumerate(heads) if ("signal", "metrics") in head}
    assert set(raised.value.failures) == missed
    assert all(isinstance(each, RetryLater) for each in raised.value.failures.values())


def test_one_malformed_event_does_not_stop_others(node: Node) -> None:
    head = {"signal": "metrics", "content-type": PROTOBUF}
    good = SDK[Signal.METRICS].SerializeToString()
    values = [good, b"\xff no protobuf", good, b"plain"]
    with run_web_input("otlp", node) as found:
        block = make_events(values, headers=[head, head, head, None])
        with pytest.raises(PartlyDelivered) as raised:
            deliver("otlp", block, url=f"http://{found.address}")
    assert {row: type(each) for row, each in raised.value.failures.items()} == {1: Never}
    assert len(read_events(node)) == 2 * 2 + 1


# ── before anything is sent ──────────────────────────────────────────────────────────────────────


def test_check_exports_no_records(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTLP_TOKEN", SECRET)
    with run_web_input("otlp", node, tokens=TOKENS) as found:
        url = f"http://{found.address}"
        with make_output("otlp", url=url, auth={"token_env": "OTLP_TOKEN"}) as output:
            output.check()
        with make_output("otlp", url=url) as output, pytest.raises(RetryLater, match="401"):
            output.check()
    assert not read_events(node)
    with make_output("otlp", url=get_unused_url()) as output, pytest.raises(RetryLater):
        output.check()
