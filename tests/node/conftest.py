"""Fixtures: running nodes with their planes, and clients that are closed after the test."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.node.http_harness import HttpNode, serve_http
from tests.ports import free_port
from turnlane.client import Client, connect
from turnlane.events import Block, block_of, get_values
from turnlane.node.flight.server import FlightPlane
from turnlane.node.node import Node
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Authority, TlsSettings
from turnlane.storage.disk_io import Disk

QUEUES: Mapping[str, Mapping[str, Any]] = {
    "disk": {"durability": "always"},
    "slow": {"sync_interval": "1h", "stale_flush": "1h"},
    "memory": {"kind": "memory", "size": 100},
}


@dataclass
class ServedNode:
    """A running node, and helpers to reach it over Flight."""

    node: Node
    plane: FlightPlane
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def url(self) -> str:
        return f"turnlane://{self.plane.address}"

    def client(self, **arguments: Any) -> Client:
        """Return a turnlane client of this node."""
        return self.opened.enter_context(connect(self.url, **arguments))

    def flight(self, **arguments: Any) -> flight.FlightClient:
        """Return a generic Flight client."""
        return self.opened.enter_context(
            flight.FlightClient(f"grpc://{self.plane.address}", **arguments)
        )

    def act(self, kind: str, **body: Any) -> dict[str, Any]:
        """Return the answer to an action."""
        (result,) = self.flight().do_action(flight.Action(kind, json.dumps(body).encode()))
        answer: dict[str, Any] = json.loads(bytes(result.body))
        return answer

    def stream(self, queue: str, producer: str | None = None, **more: Any) -> Stream:
        """Open a publishing stream."""
        command = {"publish": queue, "producer": producer, **more}
        return Stream(self.flight(), json.dumps(command).encode())

    def close(self) -> None:
        """Stop the planes, the clients and the node."""
        self.opened.close()
        self.plane.stop()
        self.node.close()


class Stream:
    """A publishing stream of a generic Flight client."""

    def __init__(self, client: flight.FlightClient, command: bytes) -> None:
        put: Any = client.do_put
        descriptor = flight.FlightDescriptor.for_command(command)
        self.writer, self.reader = put(descriptor, block_of([]).schema)
        self.greeting: dict[str, Any] = {}

    def read_greeting(self) -> dict[str, Any]:
        """Return the first message of the node."""
        self.greeting = json.loads(bytes(self.reader.read()))
        return self.greeting

    def write(self, *values: bytes, sequence: int | None = None) -> None:
        """Send values as one block."""
        self.write_block(block_of(values), sequence)

    def write_block(self, block: Block, sequence: int | None = None) -> None:
        about = {} if sequence is None else {"sequence": sequence}
        self.writer.write_with_metadata(block, pa.py_buffer(json.dumps(about).encode()))

    def read_message(self) -> dict[str, Any] | None:
        """Return the next message of the node; ``None`` at the end."""
        said = self.reader.read()
        return None if said is None else json.loads(bytes(said))

    def wait_for_progress(self, **wanted: int) -> dict[str, Any]:
        """Read messages until the node reports these positions."""
        while (news := self.read_message()) is not None:
            if all(news.get(level) == position for level, position in wanted.items()):
                return news
        pytest.fail(f"the stream ended without {wanted}")

    def finish(self) -> dict[str, Any] | None:
        """End the data and return the last message of the node. Raises the error of the stream."""
        self.writer.done_writing()
        last = None
        while (news := self.read_message()) is not None:
            last = news
        self.writer.close()
        return last


Serve = Callable[..., ServedNode]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start nodes. Nodes with the same ``name`` use the same data."""
    with contextlib.ExitStack() as started:

        def starting(
            queues: Mapping[str, Mapping[str, Any]] = QUEUES,
            *,
            name: str = "node",
            authority: Authority | None = None,
            tls: TlsSettings | None = None,
            port: int = 0,
            disk: Disk | None = None,
            **options: Any,
        ) -> ServedNode:
            node = Node(tmp_path / name, queues, disk=disk)
            plane = FlightPlane(
                node, authority or Authority(), Address(LOOPBACK, port), tls, **options
            )
            plane.start()
            served = ServedNode(node, plane)
            started.callback(served.close)
            return served

        yield starting


@pytest.fixture
def served(serve: Serve) -> ServedNode:
    """A node with a disk queue that syncs at once, one that never syncs, and a memory queue."""
    return serve()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpNode]:
    """A node with HTTP, shared by all tests of a module."""
    with serve_http(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def fresh(shared: HttpNode) -> HttpNode:
    """The shared node with an empty queue ``orders``."""
    shared.orders.settle(0, shared.orders.end)
    return shared


def values(node: Node, queue: str) -> list[bytes]:
    """Return all values of a queue in order."""
    found = node.queue(queue)
    result: list[bytes] = []
    at = found.low
    while (read := found.read(at, 10_000)) is not None:
        at = read[0] + read[1].num_rows
        result += get_values([read[1]])
    return result


@pytest.fixture
def unused_port() -> int:
    """A port on which no process listens."""
    return free_port()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port whose listener never sends anything."""
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        silent.listen()
        yield silent.getsockname()[1]
