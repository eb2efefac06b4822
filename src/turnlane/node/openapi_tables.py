"""The description of queue tables over HTTP."""

from __future__ import annotations

from typing import Final

from turnlane.node.openapi_parts import NOTHING, Json, ok, path, problems, query
from turnlane.node.openapi_schemas import ref, whole

_TABLE: Final = path("table", "The queue table's name.")
_STREAM: Final = path("stream", "The stream's id: its first line has it.")


def _tables() -> Json:
    return {
        "operationId": "tables",
        "summary": "The queue tables that the node serves and the token may read.",
        "tags": ["tables"],
        "responses": {"200": ok("The tables.", ref("Tables")), **problems("400", "401", "503")},
    }


def _receive() -> Json:
    lines = {
        "type": "string",
        "description": "A JSON object a line: at first `stream` and `fields`, then `first`, the "
        "number of the first event, and `rows`. An empty line says that the node is there.",
    }
    return {
        "operationId": "receive",
        "summary": "Receive events of a queue table as they fire, until the client leaves.",
        "tags": ["tables"],
        "parameters": [
            query("key_range", "Only events whose keys lie there.", _KEY_RANGE),
            query(
                "prefetch",
                "The most events that are sent and not settled.",
                whole(1, 100_000) | {"default": 100},
            ),
        ],
        "responses": {
            "200": {
                "description": "Events, to be settled under `/tables/{table}/streams/{stream}`.",
                "content": {"application/x-ndjson": {"schema": lines}},
            },
            **problems("400", "401", "403", "404", "503"),
        },
    }


_KEY_RANGE: Final[Json] = {
    "type": "string",
    "default": "-",
    "pattern": "^([0-9a-fA-F]{2}){0,8}-([0-9a-fA-F]{2}){0,8}$",
    "examples": ["-80", "40-80"],
}


def _settle_stream(verb: str, summary: str) -> Json:
    return {
        "operationId": f"{verb}_events",
        "summary": summary,
        "tags": ["tables"],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ref(f"{verb.capitalize()}ed")}},
        },
        "responses": {
            "204": NOTHING,
            **problems("400", "401", "403", "404", "413", "415", "503"),
        },
    }


def table_paths() -> Json:
    """The operations by path."""
    return {
        "/tables": {"get": _tables()},
        "/tables/{table}/events": {"parameters": [_TABLE], "get": _receive()},
        "/tables/{table}/streams/{stream}/ack": {
            "parameters": [_TABLE, _STREAM],
            "post": _settle_stream("ack", "Settle events; they never fire again."),
        },
        "/tables/{table}/streams/{stream}/nack": {
            "parameters": [_TABLE, _STREAM],
            "post": _settle_stream("nack", "Have events fired again."),
        },
    }
