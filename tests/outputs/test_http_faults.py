"""What does an output that speaks HTTP make of everything that a server can do to it?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Certificates
from tests.outputs.web_blocks import delivered, events, output
from tests.outputs.web_servers import (
    PATIENCE,
    Behaviour,
    Handler,
    Reply,
    Server,
    served,
    unused_url,
)
from turnlane.delivery.error_policy import get_error_type
from turnlane.errors import Never, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.outputs.http_connections import LONGEST_WAIT, Answer, error_of, quoted, retry_after

HASTY = {"timeout": "500ms", "connect_timeout": "500ms"}
"""For servers that never answer: the test waits as long."""


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as found:
        yield found


def failure(server: Server, behave: Behaviour) -> TurnlaneError:
    """The error of a delivery to a server that behaves so; the next one, to a good one, works."""
    server.behave = behave
    with output("http", url=server.url) as made:
        with pytest.raises(TurnlaneError) as raised:
            made.send(made.prepare(events([b"a", b"b"])))
        server.behave = server.well
        before = len(server.seen)
        made.send(made.prepare(events([b"a", b"b"])))
        assert len(server.seen) == before + 1
    return raised.value


def replying(reply: Reply) -> Behaviour:
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
def test_each_status_is_the_error_that_says_what_to_do(
    server: Server, status: int, kind: type[TurnlaneError]
) -> None:
    error = failure(server, replying(Reply(status, b"" if status == 304 else b"because of that")))
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
def test_metrics_count_by_what_went_wrong(server: Server, status: int, kind: str) -> None:
    assert get_error_type(failure(server, replying(Reply(status)))) == kind


def test_who_does_not_answer_is_late_and_who_is_not_there_a_matter_of_the_network(
    server: Server,
) -> None:
    server.behave = server.hang
    with output("http", url=server.url, **HASTY) as made, pytest.raises(RetryLater) as late:
        made.send(made.prepare(events([b"a"])))
    with output("http", url=unused_url()) as made, pytest.raises(RetryLater) as away:
        made.send(made.prepare(events([b"a"])))
    assert (get_error_type(late.value), get_error_type(away.value)) == ("timeout", "network")


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_whatever_is_2xx_is_delivered(server: Server, status: int) -> None:
    server.answers(Reply(status))
    delivered("http", events([b"a"]), url=server.url)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_says_when_to_come_back_in_seconds(server: Server, status: int) -> None:
    error = failure(server, replying(Reply(status, headers={"Retry-After": "120"})))
    assert isinstance(error, RetryLater)
    assert error.after == 120.0


def test_a_server_says_when_to_come_back_by_a_date(server: Server) -> None:
    date = formatdate(time.time() + 3600, usegmt=True)
    error = failure(server, replying(Reply(429, headers={"Retry-After": date})))
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
        ("1e300", LONGEST_WAIT),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
    ],
)
def test_retry_after(text: str | None, seconds: float | None) -> None:
    assert retry_after(text, now=1000.0) == seconds


@given(st.text())
def test_no_retry_after_is_too_odd(text: str) -> None:
    found = retry_after(text, now=1000.0)
    assert found is None or 0 <= found <= LONGEST_WAIT


@given(st.integers(100, 999), st.binary(max_size=2000))
def test_every_answer_but_2xx_is_an_error(status: int, body: bytes) -> None:
    error = error_of(Answer(status, {}, body), "http://h", 0.0)
    assert (error is None) == (200 <= status < 300)
    assert len(quoted(body)) <= 302


def test_a_redirect_is_not_followed(server: Server) -> None:
    elsewhere = {"Location": f"{server.url}/elsewhere"}
    server.answers(Reply(307, headers=elsewhere))
    with pytest.raises(RetryLater, match=r"not followed.*elsewhere"):
        delivered("http", events([b"a"]), url=server.url)
    assert len(server.seen) == 1


def test_what_it_is_told_early_is_heard(server: Server) -> None:
    """The refusal of a body that is too large comes before all of it was sent."""
    server.behave = server.refuse_early
    with pytest.raises(PayloadTooLarge):
        delivered("http", events([b"x" * 40_000_000]), url=server.url)


def test_a_long_answer_is_not_read_to_its_end(server: Server) -> None:
    server.answers(Reply(200, b"x" * 10_000_000))
    delivered("http", events([b"a"]), url=server.url)


# ── no answer ────────────────────────────────────────────────────────────────────────────────────


def test_nobody_is_there() -> None:
    with pytest.raises(RetryLater, match="Connection refused"):
        delivered("http", events([b"a"]), url=unused_url())


def test_nobody_has_that_name() -> None:
    with pytest.raises(RetryLater, match=r"nobody\.invalid"):
        delivered("http", events([b"a"]), url="http://nobody.invalid/")


def test_a_server_that_hangs_is_left(server: Server) -> None:
    server.behave = server.hang
    with pytest.raises(RetryLater, match=r"no answer within 0\.5 s"):
        delivered("http", events([b"a"]), url=server.url, **HASTY)


def test_a_server_that_does_not_even_read_is_left(server: Server) -> None:
    def behave(_: Handler) -> None:
        server.ended.wait(PATIENCE)

    server.behave = behave
    with pytest.raises(RetryLater, match="timed out"):
        delivered("http", events([b"x" * 40_000_000]), url=server.url, timeout="1s")


def test_a_body_may_take_longer_than_a_connection(server: Server) -> None:
    """The test waits: it is about time."""

    def behave(handler: Handler) -> Reply:
        time.sleep(1)
        handler.read()
        return Reply()

    server.behave = behave
    block = events([b"x" * 40_000_000])
    delivered("http", block, url=server.url, connect_timeout="500ms", timeout=PATIENCE)


def test_a_server_that_resets_the_connection_in_the_body(server: Server) -> None:
    assert isinstance(failure(server, server.reset_in_the_body), RetryLater)


def test_a_server_that_takes_all_and_vanishes_gets_the_same_key_again(server: Server) -> None:
    assert isinstance(failure(server, server.vanish), RetryLater)
    first, second = (seen.headers["idempotency-key"] for seen in server.seen)
    assert first == second


def test_a_server_that_speaks_no_http(server: Server) -> None:
    assert isinstance(failure(server, server.garbage), RetryLater)


def test_an_answer_that_never_ends_is_left(server: Server) -> None:
    """It has said 200: the events are there. But the connection is of no more use."""
    server.behave = server.drip
    began = time.monotonic()
    delivered("http", events([b"a"]), url=server.url, timeout="2s")
    assert time.monotonic() - began < PATIENCE


def test_a_connection_that_was_closed_meanwhile_is_no_error(server: Server) -> None:
    server.answers(Reply(200, headers={"Connection": "close"}))
    with output("http", url=server.url) as made:
        for _ in range(3):
            made.send(made.prepare(events([b"a"])))
    assert server.connections == 3


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────


def test_https_to_a_server_that_has_none(server: Server) -> None:
    url = server.url.replace("http:", "https:")
    with pytest.raises(RetryLater):
        delivered("http", events([b"a"]), url=url, **HASTY)


def test_a_certificate_for_another_name(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    other = made.issue("other", "example.org")
    with (
        served(made.server_context(other)) as server,
        pytest.raises(RetryLater, match="certificate"),
    ):
        delivered("http", events([b"a"]), url=server.url, tls={"ca": made.ca})


def test_events_wait_for_certificates_that_are_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    for tls in ({"ca": missing}, {"cert": missing, "key": missing}):
        with pytest.raises(RetryLater, match=r"none\.pem"):
            delivered("http", events([b"a"]), url="https://127.0.0.1:1/", tls=tls)


# ── before anything is sent ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", [200, 404, 405])
def test_check_delivers_nothing_and_is_content_with_a_server_that_is_there(
    server: Server, status: int
) -> None:
    server.answers(Reply(status))
    for url in (server.url + "/events", server.url + "/{key}"):
        with output("http", url=url) as made:
            made.check()
    assert [(seen.method, seen.path) for seen in server.seen] == [
        ("HEAD", "/events"),
        ("HEAD", "/"),
    ]


def test_check_raises_what_a_delivery_would(server: Server) -> None:
    server.answers(Reply(401))
    with output("http", url=server.url) as made, pytest.raises(RetryLater, match="401"):
        made.check()
    with output("http", url=unused_url()) as made, pytest.raises(RetryLater, match="refused"):
        made.check()
