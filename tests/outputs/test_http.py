"""What does the output ``http`` send, to which URLs, and does it keep secrets?"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from tests.certificates import Certificates
from tests.outputs.web_blocks import deliver, make_events, make_output, set_column
from tests.outputs.web_servers import Reply, Server, run_server
from turnlane.config import get_visible_settings, loads
from turnlane.errors import Never, PartlyDelivered, PayloadTooLarge, RetryLater
from turnlane.outputs import http_requests

SECRET = "correct horse battery staple"  # the tests' own


@pytest.fixture
def server() -> Iterator[Server]:
    with run_server() as found:
        yield found


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_json_body_is_one_array_with_any_compression(server: Server, compression: str) -> None:
    deliver("http", make_events([b"a", b'b"\n', b"c"]), url=server.url, compression=compression)
    [request] = server.requests
    assert json.loads(request.body) == [{"value": "a"}, {"value": 'b"\n'}, {"value": "c"}]
    assert request.headers["content-type"] == "application/json"
    assert request.headers.get("content-encoding", "none") == compression
    assert request.headers["user-agent"].startswith("turnlane/")


def test_jsonl_body_has_a_line_for_each_event(server: Server) -> None:
    deliver("http", make_events([b"a", b"b"]), url=server.url, format="jsonl")
    assert server.requests[0].body == b'{"value": "a"}\n{"value": "b"}\n'
    assert server.requests[0].headers["content-type"] == "application/x-ndjson"


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_event_id_setting_adds_ids_to_json_objects(server: Server, form: str) -> None:
    block = make_events([b"a", b"b", b"c"], first=7)
    objects = [b'{"value":"a"}', b"{}", b'{"value":{"event_id":1}}']
    block = set_column(block, "payload", pa.array(objects, pa.binary()))
    deliver("http", block.slice(1), url=server.url, format=form, event_id='the "id"')
    deliver("http", block, url=server.url, format=form, event_id="event_id")
    second, first = server.requests
    found = [
        json.loads(request.body)
        if form == "json"
        else [*map(json.loads, request.body.splitlines())]
        for request in (first, second)
    ]
    assert found[0] == [
        {"event_id": "alerts/0/7", "value": "a"},
        {"event_id": "alerts/0/8"},
        {"event_id": "alerts/0/9", "value": {"event_id": 1}},
    ]
    assert [each['the "id"'] for each in found[1]] == ["alerts/0/8", "alerts/0/9"]


def test_rows_without_a_position_get_no_event_id(server: Server) -> None:
    block = make_events([b"a"]).drop_columns(["partition", "offset"])
    deliver("http", block, url=server.url, event_id="event_id")
    assert server.requests[0].body == b'[{"value": "a"}]'


def test_raw_body_has_a_line_with_each_value(server: Server) -> None:
    block = set_column(
        make_events([b"a", b"b"]), "payload", pa.array([b"a\xff", None], pa.binary())
    )
    deliver("http", block, url=server.url, format="raw")
    assert server.requests[0].body == b"a\xff\n\n"
    assert server.requests[0].headers["content-type"].startswith("text/plain")


def test_slice_of_a_block_is_sent_without_other_rows(server: Server) -> None:
    """The engine slices blocks, and a slice shares the buffers of the whole block."""
    deliver("http", make_events([b"a", b"b", b"c", b"d"]).slice(1, 2), url=server.url)
    assert json.loads(server.requests[0].body) == [{"value": "b"}, {"value": "c"}]


def test_empty_block_sends_no_request(server: Server) -> None:
    deliver("http", make_events([]), url=server.url)
    deliver("http", make_events([]), url=server.url + "/{key}")
    assert not server.requests


@pytest.mark.parametrize("form", ["json", "raw"])
def test_one_by_one_sends_a_request_per_event_over_one_connection(
    server: Server, form: str
) -> None:
    deliver("http", make_events([b"a", b"b", b"c"]), url=server.url, one_by_one=True, format=form)
    assert [json.loads(request.body)["value"] for request in server.requests] == ["a", "b", "c"]
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 3
    assert server.connections == 1


def test_body_template_escapes_values_for_json(server: Server) -> None:
    hard = 'say "no"\\ \n\x01 ünï'.encode()
    body = '{{"text": "{source}: {value}"}}'
    block = make_events([hard, b"easy"], sources=["a", None])
    deliver("http", block, url=server.url, body=body)
    assert json.loads(server.requests[0].body) == [
        {"text": f"a: {hard.decode()}"},
        {"text": ": easy"},
    ]


def test_raw_body_template_does_not_escape_values(server: Server) -> None:
    deliver("http", make_events([b'"x"']), url=server.url, format="raw", body="<{value}>")
    assert server.requests[0].body == b'<"x">\n'


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_method_setting_is_used(server: Server, method: str) -> None:
    deliver("http", make_events([b"a"]), url=server.url, method=method)
    assert server.requests[0].method == method


def test_configured_headers_replace_default_ones(server: Server) -> None:
    headers = {"content-type": "application/vnd.shop+json", "user-agent": "shop", "X-Org": "1"}
    with make_output("http", url=server.url, headers=headers) as output:
        output.check()
        output.send(output.prepare(make_events([b"a"])))
    for request in server.requests:
        assert {name: request.headers[name.lower()] for name in headers} == headers


# ── URLs ──────────────────────────────────────────────────────────────────────────────────────────


def test_url_template_sends_events_to_different_urls(server: Server) -> None:
    block = make_events([b"a", b"b", b"c"], keys=["x/../y", "z", "x/../y"])
    url = f"{server.url}/{{key}}?day={{timestamp:%Y-%m-%d}}"
    deliver("http", block, url=url, headers={"X-Key": "k={key}"})
    found = {
        request.path: (request.headers["x-key"], json.loads(request.body))
        for request in server.requests
    }
    assert found == {
        "/x%2F..%2Fy?day=2023-11-14": ("k=x/../y", [{"value": "a"}, {"value": "c"}]),
        "/z?day=2023-11-14": ("k=z", [{"value": "b"}]),
    }


def test_values_cannot_change_the_path_or_add_a_header(server: Server) -> None:
    block = make_events([b"a"], keys=[".."], sources=["b\r\nX-Evil: yes\x00é"])
    url = f"{server.url}/in/{{key}}/out"
    deliver("http", block, url=url, headers={"X-Source": "{source}"})
    [request] = server.requests
    assert request.path == "/in/%2E%2E/out"
    assert "x-evil" not in request.headers
    assert request.headers["x-source"].encode("latin-1").decode() == "b  X-Evil: yes é"


def test_failing_url_fails_only_its_events(server: Server) -> None:
    def behave(handler: Any) -> Reply:
        request = handler.read()
        return Reply({"/bad": 400, "/gone": 404}.get(request.path, 200))

    server.behave = behave
    block = make_events([b"0", b"1", b"2", b"3"], keys=["good", "bad", "gone", "bad"])
    with pytest.raises(PartlyDelivered) as raised:
        deliver("http", block, url=server.url + "/{key}")
    failures = raised.value.failures
    assert set(failures) == {1, 2, 3}
    assert isinstance(failures[1], Never)
    assert isinstance(failures[2], RetryLater)


def test_failing_server_gets_no_further_requests(server: Server) -> None:
    server.set_replies(Reply(200), Reply(503, headers={"Retry-After": "7"}))
    block = make_events([b"0", b"1", b"2", b"3"])
    with pytest.raises(PartlyDelivered) as raised:
        deliver("http", block, url=server.url, one_by_one=True)
    assert set(raised.value.failures) == {1, 2, 3}
    assert {error.after for error in raised.value.failures.values()} == {7.0}  # type: ignore[attr-defined]
    assert len(server.requests) == 2


def test_send_of_many_requests_ends_after_its_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_requests, "MAX_SEND_SECONDS", 0.0)
    with pytest.raises(PartlyDelivered) as raised:
        deliver("http", make_events([b"0", b"1", b"2"]), url=server.url, one_by_one=True)
    assert set(raised.value.failures) == {1, 2}
    assert len(server.requests) == 1


def test_one_refused_event_does_not_stop_others(server: Server) -> None:
    server.set_replies(Reply(200), Reply(422), Reply(200))
    with pytest.raises(PartlyDelivered) as raised:
        deliver("http", make_events([b"0", b"1", b"2"]), url=server.url, one_by_one=True)
    assert set(raised.value.failures) == {1}
    assert len(server.requests) == 3


def test_bad_event_of_a_refused_request_is_found(server: Server) -> None:
    def behave(handler: Any) -> Reply:
        request = handler.read()
        return Reply(400 if b"poison" in request.body else 413 if b"large" in request.body else 200)

    server.behave = behave
    values = [b"%d" % number for number in range(100)]
    values[37], values[64] = b"poison", b"large"
    block = make_events(values, keys=["a", "b"] * 50)
    with pytest.raises(PartlyDelivered) as raised:
        deliver("http", block, url=server.url + "/{key}")
    kinds = {row: type(error) for row, error in raised.value.failures.items()}
    assert kinds == {37: Never, 64: PayloadTooLarge}


# ── idempotency keys ──────────────────────────────────────────────────────────────────────────────


def get_key(server: Server, block: Any, **settings: Any) -> str | None:
    deliver("http", block, url=server.url, **settings)
    return server.requests[-1].headers.get("idempotency-key")


def test_idempotency_key_is_equal_only_for_the_same_events(server: Server) -> None:
    block = make_events([b"a", b"b", b"c"], first=7)
    first = get_key(server, block)
    assert first is not None
    assert first.startswith("alerts/0/7-alerts/0/9-")
    assert get_key(server, block) == first
    assert get_key(server, block.take([0, 2])) != first, "an event in between is missing"
    assert get_key(server, block, format="raw", body="{value}") != first, "another format"
    later = set_column(block, "timestamp", block.column("timestamp").take([1, 2, 2]))
    assert get_key(server, later) != first, "a queue created again has the same offsets"
    assert get_key(server, make_events([b"a", b"b", b"c"], first=7, queue="orders")) != first
    assert get_key(server, block, idempotency_key=False) is None


def test_idempotency_key_in_the_main_lane_names_the_main_queue(server: Server) -> None:
    """In the main lane the column ``queue`` has the queues that events go to."""
    found = get_key(server, make_events([b"a"], first=3, queue=["alerts", "orders"]))
    assert found is not None
    assert found.startswith("main/0/3-main/0/3-")


def test_rows_without_a_position_get_no_idempotency_key(server: Server) -> None:
    assert get_key(server, make_events([b"a"]).select(["value", "payload"])) is None


# ── secrets and certificates ──────────────────────────────────────────────────────────────────────


def test_changed_token_file_is_used_for_the_next_request(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "token"
    for secret in ("first", "second"):
        file.write_text(f"{secret}\n")
        deliver("http", make_events([b"a"]), url=server.url, auth={"token_file": str(file)})
        assert server.requests[-1].headers["authorization"] == f"Bearer {secret}"


def test_password_is_read_from_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", SECRET)
    auth = {"username": "lane", "password_env": "SHOP_PASSWORD"}
    deliver("http", make_events([b"a"]), url=server.url, auth=auth)
    kind, _, shown_secret = server.requests[0].headers["authorization"].partition(" ")
    assert kind == "Basic"
    assert base64.b64decode(shown_secret).decode() == f"lane:{SECRET}"


def test_missing_secret_raises_a_retryable_error(server: Server, tmp_path: Path) -> None:
    for auth in ({"token_env": "NOT_SET_ANYWHERE"}, {"token_file": str(tmp_path / "none")}):
        with pytest.raises(RetryLater, match="token"):
            deliver("http", make_events([b"a"]), url=server.url, auth=auth)
    assert not server.requests


def test_secret_of_several_lines_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "one\ntwo")
    with pytest.raises(RetryLater, match="SHOP_TOKEN is not one line") as raised:
        deliver("http", make_events([b"a"]), url=server.url, auth={"token_env": "SHOP_TOKEN"})
    assert "two" not in str(raised.value)


def test_errors_do_not_contain_the_secret(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", SECRET)
    server.set_replies(Reply(401, b"no such token"))
    url = f"{server.url}/?key=of+somebody"
    with pytest.raises(RetryLater, match="no such token") as raised:
        deliver("http", make_events([b"a"]), url=url, auth={"token_env": "SHOP_TOKEN"})
    assert SECRET not in str(raised.value)
    assert "somebody" not in str(raised.value)


def test_settings_show_the_source_of_a_secret_and_not_its_value() -> None:
    text = """
        node: {data: data}
        main: {}
        actions:
          - name: out
            output: {type: http, url: 'http://h', auth: {token_env: SHOP_TOKEN},
                     headers: {Authorization: correct horse, X-Api-Key: battery}}
    """
    found = json.dumps(get_visible_settings(loads(text, environment={"SHOP_TOKEN": SECRET})))
    assert "SHOP_TOKEN" in found
    assert SECRET not in found
    assert "correct horse" not in found
    assert "battery" not in found


def test_mutual_tls_delivers(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with run_server(certificates.server_context(mutual=True)) as server:
        deliver("http", make_events([b"a"]), url=server.url, tls=certificates.client_knob())
        assert len(server.requests) == 1
        with pytest.raises(RetryLater):
            deliver("http", make_events([b"a"]), url=server.url, tls={"ca": certificates.ca})


def test_untrusted_server_is_refused_unless_verify_is_off(tmp_path: Path) -> None:
    with run_server(Certificates(tmp_path).server_context()) as server:
        with pytest.raises(RetryLater, match="certificate verify failed"):
            deliver("http", make_events([b"a"]), url=server.url)
        assert not server.requests
        deliver("http", make_events([b"a"]), url=server.url, tls={"verify": False})
        assert len(server.requests) == 1


# ── threads ───────────────────────────────────────────────────────────────────────────────────────


def test_several_threads_share_the_connections_of_an_output(server: Server) -> None:
    blocks = [make_events([b"%d" % number], first=number) for number in range(200)]
    with make_output("http", url=server.url) as output, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda block: output.send(output.prepare(block)), blocks))
    found = sorted(int(json.loads(request.body)[0]["value"]) for request in server.requests)
    assert found == list(range(200))
    assert server.connections <= 8


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "ftp://h"}, "a URL such as"),
        ({"url": "http://user:pw@h/"}, "set them under auth"),
        ({"url": "http://{source}/"}, "in its host"),
        ({"url": "http://h:99999/"}, "[Pp]ort"),
        ({"body": "{"}, r"write \{\{"),
        ({"body": "{a b}"}, "is not {column}"),
        ({"headers": {"X Y": "1"}}, "X Y"),
        ({"headers": {"X": "}"}}, r"write \}\}"),
        ({"headers": {"X": "a\nb"}}, "pattern"),
        ({"url": "http://h/{a"}, r"write \{\{"),
        ({"auth": {}}, "none is set"),
        ({"auth": {"token_env": "A", "token_file": "b"}}, "token_env and token_file"),
        ({"auth": {"password_env": "A"}}, "set username together"),
        ({"auth": {"token_env": "A", "username": "b"}}, "set username together"),
        ({"tls": {"verify": False}}, "begins with https"),
        ({"timeout": 0}, "greater than 0"),
        ({"event_id": "id", "format": "raw"}, "needs events as JSON objects"),
        ({"event_id": "id", "body": "x"}, "needs events as JSON objects"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        make_output("http", **{"url": "http://h/", **settings})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{nothing}", "needs the column 'nothing'"),
        ("{value:%Y}", "must be a time"),
        ("{headers}", "name a field of it"),
        ("{value.x}", "has no field 'x'"),
    ],
)
def test_template_that_does_not_fit_the_events_raises_a_retryable_error(
    template: str, words: str
) -> None:
    with make_output("http", url="http://h/", body=template) as output, pytest.raises(
        RetryLater, match=words
    ):  # fmt: skip
        output.prepare(make_events([b"a"]))
