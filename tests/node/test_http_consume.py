"""Tests of consuming over HTTP: leases, peeks and settling by offset."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import wait_until
from tests.node.http_harness import HttpNode, serve_http
from tests.queue_internals import state_of
from turnlane.node.http.consume import POLLS


def get_values(answer: dict[str, Any]) -> list[str]:
    return [event["value"] for event in answer["events"]]


def test_lease_returns_events_and_done_settles_them(fresh: HttpNode) -> None:
    first = fresh.orders.end
    fresh.post([{"value": str(number), "key": "k"} for number in range(5)])
    leased = fresh.take(max_events=3).json()
    assert (leased["first"], leased["attempt"], get_values(leased)) == (first, 1, ["0", "1", "2"])
    assert leased["events"][0].keys() == {"offset", "value", "key", "timestamp"}
    assert fresh.http.post(f"/leases/{leased['lease']}/done").status_code == 204
    assert fresh.orders.low == first + 3
    again = fresh.http.post(f"/leases/{leased['lease']}/done")
    assert (again.status_code, again.json()["error"]) == (404, "NoSuchLease")


def test_binary_value_is_returned_in_base64(fresh: HttpNode) -> None:
    fresh.post(b"\xff\xfe")
    leased = fresh.take().json()
    assert leased["events"][0]["value_base64"] == "//4="
    fresh.http.post(f"/leases/{leased['lease']}/done")


def test_released_or_expired_lease_returns_its_events(fresh: HttpNode) -> None:
    dead_before = fresh.orders.stats().ledger.dead
    fresh.post(b"x")
    leased = fresh.take().json()
    fresh.http.post(f"/leases/{leased['lease']}/release")
    second = fresh.take(lease="150ms").json()
    assert second["attempt"] == 2
    third = fresh.take(wait="10s").json()
    assert (third["attempt"], get_values(third)) == (3, ["x"])
    assert fresh.http.post(f"/leases/{second['lease']}/done").status_code == 404
    assert fresh.http.post(f"/leases/{third['lease']}/dead").status_code == 204
    assert fresh.orders.stats().ledger.dead == dead_before + 1


def test_extended_lease_lasts_longer(fresh: HttpNode) -> None:
    fresh.post(b"x")
    lease = fresh.take(lease="1m").json()["lease"]
    assert fresh.http.post(f"/leases/{lease}/extend", params={"lease": "100ms"}).status_code == 204
    wait_until(lambda: len(fresh.node.leases) == 0)
    assert fresh.http.post(f"/leases/{lease}/extend").status_code == 404
    lease = fresh.take(lease="30s").json()["lease"]
    before = fresh.node.leases.find(lease).expires
    assert fresh.http.post(f"/leases/{lease}/extend").status_code == 204
    again = fresh.node.leases.find(lease).expires
    assert before < again < before + 30, "for as long as at first, counted from now"
    assert fresh.http.post(f"/leases/{lease}/extend", params={"lease": "1h"}).status_code == 204
    assert fresh.node.leases.find(lease).expires > again + 3000
    assert fresh.http.post(f"/leases/{lease}/done").status_code == 204


def test_empty_queue_is_204_at_once_or_after_the_wait(fresh: HttpNode) -> None:
    began = time.monotonic()
    assert fresh.take().status_code == 204
    assert fresh.take(wait="200ms").status_code == 204
    assert time.monotonic() - began >= 0.2


def test_long_poll_is_answered_when_an_event_arrives(fresh: HttpNode) -> None:
    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(fresh.take, wait="30s")
        wait_until(lambda: state_of(fresh.orders).waiting_readers)
        fresh.post(b"x")
        leased = polling.result().json()
        assert get_values(leased) == ["x"]
        fresh.http.post(f"/leases/{leased['lease']}/done")


def test_client_that_leaves_a_long_poll_takes_no_events(fresh: HttpNode) -> None:
    with socket.create_connection((fresh.plane.address.host, fresh.plane.address.port)) as sock:
        sock.sendall(b"GET /queues/orders/events?wait=30s HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_until(lambda: state_of(fresh.orders).waiting_readers)
    fresh.post(b"x")
    leased = fresh.take(wait="20s").json()
    assert get_values(leased) == ["x"]
    fresh.http.post(f"/leases/{leased['lease']}/done")


def test_waiting_polls_do_not_delay_publishers(fresh: HttpNode) -> None:
    polls = 40
    assert polls < POLLS
    with ThreadPoolExecutor(polls) as pool:
        polling = [pool.submit(fresh.take, wait="20s", max_events=1) for _ in range(polls)]
        wait_until(lambda: state_of(fresh.orders).waiting_readers)
        assert fresh.post([{"value": "x"}] * polls).status_code == 200
        leases = [each.result().json() for each in polling]
    assert sum(len(each["events"]) for each in leases) == polls
    for each in leases:
        fresh.http.post(f"/leases/{each['lease']}/done")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"max_events": 0}, "parameter 'max_events': a whole number from 1 to 10000"),
        ({"max_events": "x"}, "parameter 'max_events'"),
        ({"wait": "2m"}, "parameter 'wait': a duration from 0s to 60s"),
        ({"lease": "0"}, "parameter 'lease': a duration from 0.1s to 3600s"),
        ({"first": 1}, "parameter 'first': no such parameter"),
    ],
)
def test_wrong_parameter_is_named_and_takes_no_events(
    fresh: HttpNode, params: dict[str, Any], said: str
) -> None:
    fresh.post(b"x")
    answer = fresh.take(**params)
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True)
    assert fresh.orders.stats().in_flight == 0


def test_peek_takes_no_events(fresh: HttpNode) -> None:
    first = fresh.orders.end
    fresh.post([{"value": str(number)} for number in range(5)])
    peek = fresh.http.get("/queues/orders/peek", params={"first": first + 1, "max": 2}).json()
    assert (peek["low"], peek["end"], get_values(peek)) == (first, first + 5, ["1", "2"])
    assert fresh.http.get("/queues/orders/peek", params={"first": first + 5}).json()["events"] == []
    assert fresh.orders.stats().in_flight == 0


def test_peek_reads_across_stored_blocks(fresh: HttpNode) -> None:
    first = fresh.orders.end
    for number in range(6):
        fresh.post([{"value": str(number)}])
        if number == 3:  # read: the first events are no longer in memory
            lease = fresh.http.get("/queues/orders/events", params={"max_events": 2}).json()[
                "lease"
            ]
    look = {"first": first, "max": 5}
    peek = fresh.http.get("/queues/orders/peek", params=look).json()
    assert get_values(peek) == ["0", "1", "2", "3", "4"]
    assert [event["offset"] for event in peek["events"]] == list(range(first, first + 5))
    fresh.http.post(f"/leases/{lease}/release")


def test_peek_leaves_out_settled_events_behind_a_pending_one(fresh: HttpNode) -> None:
    first = fresh.orders.end
    for start in (0, 5):
        fresh.post([{"value": str(number)} for number in range(start, start + 5)])
    for start, end in ((1, 3), (4, 7)):
        fresh.orders.settle(first + start, first + end)
    for most, pending in ((2, [0, 3]), (100, [0, 3, 7, 8, 9])):
        look = {"first": first, "max": most}
        peek = fresh.http.get("/queues/orders/peek", params=look).json()
        assert [event["offset"] - first for event in peek["events"]] == pending
        assert get_values(peek) == [str(number) for number in pending]


def test_range_is_settled_by_offset(fresh: HttpNode) -> None:
    first = fresh.orders.end
    fresh.post([{"value": "x"}] * 4)
    answer = fresh.http.post("/queues/orders/settle", json={"first": first, "end": first + 3})
    assert (answer.status_code, answer.json()) == (200, {"low": first + 3, "end": first + 4})
    dead = fresh.orders.stats().ledger.dead
    body = {"first": first, "end": first + 4, "outcome": "dead"}
    assert fresh.http.post("/queues/orders/settle", json=body).json()["low"] == first + 4
    assert fresh.orders.stats().ledger.dead == dead + 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "first: an offset"),
        ({"first": 0}, "end: an offset"),
        ({"first": 5, "end": 4}, "end: 4 is before first"),
        ({"first": -1, "end": 4}, "first: an offset"),
        ({"first": 0, "end": 1.5}, "end: an offset"),
        ({"first": 0, "end": 1, "x": 1}, "'x': no such field"),
        ({"first": 0, "end": 0, "outcome": "oldest"}, "outcome: one of"),
        ([], "the body is an object, not an array"),
    ],
)
def test_invalid_range_is_refused(fresh: HttpNode, body: Any, said: str) -> None:
    answer = fresh.http.post("/queues/orders/settle", json=body)
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True)


def test_head_request_takes_no_events(fresh: HttpNode) -> None:
    fresh.post(b"x")
    answer = fresh.http.head("/queues/orders/events")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "POST"}
    assert fresh.orders.stats().in_flight == 0


def test_unknown_verb_or_lease_is_404(fresh: HttpNode) -> None:
    assert fresh.http.post("/leases/x/done").json()["error"] == "NoSuchLease"
    assert fresh.http.post("/leases/x/eat").status_code == 404
    assert fresh.http.get("/leases/x/done").status_code == 405


def test_stop_ends_polls_at_once(tmp_path: Path) -> None:
    with serve_http(tmp_path) as at, ThreadPoolExecutor(1) as pool:
        polling = pool.submit(at.take, wait="50s")
        wait_until(lambda: state_of(at.orders).waiting_readers)
        began = time.monotonic()
        at.plane.stop(20)
        assert polling.result().status_code == 204
        assert time.monotonic() - began < 10
