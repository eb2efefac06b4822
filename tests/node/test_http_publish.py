"""Tests of publishing over HTTP: whole requests are accepted or refused with a reason."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import random
import subprocess
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.harness import wait_until
from tests.node.http_harness import HttpNode, serve_http
from tests.queue_internals import state_of
from turnlane.errors import QueueEmpty, QueueFull, StorageFailed
from turnlane.events import Event, block_of, get_values, iterate_events
from turnlane.node.http.events import (
    decode_json,
    decode_ndjson,
    encode_events,
    format_timestamp,
    parse_timestamp,
)
from turnlane.node.http.publish import _LevelWaiters, _publish
from turnlane.node.node import Node
from turnlane.queues.api import Ack, AckLevel, Durability
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.producer_sequences import MAX_RUNS


def read_stored(at: HttpNode) -> list[Event]:
    found = at.orders.read(0, 10_000)
    return [] if found is None else list(iterate_events(found[1], found[0]))


def encode_ndjson(at: HttpNode, text: str | bytes, **more: Any) -> httpx.Response:
    return at.post(text, headers={"content-type": "application/x-ndjson"}, **more)


def test_json_event_is_persisted_with_all_its_fields(fresh: HttpNode) -> None:
    event = {
        "value": "größe",
        "key": "k",
        "headers": {"a": "b"},
        "severity": 3,
        "source": "s",
        "timestamp": "2026-01-31T13:00:00.000001+01:00",
    }
    first = fresh.orders.end
    answer = fresh.post(event)
    assert answer.status_code == 200
    assert answer.json() == {
        "accepted": 1, "dropped": 0, "repeated": 0, "first": first, "ack": "persisted"
    }  # fmt: skip
    stamp = 1769860800000001
    assert read_stored(fresh) == [Event("größe".encode(), "k", {"a": "b"}, stamp, 3, "s", first)]


def test_json_array_keeps_its_order_and_all_forms_of_value(fresh: HttpNode) -> None:
    raw = bytes(range(256))
    content = json.dumps(
        [
            {"value": ""},
            {"value_base64": base64.b64encode(raw).decode()},
            {"data": {"a": [1, 2.5, None, "ü"]}},
            {"data": None},
            {"data": "\ud800"},
        ]
    )
    answer = fresh.post(content, headers={"content-type": "application/json"})
    assert answer.json()["accepted"] == 5
    values = [event.value for event in read_stored(fresh)]
    assert values == [b"", raw, '{"a":[1,2.5,null,"ü"]}'.encode(), b"null", b'"\\ud800"']


def test_json_lines_are_published_without_empty_lines(fresh: HttpNode) -> None:
    assert encode_ndjson(fresh, '{"value":"a"}\n\n \r\n{"value":"b"}\r\n').json()["accepted"] == 2
    assert [event.value for event in read_stored(fresh)] == [b"a", b"b"]
    assert encode_ndjson(fresh, "").json() == {
        "accepted": 0, "dropped": 0, "repeated": 0, "first": None, "ack": "persisted"
    }  # fmt: skip


def test_other_body_is_one_raw_event_with_fields_from_the_request(fresh: HttpNode) -> None:
    fresh.post(b"\xff\x00", params={"key": "k", "severity": 7, "timestamp": 5})
    headers = {"x-turnlane-key": "schlüssel".encode(), "x-turnlane-source": b"web"}
    fresh.post(b"", headers={**headers, "content-type": "text/plain"})
    one, other = read_stored(fresh)
    assert (one.value, one.key, one.severity, one.timestamp) == (b"\xff\x00", "k", 7, 5)
    assert (other.value, other.key, other.source) == (b"", "schlüssel", "web")


def test_gzipped_body_is_unpacked(fresh: HttpNode) -> None:
    body = gzip.compress(b'{"value":"x"}\n' * 5000)
    assert encode_ndjson(fresh, body).status_code == 400
    headers = {"content-type": "application/x-ndjson", "content-encoding": "gzip"}
    assert fresh.post(body, headers=headers).json()["accepted"] == 5000


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "line 1, column 1"),
        ('[{"value":"a"},\n{"value":}]', "line 2, column 10"),
        ('[{"value":"a"},{}]', "event 1: give exactly one of"),
        ('[{"value":"a","data":1}]', "event 0: give exactly one of"),
        ("[1]", "event 0: an event is an object, not a number"),
        ('"x"', "an event is an object, not text"),
        ('{"value":1}', "value: must be text, not a number"),
        ('{"value":"\\ud800"}', "value: the unpaired surrogate at 0"),
        ('{"value":"a","key":"\\udfff"}', "key: the unpaired surrogate"),
        ('{"value_base64":"a"}', "value_base64: "),
        ('{"value":"a","severty":1}', "'severty': no such field; did you mean severity?"),
        ('{"value":"a","severity":8}', "severity: a whole number from 0"),
        ('{"value":"a","severity":true}', "severity: a whole number from 0"),
        ('{"value":"a","key":5}', "key: must be text, not a number"),
        ('{"value":"a","headers":{"x":1}}', "headers.'x': must be text, not a number"),
        ('{"value":"a","headers":[]}', "headers: must be an object, not an array"),
        ('{"value":"a","timestamp":"yesterday"}', "timestamp: 'yesterday' is neither"),
        ('{"value":"a","timestamp":"2026-01-01T00:00:00"}', "has no time zone"),
        ('{"value":"a","timestamp":1e3}', "timestamp: 1000.0 is neither"),
        ('{"value":"a","timestamp":9223372036854775807}', "timestamp: "),
        ('{"data":NaN}', "NaN is not JSON"),
        ('{"data":1e999}', "too large a number"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "byte 0: not UTF-8"),
    ],
)
def test_invalid_json_is_refused_with_its_place(
    fresh: HttpNode, body: str | bytes, said: str
) -> None:
    answer = fresh.post(body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert said in answer.json()["detail"]
    assert read_stored(fresh) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"value":"a"}\n{"value":}', "line 2, column 10: not JSON"),
        ('{"value":"a"}\n\n{"value":"b","x":1}', "line 3: 'x': no such field"),
        ('{"value":"a"}\n[]', "line 2: an event is an object, not an array"),
        (b'{"value":"a"}\n\xff', "line 2, byte 0: not UTF-8"),
    ],
)
def test_invalid_line_is_named_and_nothing_is_published(
    fresh: HttpNode, body: str | bytes, said: str
) -> None:
    answer = encode_ndjson(fresh, body)
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True)
    assert read_stored(fresh) == []


@pytest.mark.parametrize(
    ("params", "headers", "said"),
    [
        ({"ack": "soon"}, {}, "parameter 'ack': one of accepted, persisted, delivered"),
        ({"timeout": "1x"}, {}, "parameter 'timeout': a duration from 0s to 60s"),
        ({"timeout": "61s"}, {}, "parameter 'timeout'"),
        ({"max": "1"}, {}, "parameter 'max': no such parameter; there are: key, source"),
        ({"ack": ["accepted", "accepted"]}, {}, "given more than once"),
        ({"severity": "9"}, {}, "parameter 'severity': a whole number from 0 to 7"),
        ({}, {"producer-id": "p"}, "give both or neither"),
        ({}, {"sequence": "1"}, "give both or neither"),
        ({}, {"producer-id": "p", "sequence": "-1"}, "header Sequence: a whole number"),
        ({}, {"producer-id": "p", "sequence": "9" * 30}, "header Sequence: a whole number"),
        ({}, {"sequence-gaps": "skip"}, "give both or neither"),
        (
            {},
            {"producer-id": "p", "sequence": "1", "sequence-gaps": "no"},
            "header Sequence-Gaps: 'no' is not 'skip'",
        ),
        ({}, {"producer-id": "p" * 300, "sequence": "1"}, "longer than 256"),
        ({}, {"producer-id": "turnlane.commits", "sequence": "1"}, "reserved for the node"),
        ({}, {"x-turnlane-key": b"\xff"}, "X-Turnlane-Key: not UTF-8"),
    ],
)
def test_wrong_parameter_is_named(
    fresh: HttpNode, params: dict[str, Any], headers: dict[str, Any], said: str
) -> None:
    answer = fresh.post(b"x", params=params, headers=headers)
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True)
    assert read_stored(fresh) == []


def test_raw_fields_with_json_are_refused(fresh: HttpNode) -> None:
    answer = fresh.post({"value": "a"}, params={"key": "k"})
    assert (answer.status_code, "of their own" in answer.json()["detail"]) == (400, True)


def test_repeated_numbered_request_is_accepted_once(fresh: HttpNode) -> None:
    name = {"producer-id": f"shop-{fresh.orders.end}"}
    events = [{"value": str(number)} for number in range(3)]
    assert fresh.post(events, headers={**name, "sequence": "0"}).json()["accepted"] == 3
    again = fresh.post([*events, {"value": "3"}], headers={**name, "sequence": "0"}).json()
    assert (again["accepted"], again["repeated"]) == (1, 3)
    whole = fresh.post(events, headers={**name, "sequence": "0"}).json()
    assert (whole["accepted"], whole["repeated"], whole["first"]) == (0, 3, None)
    assert [event.value for event in read_stored(fresh)] == [b"0", b"1", b"2", b"3"]


def encode_numbers(values: range) -> list[dict[str, str]]:
    return [{"value": str(number)} for number in values]


def test_refused_number_is_accepted_after_a_higher_one(tmp_path: Path) -> None:
    """Also after a restart: a lower number is a repeat only if the queue has accepted it."""
    with serve_http(tmp_path, {"orders": {"size": 12}}) as at:

        def send(values: range) -> httpx.Response:
            headers = {"producer-id": "shop", "sequence": str(values.start)}
            return at.post(encode_numbers(values), params={"timeout": "0"}, headers=headers)

        at.post(encode_numbers(range(10)), headers={"producer-id": "shop", "sequence": "0"})
        assert send(range(10, 20)).status_code == 429
        higher = at.post(
            encode_numbers(range(20, 22)), headers={"producer-id": "shop", "sequence": "20"}
        )
        assert higher.json()["accepted"] == 2
        at.orders.get().done()
    with serve_http(tmp_path, {"orders": {}}) as at:
        headers = {"producer-id": "shop", "sequence": "10"}
        late = at.post(encode_numbers(range(10, 22)), headers=headers).json()
        assert (late["accepted"], late["repeated"]) == (10, 2)
        found = at.orders.read(at.orders.low, 100)
        assert found is not None
        assert get_values([found[1]])[-10:] == [b"%d" % number for number in range(10, 20)]


def test_producer_may_use_several_connections(tmp_path: Path) -> None:
    """Four connections, 4,000 events and a small queue: each answered event is stored once."""
    requests = deque(range(0, 4000, 10))
    answered: set[int] = set()
    found: list[bytes | None] = []
    with serve_http(tmp_path, {"orders": {"size": 100}}) as at, ThreadPoolExecutor(4) as pool:

        def send_all(seed: int) -> None:
            dice = random.Random(seed)
            client = httpx.Client(base_url=at.plane.url, timeout=30)
            with client as http, contextlib.suppress(IndexError):
                while True:
                    first = requests.popleft()
                    answer = http.post(
                        "/queues/orders/events",
                        json=encode_numbers(range(first, first + 10)),
                        params={"ack": "persisted", "timeout": dice.choice(["0", "5s"])},
                        headers={"producer-id": "shop", "sequence": str(first)},
                    )
                    if answer.status_code == 200:
                        answered.update(range(first, first + 10))
                    if answer.status_code != 200 or dice.random() < 0.1:
                        requests.insert(dice.randrange(len(requests) + 1), first)

        sending = [pool.submit(send_all, seed) for seed in range(4)]
        while not all(each.done() for each in sending) or at.orders.stats().size:
            with contextlib.suppress(QueueEmpty), at.orders.get(50, timeout=0.05) as batch:
                found += get_values([batch.block])
        for each in sending:
            each.result()
    assert answered == set(range(4000))
    assert sorted(int(value or b"-1") for value in found) == list(range(4000))


def test_too_many_gaps_are_refused_with_the_missing_numbers(fresh: HttpNode) -> None:
    name = {"producer-id": f"gaps-{fresh.orders.end}"}
    producer = fresh.orders.producer(producer_id=name["producer-id"])
    for number in range(1, MAX_RUNS + 1):
        producer.publish_block(block_of([b"x"]), sequence=3 * number)
    refused = fresh.post(b"x", headers={**name, "sequence": "1000"})
    problem = refused.json()
    assert (refused.status_code, problem["error"]) == (409, "NumbersMissing")
    assert (problem["expected"], problem["missing"][:2]) == (0, [[0, 2], [4, 5]])
    assert fresh.post(b"x", headers={**name, "sequence": "0"}).json()["accepted"] == 1
    skip = {"sequence": "1000", "sequence-gaps": "skip"}
    assert fresh.post(b"x", headers={**name, **skip}).json()["accepted"] == 1
    assert fresh.post(b"x", headers={**name, "sequence": "2"}).json()["repeated"] == 1


def test_answer_waits_for_the_requested_level(fresh: HttpNode) -> None:
    assert fresh.post(b"x", params={"ack": "accepted"}).json()["ack"] == "accepted"
    late = fresh.post(b"x", params={"ack": "delivered", "timeout": "50ms"})
    assert (late.status_code, late.json()["error"]) == (503, "AckPending")
    assert late.headers["retry-after"] == "1"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fresh.post, b"x", params={"ack": "delivered"})
        wait_until(lambda: len(read_stored(fresh)) == 3)
        assert not answer.done()
        fresh.orders.settle(0, fresh.orders.end)
        assert answer.result().json()["ack"] == "delivered"


def test_memory_queue_answers_at_the_accepted_level(fresh: HttpNode) -> None:
    assert fresh.post(b"x", "memory").json()["ack"] == "accepted"


def test_concurrent_requests_share_syncs(fresh: HttpNode) -> None:
    """With a slow disk, one sync for each request would take ten times longer."""
    fresh.disk.delay("sync", seconds=0.05, times=None, match="chunk")
    before = fresh.orders.stats().syncs
    try:
        with ThreadPoolExecutor(40) as pool:
            codes = {each.status_code for each in pool.map(lambda _: fresh.post(b"x"), range(120))}
    finally:
        fresh.disk.clear()
    assert codes == {200}
    assert len(read_stored(fresh)) == 120
    assert fresh.orders.stats().syncs - before < 60


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_full_queue_is_429_until_it_has_room(tmp_path: Path, kind: str) -> None:
    with serve_http(tmp_path, {"orders": {"kind": kind, "size": 5}}) as at:
        ack = {"ack": "accepted"}
        assert at.post([{"value": "x"}] * 4, params=ack).status_code == 200
        for headers in ({}, {"producer-id": "p", "sequence": "0"}):
            full = at.post([{"value": "y"}] * 2, params={**ack, "timeout": "0"}, headers=headers)
            assert (full.status_code, full.json()["error"]) == (429, "QueueFull")
            assert int(full.headers["retry-after"]) >= 1
        assert at.orders.stats().ledger.accepted == 4
        lease = at.take().json()["lease"]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(at.post, [{"value": "y"}] * 2, params=ack)
            wait_until(lambda: at.orders.stats().blocked_publishers == 1)
            at.http.post(f"/leases/{lease}/done").raise_for_status()
            assert waiting.result().json()["accepted"] == 2


def test_too_many_waiting_requests_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnlane.node.http.publish.THREADS", 1)
    with serve_http(tmp_path, {"orders": {"size": 1}}) as at, ThreadPoolExecutor(1) as pool:
        at.post(b"x")
        waiting = pool.submit(at.post, b"y", params={"timeout": "60s"})
        wait_until(lambda: at.orders.stats().blocked_publishers == 1)
        assert at.post(b"z", params={"timeout": "60s"}).status_code == 429
        at.orders.settle(0, 1)
        assert waiting.result().status_code == 200


def test_numbered_request_beyond_the_limit_is_refused_temporarily(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would wait for a thread beyond its own timeout."""
    monkeypatch.setattr("turnlane.node.http.publish.THREADS", 1)
    late, quick = ({"producer-id": name, "sequence": "0"} for name in ("late", "quick"))
    with serve_http(tmp_path) as at, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            at.post, b"y", params={"timeout": "60s", "ack": "delivered"}, headers=late
        )
        wait_until(lambda: at.orders.end == 1)
        refused = at.post(b"z", params={"timeout": "60s"}, headers=quick)
        assert (refused.status_code, refused.json()["error"]) == (503, "TransportDown")
        assert refused.headers["retry-after"] == "1"
        assert at.orders.end == 1
        at.orders.settle(0, 1)
        assert waiting.result().status_code == 200
        wait_until(lambda: at.post(b"z", headers=quick).status_code == 200)


