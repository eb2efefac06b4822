"""Output ``http``: events posted to a web server, many in a request or one by one."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, Field, model_validator

from turnlane.events import Block
from turnlane.formats.lines import joined, large, lines_of, strung
from turnlane.outputs.api import OutputSettings, ids_of, key_of
from turnlane.outputs.http_connections import Answer
from turnlane.outputs.http_requests import (
    HeaderName,
    Headers,
    HeaderText,
    Prepared,
    Request,
    Rows,
    WebAddress,
    WebOutput,
    WebOutputSettings,
    chosen,
)
from turnlane.outputs.templates import (
    Template,
    TemplateText,
    checked,
    columns_of,
    for_header,
    for_json,
    for_url,
)
from turnlane.validation import Contradiction, Problem


class Form(enum.StrEnum):
    """How events stand in a body."""

    JSON = "json"
    """A JSON array of events."""
    JSONL = "jsonl"
    """A line of JSON for each."""
    RAW = "raw"
    """Each event's value, as it is, on a line."""


_KINDS: Final = {
    Form.JSON: "application/json",
    Form.JSONL: "application/x-ndjson",
    Form.RAW: "text/plain; charset=utf-8",
}
_SINGLE_KINDS: Final = {**_KINDS, Form.JSONL: "application/json"}
_COMMA: Final = pa.scalar(b",", pa.large_binary())
_NO_FIELDS: Final = pa.scalar(b"{}", pa.large_binary())
_GO_ON: Final = pa.scalar(b'",', pa.large_binary())
_END: Final = pa.scalar(b'"', pa.large_binary())
"""What comes behind a field's text: others, or none."""
_ALIVE: Final = frozenset({400, 404, 405, 411, 415, 422, 501})
"""Answers to a ``HEAD`` from somebody who wants a ``POST`` with something in it."""


TemplateAddress = Annotated[WebAddress, AfterValidator(checked)]
HeaderTemplate = Annotated[HeaderText, AfterValidator(checked)]


class HttpSettings(WebOutputSettings):
    """The settings of the output ``http``."""

    type: Literal["http"] = "http"
    url: TemplateAddress = Field(
        description="Where requests go. Its path and query may have `{column}` in them: then "
        "events go where their own columns say.",
        examples=["https://example.org/events/{source}"],
    )
    method: Literal["POST", "PUT", "PATCH"] = Field(default="POST", description="The method.")
    headers: dict[HeaderName, HeaderTemplate] = Field(
        default={},
        repr=False,
        description="Headers of every request; they may have `{column}` in them.",
    )
    format: Form = Field(
        default=Form.JSON,
        description="A body is a JSON array (`json`), or a line for each event: JSON (`jsonl`) or "
        "the value as it is (`raw`).",
    )
    body: TemplateText | None = Field(
        default=None,
        description="What is sent of each event instead, with `{column}` in it.",
        examples=['{{"text": "{source}: {value}"}}'],
    )
    one_by_one: bool = Field(default=False, description="A request for each event.")
    idempotency_key: bool = Field(
        default=True,
        description="Whether requests have a header `Idempotency-Key`, the same whenever the same "
        "events are sent again.",
    )

    event_id: str | None = Field(
        default=None,
        min_length=1,
        description="The field in which every JSON object gets its event's id, by which a receiver "
        "can drop repeats. Default: none.",
        examples=["event_id"],
    )

    @model_validator(mode="after")
    def _ids_only_in_objects(self) -> Self:
        if self.event_id is not None and (self.format is Form.RAW or self.body is not None):
            why = "is for events as JSON objects; a body or a header may have {event_id} in it"
            raise Contradiction([Problem("event_id", why)])
        return self

    @property
    def wants(self) -> frozenset[str]:
        """What templates name; keys have the events' times in them."""
        named = columns_of(self.url, self.body, *self.headers.values())
        return named | {"timestamp"} if self.idempotency_key else named


