"""Nodes and inputs for the tests of inputs that are servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.contract.harness import PATIENCE, wait_until
from turnlane.events import Event, iterate_events
from turnlane.inputs.api import Input, load
from turnlane.node.node import Node
from turnlane.testing import FaultyDisk

SECRET = "correct horse battery staple"  # the tests' own
TOKENS = ({"name": "shop", "secret": SECRET, "rights": {"main": ["publish"]}},)
HASTY = "500ms"
"""The timeout of inputs that should refuse. On a busy machine they may refuse more often."""

# One client for all tests, since a TLS context is costly; it keeps no connection open.
WEB = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=30.0)


@contextmanager
def open_node(data: Path, disk: FaultyDisk | None = None, **knobs: Any) -> Iterator[Node]:
    """Open a node with the disk queues ``main``, with these settings, and ``orders``."""
    main = {"durability": "always", "shutdown_timeout": "1s", **knobs}
    with Node(data, {"main": main, "orders": {}}, disk=disk) as node:
        yield node


def make_input(kind: str, node: Node, **knobs: Any) -> Input:
    """Create an input without starting it."""
    found = load(kind)
    settings = {"listen": "127.0.0.1:0", "queue": "main", **knobs}
    return found(found.settings_type.model_validate(settings), node)


@contextmanager
def run_web_input(kind: str, node: Node, **knobs: Any) -> Iterator[Input]:
    """Run an input whose requests may wait as long as a busy machine needs."""
    with make_input(kind, node, **{"timeout": PATIENCE, **knobs}) as found:
        found.start()
        yield found
        found.stop(5.0)


def read_events(node: Node, queue: str = "main") -> list[Event]:
    """Return the events in a queue, and leave them there."""
    found: list[Event] = []
    place = node.queue(queue)
    while (read := place.read(place.low + len(found), 100_000)) is not None:
        first, block = read
        found.extend(iterate_events(block, first))
    return found


def read_values(node: Node, queue: str = "main") -> list[bytes | None]:
    """Return the values in a queue."""
    return [event.value for event in read_events(node, queue)]


def settle_all(node: Node, queue: str = "main") -> None:
    """Settle all events in a queue."""
    place = node.queue(queue)
    place.settle(place.low, place.end)


def fill(node: Node, events: int, queue: str = "main") -> None:
    """Publish small events."""
    producer = node.queue(queue).producer()
    for _ in range(events):
        producer.publish(b"in the way")


@contextmanager
def act_when_refused(found: Input, do: Callable[[], object], times: int = 1) -> Iterator[None]:
    """Run a client that retries, and call a function once the input has refused."""

    def watch() -> None:
        wait_until(lambda: found.counters.refused >= times, "a refusal")
        do()

    with ThreadPoolExecutor(1) as watching:
        done = watching.submit(watch)
        yield
        done.result()
