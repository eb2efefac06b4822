"""Does the delivery engine bring every event through the output ``http`` to its right end?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.outputs.web_blocks import events, output
from tests.outputs.web_servers import PATIENCE, Handler, Reply, Server, served
from turnlane.delivery.engine import Engine
from turnlane.delivery.gate import LocalGate
from turnlane.delivery.outcome import Outcome
from turnlane.delivery.settings import DeliverySettings

VALUES = [b"%d" % number for number in range(1000)]


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as found:
        yield found


def outcome(values: list[bytes], keys: int = 1, *, settings: Any = None, **knobs: Any) -> Outcome:
    delivery = DeliverySettings(
        backoff=0.001, max_backoff=0.01, max_time=PATIENCE, batch_events=200, **(settings or {})
    )
    block = events(values, keys=[f"k{number % keys}" for number in range(len(values))])
    with output("http", **knobs) as made, Engine(made, delivery, LocalGate(delivery)) as engine:
        return engine.deliver(block)


def taken(server: Server) -> list[int]:
    return sorted(int(each["value"]) for seen in server.seen for each in json.loads(seen.body))


@pytest.mark.parametrize(("path", "keys"), [("/", 1), ("/{key}", 3)])
def test_one_poisoned_event_is_dead_and_all_others_are_delivered(
    server: Server, path: str, keys: int
) -> None:
    def behave(handler: Handler) -> Reply:
        seen = handler.read()
        if b"poison" in seen.body:
            return Reply(400, b"that is poison")
        server.seen.append(seen)
        return Reply()

    server.behave = behave
    found = outcome([*VALUES[:555], b"poison", *VALUES[556:]], keys, url=server.url + path)
    assert found.delivered == 999
    assert not len(found.kept)
    [dead] = found.dead
    assert dead.numbers.tolist() == [555]
    assert "that is poison" in dead.text
    assert taken(server) == [number for number in range(1000) if number != 555]


def test_what_is_too_large_together_goes_in_parts(server: Server) -> None:
    def behave(handler: Handler) -> Reply:
        seen = handler.read()
        if len(seen.body) > 500:
            return Reply(413)
        server.seen.append(seen)
        return Reply()

    server.behave = behave
    assert outcome(VALUES, url=server.url).delivered == 1000
    assert taken(server) == list(range(1000))


def test_a_server_that_fails_now_and_then_has_all_in_the_end(server: Server) -> None:
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
                return server.well(handler)

    server.behave = behave
    found = outcome(VALUES, url=server.url, settings={"breaker_failures": 10_000})
    assert not found.dead
    assert found.delivered + len(found.kept) == 1000
    assert len(set(taken(server))) >= found.delivered


def test_events_are_kept_for_a_server_that_wants_a_pause(server: Server) -> None:
    server.answers(Reply(429, headers={"Retry-After": "3600"}))
    found = outcome(VALUES, url=server.url)
    assert found.kept.tolist() == list(range(1000))
    assert not found.dead
