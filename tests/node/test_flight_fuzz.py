"""Tests of damaged Flight streams: they harm neither the node nor other clients.

Valid streams, plain, compressed and with dictionaries, are damaged before they are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.contract.harness import PATIENCE, wait_until
from tests.node.raw_flight import PUT, Message, build_messages, encode_flight_data
from turnlane.events import block_of, iterate_events
from turnlane.node.flight.messages import FlightLimits
from turnlane.node.flight.server import FlightPlane
from turnlane.node.node import Node
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Authority

COMMANDS = (b'{"publish": "logs"}', b'{"stage": "logs"}')
DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.UNKNOWN,  # errors that a repetition would raise again
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INVALID_ARGUMENT,  # Arrow's errors for unreadable data
    grpc.StatusCode.UNIMPLEMENTED,
}


class Damage(NamedTuple):
    """A change of the bytes at one place of a stream."""

    message: int
    in_body: bool
    at: int
    octets: bytes
    cut: bool


def _encode_dictionary(block: pa.RecordBatch) -> pa.RecordBatch:
    words = pa.array(["red", "green", "red"]).dictionary_encode()
    return block.append_column("colour", words)


PLAIN = block_of([b"one", b"two" * 100, b""])
STREAMS = {
    "plain": build_messages(PLAIN, None),
    "zstd": build_messages(PLAIN, "zstd"),
    "lz4": build_messages(PLAIN, "lz4"),
    "dictionary": build_messages(_encode_dictionary(PLAIN), "zstd"),
}


def _apply_damage(messages: list[Message], damages: list[Damage]) -> list[Message]:
    found = list(messages)
    for damage in damages:
        index = damage.message % len(found)
        message = found[index]
        part = message.body if damage.in_body else message.header
        at = damage.at % (len(part) + 1)
        rest = b"" if damage.cut else part[at + len(damage.octets) :]
        part = part[:at] + damage.octets + rest
        found[index] = message._replace(**{"body" if damage.in_body else "header": part})
    return found


damages = st.lists(
    st.builds(
        Damage,
        st.integers(0, 3),
        st.booleans(),
        st.integers(0, 2000),
        st.binary(min_size=1, max_size=8),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


class Sender:
    """A client that sends arbitrary messages to a node."""

    def __init__(self, node: Node, channel: grpc.Channel) -> None:
        self.node = node
        self._put: Any = channel.stream_stream(PUT)

    def send(self, messages: list[bytes]) -> grpc.StatusCode:
        """Send the messages of a stream; return how the stream ended."""
        call = self._put(iter(messages), timeout=PATIENCE)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        code: grpc.StatusCode = call.code()
        return code


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    queues = {"logs": {"kind": "memory"}, "orders": {"kind": "memory"}}
    limits = FlightLimits(max_block_bytes=1 << 20)
    with Node(tmp_path_factory.mktemp("fuzz"), queues) as node:
        plane = FlightPlane(node, Authority(), Address(LOOPBACK, 0), limits=limits)
        plane.start()
        with grpc.insecure_channel(str(plane.address)) as channel:
            yield Sender(node, channel)
        wait_until(lambda: plane.calls.running == 0)
        plane.stop()


@pytest.mark.parametrize("form", ["plain", "zstd", "lz4"])
def test_undamaged_stream_is_accepted(sender: Sender, form: str) -> None:
    before = sender.node.queue("orders").end
    messages = encode_flight_data(b'{"publish": "orders"}', STREAMS[form])
    assert sender.send(messages) is grpc.StatusCode.OK
    assert sender.node.queue("orders").end == before + 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(STREAMS)), st.sampled_from(COMMANDS), damages)
# An invalid offset: computing the size of the block with it would crash the process.
@example("plain", COMMANDS[0], [Damage(1, True, 1283, b"\x0e", False)])
def test_damaged_stream_does_not_harm_the_node(
    sender: Sender,
    caplog: pytest.LogCaptureFixture,
    form: str,
    command: bytes,
    damages: list[Damage],
) -> None:
    caplog.clear()
    damaged = _apply_damage(STREAMS[form], damages)
    assert sender.send(encode_flight_data(command, damaged)) in DOCUMENTED
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
    _check_readable(sender.node)
    good = encode_flight_data(b'{"publish": "orders"}', STREAMS["plain"])
    assert sender.send(good) is grpc.StatusCode.OK


@given(st.lists(st.binary(max_size=300), max_size=3))
def test_random_flight_data_does_no_harm(sender: Sender, messages: list[bytes]) -> None:
    assert sender.send(messages) in DOCUMENTED
    good = encode_flight_data(b'{"publish": "orders"}', STREAMS["plain"])
    assert sender.send(good) is grpc.StatusCode.OK


def _check_readable(node: Node) -> None:
    """Check that all accepted events can be read and settled."""
    logs = node.queue("logs")
    while (read := logs.read(logs.low, 1000)) is not None:
        first, block = read
        list(iterate_events(block, first))
        logs.settle(first, first + block.num_rows)
