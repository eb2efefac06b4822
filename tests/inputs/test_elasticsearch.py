from __future__ import annotations

import base64
import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from elasticsearch import ApiError, Elasticsearch, helpers
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from tests.inputs.web_inputs import (
    HASTY,
    SECRET,
    TOKENS,
    WEB,
    act_when_refused,
    fill,
    open_node,
    read_events,
    read_values,
    run_web_input,
    settle_all,
)
from turnlane.errors import QueueEmpty
from turnlane.inputs.elasticsearch import parse_secret
from turnlane.node.node import Node
from turnlane.testing import FaultyDisk

RETRYING: dict[str, Any] = {"max_retries": 50, "initial_backoff": 0.05, "max_backoff": 0.1}
DOCUMENTS = [{"_index": "shop", "_id": str(number), "n": number} for number in range(50)]


@pytest.fixture
def url(node: Node) -> Iterator[str]:
    with run_web_input("elasticsearch", node) as found:
        yield f"http://{found.address}"


@contextmanager
def client_of(url: str, **knobs: Any) -> Iterator[Elasticsearch]:
    client = Elasticsearch(url, **{"retry_on_timeout": False, "max_retries": 0, **knobs})
    try:
        yield client
    finally:
        client.close()


def is_taken(client: Elasticsearch) -> bool:
    try:
        client.index(index="a", document={})
    except ApiError as error:
        assert error.meta.status == 503  # noqa: PT017 - or nothing at all
        return False
    return True


def bulk(url: str, *lines: object, **knobs: Any) -> dict[str, Any]:
    """Send a bulk request; lines that are not bytes are encoded as JSON."""
    body = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )
    headers = {"content-type": "application/x-ndjson"}
    answer = WEB.post(f"{url}/_bulk", content=body, headers=headers, **knobs)
    found: dict[str, Any] = answer.json()
    return found


def statuses(answer: dict[str, Any]) -> list[int]:
    return [outcome["status"] for item in answer["items"] for outcome in item.values()]


# ── the real client ─────────────────────────────────────────────────────────────────────────────


def test_client_accepts_the_input_as_elasticsearch(url: str) -> None:
    with client_of(url) as client:
        assert client.info()["version"]["number"] == "9.0.0"
        assert client.ping()
        assert client.cluster.health()["status"] == "green"


def test_helpers_bulk_publishes_documents(url: str, node: Node) -> None:
    with client_of(url, http_compress=True) as client:
        assert helpers.bulk(client, DOCUMENTS) == (50, [])
    found = read_events(node)
    assert [event.value for event in found] == [b'{"n":%d}' % number for number in range(50)]
    assert [event.key for event in found] == [str(number) for number in range(50)]
    assert found[7].headers == {"index": "shop", "action": "index"}
    assert found[7].source == "127.0.0.1"


def test_streaming_bulk_answers_each_document(url: str, node: Node) -> None:
    with client_of(url) as client:
        answers = list(helpers.streaming_bulk(client, DOCUMENTS, chunk_size=7))
    assert [ok for ok, _ in answers] == [True] * 50
    assert [answer["index"]["_id"] for _, answer in answers] == [str(n) for n in range(50)]
    assert len(read_values(node)) == 50


def test_parallel_bulk_publishes_every_document_once(url: str, node: Node) -> None:
    with client_of(url) as client:
        answers = helpers.parallel_bulk(client, DOCUMENTS, thread_count=4, chunk_size=3)
        assert all(ok for ok, _ in answers)
    assert sorted(event.key or "" for event in read_events(node)) == sorted(map(str, range(50)))


def test_single_documents_are_published(url: str, node: Node) -> None:
    with client_of(url) as client:
        made = client.index(index="shop", document={"n": 1})
        assert made["result"] == "created"
        assert client.index(index="shop", id="a/b", document={"n": 2})["_id"] == "a/b"
        assert client.create(index="shop", id="3", document={"n": 3})["_index"] == "shop"
    found = read_events(node)
    assert [event.key for event in found] == [made["_id"], "a/b", "3"]
    assert [(event.headers or {})["action"] for event in found] == ["index", "index", "create"]


