"""Tests that the OpenAPI document agrees with the server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.http_harness import HttpNode, serve_http
from turnlane.delivery.settings import DeliverySettings
from turnlane.node.breakers import BreakerRequest
from turnlane.node.http import describe_plane
from turnlane.node.http.events import FIELDS, decode_json, decode_ndjson, encode_events
from turnlane.serving.auth import TokenSettings

COMPONENTS = describe_plane()["components"]


def build_validator(name: str) -> Any:
    """Return the validator of one schema of the document."""
    reference = {"$ref": f"#/components/schemas/{name}", "components": COMPONENTS}
    return jsonschema_rs.Draft202012Validator(reference)


NEW_EVENT, EVENT = build_validator("NewEvent"), build_validator("Event")

VALUES = ("value", "value_base64", "data")
NO_TEXT = st.sampled_from(
    [-1, 0, 3, 8, 1.5, 2**63, None, True, [], ["a"], {}, {"a": "b"}, {"a": 1}, {"a": None}]
)
# The schema says that both are text. Which text is allowed is in their descriptions only.
BASE64 = st.sampled_from(["", "YQ=="])
TIMES = st.sampled_from(["2026-01-31T12:00:00Z", 1769860800000000])
TEXTS = st.sampled_from(["", "a", "größe"])
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "value": TEXTS,
    "value_base64": BASE64,
    "data": TEXTS | NO_TEXT,
    "key": TEXTS | st.none(),
    "headers": st.sampled_from([None, {}, {"a": "b"}]),
    "severity": st.none() | st.integers(0, 7),
    "source": TEXTS | st.none(),
    "timestamp": TIMES | st.none(),
    "offset": TEXTS | NO_TEXT,
}


@st.composite
def sent_events(draw: st.DrawFn) -> dict[str, Any]:
    """Generate an event with at most one field that may be wrong."""
    value = draw(st.sampled_from(VALUES))
    rest = draw(st.sets(st.sampled_from([name for name in FIELDS if name not in VALUES])))
    event = {name: draw(RIGHT[name]) for name in (value, *rest)}
    if draw(st.booleans()):
        event[draw(st.sampled_from([*FIELDS, "severty"]))] = draw(NO_TEXT)
    if draw(st.integers(0, 9)) == 0:
        del event[value]
    return event


def test_generated_events_cover_all_fields() -> None:
    assert RIGHT.keys() == set(FIELDS)


@settings(max_examples=400, deadline=None)
@given(sent_events())
def test_event_is_accepted_exactly_if_the_document_allows_it(event: dict[str, Any]) -> None:
    body = json.dumps(event).encode()
    for decode in (decode_json, decode_ndjson):
        try:
            block = decode(body, 0)
        except ValueError:
            assert not NEW_EVENT.is_valid(event)
        else:
            assert NEW_EVENT.is_valid(event)
            (shown,) = encode_events(block, 5)
            assert EVENT.is_valid(shown)
            assert NEW_EVENT.is_valid(shown), "an event that was read can be sent again"


def test_references_and_schemas_of_the_document_match() -> None:
    text = json.dumps(describe_plane())
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) == set(COMPONENTS["schemas"])


def test_operation_ids_are_unique() -> None:
    names = [
        operation["operationId"]
        for item in describe_plane()["paths"].values()
        for method, operation in item.items()
        if method != "parameters"
    ]
    assert len(names) == len(set(names))


def test_breaker_has_the_documented_form(tmp_path: Path) -> None:
    with serve_http(tmp_path) as at:
        at.node.breakers.permit(BreakerRequest("send", "orders", "task", DeliverySettings()))
        shown = at.http.get("/breakers").json()
        assert shown["breakers"].keys() == {"send"}
        build_validator("Breakers").validate(shown)
        build_validator("Breaker").validate(at.http.post("/breakers/send/reset").json())


TOKEN = TokenSettings.model_validate({"name": "t", "secret": "s" * 9, "rights": {"x": ["read"]}})


def test_token_without_the_documented_right_is_refused(tmp_path: Path) -> None:
    document = describe_plane()["paths"]
    with serve_http(tmp_path, tokens=(TOKEN,)) as at:
        for path, item in document.items():
            for method, operation in item.items():
                if method == "parameters":
                    continue
                url = re.sub(r"\{queue\}|\{table\}", "orders", path)
                statuses = operation["responses"].keys()
                assert send_request(at, method, url, {}) == (401 if "401" in statuses else 200), (
                    path
                )
                allowed = send_request(at, method, url, {"authorization": f"Bearer {'s' * 9}"})
                if "{queue}" in path or "{table}" in path or path == "/metrics":
                    assert allowed == 403, path
                else:
                    assert allowed in (200, 404), path


def send_request(at: HttpNode, method: str, url: str, headers: dict[str, str]) -> int:
    return at.http.request(method, url, headers=headers).status_code


def test_wrong_token_is_reported_before_wrong_parameters(tmp_path: Path) -> None:
    with serve_http(tmp_path, tokens=(TOKEN,)) as at:
        for path in ("/queues", "/breakers", "/tables", "/queues/orders/peek"):
            assert at.http.get(f"{path}?nonsense=1").status_code == 401
