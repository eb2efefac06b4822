"""What Elasticsearch would answer, for those who ask the input ``elasticsearch``."""

from __future__ import annotations

from typing import Any, Final

from starlette.exceptions import HTTPException

from turnlane.formats.bulk import Item

_RESULTS: Final = {
    "index": ("created", 201),
    "create": ("created", 201),
    "update": ("updated", 200),
    "delete": ("deleted", 200),
}
_SHARDS: Final = {"total": 1, "successful": 1, "failed": 0}
_TYPES: Final = {
    400: "document_parsing_exception",
    401: "security_exception",
    403: "security_exception",
    404: "resource_not_found_exception",
    413: "document_too_large_exception",
    429: "es_rejected_execution_exception",
    503: "unavailable_shards_exception",
}

LICENSE: Final[dict[str, Any]] = {
    "license": {"status": "active", "type": "basic", "mode": "basic", "uid": "turnlane"},
    "features": {"ilm": {"available": False, "enabled": False}},
    "tagline": "You know, for X",
}


def done(item: Item) -> int:
    """The status of an item that was taken."""
    return _RESULTS[item.action][1]


def result(item: Item, status: int, why: str = "") -> dict[str, Any]:
    """What became of one item."""
    place = {"_index": item.target, "_id": item.id}
    if status >= 400:
        return {**place, "status": status, "error": _error(status, why)}
    became, _ = _RESULTS[item.action]
    return {**place, "_version": 1, "result": became, "_shards": _SHARDS, "status": status}


def failure(status: int, why: str) -> dict[str, Any]:
    """The answer to a request that failed as a whole."""
    error = _error(status, why)
    return {"error": {"root_cause": [error], **error}, "status": status}


def _error(status: int, why: str) -> dict[str, str]:
    return {"type": _TYPES.get(status, "illegal_argument_exception"), "reason": why}


def reason_of(error: Exception) -> str:
    """An error in words."""
    return str(error.detail) if isinstance(error, HTTPException) else str(error)


def info(name: str, version: str) -> dict[str, Any]:
    """Who is asked, and what it says it is."""
    return {
        "name": name,
        "cluster_name": "turnlane",
        "cluster_uuid": "turnlane",
        "version": {
            "number": version,
            "build_flavor": "default",
            "build_type": "turnlane",
            "build_hash": "unknown",
            "build_date": "2026-01-01T00:00:00.000Z",
            "build_snapshot": False,
            "lucene_version": "10.0.0",
            "minimum_wire_compatibility_version": "7.17.0",
            "minimum_index_compatibility_version": "7.0.0",
        },
        "tagline": "You Know, for Search",
    }


def health(name: str) -> dict[str, Any]:
    """All is well as long as somebody answers."""
    return {"cluster_name": name, "status": "green", "timed_out": False, "number_of_nodes": 1}
