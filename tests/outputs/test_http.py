"""What does the output ``http`` send, where to, and does it know what it must not say aloud?"""

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
from tests.outputs.web_blocks import delivered, events, output, with_column
from tests.outputs.web_servers import Reply, Server, served
from turnlane.config import loads, shown
from turnlane.errors import Never, PartlyDelivered, PayloadTooLarge, RetryLater
from turnlane.outputs.http_requests import RequestOutput

SECRET = "correct horse battery staple"  # the tests' own


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as found:
        yield found


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_json_body_is_one_array_with_any_compression(server: Server, compression: str) -> None:
    delivered("http", events([b"a", b'b"\n', b"c"]), url=server.url, compression=compression)
    [seen] = server.seen
    assert json.loads(seen.body) == [{"value": "a"}, {"value": 'b"\n'}, {"value": "c"}]
    assert seen.headers["content-type"] == "application/json"
    assert seen.headers.get("content-encoding", "none") == compression
    assert seen.headers["user-agent"].startswith("turnlane/")


def test_jsonl_body_has_a_line_for_each_event(server: Server) -> None:
    delivered("http", events([b"a", b"b"]), url=server.url, format="jsonl")
    assert server.seen[0].body == b'{"value": "a"}\n{"value": "b"}\n'
    assert server.seen[0].headers["content-type"] == "application/x-ndjson"


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_event_id_setting_adds_ids_to_json_objects(server: Server, form: str) -> None:
    block = events([b"a", b"b", b"c"], first=7)
    objects = [b'{"value":"a"}', b"{}", b'{"value":{"event_id":1}}']
    block = with_column(block, "payload", pa.array(objects, pa.binary()))
    delivered("http", block.slice(1), url=server.url, format=form, event_id='the "id"')
    delivered("http", block, url=server.url, format=form, event_id="event_id")
    second, first = server.seen
    found = [
        json.loads(seen.body) if form == "json" else [*map(json.loads, seen.body.splitlines())]
        for seen in (first, second)
    ]
    assert found[0] == [
        {"event_id": "alerts/0/7", "value": "a"},
        {"event_id": "alerts/0/8"},
        {"event_id": "alerts/0/9", "value": {"event_id": 1}},
    ]
    assert [each['the "id"'] for each in found[1]] == ["alerts/0/8", "alerts/0/9"]


def test_rows_without_a_position_get_no_event_id(server: Server) -> None:
    block = events([b"a"]).drop_columns(["partition", "offset"])
    delivered("http", block, url=server.url, event_id="event_id")
    assert server.seen[0].body == b'[{"value": "a"}]'


def test_raw_body_has_a_line_with_each_value(server: Server) -> None:
    block = with_column(events([b"a", b"b"]), "payload", pa.array([b"a\xff", None], pa.binary()))
    delivered("http", block, url=server.url, format="raw")
    assert server.seen[0].body == b"a\xff\n\n"
    assert server.seen[0].headers["content-type"].startswith("text/plain")


def test_slice_of_a_block_is_sent_without_other_rows(server: Server) -> None:
    """The engine cuts blocks by slices, whose buffers are those of the whole."""
    delivered("http", events([b"a", b"b", b"c", b"d"]).slice(1, 2), url=server.url)
    assert json.loads(server.seen[0].body) == [{"value": "b"}, {"value": "c"}]


def test_empty_block_sends_no_request(server: Server) -> None:
    delivered("http", events([]), url=server.url)
    delivered("http", events([]), url=server.url + "/{key}")
    assert not server.seen


@pytest.mark.parametrize("form", ["json", "raw"])
def test_one_by_one_sends_a_request_per_event_over_one_connection(
    server: Server, form: str
) -> None:
    delivered("http", events([b"a", b"b", b"c"]), url=server.url, one_by_one=True, format=form)
    assert [json.loads(seen.body)["value"] for seen in server.seen] == ["a", "b", "c"]
    assert len({seen.headers["idempotency-key"] for seen in server.seen}) == 3
    assert server.connections == 1


def test_body_template_escapes_values_for_json(server: Server) -> None:
    hard = 'say "no"\\ \n\x01 ünï'.encode()
    body = '{{"text": "{source}: {value}"}}'
    block = events([hard, b"easy"], sources=["a", None])
    delivered("http", block, url=server.url, body=body)
    assert json.loads(server.seen[0].body) == [
        {"text": f"a: {hard.decode()}"},
        {"text": ": easy"},
    ]


def test_raw_body_template_does_not_escape_values(server: Server) -> None:
    delivered("http", events([b'"x"']), url=server.url, format="raw", body="<{value}>")
    assert server.seen[0].body == b'<"x">\n'


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_method_setting_is_used(server: Server, method: str) -> None:
    delivered("http", events([b"a"]), url=server.url, method=method)
    assert server.seen[0].method == method


