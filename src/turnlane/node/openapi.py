"""The HTTP plane's description of itself: OpenAPI 3.1, complete and by hand."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any, Final

from turnlane.node.openapi_schemas import KEPT, PROBLEM, SCHEMAS, duration, ref, whole

Json = dict[str, Any]

_QUEUE: Final[Json] = {
    "name": "queue",
    "in": "path",
    "required": True,
    "description": "The queue's name.",
    "schema": {"type": "string", "minLength": 1},
}
_LEASE: Final[Json] = {
    "name": "lease",
    "in": "path",
    "required": True,
    "description": "The lease's id.",
    "schema": {"type": "string", "minLength": 1},
}

_ACTION: Final[Json] = {
    "name": "action",
    "in": "path",
    "required": True,
    "description": "The action's name.",
    "schema": {"type": "string", "minLength": 1},
}

_PROBLEMS: Final = {
    "400": "The request is wrong; `detail` names the place. Nothing has happened.",
    "401": "A token is needed, or the one given is unknown or has expired.",
    "403": "The token does not give the right to do that.",
    "404": "There is no such queue, lease or breaker.",
    "409": "There is a queue of this name with other settings.",
    "413": "An event, or the request, is larger than can ever be taken.",
    "415": "The body's encoding is not known; use gzip, deflate or none.",
    "429": "The queue is full. Nothing was taken; try again later.",
    "503": "The disk is failing, the node is closing, or an ack did not come in time. Try later.",
}


def _query(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def _problems(*statuses: str) -> Json:
    return {status: _problem(status) for status in statuses}


def _problem(status: str) -> Json:
    answer: Json = {
        "description": _PROBLEMS[status],
        "content": {"application/problem+json": {"schema": ref("Problem")}},
    }
    if status in ("429", "503"):
        schema = {"type": "integer", "minimum": 1}
        words = "Seconds after which to try again."
        answer["headers"] = {"Retry-After": {"description": words, "schema": schema}}
    return answer


def _ok(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_NOTHING: Final[Json] = {"description": "Done."}


def _publish() -> Json:
    raw: Json = {"schema": {}}
    return {
        "operationId": "publish",
        "summary": "Publish events: all of the request, or none.",
        "tags": ["events"],
        "parameters": [
            _query(
                "ack",
                "How far the events must have come before the answer. Default: persisted for disk "
                "queues, accepted for the others.",
                {"type": "string", "enum": ["accepted", "persisted", "delivered"]},
            ),
            _query("timeout", "How long to wait for room and ack; at most 60s.", duration("10s")),
            _query("key", "A raw event's key. Not with JSON.", {"type": "string"}),
            _query("source", "A raw event's source. Not with JSON.", {"type": "string"}),
            _query("severity", "A raw event's severity. Not with JSON.", whole(0, 7)),
            _query(
                "timestamp",
                "A raw event's time: ISO 8601 with a zone, or microseconds. Not with JSON.",
                {"type": "string", "examples": ["2026-01-31T12:00:00Z"]},
            ),
            _header(
                "Producer-Id",
                "Together with Sequence: what the queue has from this producer is not taken twice.",
                {"type": "string", "minLength": 1, "maxLength": 256},
            ),
            _header(
                "Sequence",
                "The number of the first event among all that the producer ever published.",
                whole(0, 2**62),
            ),
        ],
        "requestBody": {
            "required": False,
            "description": "May be compressed: `Content-Encoding: gzip` or `deflate`. "
            "What is neither JSON nor JSON lines is the value of one event, even if it is empty.",
            "content": {
                "application/json": {
                    "schema": {
                        "oneOf": [ref("NewEvent"), {"type": "array", "items": ref("NewEvent")}]
                    }
                },
                "application/x-ndjson": {
                    "schema": {"type": "string", "description": "A NewEvent on each line."}
                },
                "*/*": raw,
            },
        },
        "responses": {
            "200": _ok("The events have come as far as asked.", ref("Published")),
            **_problems("400", "401", "403", "404", "413", "415", "429", "503"),
        },
    }


def _take() -> Json:
    return {
        "operationId": "take",
        "summary": "Take the next events under a lease; they come back if it runs out.",
        "tags": ["events"],
        "parameters": [
            _query("max_events", "The most events to take.", whole(1, 10_000) | {"default": 100}),
            _query("wait", "How long to wait for events; at most 60s.", duration("0s")),
            _query("lease", "How long they are yours: 100ms to 1h.", duration("30s")),
        ],
        "responses": {
            "200": _ok("Events, to be settled under `/leases/{lease}`.", ref("Leased")),
            "204": {"description": "There was nothing to take in the time allowed."},
            **_problems("400", "401", "403", "404", "503"),
        },
    }


def _peek() -> Json:
    return {
        "operationId": "peek",
        "summary": "Look at unsettled events without taking them.",
        "tags": ["events"],
        "parameters": [
            _query("first", "The offset to begin at.", whole(0) | {"default": 0}),
            _query("max", "The most events to show.", whole(1, 10_000) | {"default": 100}),
        ],
        "responses": {
            "200": _ok("The events from there on.", ref("Peeked")),
            **_problems("400", "401", "403", "404", "503"),
        },
    }


def _settle() -> Json:
    return {
        "operationId": "settle",
        "summary": "Settle a range of offsets, for readers that keep their own place.",
        "tags": ["events"],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ref("Range")}},
        },
        "responses": {
            "200": _ok("The range is settled.", ref("Ends")),
            **_problems("400", "401", "403", "404", "413", "415", "503"),
        },
    }


_VERBS: Final = {
    "done": "Settle the lease's events as delivered.",
    "dead": "Settle the lease's events as undeliverable.",
    "release": "Give the lease's events back, to be read again.",
    "extend": "Keep the lease for longer, counted from now.",
}


def _lease(verb: str) -> Json:
    longer = _query("lease", "How long, 100ms to 1h; default: as before.", duration(None))
    return {
        "operationId": verb,
        "summary": _VERBS[verb],
        "tags": ["leases"],
        "parameters": [longer] if verb == "extend" else [],
        "responses": {"204": _NOTHING, **_problems("400", "401", "403", "404", "503")},
    }


def _queues() -> Json:
    return {
        "operationId": "queues",
        "summary": "All queues that the token has a right on.",
        "tags": ["queues"],
        "responses": {"200": _ok("The queues.", ref("Queues")), **_problems("400", "401", "503")},
    }


def _queue() -> Json:
    return {
        "operationId": "queue",
        "summary": "A queue's settings, positions and counts.",
        "tags": ["queues"],
        "responses": {
            "200": _ok("The queue.", ref("Queue")),
            **_problems("400", "401", "403", "404", "503"),
        },
    }


def _make() -> Json:
    return {
        "operationId": "create",
        "summary": "Make a queue; one that is there with the same settings is fine.",
        "tags": ["queues"],
        "requestBody": {
            "required": False,
            "description": "The queue's knobs, as in the configuration.",
            "content": {"application/json": {"schema": ref("Knobs")}},
        },
        "responses": {
            "200": _ok("It was there.", ref("Queue")),
            "201": _ok("It was made.", ref("Queue")),
            **_problems("400", "401", "403", "409", "413", "415", "503"),
        },
    }


def _drop() -> Json:
    return {
        "operationId": "drop",
        "summary": "Drop a queue that was made at run time, with everything in it.",
        "tags": ["queues"],
        "responses": {"204": _NOTHING, **_problems("400", "401", "403", "404", "503")},
    }


def _breakers() -> Json:
    return {
        "operationId": "breakers",
        "summary": "The circuit breakers of actions.",
        "tags": ["actions"],
        "responses": {
            "200": _ok("Those whose queues the token may read.", ref("Breakers")),
            **_problems("400", "401", "503"),
        },
    }


def _reset() -> Json:
    return {
        "operationId": "reset",
        "summary": "Close the breaker of an action: its destination is back.",
        "tags": ["actions"],
        "responses": {
            "200": _ok("It is closed.", ref("Breaker")),
            **_problems("400", "401", "403", "404", "503"),
        },
    }


def _about(name: str, summary: str, *, not_ready: bool = False) -> Json:
    responses: Json = {"200": _ok("Yes.", ref("Status"))}
    if not_ready:
        responses["503"] = _ok("No; `reasons` say why.", ref("Status")) | {
            "headers": _problem("503")["headers"]
        }
    return {
        "operationId": name,
        "summary": summary,
        "tags": ["node"],
        "security": [],
        "responses": responses,
    }


def _metrics() -> Json:
    return {
        "operationId": "metrics",
        "summary": "Metrics in Prometheus' text format.",
        "tags": ["node"],
        "responses": {
            "200": {
                "description": "The metrics.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            },
            **_problems("401", "403", "503"),
        },
    }


def _openapi() -> Json:
    return {
        "operationId": "openapi",
        "summary": "This document.",
        "tags": ["node"],
        "security": [],
        "responses": {"200": _ok("OpenAPI 3.1.", {"type": "object"})},
    }


def _paths() -> Json:
    of_queue: Json = {"parameters": [_QUEUE]}
    paths: Json = {
        "/queues": {"get": _queues()},
        "/queues/{queue}": of_queue | {"get": _queue(), "put": _make(), "delete": _drop()},
        "/queues/{queue}/events": of_queue | {"post": _publish(), "get": _take()},
        "/queues/{queue}/peek": of_queue | {"get": _peek()},
        "/queues/{queue}/settle": of_queue | {"post": _settle()},
        "/breakers": {"get": _breakers()},
        "/breakers/{action}/reset": {"parameters": [_ACTION], "post": _reset()},
        "/healthz": {"get": _about("healthz", "Whether the process is alive.")},
        "/readyz": {"get": _about("readyz", "Whether the node takes events.", not_ready=True)},
        "/metrics": {"get": _metrics()},
        "/openapi.json": {"get": _openapi()},
    }
    for verb in _VERBS:
        paths[f"/leases/{{lease}}/{verb}"] = {"parameters": [_LEASE], "post": _lease(verb)}
    return paths


@cache
def document() -> Json:
    """The whole document."""
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "turnlane",
            "version": version("turnlane"),
            "summary": "A durable event queue and delivery pipeline.",
            "description": KEPT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"token": bearer},
            "schemas": SCHEMAS | {"Problem": PROBLEM},
        },
    }