def test_requests_that_wait_for_one_queue_do_not_delay_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnlane.node.http.publish.THREADS", 1)
    queues: dict[str, dict[str, Any]] = {"orders": {"size": 1}, "logs": {}}
    with serve_http(tmp_path, queues) as at, ThreadPoolExecutor(1) as pool:
        at.post(b"x")
        waiting = pool.submit(at.post, b"y", params={"timeout": "60s"})
        wait_until(lambda: at.orders.stats().blocked_publishers == 1)
        numbered = {"producer-id": "p", "sequence": "0"}
        other = at.http.post("/queues/logs/events", content=b"z", headers=numbered)
        assert other.status_code == 200
        at.orders.settle(0, 1)
        assert waiting.result().status_code == 200


def test_timeout_of_a_request_includes_the_wait_for_a_thread(tmp_path: Path) -> None:
    with serve_http(tmp_path, {"orders": {"size": 1}}) as at:
        at.post(b"x")
        with pytest.raises(QueueFull):
            _publish(at.orders, block_of([b"y"]), AckLevel.ACCEPTED, time.monotonic() - 1)


def test_events_lost_by_the_disk_fail_every_affected_request(tmp_path: Path) -> None:
    async def wait_for_the_loss(queue: BufferedQueue) -> None:
        follower = _LevelWaiters(queue, AckLevel.DELIVERED, asyncio.get_running_loop())
        waits = [asyncio.create_task(follower.wait(end, time.monotonic() + 20)) for end in (1, 2)]
        await asyncio.sleep(0)
        follower._on_ack(Ack(1, 1, 2, AckLevel.DELIVERED, Durability.ALWAYS))
        for wait in waits:
            with pytest.raises(StorageFailed, match="lost events"):
                await wait

    with Node(tmp_path, {"orders": {}}) as node:
        asyncio.run(wait_for_the_loss(node.queue("orders")))


