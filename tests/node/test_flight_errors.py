"""Tests of malformed, wrong and huge Flight requests: precise errors, and no effect on others."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import flight

from tests.contract.harness import wait_until
from tests.node.conftest import ServedNode, Stream, values
from turnlane.errors import StorageFailed
from turnlane.events import block_of
from turnlane.node.flight.actions import ACTIONS, Actions
from turnlane.node.flight.messages import MAX_COMMAND, MAX_MESSAGE, build_flight_error

REFUSALS = (flight.FlightError, pa.ArrowException)

together = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *("publish", "producer", "ack", "sequence", "stage", "stages", "ranges", "writer", "epoch"),
        *("read", "first", "end", "consume", "max_events", "wait", "lease", "seconds", "holder"),
        *("queue", "knobs", "beyond", "timeout"),
    ]
)
COMMANDS = st.binary(max_size=60) | st.dictionaries(
    NAMES | st.text(max_size=5),
    JSON | st.sampled_from(["disk", "memory", 0, 1, -1, 1e308]),
    max_size=5,
).map(lambda command: json.dumps(command).encode())


@pytest.fixture
def healthy_node(served: ServedNode) -> Iterator[ServedNode]:
    """A node that must work when the test ends."""
    yield served
    stream = served.stream("disk", "in the end")
    stream.read_greeting()
    stream.write(b"fine")
    assert stream.finish() == {"accepted": 1, "persisted": 1, "delivered": 0}
    assert served.node.leases is not None


def _catch_refusal(call: Callable[[], object]) -> str:
    """Return the error of a refused call, which must not be an internal error of the node."""
    with pytest.raises(REFUSALS) as refusal:
        call()
    text = str(refusal.value)
    assert "turnlane:" in text, text
    assert "turnlane:Bug" not in text, text
    assert "Traceback" not in text, text
    return text


def _allow_refusal(call: Callable[[], object]) -> None:
    """Allow any refusal except an internal error of the node."""
    said = "turnlane:"
    try:
        call()
    except REFUSALS as error:
        said = str(error)
    assert "turnlane:" in said
    assert "turnlane:Bug" not in said


def _put(
    served: ServedNode, command: bytes, *blocks: pa.RecordBatch, metadata: bytes = b""
) -> None:
    stream = Stream(served.flight(), command)
    try:
        for block in blocks:
            stream.writer.write_with_metadata(block, pa.py_buffer(metadata))
    except REFUSALS:
        pass  # the node was faster; the end of the stream has the reason
    stream.finish()


# ── invalid commands ─────────────────────────────────────────────────────────────────────────────


@together
@given(command=COMMANDS)
def test_invalid_command_of_a_stream_is_refused(healthy_node: ServedNode, command: bytes) -> None:
    _allow_refusal(lambda: _put(healthy_node, command))


@together
@given(command=COMMANDS)
def test_invalid_ticket_is_refused(healthy_node: ServedNode, command: bytes) -> None:
    if b'"wait"' in command:
        return  # it might be a valid one
    _allow_refusal(lambda: healthy_node.flight().do_get(flight.Ticket(command)).read_all())


@together
@given(kind=st.sampled_from(sorted(set(ACTIONS) - {"wait", "drop"})) | st.text(), body=COMMANDS)
def test_invalid_body_of_an_action_is_refused(
    healthy_node: ServedNode, kind: str, body: bytes
) -> None:
    _allow_refusal(lambda: list(healthy_node.flight().do_action(flight.Action(kind, body))))


@together
@given(metadata=COMMANDS)
def test_invalid_metadata_of_a_block_is_refused(healthy_node: ServedNode, metadata: bytes) -> None:
    _allow_refusal(
        lambda: _put(healthy_node, b'{"publish": "memory"}', block_of([]), metadata=metadata)
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (b"", "must be a JSON object with one of publish, stage"),
        (b"[]", "must be a JSON object with one of publish, stage"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"publish": 5}', "publish: must be text, not 5"),
        (b'{"publish": "disk", "prodcer": "p"}', "did you mean producer"),
        (b'{"publish": "disk", "ack": "never"}', "ack: must be one of"),
        (b'{"publish": "nope"}', "turnlane:NoSuchQueue: there is no queue 'nope'"),
        (b'{"publish": ""}', "publish: "),
        (b'{"stage": "nope"}', "turnlane:NoSuchQueue"),
        (b'{"publish": "disk", "producer": "' + b"x" * MAX_COMMAND + b'"}', "are allowed"),
    ],
)
def test_error_of_a_wrong_command_names_the_field(
    healthy_node: ServedNode, command: bytes, said: str
) -> None:
    assert said in _catch_refusal(lambda: _put(healthy_node, command))


@pytest.mark.parametrize(
    ("ticket", "said"),
    [
        ({"read": "disk", "first": -1}, "first: must be at least 0"),
        ({"read": "disk", "first": "0"}, "first: must be a whole number"),
        ({"read": "disk", "first": 1.5}, "first: must be a whole number"),
        ({"read": "disk", "end": 1 << 63}, "end: must be less than"),
        ({"consume": "disk", "wait": 1e9}, "wait: must be at most 300"),
        ({"consume": "disk", "max_events": 0}, "max_events: must be at least 1"),
        ({"consume": "disk", "lease": 0}, "lease: must be more than 0"),
        ({"consume": "nope"}, "turnlane:NoSuchQueue"),
    ],
)
def test_error_of_a_wrong_ticket_names_the_field(
    healthy_node: ServedNode, ticket: dict[str, Any], said: str
) -> None:
    made = flight.Ticket(json.dumps(ticket).encode())
    assert said in _catch_refusal(lambda: healthy_node.flight().do_get(made).read_all())


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("dance", {}, "turnlane:NotSupported: there is no action 'dance'; there are: ping"),
        ("done", {}, "lease: is required"),
        ("done", {"lease": "nope"}, "turnlane:NoSuchLease"),
        ("extend", {"lease": "x", "seconds": -1}, "seconds: must be more than 0"),
        ("wait", {"queue": "disk"}, "beyond: is required"),
        ("settle", {"queue": "disk", "first": 5}, "end: is required"),
        ("create", {"queue": "a/b"}, "is not a name"),
        ("create", {"queue": "new", "knobs": {"path": "/tmp/x"}}, "path: "),
        ("create", {"queue": "new", "knobs": {"kind": "direct"}}, "kind: "),
        ("create", {"queue": "disk", "knobs": {"size": 5}}, "turnlane:QueueExists"),
        ("drop", {"queue": "disk"}, "is in the configuration"),
        ("commit", {"stages": ["../../etc/passwd"]}, "turnlane:NoSuchStage"),
        ("commit", {"ranges": [{"queue": "nope", "first": 0, "end": 1}]}, "turnlane:NoSuchQueue"),
        ("commit", {"stages": "abc"}, "stages: must be a list"),
    ],
)
def test_error_of_a_wrong_action_names_the_field(
    healthy_node: ServedNode, kind: str, body: dict[str, Any], said: str
) -> None:
    assert said in _catch_refusal(lambda: healthy_node.act(kind, **body))


def test_abort_of_an_unknown_stage_succeeds(healthy_node: ServedNode) -> None:
    assert healthy_node.act("abort", stages=["gone", "../../x"]) == {}


# ── invalid blocks ───────────────────────────────────────────────────────────────────────────────


def test_wrong_column_is_refused_and_named(healthy_node: ServedNode) -> None:
    block = pa.record_batch({"value": pa.array(["text"])})
    descriptor = flight.FlightDescriptor.for_command(b'{"publish": "disk"}')

    def put() -> None:
        writer, _ = healthy_node.flight().do_put(descriptor, block.schema)
        try:
            writer.write_batch(block)
        finally:
            writer.close()

    assert "turnlane:SchemaMismatch: column 'value' is string" in _catch_refusal(put)
    assert values(healthy_node.node, "disk") == []


def test_stage_with_a_wrong_column_is_refused_at_once(healthy_node: ServedNode) -> None:
    schema = pa.schema([("value", pa.int64())])
    descriptor = flight.FlightDescriptor.for_command(b'{"stage": "disk"}')

    def put() -> None:
        writer, _ = healthy_node.flight().do_put(descriptor, schema)
        writer.close()

    assert "turnlane:SchemaMismatch" in _catch_refusal(put)
    assert len(healthy_node.node.staging) == 0


def _forge_block(kind: pa.DataType, offsets: list[int], data: bytes) -> pa.RecordBatch:
    """Return a column with invalid offsets or bytes."""
    honest = np.minimum(np.arange(len(offsets), dtype=np.int32), len(data))
    honest[-1] = len(data)
    buffers = [None, pa.py_buffer(honest.data), pa.py_buffer(data)]
    column = pa.Array.from_buffers(kind, len(offsets) - 1, buffers)
    honest[:] = offsets  # Arrow itself would refuse it
    return pa.record_batch([column], names=["value" if kind == pa.binary() else "key"])


@pytest.mark.parametrize("command", [b'{"publish": "disk"}', b'{"stage": "disk"}'])
@pytest.mark.parametrize(
    "block",
    [
        _forge_block(pa.binary(), [0, 1 << 30, 5], b"short"),
        _forge_block(pa.binary(), [0, 4, 2, 9], b"backwards"),
        _forge_block(pa.binary(), [0, -5, 8], b"negative"),
        _forge_block(pa.string(), [0, 2], b"\xff\xfe"),
    ],
    ids=["beyond", "backwards", "negative", "not-utf8"],
)
def test_forged_block_is_refused(
    healthy_node: ServedNode, command: bytes, block: pa.RecordBatch
) -> None:
    """Readers would access foreign memory, or crash."""

    def put() -> None:
        descriptor = flight.FlightDescriptor.for_command(command)
        writer, _ = healthy_node.flight().do_put(descriptor, block.schema)
        try:
            writer.write_batch(block)
        finally:
            writer.close()

    assert "turnlane:ValueError" in _catch_refusal(put)
    assert values(healthy_node.node, "disk") == []


def test_sequence_without_a_producer_is_refused(healthy_node: ServedNode) -> None:
    said = _catch_refusal(
        lambda: _put(
            healthy_node, b'{"publish": "disk"}', block_of([b"x"]), metadata=b'{"sequence": 0}'
        )
    )
    assert "a sequence needs a producer" in said


@pytest.mark.parametrize("sequence", [-1, 1 << 63, "0", 1.5, True])
def test_invalid_sequence_is_refused(healthy_node: ServedNode, sequence: object) -> None:
    metadata = json.dumps({"sequence": sequence}).encode()
    said = _catch_refusal(
        lambda: _put(
            healthy_node,
            b'{"publish": "disk", "producer": "p"}',
            block_of([b"x"]),
            metadata=metadata,
        )
    )
    assert "turnlane:ConfigError: sequence: " in said
    assert values(healthy_node.node, "disk") == []


def test_huge_metadata_is_refused(healthy_node: ServedNode) -> None:
    metadata = b" " * (MAX_COMMAND + 1)
    said = _catch_refusal(
        lambda: _put(healthy_node, b'{"publish": "disk"}', block_of([b"x"]), metadata=metadata)
    )
    assert "are allowed" in said


def test_events_published_before_an_error_stay(healthy_node: ServedNode) -> None:
    stream = healthy_node.stream("disk", "p")
    stream.read_greeting()
    stream.write(b"good", sequence=0)
    stream.wait_for_progress(accepted=1)
    stream.write(b"bad", sequence=-1)
    with pytest.raises(flight.FlightServerError, match="turnlane:ConfigError"):
        stream.finish()
    assert values(healthy_node.node, "disk") == [b"good"]


def test_faulty_client_does_not_affect_others(healthy_node: ServedNode) -> None:
    good = healthy_node.stream("disk", "good")
    good.read_greeting()
    for number in range(5):
        good.write(b"%d" % number, sequence=number)
        with pytest.raises(flight.FlightServerError):
            _put(healthy_node, b'{"publish": "disk"}', block_of([b"x"]), metadata=b"junk")
    assert good.finish() == {"accepted": 5, "persisted": 5, "delivered": 0}


def test_bytes_that_are_not_grpc_do_no_harm(healthy_node: ServedNode) -> None:
    address = healthy_node.plane.address
    for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 10, b""):
        with socket.create_connection((address.host, address.port)) as connection:
            connection.sendall(junk)
    assert healthy_node.act("ping")["instance"] == healthy_node.node.instance


METHODS = ["DoPut", "DoExchange", "DoGet", "DoAction", "GetFlightInfo", "ListFlights", "Handshake"]


@together
@given(method=st.sampled_from(METHODS), messages=st.lists(st.binary(max_size=200), max_size=4))
def test_messages_that_are_not_flight_do_no_harm(
    healthy_node: ServedNode, method: str, messages: list[bytes]
) -> None:
    """Sends arbitrary bytes instead of Flight messages over real gRPC."""
    grpc = pytest.importorskip("grpc")
    with grpc.insecure_channel(str(healthy_node.plane.address)) as channel:
        call = channel.stream_stream(f"/arrow.flight.protocol.FlightService/{method}")
        with contextlib.suppress(grpc.RpcError):
            for answer in call(iter(messages), timeout=5):
                assert isinstance(answer, bytes)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def test_error_has_its_class_in_message_and_details() -> None:
    error = build_flight_error(StorageFailed("the disk is gone", after=2.5))
    assert isinstance(error, flight.FlightUnavailableError)
    assert str(error) == "turnlane:StorageFailed: the disk is gone"
    assert json.loads(error.extra_info) == {
        "error": "StorageFailed",
        "message": "the disk is gone",
        "after": 2.5,
    }


def test_long_error_message_is_cut(healthy_node: ServedNode) -> None:
    assert len(_catch_refusal(lambda: healthy_node.act("done", lease="x" * 1000))) < 4 * MAX_MESSAGE
    assert len(str(build_flight_error(ValueError("x" * 10_000)))) < MAX_MESSAGE + 50


def test_internal_error_is_logged_and_hidden_from_the_client(
    healthy_node: ServedNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_internally(*_: object) -> dict[str, Any]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Actions, "answer", fail_internally)
    with pytest.raises(flight.FlightInternalError, match="its log says why") as failed:
        healthy_node.act("ping")
    monkeypatch.undo()
    assert "secret" not in str(failed.value)
    wait_until(lambda: "secret detail" in caplog.text)
