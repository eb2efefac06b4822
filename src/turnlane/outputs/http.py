"""Output ``http``: sends events to a web server, many in a request or one by one.

Every response with a status of 2xx means that the events are delivered. URL, headers and body may
be templates; events with different URLs or headers go in different requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, Field, model_validator

from turnlane.events import Block
from turnlane.formats.lines import join_columns, join_lines, join_texts, to_large_binary
from turnlane.outputs.api import Output, OutputSettings
from turnlane.outputs.http_client import HttpResponse
from turnlane.outputs.http_requests import (
    BlockRows,
    HeaderName,
    Headers,
    HeaderText,
    HttpRequest,
    HttpUrl,
    RequestOutputSettings,
    RequestSender,
    require_success,
    select_rows,
)
from turnlane.outputs.templates import (
    Template,
    TemplateText,
    check_template,
    escape_header,
    escape_json,
    escape_url,
    find_template_columns,
    make_event_ids,
    make_idempotency_key,
)
from turnlane.validation import ConfigIssue, ContradictorySettings

_CONTENT_TYPES: Final = {
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "raw": "text/plain; charset=utf-8",
}
_SINGLE_CONTENT_TYPES: Final = {**_CONTENT_TYPES, "jsonl": "application/json"}
_COMMA: Final = pa.scalar(b",", pa.large_binary())
_EMPTY_OBJECT: Final = pa.scalar(b"{}", pa.large_binary())
_QUOTE_AND_COMMA: Final = pa.scalar(b'",', pa.large_binary())
_QUOTE: Final = pa.scalar(b'"', pa.large_binary())
_REACHABLE: Final = frozenset({400, 404, 405, 411, 415, 422, 501})
"""Statuses with which a server that expects a ``POST`` may answer a ``HEAD``."""


UrlTemplate = Annotated[HttpUrl, AfterValidator(check_template)]
HeaderTemplate = Annotated[HeaderText, AfterValidator(check_template)]


class HttpOutputSettings(RequestOutputSettings, OutputSettings):
    """The settings of the output ``http``."""

    type: Literal["http"] = "http"
    url: UrlTemplate = Field(
        description="The URL of the requests. Path and query may contain `{column}`: then each "
        "event goes to the URL with its own values.",
        examples=["https://example.org/events/{source}"],
    )
    method: Literal["POST", "PUT", "PATCH"] = Field(default="POST", description="The HTTP method.")
    headers: dict[HeaderName, HeaderTemplate] = Field(
        default={},
        repr=False,
        description="Headers of every request; they may contain `{column}`.",
    )
    format: Literal["json", "jsonl", "raw"] = Field(
        default="json",
        description="The body is a JSON array (`json`), or a line for each event: JSON (`jsonl`) "
        "or the unchanged value (`raw`).",
    )
    body: TemplateText | None = Field(
        default=None,
        description="A template for each event, with `{column}`, that is sent instead.",
        examples=['{{"text": "{source}: {value}"}}'],
    )
    one_by_one: bool = Field(default=False, description="Send each event in its own request.")
    idempotency_key: bool = Field(
        default=True,
        description="Whether requests have an `Idempotency-Key` header, which is the same whenever "
        "the same events are sent again.",
    )

    event_id: str | None = Field(
        default=None,
        min_length=1,
        description="A field that is added to every JSON object and contains the event's id, so "
        "that a receiver can drop repeated events. Default: none.",
        examples=["event_id"],
    )

    @model_validator(mode="after")
    def _check_event_id(self) -> Self:
        if self.event_id is not None and (self.format == "raw" or self.body is not None):
            message = "needs events as JSON objects; a body or a header may contain {event_id}"
            raise ContradictorySettings([ConfigIssue("event_id", message)])
        return self

    @property
    def wanted_columns(self) -> frozenset[str]:
        """The columns of the templates, and the time for idempotency keys."""
        named = find_template_columns(self.url, self.body, *self.headers.values())
        return named | {"timestamp"} if self.idempotency_key else named


class HttpOutput(Output):
    """Sends events to a web server."""

    settings_type: ClassVar[type[OutputSettings]] = HttpOutputSettings
    settings: HttpOutputSettings

    def __init__(self, settings: HttpOutputSettings) -> None:
        super().__init__(settings)
        self._url = Template.parse(settings.url)
        self._headers = {name: Template.parse(each) for name, each in settings.headers.items()}
        self._body = None if settings.body is None else Template.parse(settings.body)
        constants = {name: each.constant for name, each in self._headers.items()}
        self._sender = RequestSender(
            settings,
            _accept_response,
            method=settings.method,
            headers={name: text.encode() for name, text in constants.items() if text is not None},
        )

    @property
    def can_deliver_partly(self) -> bool:
        """Whether there may be several requests for a block."""
        is_constant = self._url.constant is not None
        has_constant_headers = len(self._sender.headers) == len(self._headers)
        return self.settings.one_by_one or not (is_constant and has_constant_headers)

    def prepare(self, block: Block) -> list[HttpRequest]:
        """Make one request for all events that have the same URL and headers."""
        if self._body is not None:
            escape = None if self.settings.format == "raw" else escape_json
            payloads = to_large_binary(self._body.fill(block, escape))
        else:
            payloads = to_large_binary(block.column("payload"))
            ids = None if self.settings.event_id is None else make_event_ids(block)
            if ids is not None:
                payloads = _add_ids(payloads, ids, self.settings.event_id)
        return [
            self._make_request(block, payloads, url, headers, rows)
            for rows, url, headers in self._group_rows(block)
        ]

    def _group_rows(self, block: Block) -> Iterator[tuple[BlockRows, str, Headers]]:
        """Yield the rows of each request with its URL and headers."""
        all_rows: BlockRows = np.arange(block.num_rows)
        constant_url = self._url.constant
        if constant_url is not None and not self.can_deliver_partly:
            if block.num_rows:
                yield all_rows, constant_url, self._sender.headers
            return
        columns = [self._url.fill(block, escape_url)]
        columns += [each.fill(block, escape_header) for each in self._headers.values()]
        names = list(self._headers)
        if self.settings.one_by_one:
            groups = [all_rows[at : at + 1] for at in range(block.num_rows)]
        else:
            groups = _group_equal_rows(columns)
        for rows in groups:
            url, *texts = (str(column[int(rows[0])]) for column in columns)
            yield rows, url, {name: text.encode() for name, text in zip(names, texts, strict=True)}

    def _make_request(
        self,
        block: Block,
        payloads: Any,  # noqa: ANN401
        url: str,
        headers: Headers,
        rows: BlockRows,
    ) -> HttpRequest:
        rebuild = partial(self._make_request, block, payloads, url, headers)
        if len(rows) < block.num_rows:
            block, payloads = select_rows(block, rows), payloads.take(rows)
        body = self._make_body(payloads)
        key = make_idempotency_key(block, body) if self.settings.idempotency_key else None
        types = _SINGLE_CONTENT_TYPES if self.settings.one_by_one else _CONTENT_TYPES
        packed, packed_headers = self._sender.encode_body(
            body, types[self.settings.format], key, headers
        )
        return HttpRequest(url, packed, packed_headers, rows, rebuild)

    def _make_body(self, payloads: Any) -> pa.Buffer:  # noqa: ANN401
        if self.settings.one_by_one:
            return join_texts(payloads).data
        if self.settings.format == "json":
            elements = join_texts(join_columns(payloads, _COMMA)).data
            return pa.py_buffer(b"".join((b"[", elements[:-1], b"]")))
        return join_lines(payloads)

    def send(self, prepared: list[HttpRequest]) -> None:
        self._sender.send(prepared)

    def cancel(self) -> None:
        self._sender.cancel()

    def close(self) -> None:
        self._sender.close()

    def check(self) -> None:
        """Send a ``HEAD`` to the URL, or to the root of the host if the URL has columns."""
        url = self._url.constant
        if url is None:
            url = "/".join([*self._url.get_text_before_fields().split("/")[:3], ""])
        response = self._sender.request_once(url, method="HEAD")
        if response.status not in _REACHABLE:
            require_success(response, url)


def _accept_response(_request: HttpRequest, _response: HttpResponse) -> None:
    """Do nothing: a good status is enough."""


def _add_ids(objects: Any, ids: pa.Array[Any], name: str | None) -> Any:  # noqa: ANN401
    """Add a field of this name with the id to each JSON object."""
    head = pa.scalar(f'{{{json.dumps(name)}:"'.encode(), pa.large_binary())
    rest = pc.binary_replace_slice(objects, 0, 1, b"")
    separator = pc.if_else(pc.equal(objects, _EMPTY_OBJECT), _QUOTE, _QUOTE_AND_COMMA)
    return join_columns(head, to_large_binary(escape_json(ids)), separator, rest)


def _group_equal_rows(columns: list[Any]) -> list[BlockRows]:
    """Return groups of the rows that are equal in all columns, each group in order."""
    combined: Any = pc.binary_join_element_wise(*columns, "\n")
    numbers = combined.dictionary_encode().indices.to_numpy()
    order = np.argsort(numbers, kind="stable")
    ends = np.flatnonzero(np.diff(numbers[order])) + 1
    return [part for part in np.split(order, ends) if len(part)]