def test_dropping_queue_answers_with_the_number(tmp_path: Path) -> None:
    knobs = {"kind": "memory", "size": 3, "full_behavior": "drop_newest"}
    with serve_http(tmp_path, {"orders": knobs}) as at:
        assert at.post([{"value": "x"}] * 3).json()["accepted"] == 3
        answer = at.post([{"value": "x"}] * 2).json()
        assert (answer["accepted"], answer["dropped"]) == (0, 2)


def test_too_large_request_is_413_and_publishes_nothing(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_request_bytes": 5000, "max_decompressed_bytes": 100_000}
    with serve_http(tmp_path, {"orders": {"size": 5, "max_event_bytes": 1000}}, **limits) as at:
        requests: list[tuple[Any, dict[str, Any]]] = [
            ([{"value": "x"}] * 6, {}),
            ([{"value": "x"}, {"value": "x" * 1500}], {}),
            ([{"value": "x"}, {"value": "x" * 1500}],
             {"headers": {"producer-id": "p", "sequence": "0"}}),
            (b"x" * 5001, {}),
            (gzip.compress(bytes(200_000)), {"headers": {"content-encoding": "gzip"}}),
        ]  # fmt: skip
        for content, more in requests:
            assert at.post(content, **more).status_code == 413
        assert at.orders.end == 0
        assert at.post(b"x" * 900).status_code == 200


def test_unknown_queue_is_404_and_names_the_others(fresh: HttpNode) -> None:
    answer = fresh.post(b"x", "nope")
    assert (answer.status_code, answer.json()["error"]) == (404, "NoSuchQueue")
    assert "memory, orders" in answer.json()["detail"]


def test_recreated_queue_accepts_events(fresh: HttpNode) -> None:
    for _ in range(2):
        assert fresh.http.put("/queues/passing", json={}).status_code == 201
        assert fresh.post(b"x", "passing").json()["first"] == 0
        assert fresh.http.delete("/queues/passing").status_code == 204


def test_request_that_waits_for_an_ack_ends_when_the_queue_is_closed(fresh: HttpNode) -> None:
    fresh.http.put("/queues/passing", json={})
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fresh.post, b"x", "passing", params={"ack": "delivered"})
        wait_until(lambda: fresh.node.queue("passing").end == 1)
        fresh.http.delete("/queues/passing")
        assert (answer.result().status_code, answer.result().json()["error"]) == (
            503,
            "QueueClosed",
        )


