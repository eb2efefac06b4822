"""The input ``elasticsearch``: as much of its API as shippers and bulk helpers need."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from turnlane.errors import EventTooLarge, QueueFull
from turnlane.events import Block, build_values
from turnlane.formats.http_bodies import Item, item_of, items_of
from turnlane.formats.lines import block_of_values, headers_of
from turnlane.inputs.api import InputSettings
from turnlane.inputs.http import WebInput, WebInputSettings, source_of
from turnlane.serving.auth import parse_bearer
from turnlane.serving.http_body import build_problem

# ── elasticsearch_answers ──
# What Elasticsearch would answer, for those who ask the input ``elasticsearch``.

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


INDEX_HEADER: Final = "index"
ACTION_HEADER: Final = "action"

# What shippers set up before they send: taken note of, kept nowhere.
_SETUP: Final = (
    "/_index_template/{name}",
    "/_template/{name}",
    "/_component_template/{name}",
    "/_ilm/policy/{name}",
    "/_ingest/pipeline/{name}",
    "/_data_stream/{name}",
    "/{name}",
)


class ElasticsearchSettings(WebInputSettings):
    """The settings of the input ``elasticsearch``."""

    type: Literal["elasticsearch"] = "elasticsearch"
    version: str = Field(
        "9.0.0",
        pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$",
        description="The version it says it is: some shippers insist on their own or a newer one.",
    )


class ElasticsearchInput(WebInput):
    """Each document becomes an event: its id the key, its index and the action headers."""

    settings_type: ClassVar[type[InputSettings]] = ElasticsearchSettings
    settings: ElasticsearchSettings

    def routes(self) -> Sequence[BaseRoute]:
        write = ["POST", "PUT"]
        return [
            Route("/", self._info),
            Route("/_bulk", self._bulk, methods=write),
            Route("/_license", self._license),
            Route("/_xpack", self._license),
            Route("/_cluster/health", self._health),
            Route("/{index}/_bulk", self._bulk, methods=write),
            Route("/{index}/_doc", self._document, methods=["POST"]),
            Route("/{index}/_doc/{id:path}", self._document, methods=write),
            Route("/{index}/_create/{id:path}", self._document, methods=write),
            *(Route(path, self._setup, methods=["GET", "PUT"]) for path in _SETUP),
        ]

    def token_of(self, request: Request) -> str | None:
        return secret_of(request.headers.get("authorization", ""))

    def refusal(self, _request: Request, error: Exception) -> Response:
        plain = build_problem(error)
        kept = ("retry-after", "www-authenticate", "connection", "allow")
        headers = {name: plain.headers[name] for name in kept if name in plain.headers}
        status = plain.status_code
        return _reply(failure(status, reason_of(error)), status, headers)

    # ── documents ───────────────────────────────────────────────────────────────────────────────

    async def _bulk(self, request: Request) -> Response:
        begun = time.monotonic()
        self.authorize(request, self.settings.queue)
        body = await self.body_of(request)
        index = request.path_params.get("index")
        results = await self.in_time(
            self.settings.queue, self._take_all, body, index, source_of(request)
        )
        took = round((time.monotonic() - begun) * 1000)
        return _reply({"took": took, "errors": any(map(_failed, results)), "items": results})

    def _take_all(
        self, body: bytes, index: str | None, source: str | None, deadline: float
    ) -> list[Any]:
        items = items_of(body, index)
        if not items:
            raise ValueError("the bulk request is empty")
        statuses = self._publish(items, source, deadline)
        if set(statuses) == {429}:
            # Said of the request as a whole, as Elasticsearch does: then clients send it again by
            # themselves, which some do not if it is only said of each item.
            raise QueueFull(self._why(items[0], 429))
        self.count(refused=int(429 in statuses))
        return [
            {item.action: result(item, status, self._why(item, status))}
            for item, status in zip(items, statuses, strict=True)
        ]

    def _publish(self, items: Sequence[Item], source: str | None, deadline: float) -> list[int]:
        """Publish the items that can be; each one's status."""
        statuses = np.array([400 if item.problem else done(item) for item in items])
        good = np.flatnonzero(statuses < 400)
        if len(good):
            block = _block([items[at] for at in good.tolist()], source)
            taken = self.publisher.publish_fitting(self.settings.queue, block, deadline)
            statuses[good[taken.too_large]] = 413
            statuses[good[taken.full]] = 429
            self.count(events=taken.inside)
        self.count(invalid=int(np.isin(statuses, (400, 413)).any()))
        found: list[int] = statuses.tolist()
        return found

    def _why(self, item: Item, status: int) -> str:
        if status == 413:
            return self.publisher.limit(self.settings.queue)
        return item.problem or f"queue {self.settings.queue!r} is full"

    async def _document(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        index, key = request.path_params["index"], request.path_params.get("id")
        creates = str(request.scope["path"]).startswith(f"/{index}/_create/")
        body = await self.body_of(request)
        item = item_of("create" if creates else "index", index, key, body.strip())
        [status] = await self.in_time(
            self.settings.queue, self._publish, [item], source_of(request)
        )
        if status == 429:
            raise QueueFull(self._why(item, status))
        if status == 413:
            raise EventTooLarge(self._why(item, status))
        if status == 400:
            return _reply(failure(400, self._why(item, status)), 400)
        return _reply(result(item, status), status)

    # ── greetings ───────────────────────────────────────────────────────────────────────────────

    async def _info(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        return _reply(info(self.settings.label, self.settings.version))

    async def _license(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        return _reply(LICENSE)

    async def _health(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        return _reply(health(self.settings.label))

    async def _setup(self, request: Request) -> Response:
        """Nothing is ever there, and everything may be made: shippers are content with that."""
        self.authorize(request, self.settings.queue)
        name = request.path_params["name"]
        is_index = request.scope["path"] == f"/{name}"
        if request.method != "PUT" or (is_index and name.startswith("_")):
            return _reply(failure(404, f"there is no {name}"), 404)
        await self.body_of(request)
        return _reply({"acknowledged": True, "shards_acknowledged": True, "index": name})


def _block(items: Sequence[Item], source: str | None) -> Block:
    names = (INDEX_HEADER, ACTION_HEADER)
    headers = headers_of(names, [item.target for item in items], [item.action for item in items])
    values = build_values([item.source for item in items])
    return block_of_values(values, keys=[item.id for item in items], headers=headers, source=source)


def _failed(result: dict[str, Any]) -> bool:
    return any("error" in outcome for outcome in result.values())


def _reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401
    # Elastic's clients talk to nobody who does not say this.
    return JSONResponse(content, status, {**(headers or {}), "x-elastic-product": "Elasticsearch"})


def secret_of(header: str) -> str | None:
    """The token, shown as a bearer, as an API key (alone or in ``id:key``) or as a password."""
    kind, _, shown = header.strip().partition(" ")
    if kind.lower() not in ("apikey", "basic"):
        return parse_bearer(header)
    try:
        name, colon, secret = base64.b64decode(shown, validate=True).decode().partition(":")
    except ValueError:
        name, colon, secret = shown, "", ""
    if colon:
        return secret
    return shown if kind.lower() == "apikey" else name or None