def test_index_can_be_looked_up_and_created(url: str) -> None:
    with client_of(url) as client:
        assert not client.indices.exists(index="shop")
        assert client.indices.create(index="shop")["acknowledged"]
        assert not client.indices.exists_index_template(name="shop")
        assert client.indices.put_index_template(name="shop", index_patterns=["shop-*"])
        assert client.ilm.put_lifecycle(name="shop", policy={"phases": {}})
        assert client.license.get()["license"]["status"] == "active"


def test_unknown_resource_answers_404(url: str, node: Node) -> None:
    with client_of(url) as client, pytest.raises(ApiError) as refused:
        client.search(index="shop")
    assert refused.value.meta.status in {404, 405}
    assert WEB.put(f"{url}/_something").status_code == 404
    assert read_values(node) == []


# ── per-item results ────────────────────────────────────────────────────────────────────────────


def test_every_action_becomes_an_event(url: str, node: Node) -> None:
    answer = bulk(
        url,
        {"index": {"_index": "a", "_id": 1}}, {"n": 1},
        {"create": {"_index": "b", "_id": "2"}}, b'{"n":   2}',
        {"update": {"_index": "c", "_id": "3"}}, {"doc": {"n": 3}},
        {"delete": {"_index": "d", "_id": "4"}},
        b"",
    )  # fmt: skip
    assert (answer["errors"], statuses(answer)) == (False, [201, 201, 200, 200])
    assert [next(iter(item.values()))["result"] for item in answer["items"]] == [
        "created",
        "created",
        "updated",
        "deleted",
    ]
    assert [event.key for event in read_events(node)] == ["1", "2", "3", "4"]
    assert read_values(node) == [b'{"n": 1}', b'{"n":   2}', b'{"doc": {"n": 3}}', b""]


def test_bulk_document_that_is_not_json_fails_alone(url: str, node: Node) -> None:
    answer = bulk(
        url,
        {"index": {"_index": "a"}}, {"n": 1},
        {"index": {"_index": "a"}}, b"{nonsense",
        {"index": {"_index": "a"}}, b"[1]",
        {"index": {"_index": "a"}}, {"n": 2},
        {"index": {"_index": "a"}},
    )  # fmt: skip
    assert (answer["errors"], statuses(answer)) == (True, [201, 400, 400, 201, 400])
    assert "not JSON" in answer["items"][1]["index"]["error"]["reason"]
    assert read_values(node) == [b'{"n": 1}', b'{"n": 2}']
    # The event has the generated id.
    assert read_events(node)[1].key == answer["items"][3]["index"]["_id"]


@pytest.mark.parametrize("action", ["update", "delete"])
def test_update_or_delete_without_id_is_refused(url: str, node: Node, action: str) -> None:
    answer = WEB.post(
        f"{url}/shop/_bulk", content=b'{"index": {}}\n{}\n{"%s": {}}\n{}\n' % action.encode()
    )
    assert answer.status_code == 400
    assert "line 3" in answer.json()["error"]["reason"]
    assert read_events(node) == []


def test_bulk_document_with_too_long_id_fails_alone(url: str, node: Node) -> None:
    lines = [line for key in ("a", "b" * 2**20) for line in ({"index": {"_id": key}}, {"n": 1})]
    answer = bulk(f"{url}/shop", *lines)
    assert statuses(answer) == [201, 400]
    assert [event.key for event in read_events(node)] == ["a"]


def test_bulk_document_too_large_for_the_queue_fails_alone(tmp_path: Path) -> None:
    with (
        open_node(tmp_path, max_event_bytes="1Ki") as node,
        run_web_input("elasticsearch", node) as found,
    ):
        large = {"_index": "a", "text": "x" * 2000}
        with client_of(f"http://{found.address}") as client:
            done, failed = helpers.bulk(client, [large, *DOCUMENTS], raise_on_error=False)
        assert (done, len(read_values(node))) == (50, 50)
        assert isinstance(failed, list)
        assert [each["index"]["status"] for each in failed] == [413]


