"""The input ``elasticsearch``: the part of its API that shippers and bulk helpers need.

The bulk format is lines in pairs: an action such as ``{"index": {"_id": "1"}}``, then its document.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from turnlane.errors import EventTooLarge, QueueFull
from turnlane.events import build_values
from turnlane.formats.lines import build_event_block, build_headers
from turnlane.inputs.api import InputSettings
from turnlane.inputs.http import WebInput, WebInputSettings, get_source
from turnlane.serving.auth import parse_bearer
from turnlane.serving.http_problems import build_problem

# ── the bulk format ──────────────────────────────────────────────────────────────────────────────

_WITH_DOCUMENT: Final = frozenset({"index", "create", "update"})
_WITH_ID: Final = frozenset({"update", "delete"})
_ACTIONS: Final = _WITH_DOCUMENT | _WITH_ID

# Bytes, as in Elasticsearch.
_MAX_ID_BYTES: Final = 512
_MAX_INDEX_BYTES: Final = 255


class BulkItem(NamedTuple):
    """One action of a bulk request, with its document."""

    action: str
    target: str
    """The index."""
    id: str
    document: bytes
    """The document as written; empty for a ``delete``."""
    problem: str | None = None
    """Why the item cannot be accepted."""


def parse_bulk(body: bytes, index: str | None = None) -> list[BulkItem]:
    """Return the items of a bulk request; ``index`` is used for items without one.

    Raises ``ValueError`` if a line is not an action: then the following lines have no meaning.
    """
    items: list[BulkItem] = []
    lines = iter(enumerate(body.split(b"\n"), start=1))
    for number, line in lines:
        if not line or line.isspace():
            continue
        try:
            action, own_index, key = _parse_action(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not an action: {error}") from None
        target = own_index or index
        if target is None:
            raise ValueError(f"line {number} names no index, and neither does the path")
        document = next(lines, (0, b""))[1].strip() if action in _WITH_DOCUMENT else b""
        items.append(_build_item(action, target, key, document))
    return items


def _parse_action(line: bytes) -> tuple[str, str | None, str | None]:
    """Return the action, its index and its document id."""
    content = json.loads(line)
    if not isinstance(content, dict) or len(content) != 1:
        raise ValueError('it has to be an object such as {"index": {"_id": "1"}}')
    [(action, fields)] = content.items()
    if action not in _ACTIONS or not isinstance(fields, dict):
        raise ValueError(f"{action!r} is not one of {', '.join(sorted(_ACTIONS))}")
    key = _get_text(fields, "_id")
    if key is None and action in _WITH_ID:
        raise ValueError(f"{action} needs an _id")
    return action, _get_text(fields, "_index"), key


def _get_text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str | int):
        raise ValueError(f"{name} has to be text")  # noqa: TRY004 - about the line, as the others
    text = str(value)
    text.encode()  # raises for a lone surrogate, which a queue cannot store
    return text


def _build_item(action: str, index: str, key: str | None, document: bytes) -> BulkItem:
    """Return an item, with a new id if it has none, and with its problem if it has one."""
    name = key or uuid.uuid4().hex
    problem: str | None = None
    for field, text, most in (("_index", index, _MAX_INDEX_BYTES), ("_id", name, _MAX_ID_BYTES)):
        if len(text.encode()) > most:
            problem = f"{field} has {len(text.encode())} bytes; {most} are allowed"
    if problem is None and action != "delete":
        try:
            if not isinstance(json.loads(document), dict):
                problem = "the document is not a JSON object"
        except RecursionError:
            problem = "the document is nested too deeply"
        except ValueError as error:
            problem = f"the document is not JSON: {error}"
    return BulkItem(action, index, name, document, problem)


# ── answers, as the clients of Elasticsearch expect them ─────────────────────────────────────────

_RESULTS: Final = {
    "index": ("created", 201),
    "create": ("created", 201),
    "update": ("updated", 200),
    "delete": ("deleted", 200),
}
_ERROR_TYPES: Final = {
    400: "document_parsing_exception",
    401: "security_exception",
    403: "security_exception",
    404: "resource_not_found_exception",
    413: "document_too_large_exception",
    429: "es_rejected_execution_exception",
    503: "unavailable_shards_exception",
}
_LICENSE: Final[dict[str, Any]] = {
    "license": {"status": "active", "type": "basic", "mode": "basic", "uid": "turnlane"},
    "features": {"ilm": {"available": False, "enabled": False}},
    "tagline": "You know, for X",
}


def _build_result(item: BulkItem, status: int, why: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {"_index": item.target, "_id": item.id}
    if status >= 400:
        return {**result, "status": status, "error": _build_error(status, why)}
    shards = {"total": 1, "successful": 1, "failed": 0}
    outcome, _ = _RESULTS[item.action]
    return {**result, "_version": 1, "result": outcome, "_shards": shards, "status": status}


def _build_failure(status: int, why: str) -> dict[str, Any]:
    """Return the answer to a request that failed as a whole."""
    error = _build_error(status, why)
    return {"error": {"root_cause": [error], **error}, "status": status}


def _build_error(status: int, why: str) -> dict[str, str]:
    return {"type": _ERROR_TYPES.get(status, "illegal_argument_exception"), "reason": why}


def _reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401
    # Elastic's clients refuse a server without this header.
    return JSONResponse(content, status, {**(headers or {}), "x-elastic-product": "Elasticsearch"})


# ── the input ────────────────────────────────────────────────────────────────────────────────────

INDEX_HEADER: Final = "index"
ACTION_HEADER: Final = "action"

# Resources that shippers set up before they send: accepted, not stored.
_SETUP_PATHS: Final = (
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

    def build_routes(self) -> Sequence[BaseRoute]:
        write = ["POST", "PUT"]
        return [
            Route("/", self._answer_info),
            Route("/_bulk", self._handle_bulk, methods=write),
            Route("/_license", self._answer_license),
            Route("/_xpack", self._answer_license),
            Route("/_cluster/health", self._answer_health),
            Route("/{index}/_bulk", self._handle_bulk, methods=write),
            Route("/{index}/_doc", self._handle_document, methods=["POST"]),
            Route("/{index}/_doc/{id:path}", self._handle_document, methods=write),
            Route("/{index}/_create/{id:path}", self._handle_document, methods=write),
            *(Route(path, self._handle_setup, methods=["GET", "PUT"]) for path in _SETUP_PATHS),
        ]

    def get_token(self, request: Request) -> str | None:
        return parse_secret(request.headers.get("authorization", ""))

    def build_refusal(self, _request: Request, error: Exception) -> Response:
        problem = build_problem(error)
        names = ("retry-after", "www-authenticate", "connection", "allow", "accept-encoding")
        headers = {name: problem.headers[name] for name in names if name in problem.headers}
        reason = str(error.detail) if isinstance(error, HTTPException) else str(error)
        return _reply(_build_failure(problem.status_code, reason), problem.status_code, headers)

    # ── documents ───────────────────────────────────────────────────────────────────────────────

    async def _handle_bulk(self, request: Request) -> Response:
        started = time.monotonic()
        self.authorize(request, self.settings.queue)
        body = await self.read_body(request)
        index = request.path_params.get("index")
        results = await self.run_in_time(
            self.settings.queue, self._publish_bulk, body, index, get_source(request)
        )
        took = round((time.monotonic() - started) * 1000)
        has_errors = any("error" in each for result in results for each in result.values())
        return _reply({"took": took, "errors": has_errors, "items": results})

    def _publish_bulk(
        self, body: bytes, index: str | None, source: str | None, deadline: float
    ) -> list[dict[str, Any]]:
        items = parse_bulk(body, index)
        if not items:
            raise ValueError("the bulk request is empty")
        statuses = self._publish(items, source, deadline)
        if set(statuses) == {429}:
            # Refuse the whole request, as Elasticsearch does: then all clients send it again by
            # themselves. Some do not if only the items are refused.
            raise QueueFull(self._explain(items[0], 429))
        self.count(refused=int(429 in statuses))
        return [
            {item.action: _build_result(item, status, self._explain(item, status))}
            for item, status in zip(items, statuses, strict=True)
        ]

    def _publish(self, items: Sequence[BulkItem], source: str | None, deadline: float) -> list[int]:
        """Publish the items without a problem; return the status of each item."""
        statuses = np.array([400 if item.problem else _RESULTS[item.action][1] for item in items])
        good = np.flatnonzero(statuses < 400)
        if len(good):
            chosen = [items[at] for at in good.tolist()]
            indexes, actions = [item.target for item in chosen], [item.action for item in chosen]
            block = build_event_block(
                build_values([item.document for item in chosen]),
                keys=[item.id for item in chosen],
                headers=build_headers((INDEX_HEADER, ACTION_HEADER), indexes, actions),
                source=source,
            )
            result = self.publisher.publish_fitting(self.settings.queue, block, deadline)
            statuses[good[result.too_large]] = 413
            statuses[good[result.without_room]] = 429
            self.count(events=result.accepted)
        self.count(invalid=int(np.isin(statuses, (400, 413)).any()))
        found: list[int] = statuses.tolist()
        return found

    def _explain(self, item: BulkItem, status: int) -> str:
        if status == 413:
            return self.publisher.describe_limit(self.settings.queue)
        return item.problem or f"queue {self.settings.queue!r} is full"

    async def _handle_document(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        index, key = request.path_params["index"], request.path_params.get("id")
        is_create = str(request.scope["path"]).startswith(f"/{index}/_create/")
        body = await self.read_body(request)
        item = _build_item("create" if is_create else "index", index, key, body.strip())
        [status] = await self.run_in_time(
            self.settings.queue, self._publish, [item], get_source(request)
        )
        if status == 429:
            raise QueueFull(self._explain(item, status))
        if status == 413:
            raise EventTooLarge(self._explain(item, status))
        if status == 400:
            return _reply(_build_failure(400, self._explain(item, status)), 400)
        return _reply(_build_result(item, status), status)

    # ── requests that shippers send before documents ────────────────────────────────────────────

    async def _answer_info(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        version = {
            "number": self.settings.version,
            "build_flavor": "default",
            "build_type": "turnlane",
            "build_hash": "unknown",
            "build_date": "2026-01-01T00:00:00.000Z",
            "build_snapshot": False,
            "lucene_version": "10.0.0",
            "minimum_wire_compatibility_version": "7.17.0",
            "minimum_index_compatibility_version": "7.0.0",
        }
        return _reply(
            {
                "name": self.settings.label,
                "cluster_name": "turnlane",
                "cluster_uuid": "turnlane",
                "version": version,
                "tagline": "You Know, for Search",
            }
        )

    async def _answer_license(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        return _reply(_LICENSE)

    async def _answer_health(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        name = self.settings.label
        return _reply(
            {"cluster_name": name, "status": "green", "timed_out": False, "number_of_nodes": 1}
        )

    async def _handle_setup(self, request: Request) -> Response:
        """Answer that nothing exists and that everything may be created: shippers accept that."""
        self.authorize(request, self.settings.queue)
        name = request.path_params["name"]
        is_index = request.scope["path"] == f"/{name}"
        if request.method != "PUT" or (is_index and name.startswith("_")):
            return _reply(_build_failure(404, f"there is no {name}"), 404)
        await self.read_body(request)
        return _reply({"acknowledged": True, "shards_acknowledged": True, "index": name})


def parse_secret(header: str) -> str | None:
    """Return the token of a header: a bearer, an API key (alone or in ``id:key``) or a password."""
    kind, _, content = header.strip().partition(" ")
    if kind.lower() not in ("apikey", "basic"):
        return parse_bearer(header)
    try:
        name, colon, secret = base64.b64decode(content, validate=True).decode().partition(":")
    except ValueError:
        name, colon, secret = content, "", ""
    if colon:
        return secret
    return content if kind.lower() == "apikey" else name or None