def test_configured_headers_replace_default_ones(server: Server) -> None:
    headers = {"content-type": "application/vnd.shop+json", "user-agent": "shop", "X-Org": "1"}
    with output("http", url=server.url, headers=headers) as made:
        made.check()
        made.send(made.prepare(events([b"a"])))
    for seen in server.seen:
        assert {name: seen.headers[name.lower()] for name in headers} == headers


# ── where to ─────────────────────────────────────────────────────────────────────────────────────


def test_url_template_sends_events_to_different_urls(server: Server) -> None:
    block = events([b"a", b"b", b"c"], keys=["x/../y", "z", "x/../y"])
    url = f"{server.url}/{{key}}?day={{timestamp:%Y-%m-%d}}"
    delivered("http", block, url=url, headers={"X-Key": "k={key}"})
    found = {seen.path: (seen.headers["x-key"], json.loads(seen.body)) for seen in server.seen}
    assert found == {
        "/x%2F..%2Fy?day=2023-11-14": ("k=x/../y", [{"value": "a"}, {"value": "c"}]),
        "/z?day=2023-11-14": ("k=z", [{"value": "b"}]),
    }


def test_values_cannot_change_the_path_or_add_a_header(server: Server) -> None:
    block = events([b"a"], keys=[".."], sources=["b\r\nX-Evil: yes\x00é"])
    url = f"{server.url}/in/{{key}}/out"
    delivered("http", block, url=url, headers={"X-Source": "{source}"})
    [seen] = server.seen
    assert seen.path == "/in/%2E%2E/out"
    assert "x-evil" not in seen.headers
    assert seen.headers["x-source"].encode("latin-1").decode() == "b  X-Evil: yes é"


def test_failing_url_fails_only_its_events(server: Server) -> None:
    def behave(handler: Any) -> Reply:
        seen = handler.read()
        return Reply({"/bad": 400, "/gone": 404}.get(seen.path, 200))

    server.behave = behave
    block = events([b"0", b"1", b"2", b"3"], keys=["good", "bad", "gone", "bad"])
    with pytest.raises(PartlyDelivered) as raised:
        delivered("http", block, url=server.url + "/{key}")
    failures = raised.value.failures
    assert set(failures) == {1, 2, 3}
    assert isinstance(failures[1], Never)
    assert isinstance(failures[2], RetryLater)


def test_failing_server_gets_no_further_requests(server: Server) -> None:
    server.answers(Reply(200), Reply(503, headers={"Retry-After": "7"}))
    block = events([b"0", b"1", b"2", b"3"])
    with pytest.raises(PartlyDelivered) as raised:
        delivered("http", block, url=server.url, one_by_one=True)
    assert set(raised.value.failures) == {1, 2, 3}
    assert {error.after for error in raised.value.failures.values()} == {7.0}  # type: ignore[attr-defined]
    assert len(server.seen) == 2


def test_send_of_many_requests_ends_after_its_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestOutput, "max_send_seconds", 0.0)
    with pytest.raises(PartlyDelivered) as raised:
        delivered("http", events([b"0", b"1", b"2"]), url=server.url, one_by_one=True)
    assert set(raised.value.failures) == {1, 2}
    assert len(server.seen) == 1


def test_one_refused_event_does_not_stop_others(server: Server) -> None:
    server.answers(Reply(200), Reply(422), Reply(200))
    with pytest.raises(PartlyDelivered) as raised:
        delivered("http", events([b"0", b"1", b"2"]), url=server.url, one_by_one=True)
    assert set(raised.value.failures) == {1}
    assert len(server.seen) == 3


def test_bad_event_of_a_refused_request_is_found(server: Server) -> None:
    def behave(handler: Any) -> Reply:
        seen = handler.read()
        return Reply(400 if b"poison" in seen.body else 413 if b"large" in seen.body else 200)

    server.behave = behave
    values = [b"%d" % number for number in range(100)]
    values[37], values[64] = b"poison", b"large"
    block = events(values, keys=["a", "b"] * 50)
    with pytest.raises(PartlyDelivered) as raised:
        delivered("http", block, url=server.url + "/{key}")
    kinds = {row: type(error) for row, error in raised.value.failures.items()}
    assert kinds == {37: Never, 64: PayloadTooLarge}


# ── which is which ───────────────────────────────────────────────────────────────────────────────


def key(server: Server, block: Any, **settings: Any) -> str | None:
    delivered("http", block, url=server.url, **settings)
    return server.seen[-1].headers.get("idempotency-key")


