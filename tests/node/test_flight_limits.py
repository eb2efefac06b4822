"""Tests of the limits of the Flight plane: silent, idle, numerous and oversized clients."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pyarrow as pa
import pytest
from pyarrow import flight
from pydantic import SecretStr, ValidationError

from tests.contract.harness import PATIENCE, wait_until
from tests.node.conftest import Serve, ServedNode, values
from tests.node.raw_flight import EXCHANGE, PUT, build_messages, encode_flight_data
from turnlane.client import node_client
from turnlane.errors import ConfigError, EventTooLarge, TransportDown
from turnlane.events import block_of
from turnlane.node.flight import server as flight_plane
from turnlane.node.flight.messages import MAX_COMMAND, BlockMetadata, FlightLimits, parse_command
from turnlane.serving.auth import Authority, TokenSettings

QUEUES = {"orders": {"kind": "memory"}}
TOKEN = TokenSettings(name="shop", secret=SecretStr("secret"), rights={"*": ["publish"]})  # type: ignore[dict-item]
SHOWN = (("authorization", "Bearer secret"),)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@contextmanager
def open_silent_streams(
    served: ServedNode, count: int, method: str = PUT, metadata: Any = ()
) -> Iterator[list[Any]]:
    """Open streams on which nothing is ever sent."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with grpc.insecure_channel(str(served.plane.address)) as channel:
        call = channel.stream_stream(method)
        yield [call(nothing(), metadata=metadata) for _ in range(count)]
        over.set()


@pytest.mark.parametrize("method", [PUT, EXCHANGE])
def test_silent_stream_without_a_token_is_refused_at_once(serve: Serve, method: str) -> None:
    """Arrow would wait for the first message of each stream on a thread."""
    served = serve(QUEUES, authority=Authority([TOKEN]))
    with open_silent_streams(served, 10, method) as streams:
        assert {each.code() for each in streams} == {grpc.StatusCode.UNAUTHENTICATED}
    assert served.plane.calls.running == 0


def test_silent_streams_count_as_calls(serve: Serve) -> None:
    limits = FlightLimits(max_calls=3)
    served = serve(QUEUES, authority=Authority([TOKEN]), limits=limits)
    with open_silent_streams(served, 5, metadata=SHOWN) as streams:
        wait_until(lambda: sum(each.done() for each in streams) == 2)
        assert [each.code() for each in streams if each.done()] == [UNAVAILABLE] * 2
        with pytest.raises(TransportDown, match="too many calls"):
            served.client(token="secret").nodes[0].ping()
    wait_until(lambda: served.plane.calls.running == 0)
    assert served.client(token="secret").nodes[0].ping()


def test_list_of_actions_needs_a_token(serve: Serve) -> None:
    served = serve(QUEUES, authority=Authority([TOKEN]))
    with pytest.raises(flight.FlightUnauthenticatedError, match="turnlane:NotAllowed"):
        list(served.flight().list_actions())
    options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer secret")])  # type: ignore[list-item]
    assert list(served.flight().list_actions(options))


