"""A client that knows nothing but Arrow Flight and the JSON of the protocol."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from tests.compatibility.running import encode_bytes
from turnlane import block_of

EMPTY: Final = block_of([])


class FlightPeer:
    """Calls a node. ``client`` may be used for everything else."""

    def __init__(self, location: str, token: str | None = None) -> None:
        self.client = flight.FlightClient(location)
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self.options: Any = flight.FlightCallOptions(timeout=60.0, headers=headers)  # type: ignore[arg-type]

    def act(self, kind: str, **body: Any) -> dict[str, Any]:
        """Return the answer to an action."""
        action = flight.Action(kind, json.dumps(body).encode())
        (result,) = self.client.do_action(action, self.options)
        return read_metadata(result.body)

    def greet(self, queue: str, producer: str) -> dict[str, Any]:
        """Return the first message on a publishing stream, and leave."""
        writer, reader = self.open({"publish": queue, "producer": producer, "ack": "accepted"})
        greeting = read_metadata(next(iter(reader)).app_metadata)
        reader.cancel()
        with contextlib.suppress(pa.ArrowException):  # the call was cancelled
            writer.close()
        return greeting

    def open(self, command: dict[str, Any]) -> tuple[Any, Any]:
        """Open a stream in both directions."""
        descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
        return self.client.do_exchange(descriptor, self.options)

    def put(self, command: dict[str, Any], *blocks: pa.RecordBatch) -> dict[str, Any]:
        """Send blocks to the end, and return the last answer."""
        do_put: Any = self.client.do_put
        descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
        schema = (blocks[0] if blocks else EMPTY).schema
        writer, answers = do_put(descriptor, schema, self.options)
        for block in blocks:
            writer.write_batch(block)
        writer.done_writing()
        last = None
        while (answer := answers.read()) is not None:
            last = answer
        writer.close()
        return read_metadata(last)

    def get(self, **command: Any) -> list[tuple[dict[str, Any], pa.RecordBatch]]:
        """Return the blocks of a stream with their metadata."""
        reader = self.client.do_get(flight.Ticket(json.dumps(command).encode()), self.options)
        return [
            (read_metadata(chunk.app_metadata), chunk.data)
            for chunk in reader
            if chunk.data is not None
        ]

    def read(self, queue: str) -> list[dict[str, Any]]:
        """Return every event of a queue that is not settled."""
        spans = self.act("unsettled", queue=queue, events=1_000_000)["spans"]
        rows = [
            {"offset": about["first"] + number, **row}
            for about, block in self.get(read=queue)
            for number, row in enumerate(read_rows(block))
        ]
        return [row for row in rows if any(first <= row["offset"] < end for first, end in spans)]

    def consume(self, queue: str, count: int) -> list[dict[str, Any]]:
        """Take this many events and settle them, each batch as it comes."""
        events: list[dict[str, Any]] = []
        while len(events) < count:
            batch = self.get(consume=queue, max_events=count - len(events), wait=30)
            assert batch, f"{len(events)} of {count} events came"
            for about, block in batch:
                events += [
                    {"offset": about["first"] + number, "attempt": about["attempt"], **row}
                    for number, row in enumerate(read_rows(block))
                ]
            self.act("done", lease=batch[0][0]["lease"])
        return events

    def close(self) -> None:
        """Let go of the connection."""
        self.client.close()


@contextlib.contextmanager
def connect_peer(location: str, token: str | None = None) -> Iterator[FlightPeer]:
    """Connect for a while."""
    peer = FlightPeer(location, token)
    try:
        yield peer
    finally:
        peer.close()


def read_metadata(metadata: pa.Buffer | None) -> dict[str, Any]:
    """Decode the metadata that a node has sent."""
    found: dict[str, Any] = json.loads(b"{}" if metadata is None else bytes(metadata))
    return found


def read_rows(block: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as JSON can keep them, without nulls."""
    return [
        {name: _read_value(value) for name, value in row.items() if value is not None}
        for row in block.to_pylist()
    ]


def _read_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return encode_bytes(value)
    if isinstance(value, list):
        return [list(each) if isinstance(each, tuple) else each for each in value]
    return value.isoformat() if hasattr(value, "isoformat") else value