def test_full_queue_answers_429_only_for_documents_without_room(tmp_path: Path) -> None:
    knobs: dict[str, Any] = {"timeout": HASTY, "ack": "accepted"}
    with (
        open_node(tmp_path, size=32) as node,
        run_web_input("elasticsearch", node, **knobs) as found,
    ):
        lines = [line for n in range(64) for line in ({"index": {"_id": n}}, {"n": n})]
        answer = bulk(f"http://{found.address}/shop", *lines)
        taken = [event.key for event in read_events(node)]
        assert 0 < len(taken) <= 32
        assert answer["errors"]
        assert statuses(answer) == [201] * len(taken) + [429] * (64 - len(taken))
        assert taken == [str(n) for n in range(len(taken))]
        reason = answer["items"][-1]["index"]["error"]["type"]
        assert reason == "es_rejected_execution_exception"


def test_helper_retries_a_refused_request(tmp_path: Path) -> None:
    with (
        open_node(tmp_path, size=60) as node,
        run_web_input("elasticsearch", node, timeout=HASTY) as found,
        client_of(f"http://{found.address}") as client,
    ):
        fill(node, 60)
        with pytest.raises(ApiError) as refused:
            helpers.bulk(client, DOCUMENTS)
        assert (refused.value.meta.status, found.counters.refused) == (429, 1)
        with act_when_refused(found, lambda: settle_all(node), times=2):
            assert helpers.bulk(client.options(max_retries=9), DOCUMENTS, **RETRYING) == (50, [])
        assert {event.key for event in read_events(node)} == {str(n) for n in range(50)}


def test_helper_retries_refused_items(tmp_path: Path) -> None:
    seen: list[str | None] = []
    with (
        open_node(tmp_path, size=20) as node,
        # With `accepted`, no event in the queue is refused, even with a slow disk.
        run_web_input("elasticsearch", node, timeout="100ms", ack="accepted") as found,
        client_of(f"http://{found.address}", max_retries=50) as client,
    ):
        stopped = threading.Event()

        def consume() -> None:
            while not (stopped.is_set() and not node.queue("main").stats().ledger.pending):
                with contextlib.suppress(QueueEmpty), node.queue("main").get(5, 0.01) as batch:
                    seen.extend(event.key for event in batch)
                stopped.wait(0.02)  # slower than the documents arrive

        consuming = threading.Thread(target=consume)
        consuming.start()
        try:
            done = helpers.bulk(client, DOCUMENTS, raise_on_error=False, **RETRYING)
        finally:
            stopped.set()
            consuming.join()
    assert done == (50, [])
    assert sorted(seen, key=str) == sorted(map(str, range(50)))


def test_full_disk_answers_503_until_there_is_space(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with (
        open_node(tmp_path, disk) as node,
        run_web_input("elasticsearch", node, timeout=HASTY) as found,
    ):
        disk.fill()
        with client_of(f"http://{found.address}") as client:
            for _ in range(2):
                with pytest.raises(ApiError) as refused:
                    helpers.bulk(client, [{"_index": "a", "text": "x" * 2**20}])
                assert refused.value.meta.status == 503
                assert refused.value.meta.headers["retry-after"] == "1"
            disk.unfill()
            wait_until(lambda: is_taken(client), "recovery")
        assert read_values(node)[-1] == b"{}"


# ── whole requests ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\n\n",
        b"nonsense\n",
        b"[]\n",
        b"{}\n",
        b'{"search": {}}\n{}\n',
        b'{"index": []}\n{}\n',
        b'{"index": {}}\n{}\n',
        b'{"index": {"_index": "\\ud800"}}\n{}\n',
        b'{"index": {"_index": {"a": 1}}}\n{}\n',
        b"[" * 100_000,
        b'{"index": {"_index": "a"}}\n{}\nnonsense\n{}\n',
    ],
)
def test_malformed_bulk_is_refused_whole(url: str, node: Node, body: bytes) -> None:
    answer = WEB.post(f"{url}/_bulk", content=body)
    assert (answer.status_code, answer.json()["status"]) == (400, 400)
    assert answer.headers["x-elastic-product"] == "Elasticsearch"
    assert read_values(node) == []


