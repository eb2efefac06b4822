"""Does the output ``elasticsearch`` index each event once, and report only what failed?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from tests.inputs.web_inputs import (
    HASTY,
    SECRET,
    TOKENS,
    fill,
    open_node,
    read_events,
    run_web_input,
    settle_all,
)
from tests.outputs.web_blocks import deliver, make_events, make_output, set_column
from tests.outputs.web_servers import Reply, Server, get_unused_url, run_server
from turnlane.errors import Never, PartlyDelivered, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.inputs.elasticsearch import BulkItem, parse_bulk
from turnlane.node.node import Node


@pytest.fixture
def server() -> Iterator[Server]:
    with run_server() as found:
        yield found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with open_node(tmp_path / "node") as found:
        yield found


def make_reply(*statuses: int) -> Reply:
    items = [
        {"create": {"status": status}}
        if status < 300
        else {"create": {"status": status, "error": {"type": "its_type", "reason": "its reason"}}}
        for status in statuses
    ]
    body = json.dumps({"errors": any(status >= 300 for status in statuses), "items": items})
    return Reply(200, body.encode(), {"Content-Type": "application/json"})


def get_failures(server: Server, block: Block, **settings: Any) -> dict[int, TurnlaneError]:
    with pytest.raises(PartlyDelivered) as raised:
        deliver("elasticsearch", block, url=server.url, index="logs", **settings)
    return raised.value.failures


def get_sent_items(block: Block, **settings: Any) -> list[BulkItem]:
    """Send a block and return the items as Elasticsearch reads them."""
    with run_server() as server:
        server.set_replies(make_reply(*[201] * block.num_rows))
        deliver("elasticsearch", block, url=server.url, **{"index": "logs", **settings})
        return parse_bulk(server.requests[0].body)


# ── documents ────────────────────────────────────────────────────────────────────────────────────


def test_document_has_the_event_id_and_repeats_do_not_replace_it(server: Server) -> None:
    server.set_replies(make_reply(201, 201))
    deliver("elasticsearch", make_events([b"a", b"b"], first=7), url=server.url + "/", index="logs")
    [request] = server.requests
    assert request.path.startswith("/_bulk?")
    assert request.headers["content-encoding"] == "gzip"
    assert parse_bulk(request.body) == [
        BulkItem("create", "logs", "alerts/0/7-2023-11-14T22:13:20.000000Z", b'{"value": "a"}'),
        BulkItem("create", "logs", "alerts/0/8-2023-11-14T22:13:20.000001Z", b'{"value": "b"}'),
    ]


def test_templates_fill_index_and_id_from_columns() -> None:
    block = make_events([b"a", b"b"], keys=['k"1\n', "k2"], sources=["x", "y"])
    found = get_sent_items(
        block, index="logs-{source}-{timestamp:%Y.%m.%d}", id="{key}", action="index"
    )
    assert [(item.action, item.target, item.id) for item in found] == [
        ("index", "logs-x-2023.11.14", 'k"1\n'),
        ("index", "logs-y-2023.11.14", "k2"),
    ]


def test_rows_without_a_position_get_no_id(server: Server) -> None:
    server.set_replies(make_reply(201))
    block = make_events([b"a"]).select(["value", "payload"])
    deliver("elasticsearch", block, url=server.url, index="totals")
    assert server.requests[0].body.splitlines()[0] == b'{"create":{"_index":"totals"}}'


def test_several_rows_of_one_event_get_different_ids() -> None:
    block = set_column(make_events([b"a", b"b"]), "offset", pa.array([7, 7]))
    block = block.append_column("turnlane_row", pa.array([0, 1], pa.int32()))
    assert [item.id.partition("-")[0] for item in get_sent_items(block, index="logs")] == [
        "alerts/0/7",
        "alerts/0/7.1",
    ]


def test_raw_document_with_line_ends_is_sent_on_one_line() -> None:
    pretty = json.dumps({"a": "x\ny", "b": [1]}, indent=2).replace("\n", "\r\n").encode()
    block = set_column(make_events([b"a", b"b"]), "payload", pa.array([pretty, b"{}"], pa.binary()))
    found = get_sent_items(block, format="raw")
    assert [json.loads(item.document) for item in found] == [{"a": "x\ny", "b": [1]}, {}]


def test_pipeline_is_part_of_the_url(server: Server) -> None:
    server.set_replies(make_reply(201))
    deliver("elasticsearch", make_events([b"a"]), url=server.url, index="logs", pipeline="a b")
    assert server.requests[0].path.endswith("&pipeline=a+b")


# ── results ──────────────────────────────────────────────────────────────────────────────────────


def test_partly_refused_bulk_reports_only_failed_documents(server: Server) -> None:
    server.set_replies(make_reply(201, 429, 400, 503, 413, 403, 429, 400))
    found = get_failures(server, make_events([b"%d" % number for number in range(8)]))
    kinds = {row: type(error) for row, error in found.items()}
    assert kinds == {
        1: RetryLater,
        2: Never,
        3: RetryLater,
        4: PayloadTooLarge,
        5: RetryLater,
        6: RetryLater,
        7: Never,
    }
    assert found[1] is found[6], "retryable errors are shared"
    assert found[2] is not found[7], "final errors are not shared"
    assert "its_type: its reason" in str(found[2])


def test_existing_document_counts_as_delivered(server: Server) -> None:
    server.set_replies(make_reply(409, 201))
    deliver("elasticsearch", make_events([b"a", b"b"]), url=server.url, index="logs")
    assert set(get_failures(server, make_events([b"a", b"b"]), action="index")) == {0}


def test_documents_with_the_same_retryable_status_share_one_error(server: Server) -> None:
    server.set_replies(make_reply(429, 429))
    with pytest.raises(RetryLater, match="HTTP 429: its_type"):
        deliver("elasticsearch", make_events([b"a", b"b"]), url=server.url, index="logs")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"errors": true}',
        b'{"errors": false}',
        b'{"errors": true, "items": []}',
        b'{"errors": true, "items": [1, 2]}',
        b'{"errors": true, "items": [{"create": {}}, {}]}',
        b'{"errors": true, "items": [{"create": {"status": "x"}}, {"create": {"error": 3}}]}',
        b'{"errors": true, "items": [{"create": {"status": 0}}, {"create": {"status": 199}}]}',
        b'{"errors": true, "items": [{"create": {"status": 1e999}}, {"create": {"status": null}}]}',
        b'{"errors": true, "items": [{"a": {"status": 503, "error": {"reason": "\\ud800"}}}, {}]}',
        b'{"errors": false, "items": [',
        b"[" * 100_000,
    ],
)
def test_malformed_response_delivers_nothing(server: Server, body: bytes) -> None:
    server.set_replies(Reply(200, body))
    with pytest.raises((RetryLater, PartlyDelivered)) as raised:
        deliver("elasticsearch", make_events([b"a", b"b"]), url=server.url, index="logs")
    if isinstance(raised.value, PartlyDelivered):
        assert set(raised.value.failures) == {0, 1}
        assert all(isinstance(each, RetryLater) for each in raised.value.failures.values())


def test_incomplete_response_delivers_nothing(server: Server) -> None:
    def behave(handler: Any) -> None:
        handler.read()
        handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"errors": false}')
        handler.wfile.flush()
        handler.reset()

    server.behave = behave
    with pytest.raises(RetryLater):
        deliver("elasticsearch", make_events([b"a"]), url=server.url, index="logs")


def test_error_status_applies_to_all_events(server: Server) -> None:
    for status, kind in (
        (413, PayloadTooLarge),
        (400, Never),
        (401, RetryLater),
        (503, RetryLater),
    ):
        server.set_replies(Reply(status))
        with pytest.raises(kind):
            deliver("elasticsearch", make_events([b"a", b"b"]), url=server.url, index="logs")


# ── our own input ────────────────────────────────────────────────────────────────────────────────


def test_own_input_receives_every_event(node: Node) -> None:
    values = [b'event "%d"' % number for number in range(1000)]
    with run_web_input("elasticsearch", node) as found:
        url = f"http://{found.address}"
        deliver("elasticsearch", make_events(values), url=url, index="logs-{queue}")
    got = read_events(node)
    assert [json.loads(event.value or b"")["value"].encode() for event in got] == values
    assert got[17].key == "alerts/0/17-2023-11-14T22:13:20.000017Z"
    assert got[17].headers == {"index": "logs-alerts", "action": "create"}


def test_own_input_refuses_some_documents(node: Node) -> None:
    block = set_column(make_events([b"a", b"b", b"c"]), "payload", [b"{}", b"no JSON", b"{}"])
    with run_web_input("elasticsearch", node) as found:
        url = f"http://{found.address}"
        with pytest.raises(PartlyDelivered) as raised:
            deliver("elasticsearch", block, url=url, index="logs", format="raw")
    assert isinstance(raised.value.failures.pop(1), Never)
    assert not raised.value.failures
    assert len(read_events(node)) == 2


def test_own_input_with_a_full_queue_is_retried(tmp_path: Path) -> None:
    with open_node(tmp_path / "full", size=100) as node:
        fill(node, 100)
        with run_web_input("elasticsearch", node, timeout=HASTY) as found:
            settings: Any = {"url": f"http://{found.address}", "index": "logs"}
            with pytest.raises(RetryLater) as raised:
                deliver("elasticsearch", make_events([b"a"]), **settings)
            assert raised.value.after is not None
        settle_all(node)
        with run_web_input("elasticsearch", node) as found:
            deliver(
                "elasticsearch", make_events([b"a"]), url=f"http://{found.address}", index="logs"
            )
        assert len(read_events(node)) == 1


def test_api_key_authenticates_at_own_input(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ES_KEY", SECRET)
    auth = {"token_env": "ES_KEY", "scheme": "ApiKey"}
    with run_web_input("elasticsearch", node, tokens=TOKENS) as found:
        url = f"http://{found.address}"
        with make_output("elasticsearch", url=url, index="logs", auth=auth) as output:
            output.check()
            output.send(output.prepare(make_events([b"a"])))
        with (
            make_output("elasticsearch", url=url, index="logs") as output,
            pytest.raises(RetryLater),
        ):
            output.check()
    assert len(read_events(node)) == 1


# ── before anything is sent ──────────────────────────────────────────────────────────────────────


def test_check_requires_a_response_of_elasticsearch(server: Server) -> None:
    server.set_replies(Reply(200, b"<html>hello</html>"))
    with make_output("elasticsearch", url=server.url, index="logs") as output, pytest.raises(
        RetryLater, match="not a response of Elasticsearch: <html>hello"
    ):  # fmt: skip
        output.check()
    with (
        make_output("elasticsearch", url=get_unused_url(), index="logs") as output,
        pytest.raises(RetryLater),
    ):
        output.check()


@pytest.mark.parametrize(
    "settings", [{"url": "http://h/?a=b"}, {"index": "{"}, {"action": "update"}]
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make_output("elasticsearch", **{"url": "http://h", "index": "logs", **settings})
