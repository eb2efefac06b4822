"""Does the engine deliver through the output ``http`` while the server fails?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.outputs.web_blocks import make_events, make_output
from tests.outputs.web_servers import TIMEOUT, Handler, Reply, Server, run_server
from turnlane.delivery.destination import LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.results import BlockResult
from turnlane.delivery.settings import DeliverySettings
from turnlane.pacing import Backoff

SLACK = 5.0
"""Seconds by which a busy machine may be late."""
VALUES = [b"%d" % number for number in range(1000)]


@pytest.fixture
def server() -> Iterator[Server]:
    with run_server() as found:
        yield found


def make_settings(settings: dict[str, Any]) -> DeliverySettings:
    short_waits = {"backoff": 0.001, "max_backoff": 0.01, "max_time": TIMEOUT, "batch_events": 200}
    return DeliverySettings(**{**short_waits, **settings})


def deliver(
    values: list[bytes], keys: int = 1, *, settings: Any = None, **knobs: Any
) -> BlockResult:
    delivery = make_settings(settings or {})
    block = make_events(values, keys=[f"k{number % keys}" for number in range(len(values))])
    with (
        make_output("http", **knobs) as output,
        Engine(
            output,
            delivery,
            LocalDestinationState(delivery),
            can_deliver_partly=output.can_deliver_partly,
        ) as engine,
    ):
        return engine.deliver(block)


def get_received(server: Server) -> list[int]:
    return sorted(
        int(each["value"]) for request in server.requests for each in json.loads(request.body)
    )


@pytest.mark.parametrize(("path", "keys"), [("/", 1), ("/{key}", 3)])
def test_one_bad_event_is_dead_and_all_others_are_delivered(
    server: Server, path: str, keys: int
) -> None:
    def behave(handler: Handler) -> Reply:
        request = handler.read()
        if b"poison" in request.body:
            return Reply(400, b"that is poison")
        server.requests.append(request)
        return Reply()

    server.behave = behave
    found = deliver([*VALUES[:555], b"poison", *VALUES[556:]], keys, url=server.url + path)
    assert found.delivered == 999
    assert not len(found.deferred)
    [dead] = found.dead
    assert dead.numbers.tolist() == [555]
    assert "that is poison" in dead.text
    assert get_received(server) == [number for number in range(1000) if number != 555]


@pytest.mark.parametrize("status", [413, 414, 431])
def test_too_large_requests_are_split(server: Server, status: int) -> None:
    def behave(handler: Handler) -> Reply:
        request = handler.read()
        if len(request.body) > 500:
            return Reply(status)
        server.requests.append(request)
        return Reply()

    server.behave = behave
    assert deliver(VALUES, url=server.url).delivered == 1000
    assert get_received(server) == list(range(1000))


@pytest.mark.parametrize(
    ("ordering", "late"), [("none", {1, 3}), ("key", {1, 3, 6, 8}), ("strict", set(range(1, 10)))]
)
def test_ordered_events_do_not_overtake_events_of_a_failing_url(
    server: Server, ordering: str, late: set[int]
) -> None:
    """Five keys have two events each, and every event has its own URL."""

    def behave(handler: Handler) -> Reply:
        request = handler.read()
        number = int(json.loads(request.body)[0]["value"])
        if number in (1, 3):
            return Reply(404)
        server.requests.append(request)
        return Reply()

    server.behave = behave
    settings = {"ordering": ordering, "breaker_failures": 10**6, "max_time": 1.0}
    found = deliver(VALUES[:10], 5, settings=settings, url=server.url + "/{value}")
    assert late.isdisjoint(get_received(server))
    assert late <= set(found.deferred.tolist())
    assert 0 in get_received(server)


@pytest.mark.parametrize("status", [413, 414, 431])
def test_single_event_that_is_too_large_is_dead(server: Server, status: int) -> None:
    def behave(handler: Handler) -> Reply:
        return Reply(status if b"huge" in handler.read().body else 200)

    server.behave = behave
    found = deliver([*VALUES[:9], b"huge"], url=server.url + "/{value}", headers={"X": "{value}"})
    assert found.delivered == 9
    [dead] = found.dead
    assert (dead.numbers.tolist(), dead.error) == ([9], "PayloadTooLarge")


def test_server_with_random_failures_gets_every_event(server: Server) -> None:
    count = iter(range(10_000))

    def behave(handler: Handler) -> Reply | None:
        match next(count) % 4:
            case 0:
                handler.read()
                return Reply(503)
            case 1:
                server.reset_in_the_body(handler)
                return None
            case _:
                return server.accept(handler)

    server.behave = behave
    left = VALUES
    deadline = time.monotonic() + TIMEOUT
    while left and time.monotonic() < deadline:  # a lane delivers deferred events again
        found = deliver(left, url=server.url, settings={"breaker_failures": 10_000})
        assert not found.dead
        left = [left[number] for number in found.deferred]
    assert not left
    assert set(get_received(server)) == set(range(1000))


def test_slower_server_gets_fewer_concurrent_requests(server: Server) -> None:
    """The server handles one request at a time, each slower than the one before."""
    working, pace = threading.Lock(), iter(np.linspace(0.0, 0.015, 200))

    def behave(handler: Handler) -> Reply:
        request = handler.read()
        with working:
            server.ended.wait(next(pace))
            server.requests.append(request)
        return Reply()

    server.behave = behave
    delivery = make_settings({"batch_events": 5, "max_concurrency": 64, "breaker_failures": 1})
    state = LocalDestinationState(delivery)
    with make_output("http", url=server.url) as output, Engine(output, delivery, state) as engine:
        found = engine.deliver(make_events(VALUES))
    status = state.get_status()
    assert (found.delivered, status.totals["failures"]) == (1000, 0), "a slow server has not failed"
    assert get_received(server) == list(range(1000))
    assert status.concurrency is not None
    assert status.concurrency <= 8, "more concurrent requests would only wait"


def test_server_sees_retries_at_the_times_of_the_backoff(server: Server) -> None:
    """Waits double from 50 ms up to 200 ms, with a jitter of a fifth."""
    times: list[float] = []
    failures = 5

    def behave(handler: Handler) -> Reply:
        request = handler.read()
        times.append(time.monotonic())
        if len(times) <= failures:
            return Reply(503)
        server.requests.append(request)
        return Reply()

    server.behave = behave
    knobs = {"backoff": 0.05, "max_backoff": 0.2, "jitter": 0.2, "breaker_failures": 100}
    assert deliver(VALUES[:10], settings=knobs, url=server.url).delivered == 10
    backoff = Backoff.from_jitter(0.05, 0.2, 0.2)
    for number, wait in enumerate(np.diff(times), 1):
        assert wait >= backoff.get_wait(number, 0.0) - 0.001
        assert wait <= backoff.get_wait(number, 1.0) + SLACK
    assert len(times) == failures + 1


def test_long_retry_after_defers_all_events(server: Server) -> None:
    server.set_replies(Reply(429, headers={"Retry-After": "3600"}))
    found = deliver(VALUES, url=server.url)
    assert found.deferred.tolist() == list(range(1000))
    assert not found.dead