def test_curl_can_publish_and_consume(fresh: HttpNode) -> None:
    def run_curl(*args: str, data: bytes = b"") -> dict[str, Any]:
        command = ["curl", "-sS", "--fail-with-body", *args]
        run = subprocess.run(command, input=data, capture_output=True, check=True, timeout=30)
        found: dict[str, Any] = json.loads(run.stdout or b"{}")
        return found

    url = fresh.plane.url
    events = f"{url}/queues/orders/events"
    assert run_curl(events, "-d", "hello")["accepted"] == 1
    assert run_curl(events, "--json", '{"value": "a", "key": "b"}')["accepted"] == 1
    lines = gzip.compress(b'{"value":"c"}\n' * 3)
    kind = ["-H", "content-type: application/x-ndjson", "-H", "content-encoding: gzip"]
    assert run_curl(events, *kind, "--data-binary", "@-", data=lines)["accepted"] == 3
    taken = run_curl(f"{events}?wait=5s")
    assert [event["value"] for event in taken["events"]] == ["hello", "a", "c", "c", "c"]
    assert run_curl("-X", "POST", f"{url}/leases/{taken['lease']}/done") == {}
    assert read_stored(fresh) == []


# ── the codec ───────────────────────────────────────────────────────────────────────────────────

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
events = st.fixed_dictionaries(
    {"value": texts},
    optional={
        "key": texts,
        "headers": st.dictionaries(texts, texts, max_size=3),
        "severity": st.integers(0, 7),
        "source": texts,
        "timestamp": st.integers(-(10**14), 10**14),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=5))