def test_oversize_and_compression_bomb_bodies_are_refused(node: Node) -> None:
    with run_web_input("elasticsearch", node, max_decompressed_bytes="1Mi") as found:
        bomb = gzip.compress(bytes(20_000_000))
        url = f"http://{found.address}/_bulk"
        answer = WEB.post(url, content=bomb, headers={"content-encoding": "gzip"})
        assert answer.status_code == 413
        assert statuses(bulk(f"http://{found.address}/a", {"index": {}}, {"n": 1})) == [201]


def test_single_document_that_is_not_json_is_refused(url: str, node: Node) -> None:
    assert WEB.put(f"{url}/a/_doc/1", content=b"nonsense").status_code == 400
    assert read_values(node) == []


def test_single_document_for_a_full_queue_answers_429(tmp_path: Path) -> None:
    with (
        open_node(tmp_path, size=1, max_event_bytes="1Ki") as node,
        run_web_input("elasticsearch", node, timeout=HASTY) as found,
    ):
        large = WEB.post(f"http://{found.address}/a/_doc", json={"x": "x" * 2000})
        assert large.status_code == 413
        fill(node, 1)
        answer = WEB.post(f"http://{found.address}/a/_doc", json={"n": 1})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


# ── tokens, TLS, fuzz ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        ({"bearer_auth": SECRET}, 200),
        ({"api_key": SECRET}, 200),
        ({"api_key": ("shop", SECRET)}, 200),
        ({"basic_auth": ("shop", SECRET)}, 200),
        ({"basic_auth": ("shop", "guess")}, 401),
        ({"api_key": "guess"}, 401),
        ({}, 401),
    ],
)
def test_token_is_accepted_in_every_form_of_the_client(
    node: Node, shown: dict[str, Any], status: int
) -> None:
    with (
        run_web_input("elasticsearch", node, tokens=TOKENS) as found,
        client_of(f"http://{found.address}", **shown) as client,
    ):
        if status == 200:
            assert client.info()
            assert client.index(index="a", document={})
        else:
            with pytest.raises(ApiError) as refused:
                client.info()
            assert refused.value.meta.status == status
            with pytest.raises(ApiError) as refused:
                client.index(index="a", document={})
            assert refused.value.meta.status == status
    assert len(read_values(node)) == (status == 200)


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        ("", None),
        ("Bearer abc", "abc"),
        ("ApiKey abc", "abc"),
        ("apikey " + base64.b64encode(b"id:key").decode(), "key"),
        ("Basic " + base64.b64encode(b"user:pass:word").decode(), "pass:word"),
        ("Basic !!!", "!!!"),
        ("Digest abc", None),
    ],
)
def test_secret_is_parsed_from_every_form_of_header(header: str, secret: str | None) -> None:
    assert parse_secret(header) == secret


def test_tls_settings_enable_https(node: Node, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with (
        run_web_input("elasticsearch", node, tls=certificates.server_knob()) as found,
        client_of(f"https://{found.address}", ca_certs=str(certificates.ca)) as client,
    ):
        assert helpers.bulk(client, DOCUMENTS) == (50, [])


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        open_node(tmp_path_factory.mktemp("fuzz"), durability="never") as node,
        run_web_input("elasticsearch", node, timeout="10s") as found,
    ):
        yield f"http://{found.address}"


LINE = st.sampled_from([
    b'{"index": {}}', b'{"create": {"_id": "\xc3\xa4"}}', b'{"delete": {"_id": 1}}', b'{"a": 1}',
    b'{"index": {"_id": "\\ud800"}}', b'{"index": null}', b"{", b"", b"\xff", b'{"a": NaN}',
])  # fmt: skip


@given(
    body=st.binary(max_size=200) | st.lists(LINE, max_size=8).map(b"\n".join),
    encoding=st.sampled_from(["identity", "identity", "gzip"]),
)
def test_random_bulk_gets_a_documented_answer(lasting: str, body: bytes, encoding: str) -> None:
    answer = WEB.post(f"{lasting}/x/_bulk", content=body, headers={"content-encoding": encoding})
    assert answer.status_code in {200, 400}
    if answer.status_code == 200:
        found = statuses(answer.json())
        assert set(found) <= {200, 201, 400}
        assert answer.json()["errors"] == (400 in found)
    assert WEB.get(lasting).status_code == 200
