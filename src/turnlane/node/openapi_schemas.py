"""The shapes of what goes in and out over HTTP, as JSON Schemas."""

from __future__ import annotations

from typing import Any, Final

from turnlane.queues.settings import QueueSettings

Json = dict[str, Any]

KEPT: Final = (
    "Events go in over `POST /queues/{queue}/events` and are kept until a consumer has settled "
    "them. An answer of 200 with `ack: persisted` means that they survive a crash."
)


def ref(name: str) -> Json:
    """A reference to one of :data:`SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def whole(least: int, most: int = 2**63 - 1) -> Json:
    """A whole number."""
    return {"type": "integer", "minimum": least, "maximum": most}


def duration(default: str | None) -> Json:
    """A duration in a parameter."""
    schema: Json = {"type": "string", "examples": ["500ms", "30s", "1m", "2.5"]}
    return schema if default is None else schema | {"default": default}


def _object(required: tuple[str, ...], properties: Json, **more: object) -> Json:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    } | more


_COUNT: Final = whole(0)
_TEXT: Final[Json] = {"type": "string"}
_NULL: Final[Json] = {"type": "null"}
_HEADERS: Final[Json] = {"type": "object", "additionalProperties": {"type": "string"}}
_TIMESTAMP: Final[Json] = {
    "anyOf": [
        {"type": "string", "description": "ISO 8601 with a time zone."},
        whole(-((1 << 63) // 1000 - 1), (1 << 63) // 1000 - 1)
        | {"description": "Microseconds since the epoch."},
    ],
    "examples": ["2026-01-31T12:00:00Z", 1769860800000000],
}
_ENDS: Final[Json] = {
    "low": _COUNT | {"description": "Everything below this offset is settled."},
    "end": _COUNT | {"description": "The offset that the next event will get."},
}


def _optional(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


def _new_event() -> Json:
    rest: Json = {
        "key": _optional(_TEXT),
        "headers": _optional(_HEADERS),
        "severity": _optional(whole(0, 7) | {"description": "0 (emergency) to 7 (debug)."}),
        "source": _optional(_TEXT),
        "timestamp": _optional(_TIMESTAMP) | {"description": "Default: now."},
        "offset": {"description": "Ignored: an event that was read can be sent as it is."},
    }
    values: Json = {
        "value": _TEXT | {"description": "The value as text."},
        "value_base64": _TEXT
        | {"contentEncoding": "base64", "description": "The value in base64."},
        "data": {"description": "The value is this JSON, written as JSON text."},
    }
    return {
        "description": "An event; its value in one of three forms.",
        "oneOf": [_object((name,), {name: schema} | rest) for name, schema in values.items()],
    }


def _event() -> Json:
    return _object(
        ("offset",),
        {
            "offset": _COUNT,
            "value": _optional(_TEXT) | {"description": "The value, if it is text."},
            "value_base64": _TEXT | {"description": "The value, if it is not."},
            "key": _TEXT,
            "headers": _HEADERS,
            "severity": whole(-128, 127),
            "source": _TEXT,
            "timestamp": _TIMESTAMP,
        },
        description="An event as it is read. What it does not have is left out.",
    )


def _knobs() -> Json:
    made = QueueSettings.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {
        name: {"description": schema.get("description", "")}
        for name, schema in made["properties"].items()
        if name not in ("name", "path")
    }
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "description": "A queue's settings; see the reference of queues. Default kind: disk.",
        "examples": [{}, {"kind": "memory", "size": 1000}],
    }


_EVENTS: Final[Json] = {"type": "array", "items": ref("Event")}
_NUMBERS: Final[Json] = {
    "type": "array",
    "description": "Numbers of events, or pairs of a first one and the one after the last.",
    "items": {"anyOf": [_COUNT, {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}]},
    "examples": [[0, 1, [5, 9]]],
}

PROBLEM: Final = _object(
    ("title", "status", "detail", "error"),
    {
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": _TEXT | {"description": "What is wrong, where, and what to do."},
        "error": _TEXT | {"description": "The kind of error, as the Python client raises it."},
    },
    description="What went wrong (RFC 9457).",
)

SCHEMAS: Final[Json] = {
    "NewEvent": _new_event(),
    "Event": _event(),
    "Published": _object(
        ("accepted", "dropped", "repeated", "first", "ack"),
        {
            "accepted": _COUNT | {"description": "Events that are now in the queue."},
            "dropped": _COUNT | {"description": "Events that the queue's policy shed."},
            "repeated": _COUNT | {"description": "Events that were there already."},
            "first": _optional(_COUNT) | {"description": "The offset of the first one accepted."},
            "ack": _TEXT | {"enum": ["accepted", "persisted", "delivered"]},
        },
    ),
    "Leased": _object(
        ("lease", "first", "attempt", "events"),
        {
            "lease": _TEXT,
            "first": _COUNT,
            "attempt": whole(1) | {"description": "1 when handed out for the first time."},
            "events": _EVENTS,
        },
    ),
    "Peeked": _object(("low", "end", "events"), _ENDS | {"events": _EVENTS}),
    "Ends": _object(("low", "end"), _ENDS),
    "Range": _object(
        ("first", "end"),
        {
            "first": _COUNT,
            "end": _COUNT | {"description": "One beyond the last."},
            "outcome": _TEXT | {"enum": ["delivered", "dead"], "default": "delivered"},
        },
    ),
    "Knobs": _knobs(),
    "Queue": _object(
        ("name", "low", "end", "settings", "stats"),
        {"name": _TEXT} | _ENDS | {"settings": {"type": "object"}, "stats": {"type": "object"}},
    ),
    "Queues": _object(
        ("instance", "queues"),
        {
            "instance": _TEXT | {"description": "New at every start of the node."},
            "queues": {"type": "array", "items": ref("Queue")},
        },
    ),
    "Breaker": _object(
        ("queue", "state", "wait", "failures", "error"),
        {
            "queue": _TEXT | {"description": "The queue that the action's lane reads."},
            "state": _TEXT | {"enum": ["closed", "open", "half_open"]},
            "wait": {"type": "number", "description": "Seconds until something may be sent."},
            "failures": _COUNT | {"description": "In a row."},
            "error": _optional(_TEXT) | {"description": "What the destination said last."},
        },
    ),
    "Breakers": _object(
        ("breakers",),
        {"breakers": {"type": "object", "additionalProperties": ref("Breaker")}},
    ),
    "Tables": _object(
        ("tables",),
        {
            "tables": {
                "type": "array",
                "items": _object(
                    ("name", "open", "shards"),
                    {
                        "name": _TEXT,
                        "open": {"type": "boolean", "description": "Whether it was reached."},
                        "shards": {"type": "array", "items": ref("Shard")},
                    },
                ),
            }
        },
    ),
    "Shard": _object(
        ("range", "leads"),
        {
            "range": _TEXT | {"description": "The key range."},
            "leads": {"type": "boolean", "description": "Whether this node fires its events."},
        },
    ),
    "Acked": _object(("events",), {"events": _NUMBERS}),
    "Nacked": _object(
        ("events",),
        {
            "events": _NUMBERS,
            "delay": _optional({"type": "number", "minimum": 0})
            | {"description": "Seconds until they fire again; default: their backoff."},
            "error": _optional(_TEXT) | {"description": "Why, to be kept with them."},
        },
    ),
    "Status": _object(
        ("status",),
        {"status": _TEXT, "reasons": {"type": "array", "items": _TEXT}},
    ),
}