def test_event_that_was_read_can_be_published_again(given_events: list[dict[str, Any]]) -> None:
    block = decode_json(json.dumps(given_events).encode(), 7)
    shown = encode_events(block, 3)
    assert [event["offset"] for event in shown] == list(range(3, 3 + len(given_events)))
    lines = "\n".join(json.dumps(event) for event in shown).encode()
    assert decode_ndjson(lines, 8).equals(block)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\value key01null', max_size=60))
def test_any_body_is_decoded_or_a_value_error(body: bytes | str) -> None:
    raw = body if isinstance(body, bytes) else body.encode()
    for codec in (decode_json, decode_ndjson):
        try:
            codec(raw, 0)
        except ValueError as error:
            assert type(error) is ValueError  # noqa: PT017 - either way is right


def test_any_nesting_is_decoded_or_a_value_error() -> None:
    """A value that can just be parsed may be too deep to be written."""
    for depth in range(800, 5000):
        with contextlib.suppress(ValueError):
            decode_json(b'{"data":' + b"[" * depth + b"]" * depth + b"}", 0)


@given(st.integers(-((1 << 63) // 1000 - 1), (1 << 63) // 1000 - 1))
def test_every_formatted_timestamp_can_be_parsed(stamp: int) -> None:
    assert parse_timestamp(format_timestamp(stamp)) == stamp


def test_stuck_request_does_not_delay_others(fresh: HttpNode) -> None:
    """A blocked queue delays neither other queues nor the probes."""
    fresh.http.put("/queues/stuck", json={})
    stuck = fresh.node.queue("stuck")
    with ThreadPoolExecutor(1) as pool:
        with state_of(stuck).lock:
            waiting = pool.submit(fresh.http.get, "/queues/stuck")
            assert fresh.post(b"x").status_code == 200
            assert fresh.http.get("/healthz").status_code == 200
            assert not waiting.done()
        assert waiting.result().status_code == 200
    fresh.http.delete("/queues/stuck")
