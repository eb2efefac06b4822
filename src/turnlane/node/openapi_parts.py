"""What the descriptions of operations are made of."""

from __future__ import annotations

from typing import Any, Final

from turnlane.node.openapi_schemas import ref

Json = dict[str, Any]

_PROBLEMS: Final = {
    "400": "The request is wrong; `detail` names the place. Nothing has happened.",
    "401": "A token is needed, or the one given is unknown or has expired.",
    "403": "The token does not give the right to do that.",
    "404": "There is no such queue, lease, breaker, table or stream.",
    "409": "There is a queue of this name with other settings; or too many of a producer's "
    "numbers are missing.",
    "413": "An event, or the request, is larger than can ever be taken.",
    "415": "The body's encoding is not known; use gzip, deflate or none.",
    "429": "The queue is full. Nothing was taken; try again later.",
    "503": "The disk is failing, the node is closing, or an ack did not come in time. Try later.",
}


def path(name: str, description: str) -> Json:
    """A parameter in the path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "minLength": 1},
    }


def query(name: str, description: str, schema: Json) -> Json:
    """A parameter of the query."""
    return {"name": name, "in": "query", "description": description, "schema": schema}


def header(name: str, description: str, schema: Json) -> Json:
    """A parameter in a header."""
    return {"name": name, "in": "header", "description": description, "schema": schema}


def problems(*statuses: str) -> Json:
    """What may go wrong, by status."""
    return {status: problem(status) for status in statuses}


def problem(status: str) -> Json:
    """The answer to something that goes wrong."""
    answer: Json = {
        "description": _PROBLEMS[status],
        "content": {"application/problem+json": {"schema": ref("Problem")}},
    }
    if status in ("429", "503"):
        schema = {"type": "integer", "minimum": 1}
        words = "Seconds after which to try again."
        answer["headers"] = {"Retry-After": {"description": words, "schema": schema}}
    return answer


def ok(description: str, schema: Json) -> Json:
    """An answer in JSON."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


NOTHING: Final[Json] = {"description": "Done."}
