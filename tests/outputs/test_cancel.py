"""Does a send that hangs end when it is cancelled, and are its events deferred?"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.contract.harness import wait_until
from tests.outputs.web_blocks import make_events, make_output
from tests.outputs.web_servers import TIMEOUT, Handler, run_server
from turnlane.delivery.destination import LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.settings import DeliverySettings
from turnlane.delivery.workers import IN_FLIGHT
from turnlane.outputs.api import Output

DELIVERY = DeliverySettings(concurrency=2, batch_events=5, max_time=0.2)
LONG_TIMEOUT = "10m"


def test_cancel_ends_a_send_to_a_web_server_that_never_ends_its_response() -> None:
    """It sends a byte now and then, so the time limit of a single read never applies."""
    closed = threading.Semaphore(0)

    def trickle(handler: Handler) -> None:
        handler.read()
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        with contextlib.suppress(OSError):
            while not handler.server.ended.wait(0.02):
                handler.wfile.write(b"x")
        closed.release()

    with run_server() as server:
        server.behave = trickle
        with make_output("http", url=server.url, timeout=LONG_TIMEOUT) as output:
            check_given_up(output)
        for _ in range(2):
            assert closed.acquire(timeout=TIMEOUT)


def test_cancel_ends_a_send_to_a_syslog_receiver_that_never_reads(silent_receiver: str) -> None:
    with make_output(
        "syslog", address=silent_receiver, protocol="tcp", timeout=LONG_TIMEOUT, format="raw"
    ) as output:
        check_given_up(output, size=10_000_000)


def check_given_up(output: Output, size: int = 1) -> None:
    """Check that all events are deferred and the sending threads end long before the timeout."""
    before = set(threading.enumerate())
    with Engine(output, DELIVERY, LocalDestinationState(DELIVERY), grace=0.2) as engine:
        result = engine.deliver(make_events([b"x" * size] * 10))
        assert result.deferred.tolist() == list(range(10))
    wait_until(lambda: not get_sender_threads() - before, "the senders to end", TIMEOUT)
    assert not len(IN_FLIGHT)


def get_sender_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("turnlane-sender")}


@pytest.fixture
def silent_receiver() -> Iterator[str]:
    """A receiver that accepts connections and never reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
