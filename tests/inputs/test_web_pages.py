"""Web pages cannot post to the HTTP inputs that have no tokens; other senders can."""

from __future__ import annotations

import pytest

from tests.inputs.test_expired_tokens import REQUESTS
from tests.inputs.web_inputs import SECRET, TOKENS, WEB, read_values, run_web_input
from turnlane.inputs.api import Input
from turnlane.node.node import Node

FOREIGN = {
    "another origin": {"origin": "https://evil.example"},
    "no origin": {"origin": "null"},
    "another site": {"sec-fetch-site": "cross-site"},
    "a name that resolves to this machine": {
        "origin": "http://evil.example:8088",
        "host": "evil.example:8088",
        "sec-fetch-site": "same-origin",
    },
}


def send(found: Input, kind: str, headers: dict[str, str]) -> int:
    path, content_type, body = REQUESTS[kind]
    url = f"http://127.0.0.1:{str(found.address).rpartition(':')[2]}/{path}"
    return WEB.post(url, content=body, headers={"content-type": content_type} | headers).status_code


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("page", FOREIGN)
def test_web_page_posts_to_an_input_without_tokens_is_refused(
    node: Node, kind: str, page: str
) -> None:
    with run_web_input(kind, node) as found:
        assert send(found, kind, FOREIGN[page]) == 403
        assert (found.counters.invalid, read_values(node)) == (1, [])


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("host", ["localhost:4318", "127.0.0.1", "[::1]:9200"])
def test_sender_with_a_name_of_this_machine_is_accepted(node: Node, kind: str, host: str) -> None:
    with run_web_input(kind, node) as found:
        assert send(found, kind, {"host": host}) == 200
        assert send(found, kind, {"host": host, "origin": f"http://{host}"}) == 200


@pytest.mark.parametrize("kind", REQUESTS)
def test_web_page_posts_to_a_public_input_by_a_name_of_its_own_is_refused(
    node: Node, kind: str
) -> None:
    rebound = FOREIGN["a name that resolves to this machine"]
    with run_web_input(kind, node, listen="0.0.0.0:0", insecure=True) as found:
        assert send(found, kind, rebound) == 403
        assert send(found, kind, {"host": "queue.internal:4318"}) == 200  # no browser
        own = "192.0.2.7:4318"
        assert send(found, kind, {"host": own, "origin": f"http://{own}"}) == 200


@pytest.mark.parametrize("kind", REQUESTS)
def test_web_page_with_a_token_is_accepted(node: Node, kind: str) -> None:
    page = {**FOREIGN["another origin"], "authorization": f"Bearer {SECRET}"}
    with run_web_input(kind, node, tokens=TOKENS) as found:
        assert send(found, kind, page) == 200