@pytest.mark.parametrize("command", [b'{"publish": "orders"}', b'{"stage": "orders"}'])
def test_client_that_leaves_before_the_answer_is_not_logged_as_an_error(
    serve: Serve,
    command: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def send_too_late(writer: flight.FlightMetadataWriter, data: bytes) -> None:
        assert is_open.wait(PATIENCE)
        stream.cancel()
        # gRPC accepts some messages before it knows that the peer is gone.
        while True:
            tell(writer, data)

    is_open = threading.Event()
    tell = flight_plane._send_metadata
    monkeypatch.setattr(flight_plane, "_send_metadata", send_too_late)
    served = serve(QUEUES)
    with grpc.insecure_channel(str(served.plane.address)) as channel:
        stream = channel.stream_stream(PUT)(
            iter(encode_flight_data(command, build_messages(block_of([b"x"]))))
        )
        is_open.set()
        wait_until(stream.done)
        wait_until(lambda: served.plane.calls.running == 0)
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


# Connections


def build_short_limits() -> FlightLimits:
    """Return limits with a shorter idle timeout than a configuration allows."""
    return FlightLimits().model_copy(update={"idle_timeout": 0.2})


def test_idle_connection_is_closed(serve: Serve) -> None:
    served = serve(QUEUES, limits=build_short_limits())
    address = served.plane.address
    with socket.create_connection((address.host, address.port), PATIENCE) as idle:
        while idle.recv(4096):  # HTTP/2 begins with settings
            pass


def test_silent_stream_ends_with_its_connection(serve: Serve) -> None:
    served = serve(QUEUES, limits=build_short_limits())
    with open_silent_streams(served, 1) as (stream,):
        assert stream.code() is UNAVAILABLE
    wait_until(lambda: served.plane.calls.running == 0)


def test_idle_publisher_reconnects_without_a_warning(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve({"orders": {"durability": "always"}}, limits=build_short_limits())
    producer = served.client().queue("orders").producer(ack="persisted")
    producer.publish(b"one", timeout=PATIENCE)
    (first,) = served.plane._streams
    wait_until(lambda: bool(served.plane._streams - {first}))
    producer.publish(b"two", timeout=PATIENCE)
    assert values(served.node, "orders") == [b"one", b"two"]
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_idle_timeout_below_the_longest_wait_is_refused() -> None:
    with pytest.raises(ValidationError, match="idle_timeout"):
        FlightLimits(idle_timeout=300.0)


def test_newest_connections_beyond_the_limit_are_closed(serve: Serve) -> None:
    served = serve(QUEUES, limits=FlightLimits(max_connections=1))
    first = served.client().nodes[0]
    first.ping()
    # Wait until the watch has seen it: of two simultaneous connections either may be the newer.
    watch = served.plane._watch
    wait_until(lambda: watch is not None and len(watch._known) == 1)
    address = served.plane.address
    with socket.create_connection((address.host, address.port), PATIENCE) as second:
        while second.recv(4096):
            pass
    assert first.ping(timeout=PATIENCE)


# Blocks


def build_bomb(size: int) -> pa.RecordBatch:
    """Return a block that is small while compressed."""
    return block_of([bytes(size)])


def send(served: ServedNode, block: pa.RecordBatch) -> None:
    """Publish a block as a generic Flight client."""
    options = flight.FlightCallOptions(
        timeout=PATIENCE, write_options=pa.ipc.IpcWriteOptions(compression="zstd")
    )
    put: Any = served.flight().do_put
    descriptor = flight.FlightDescriptor.for_command(b'{"publish": "orders"}')
    writer, reader = put(descriptor, block.schema, options)
    writer.write_batch(block)
    writer.done_writing()
    while reader.read() is not None:
        pass
    writer.close()


def test_block_that_unpacks_too_large_ends_only_its_stream(serve: Serve) -> None:
    served = serve(QUEUES, limits=FlightLimits(max_block_bytes=1 << 20))
    with pytest.raises(flight.FlightServerError, match=r"turnlane:EventTooLarge.*max_block_bytes"):
        send(served, build_bomb(8 << 20))
    send(served, block_of([b"small"]))
    assert values(served.node, "orders") == [b"small"]


def test_events_without_content_count_against_the_limit(serve: Serve) -> None:
    """The node fills in the columns that the client left out, which takes memory."""
    served = serve(QUEUES, limits=FlightLimits(max_block_bytes=1 << 20))
    nothing = pa.record_batch([pa.nulls(10_000_000)], names=["nothing"])
    with pytest.raises(flight.FlightServerError, match="turnlane:EventTooLarge"):
        send(served, nothing)


def test_stage_refuses_a_block_that_unpacks_too_large(serve: Serve) -> None:
    served = serve(QUEUES, limits=FlightLimits(max_block_bytes=1 << 20))
    block = build_bomb(2 << 20)

    def stage() -> None:
        with served.client().stage("orders", block.schema) as stage:
            stage.write(block)
            stage.finish()

    with pytest.raises(EventTooLarge):
        stage()


def test_client_sends_large_blocks_in_pieces(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_client, "SEND_BYTES", 1 << 19)
    served = serve({"orders": {}, "staged": {}}, limits=FlightLimits(max_block_bytes=1 << 20))
    expected = [b"%d" % number * 10_000 for number in range(100, 200)]
    block = block_of(expected)
    client = served.client()
    queue = client.queue("orders", producer_id="till", batch_size=1000)
    queue.producer(ack="persisted").publish_block(block, timeout=PATIENCE)
    with client.stage("staged", block.schema) as stage:
        stage.write(block)
        assert client.commit([stage.finish()])
    assert values(served.node, "orders") == values(served.node, "staged") == expected


def test_streams_of_blocks_are_refused_while_memory_is_short(serve: Serve) -> None:
    held = pa.allocate_buffer(1 << 20)
    served = serve(QUEUES, limits=FlightLimits(max_memory=held.size))
    served.node.queue("orders").producer().publish(b"x")
    with pytest.raises(flight.FlightUnavailableError, match="short of memory"):
        send(served, block_of([b"y"]))
    assert [each.value for each in served.client().queue("orders").get(timeout=PATIENCE)] == [b"x"]


def test_too_long_metadata_is_refused_before_it_is_copied() -> None:
    with pytest.raises(ConfigError, match=f"{MAX_COMMAND} are allowed"):
        parse_command(BlockMetadata, pa.py_buffer(bytes(MAX_COMMAND + 1)))
