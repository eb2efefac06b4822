"""Flight streams as single messages, for clients that break the rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa

PUT = "/arrow.flight.protocol.FlightService/DoPut"
EXCHANGE = "/arrow.flight.protocol.FlightService/DoExchange"


class Message(NamedTuple):
    """The parts of one message of a stream."""

    header: bytes
    body: bytes


def build_messages(block: pa.RecordBatch, compression: Any = None) -> list[Message]:
    """Return the Flight messages of a block: schema, dictionaries, and the block itself."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, block.schema, options=options) as writer:
        writer.write_batch(block)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [Message(bytes(each.metadata), bytes(each.body or b"")) for each in reader]


def _encode_varint(number: int) -> bytes:
    octets = bytearray()
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    return bytes([*octets, number])


def _encode_field(number: int, content: bytes) -> bytes:
    return _encode_varint(number << 3 | 2) + _encode_varint(len(content)) + content


def encode_flight_data(command: bytes, messages: list[Message]) -> list[bytes]:
    """Return ``FlightData`` in Protocol Buffers; the first message has the command."""
    descriptor = _encode_field(1, b"\x08\x02" + _encode_field(2, command))
    found = [_encode_field(2, each.header) + _encode_field(1000, each.body) for each in messages]
    return [descriptor + found[0], *found[1:]]
