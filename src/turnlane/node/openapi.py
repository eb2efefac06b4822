"""The HTTP plane's description of itself: OpenAPI 3.1, complete and by hand."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Final

from turnlane.node.openapi_parts import NOTHING, Json, header, ok, path, problem, problems, query
from turnlane.node.openapi_schemas import KEPT, PROBLEM, SCHEMAS, duration, ref, whole
from turnlane.node.openapi_tables import table_paths

_QUEUE: Final = path("queue", "The queue's name.")
_LEASE: Final = path("lease", "The lease's id.")
_ACTION: Final = path("action", "The action's name.")


def _publish() -> Json:
    raw: Json = {"schema": {}}
    return {
        "operationId": "publish",
        "summary": "Publish events: all of the request, or none.",
        "tags": ["events"],
        "parameters": [
            query(
                "ack",
                "How far the events must have come before the answer. Default: persisted for disk "
                "queues, accepted for the others.",
                {"type": "string", "enum": ["accepted", "persisted", "delivered"]},
            ),
            query("timeout", "How long to wait for room and ack; at most 60s.", duration("10s")),
            query("key", "A raw event's key. Not with JSON.", {"type": "string"}),
            query("source", "A raw event's source. Not with JSON.", {"type": "string"}),
            query("severity", "A raw event's severity. Not with JSON.", whole(0, 7)),
            query(
                "timestamp",
                "A raw event's time: ISO 8601 with a zone, or microseconds. Not with JSON.",
                {"type": "string", "examples": ["2026-01-31T12:00:00Z"]},
            ),
            header(
                "Producer-Id",
                "Together with Sequence: what the queue has from this producer is not taken twice.",
                {"type": "string", "minLength": 1, "maxLength": 256},
            ),
            header(
                "Sequence",
                "The number of the first event among all that the producer ever published.",
                whole(0, 2**62),
            ),
            header(
                "Sequence-Gaps",
                "Lower numbers that the queue does not have will not come: count them as taken.",
                {"type": "string", "enum": ["skip"]},
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
            "200": ok("The events have come as far as asked.", ref("Published")),
            **problems("400", "401", "403", "404", "409", "413", "415", "429", "503"),
        },
    }


def _take() -> Json:
    return {
        "operationId": "take",
        "summary": "Take the next events under a lease; they come back if it runs out.",
        "tags": ["events"],
        "parameters": [
            query("max_events", "The most events to take.", whole(1, 10_000) | {"default": 100}),
            query("wait", "How long to wait for events; at most 60s.", duration("0s")),
            query("lease", "How long they are yours: 100ms to 1h.", duration("30s")),
        ],
        "responses": {
            "200": ok("Events, to be settled under `/leases/{lease}`.", ref("Leased")),
            "204": {"description": "There was nothing to take in the time allowed."},
            **problems("400", "401", "403", "404", "503"),
        },
    }


def _peek() -> Json:
    return {
        "operationId": "peek",
        "summary": "Look at unsettled events without taking them.",
        "tags": ["events"],
        "parameters": [
            query("first", "The offset to begin at.", whole(0) | {"default": 0}),
            query("max", "The most events to show.", whole(1, 10_000) | {"default": 100}),
        ],
        "responses": {
            "200": ok("The events from there on.", ref("Peeked")),
            **problems("400", "401", "403", "404", "503"),
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
            "200": ok("The range is settled.", ref("Ends")),
            **problems("400", "401", "403", "404", "413", "415", "503"),
        },
    }


_VERBS: Final = {
    "done": "Settle the lease's events as delivered.",
    "dead": "Settle the lease's events as undeliverable.",
    "release": "Give the lease's events back, to be read again.",
    "extend": "Keep the lease for longer, counted from now.",
}


def _lease(verb: str) -> Json:
    longer = query("lease", "How long, 100ms to 1h; default: as before.", duration(None))
    return {
        "operationId": verb,
        "summary": _VERBS[verb],
        "tags": ["leases"],
        "parameters": [longer] if verb == "extend" else [],
        "responses": {"204": NOTHING, **problems("400", "401", "403", "404", "503")},
    }


def _queues() -> Json:
    return {
        "operationId": "queues",
        "summary": "All queues that the token has a right on.",
        "tags": ["queues"],
        "responses": {"200": ok("The queues.", ref("Queues")), **problems("400", "401", "503")},
    }


def _queue() -> Json:
    return {
        "operationId": "queue",
        "summary": "A queue's settings, positions and counts.",
        "tags": ["queues"],
        "responses": {
            "200": ok("The queue.", ref("Queue")),
            **problems("400", "401", "403", "404", "503"),
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
            "200": ok("It was there.", ref("Queue")),
            "201": ok("It was made.", ref("Queue")),
            **problems("400", "401", "403", "409", "413", "415", "503"),
        },
    }


def _drop() -> Json:
    return {
        "operationId": "drop",
        "summary": "Drop a queue that was made at run time, with everything in it.",
        "tags": ["queues"],
        "responses": {"204": NOTHING, **problems("400", "401", "403", "404", "503")},
    }


def _breakers() -> Json:
    return {
        "operationId": "breakers",
        "summary": "The circuit breakers of actions.",
        "tags": ["actions"],
        "responses": {
            "200": ok("Those whose queues the token may read.", ref("Breakers")),
            **problems("400", "401", "503"),
        },
    }


def _reset() -> Json:
    return {
        "operationId": "reset",
        "summary": "Close the breaker of an action: its destination is back.",
        "tags": ["actions"],
        "responses": {
            "200": ok("It is closed.", ref("Breaker")),
            **problems("400", "401", "403", "404", "503"),
        },
    }


def _about(name: str, summary: str, *, not_ready: bool = False) -> Json:
    responses: Json = {"200": ok("Yes.", ref("Status"))}
    if not_ready:
        responses["503"] = ok("No; `reasons` say why.", ref("Status")) | {
            "headers": problem("503")["headers"]
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
            **problems("401", "403", "503"),
        },
    }


def _openapi() -> Json:
    return {
        "operationId": "openapi",
        "summary": "This document.",
        "tags": ["node"],
        "security": [],
        "responses": {"200": ok("OpenAPI 3.1.", {"type": "object"})},
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
        **table_paths(),
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
