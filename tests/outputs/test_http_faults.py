"""What do outputs over HTTP do when servers fail in any way?"""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Certificates
from tests.outputs.web_blocks import deliver, make_events, make_output
from tests.outputs.web_servers import (
    TIMEOUT,
    Behaviour,
    Handler,
    Reply,
    Server,
    get_unused_url,
    run_server,
)
from turnlane.delivery.error_policy import get_error_type
from turnlane.errors import Never, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.outputs.connections import ClientTls
from turnlane.outputs.http_client import (
    HttpClient,
    HttpLimits,
    HttpResponse,
    get_response_error,
    parse_retry_after,
    quote_body,
)
from turnlane.pacing import MAX_RETRY_AFTER

SHORT_TIMEOUTS = {"timeout": "500ms", "connect_timeout": "500ms"}
"""For servers that never answer: the test waits for this time."""


@pytest.fixture
def server() -> Iterator[Server]:
    with run_server() as found:
        yield found


def get_failure(server: Server, behave: Behaviour) -> TurnlaneError:
    """Return the error of a delivery to this server; check that the next delivery works."""
    server.behave = behave
    with make_output("http", url=server.url) as output:
        with pytest.raises(TurnlaneError) as raised:
            output.send(output.prepare(make_events([b"a", b"b"])))
        server.behave = server.accept
        before = len(server.requests)
        output.send(output.prepare(make_events([b"a", b"b"])))
        assert len(server.requests) == before + 1
    return raised.value


def make_behaviour(reply: Reply) -> Behaviour:
    def behave(handler: Handler) -> Reply:
        handler.read()
        return reply

    return behave


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Never),
        (422, Never),
        (413, PayloadTooLarge),
        (414, PayloadTooLarge),
        (431, PayloadTooLarge),
        *((status, RetryLater) for status in (401, 403, 404, 405, 407, 408, 425, 429)),
        *((status, RetryLater) for status in (301, 304, 409, 418, 500, 502, 503, 504, 599)),
    ],
)
def test_each_status_becomes_the_right_error(
    server: Server, status: int, kind: type[TurnlaneError]
) -> None:
    error = get_failure(
        server, make_behaviour(Reply(status, b"" if status == 304 else b"because of that"))
    )
    assert type(error) is kind
    assert f"HTTP {status}" in str(error)
    assert "because of that" in str(error) or status == 304


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "auth"),
        (404, "client_error"),
        (408, "timeout"),
        (429, "rate_limit"),
        (500, "server_error"),
        (504, "timeout"),
    ],
)
def test_each_status_has_its_label_in_metrics(server: Server, status: int, kind: str) -> None:
    assert get_error_type(get_failure(server, make_behaviour(Reply(status)))) == kind


def test_silent_server_is_a_timeout_and_absent_server_a_network_error(
    server: Server,
) -> None:
    server.behave = server.hang
    with (
        make_output("http", url=server.url, **SHORT_TIMEOUTS) as output,
        pytest.raises(RetryLater) as late,
    ):
        output.send(output.prepare(make_events([b"a"])))
    with make_output("http", url=get_unused_url()) as output, pytest.raises(RetryLater) as away:
        output.send(output.prepare(make_events([b"a"])))
    assert (get_error_type(late.value), get_error_type(away.value)) == ("timeout", "network")


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_every_2xx_status_counts_as_delivered(server: Server, status: int) -> None:
    server.set_replies(Reply(status))
    deliver("http", make_events([b"a"]), url=server.url)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds_is_passed_on(server: Server, status: int) -> None:
    error = get_failure(server, make_behaviour(Reply(status, headers={"Retry-After": "120"})))
    assert isinstance(error, RetryLater)
    assert error.after == 120.0


def test_retry_after_as_a_date_is_passed_on(server: Server) -> None:
    date = formatdate(time.time() + 3600, usegmt=True)
    error = get_failure(server, make_behaviour(Reply(429, headers={"Retry-After": date})))
    assert isinstance(error, RetryLater)
    assert error.after is not None
    assert 3000 < error.after <= 3600


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("", None),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("1e300", MAX_RETRY_AFTER),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
    ],
)
def test_retry_after_header_is_parsed(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text, now=1000.0) == seconds


@given(st.text())
def test_any_retry_after_header_gives_a_valid_wait_or_none(text: str) -> None:
    found = parse_retry_after(text, now=1000.0)
    assert found is None or 0 <= found <= MAX_RETRY_AFTER


@given(st.integers(100, 999), st.binary(max_size=2000))
def test_every_status_but_2xx_is_an_error(status: int, body: bytes) -> None:
    error = get_response_error(HttpResponse(status, {}, body), "http://h", 0.0)
    assert (error is None) == (200 <= status < 300)
    assert len(quote_body(body)) <= 302


def test_redirect_is_not_followed(server: Server) -> None:
    elsewhere = {"Location": f"{server.url}/elsewhere"}
    server.set_replies(Reply(307, headers=elsewhere))
    with pytest.raises(RetryLater, match=r"does not follow redirects.*elsewhere"):
        deliver("http", make_events([b"a"]), url=server.url)
    assert len(server.requests) == 1


def test_response_before_the_whole_body_is_sent_is_read(server: Server) -> None:
    """The server refuses a body that is too large before all of it is sent."""
    server.behave = server.refuse_before_reading
    with pytest.raises(PayloadTooLarge):
        deliver("http", make_events([b"x" * 40_000_000]), url=server.url)


def test_long_response_is_not_read_to_its_end(server: Server) -> None:
    server.set_replies(Reply(200, b"x" * 10_000_000))
    deliver("http", make_events([b"a"]), url=server.url)


# ── no answer ────────────────────────────────────────────────────────────────────────────────────