def test_idempotency_key_is_equal_only_for_the_same_events(server: Server) -> None:
    block = events([b"a", b"b", b"c"], first=7)
    first = key(server, block)
    assert first is not None
    assert first.startswith("alerts/0/7-alerts/0/9-")
    assert key(server, block) == first
    assert key(server, block.take([0, 2])) != first, "an event between was left out"
    assert key(server, block, format="raw", body="{value}") != first, "another form of them"
    later = with_column(block, "timestamp", block.column("timestamp").take([1, 2, 2]))
    assert key(server, later) != first, "a queue made anew counts from the beginning"
    assert key(server, events([b"a", b"b", b"c"], first=7, queue="orders")) != first
    assert key(server, block, idempotency_key=False) is None


def test_idempotency_key_in_the_main_lane_names_the_main_queue(server: Server) -> None:
    """There, the column ``queue`` says where they go next."""
    found = key(server, events([b"a"], first=3, queue=["alerts", "orders"]))
    assert found is not None
    assert found.startswith("main/0/3-main/0/3-")


def test_rows_without_a_position_get_no_idempotency_key(server: Server) -> None:
    assert key(server, events([b"a"]).select(["value", "payload"])) is None


# ── secrets and certificates ─────────────────────────────────────────────────────────────────────


def test_changed_token_file_is_used_for_the_next_request(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "token"
    for secret in ("first", "second"):
        file.write_text(f"{secret}\n")
        delivered("http", events([b"a"]), url=server.url, auth={"token_file": str(file)})
        assert server.seen[-1].headers["authorization"] == f"Bearer {secret}"


def test_password_is_read_from_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", SECRET)
    auth = {"username": "lane", "password_env": "SHOP_PASSWORD"}
    delivered("http", events([b"a"]), url=server.url, auth=auth)
    kind, _, shown_secret = server.seen[0].headers["authorization"].partition(" ")
    assert kind == "Basic"
    assert base64.b64decode(shown_secret).decode() == f"lane:{SECRET}"


def test_missing_secret_raises_a_retryable_error(server: Server, tmp_path: Path) -> None:
    for auth in ({"token_env": "NOT_SET_ANYWHERE"}, {"token_file": str(tmp_path / "none")}):
        with pytest.raises(RetryLater, match="token"):
            delivered("http", events([b"a"]), url=server.url, auth=auth)
    assert not server.seen


def test_secret_of_several_lines_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "one\ntwo")
    with pytest.raises(RetryLater, match="SHOP_TOKEN is not one line") as raised:
        delivered("http", events([b"a"]), url=server.url, auth={"token_env": "SHOP_TOKEN"})
    assert "two" not in str(raised.value)


def test_errors_do_not_contain_the_secret(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", SECRET)
    server.answers(Reply(401, b"no such token"))
    url = f"{server.url}/?key=of+somebody"
    with pytest.raises(RetryLater, match="no such token") as raised:
        delivered("http", events([b"a"]), url=url, auth={"token_env": "SHOP_TOKEN"})
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
    found = json.dumps(shown(loads(text, environment={"SHOP_TOKEN": SECRET})))
    assert "SHOP_TOKEN" in found
    assert SECRET not in found
    assert "correct horse" not in found
    assert "battery" not in found


def test_mutual_tls_delivers(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    with served(made.server_context(mutual=True)) as server:
        delivered("http", events([b"a"]), url=server.url, tls=made.client_knob())
        assert len(server.seen) == 1
        with pytest.raises(RetryLater):
            delivered("http", events([b"a"]), url=server.url, tls={"ca": made.ca})


def test_untrusted_server_is_refused_unless_verify_is_off(tmp_path: Path) -> None:
    with served(Certificates(tmp_path).server_context()) as server:
        with pytest.raises(RetryLater, match="certificate verify failed"):
            delivered("http", events([b"a"]), url=server.url)
        assert not server.seen
        delivered("http", events([b"a"]), url=server.url, tls={"verify": False})
        assert len(server.seen) == 1


# ── threads ──────────────────────────────────────────────────────────────────────────────────────


def test_several_threads_share_the_connections_of_an_output(server: Server) -> None:
    blocks = [events([b"%d" % number], first=number) for number in range(200)]
    with output("http", url=server.url) as made, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda block: made.send(made.prepare(block)), blocks))
    found = sorted(int(json.loads(seen.body)[0]["value"]) for seen in server.seen)
    assert found == list(range(200))
    assert server.connections <= 8


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


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
        ({"auth": {"password_env": "A"}}, "need a username"),
        ({"auth": {"token_env": "A", "username": "b"}}, "needs password_env"),
        ({"tls": {"verify": False}}, "begins with https"),
        ({"timeout": 0}, "greater than 0"),
        ({"event_id": "id", "format": "raw"}, "needs events as JSON objects"),
        ({"event_id": "id", "body": "x"}, "needs events as JSON objects"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        output("http", **{"url": "http://h/", **settings})


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
    with output("http", url="http://h/", body=template) as made, pytest.raises(
        RetryLater, match=words
    ):  # fmt: skip
        made.prepare(events([b"a"]))