class HttpOutput(WebOutput):
    """Whatever answers with 2xx has the events."""

    settings_type: ClassVar[type[OutputSettings]] = HttpSettings
    settings: HttpSettings

    def __init__(self, settings: HttpSettings) -> None:
        super().__init__(settings)
        self.method = settings.method
        self._url = Template.parse(settings.url)
        self._headers = {name: Template.parse(each) for name, each in settings.headers.items()}
        self._body = None if settings.body is None else Template.parse(settings.body)

    @property
    def takes_apart(self) -> bool:
        """Whether there may be several requests for a block."""
        return self.settings.one_by_one or not self._is_constant

    @property
    def _is_constant(self) -> bool:
        return self._url.constant is not None and len(self.headers()) == len(self._headers)

    # ── preparing ───────────────────────────────────────────────────────────────────────────────

    def prepare(self, block: Block) -> Prepared:
        """A request for all, or for those that go to one place with the same headers."""
        payloads = self._payloads(block)
        requests = [
            self._request(block, payloads, url, headers, rows)
            for rows, url, headers in self._targets(block)
        ]
        return Prepared(block.num_rows, requests)

    def _payloads(self, block: Block) -> Any:  # noqa: ANN401
        if self._body is None:
            objects = large(block.column("payload"))
            name = self.settings.event_id
            return objects if name is None else _with_ids(objects, ids_of(block), name)
        escape = None if self.settings.format is Form.RAW else for_json
        return large(self._body.fill(block, escape))

    def _targets(self, block: Block) -> Iterator[tuple[Rows, str, Headers]]:
        """Where which rows go, and with which headers."""
        every: Rows = np.arange(block.num_rows)
        where = self._url.constant
        if where is not None and not self.takes_apart:
            if block.num_rows:
                yield every, where, self.headers()
            return
        columns = [self._url.fill(block, for_url)]
        columns += [each.fill(block, for_header) for each in self._headers.values()]
        names = list(self._headers)
        if self.settings.one_by_one:
            groups = [every[at : at + 1] for at in range(block.num_rows)]
        else:
            groups = _groups(columns)
        for rows in groups:
            url, *texts = (str(column[int(rows[0])]) for column in columns)
            yield rows, url, {name: text.encode() for name, text in zip(names, texts, strict=True)}

    def _request(
        self,
        block: Block,
        payloads: Any,  # noqa: ANN401
        url: str,
        headers: Headers,
        rows: Rows,
    ) -> Request:
        part = partial(self._request, block, payloads, url, headers)
        if len(rows) < block.num_rows:
            block, payloads = chosen(block, rows), payloads.take(rows)
        body = self._joined(payloads)
        key = key_of(block, body) if self.settings.idempotency_key else None
        packed, sent = self.packed(body, self._kind, key, headers)
        return Request(url, packed, sent, rows, part)

    @property
    def _kind(self) -> str:
        kinds = _SINGLE_KINDS if self.settings.one_by_one else _KINDS
        return kinds[self.settings.format]

    def _joined(self, payloads: Any) -> pa.Buffer:  # noqa: ANN401
        if self.settings.one_by_one:
            return strung(payloads).data
        if self.settings.format is Form.JSON:
            elements = strung(joined(payloads, _COMMA)).data
            return pa.py_buffer(b"".join((b"[", elements[:-1], b"]")))
        return lines_of(payloads)

    def headers(self) -> Headers:
        constants = {name: each.constant for name, each in self._headers.items()}
        return {name: text.encode() for name, text in constants.items() if text is not None}

    # ── answers ─────────────────────────────────────────────────────────────────────────────────

    def understand(self, request: Request, answer: Answer) -> None:
        """Nothing is asked of a good answer."""

    def check(self) -> None:
        """Ask for the address with ``HEAD``; if that depends on events, for the host's root."""
        url = self._url.constant
        if url is None:
            url = "/".join([*self._url.before_places().split("/")[:3], ""])
        answer = self.exchange(url, method="HEAD")
        if answer.status not in _ALIVE:
            self.good(answer, url)


def _with_ids(objects: Any, ids: pa.Array[Any] | None, name: str) -> Any:  # noqa: ANN401
    """JSON objects with one field more; without ids, as they are."""
    if ids is None:
        return objects
    head = pa.scalar(f'{{{json.dumps(name)}:"'.encode(), pa.large_binary())
    rest = pc.binary_replace_slice(objects, 0, 1, b"")
    more = pc.if_else(pc.equal(objects, _NO_FIELDS), _END, _GO_ON)
    return joined(head, large(for_json(ids)), more, rest)


def _groups(columns: list[Any]) -> list[Rows]:
    """The rows that are alike in all columns, each group in their order."""
    alike: Any = pc.binary_join_element_wise(*columns, "\n")
    numbers = alike.dictionary_encode().indices.to_numpy()
    order = np.argsort(numbers, kind="stable")
    ends = np.flatnonzero(np.diff(numbers[order])) + 1
    return [part for part in np.split(order, ends) if len(part)]