def test_refused_connection_is_retryable() -> None:
    with pytest.raises(RetryLater, match="Connection refused"):
        deliver("http", make_events([b"a"]), url=get_unused_url())


def test_unknown_host_is_retryable() -> None:
    with pytest.raises(RetryLater, match=r"nobody\.invalid"):
        deliver("http", make_events([b"a"]), url="http://nobody.invalid/")


def test_server_that_never_answers_times_out(server: Server) -> None:
    server.behave = server.hang
    with pytest.raises(RetryLater, match=r"no answer within 0\.5 s"):
        deliver("http", make_events([b"a"]), url=server.url, **SHORT_TIMEOUTS)


def test_server_that_never_reads_times_out(server: Server) -> None:
    def behave(_: Handler) -> None:
        server.ended.wait(TIMEOUT)

    server.behave = behave
    with pytest.raises(RetryLater, match="no answer within 1 s"):
        deliver("http", make_events([b"x" * 40_000_000]), url=server.url, timeout="1s")


def test_sending_the_body_may_take_longer_than_connect_timeout(server: Server) -> None:
    """The server sleeps longer than the limit for connecting."""

    def behave(handler: Handler) -> Reply:
        time.sleep(1)
        handler.read()
        return Reply()

    server.behave = behave
    block = make_events([b"x" * 40_000_000])
    deliver("http", block, url=server.url, connect_timeout="500ms", timeout=TIMEOUT)


def test_connection_reset_while_sending_is_retryable(server: Server) -> None:
    assert isinstance(get_failure(server, server.reset_in_the_body), RetryLater)


def test_request_repeated_after_a_lost_response_has_the_same_key(server: Server) -> None:
    assert isinstance(get_failure(server, server.reset_after_request), RetryLater)
    first, second = (request.headers["idempotency-key"] for request in server.requests)
    assert first == second


def test_response_that_is_not_http_is_retryable(server: Server) -> None:
    assert isinstance(get_failure(server, server.send_garbage), RetryLater)


def test_response_that_never_ends_is_cut_off(server: Server) -> None:
    """It has said 200: the events are there. But the connection is of no more use."""
    server.behave = server.answer_slowly
    began = time.monotonic()
    deliver("http", make_events([b"a"]), url=server.url, timeout="2s")
    assert time.monotonic() - began < TIMEOUT


def test_idle_connection_closed_by_the_server_is_replaced(server: Server) -> None:
    server.set_replies(Reply(200, headers={"Connection": "close"}))
    with make_output("http", url=server.url) as output:
        for _ in range(3):
            output.send(output.prepare(make_events([b"a"])))
    assert server.connections == 3


@pytest.mark.parametrize(
    ("raw", "body", "is_complete"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde", True),
        (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"abc", False),
        (b"Content-Length: 10\r\n\r\nabc", b"abc", False),
        (b"Connection: close\r\n\r\nabc", b"abc", True),
        (b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"abc"), b"abc", True),
        (b"Content-Encoding: gzip\r\n\r\nabc", b"abc", True),
    ],
    ids=["chunked", "cut chunks", "cut body", "without length", "gzip", "not gzip"],
)
def test_response_is_read_in_every_form(
    server: Server, raw: bytes, body: bytes, is_complete: bool
) -> None:
    def behave(handler: Handler) -> None:
        handler.read()
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + raw)
        handler.close_connection = True

    server.behave = behave
    with HttpClient(server.url, ClientTls(), HttpLimits(TIMEOUT, TIMEOUT)) as client:
        response = client.request("POST", server.url, {}, b"a")
    assert (response.status, response.body, response.is_complete) == (200, body, is_complete)


def test_url_with_special_characters_is_quoted(server: Server) -> None:
    with HttpClient(server.url, ClientTls(), HttpLimits(TIMEOUT, TIMEOUT)) as client:
        client.request("POST", f"{server.url}/a b/ü%20/x?q=1 2&z=%C3%A4", {}, b"a")
    assert [request.path for request in server.requests] == ["/a%20b/%C3%BC%20/x?q=1%202&z=%C3%A4"]


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────


def test_https_to_a_plain_server_is_retryable(server: Server) -> None:
    url = server.url.replace("http:", "https:")
    with pytest.raises(RetryLater):
        deliver("http", make_events([b"a"]), url=url, **SHORT_TIMEOUTS)


def test_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    other = certificates.issue("other", "example.org")
    with (
        run_server(certificates.server_context(other)) as server,
        pytest.raises(RetryLater, match="certificate"),
    ):
        deliver("http", make_events([b"a"]), url=server.url, tls={"ca": certificates.ca})


def test_missing_certificate_files_raise_a_retryable_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    for tls in ({"ca": missing}, {"cert": missing, "key": missing}):
        with pytest.raises(RetryLater, match=r"none\.pem"):
            deliver("http", make_events([b"a"]), url="https://127.0.0.1:1/", tls=tls)


# ── before anything is sent ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", [200, 404, 405])
def test_check_of_a_reachable_server_passes_without_delivering(server: Server, status: int) -> None:
    server.set_replies(Reply(status))
    for url in (server.url + "/events", server.url + "/{key}"):
        with make_output("http", url=url) as output:
            output.check()
    assert [(request.method, request.path) for request in server.requests] == [
        ("HEAD", "/events"),
        ("HEAD", "/"),
    ]


def test_check_raises_the_error_of_a_delivery(server: Server) -> None:
    server.set_replies(Reply(401))
    with make_output("http", url=server.url) as output, pytest.raises(RetryLater, match="401"):
        output.check()
    with (
        make_output("http", url=get_unused_url()) as output,
        pytest.raises(RetryLater, match="refused"),
    ):
        output.check()
