"""Does a send that hangs end once nobody waits for it, and do its events stay?"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.contract.harness import wait_until
from tests.outputs.web_blocks import events, output
from tests.outputs.web_servers import PATIENCE, Handler, served
from turnlane.delivery.destination import LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.settings import DeliverySettings
from turnlane.delivery.workers import IN_FLIGHT
from turnlane.outputs.api import Output

DELIVERY = DeliverySettings(concurrency=2, batch_events=5, max_time=0.2)
LONGER = "10m"


def test_cancel_ends_a_send_to_a_web_server_that_never_ends_its_response() -> None:
    """A byte now and then: no time limit for a single read ends that."""
    hung_up = threading.Semaphore(0)

    def trickle(handler: Handler) -> None:
        handler.read()
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        with contextlib.suppress(OSError):
            while not handler.server.ended.wait(0.02):
                handler.wfile.write(b"x")
        hung_up.release()

    with served() as server:
        server.behave = trickle
        with output("http", url=server.url, timeout=LONGER) as made:
            check_given_up(made)
        for _ in range(2):
            assert hung_up.acquire(timeout=PATIENCE)


def test_cancel_ends_a_send_to_a_syslog_receiver_that_never_reads(deaf: str) -> None:
    with output("syslog", address=deaf, protocol="tcp", timeout=LONGER, format="raw") as made:
        check_given_up(made, size=10_000_000)


def check_given_up(made: Output, size: int = 1) -> None:
    """All events are kept, and the threads that sent them end long before their time is over."""
    before = set(threading.enumerate())
    with Engine(made, DELIVERY, LocalDestinationState(DELIVERY), grace=0.2) as engine:
        outcome = engine.deliver(events([b"x" * size] * 10))
        assert outcome.deferred.tolist() == list(range(10))
    wait_until(lambda: not senders() - before, "the senders to end", PATIENCE)
    assert not len(IN_FLIGHT)


def senders() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("turnlane-sender")}


@pytest.fixture
def deaf() -> Iterator[str]:
    """Somebody who takes connections and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
