"""Output ``elasticsearch``: events as documents, through the bulk API. OpenSearch has the same."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, ClassVar, Final, Literal
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from turnlane.errors import PartlyDelivered, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.formats.lines import joined, large, strung
from turnlane.outputs.api import OutputSettings, lasting_ids
from turnlane.outputs.http_connections import Answer, error_of, quoted, shown
from turnlane.outputs.http_requests import (
    BaseAddress,
    Compression,
    Failures,
    Prepared,
    Request,
    Rows,
    WebOutput,
    WebOutputSettings,
    chosen,
)
from turnlane.outputs.templates import Template, TemplateText, columns_of, for_json

_KIND: Final = "application/x-ndjson"
_WANTED: Final = "errors,items.*.status,items.*.error.type,items.*.error.reason"
"""What we want to know of an answer: without the rest it is a tenth as long."""
_EXISTS: Final = 409
_LINE_ENDS: Final = "[\r\n]"


class ElasticsearchSettings(WebOutputSettings):
    """The settings of the output ``elasticsearch``."""

    type: Literal["elasticsearch"] = "elasticsearch"
    url: BaseAddress = Field(description="Where Elasticsearch is.", examples=["https://host:9200"])
    index: TemplateText = Field(
        description="The index or data stream of each event; `{column}` in it is one of its "
        "columns.",
        examples=["logs-{timestamp:%Y.%m.%d}"],
    )
    action: Literal["create", "index"] = Field(
        default="create",
        description="What is done with a document whose id is there already: it stays (`create`, "
        "which data streams insist on), or it is replaced (`index`).",
    )
    id: TemplateText | None = Field(
        default=None,
        description="The document's id. Default: the event's id and time, so that an event that "
        "is sent again is the same document.",
    )
    format: Literal["json", "raw"] = Field(
        default="json",
        description="The document is the whole event, or the event's value, which then has to be "
        "a JSON object.",
    )
    pipeline: str | None = Field(default=None, description="The ingest pipeline to go through.")
    compression: Literal[Compression.NONE, Compression.GZIP] = Field(
        default=Compression.GZIP, description="How bodies are made smaller."
    )

    @property
    def wants(self) -> frozenset[str]:
        """What templates name, and the events' times, for ids."""
        return columns_of(self.index, self.id) | {"timestamp"}


class ElasticsearchOutput(WebOutput):
    """A document is taken or refused by itself: only what failed comes again."""

    settings_type: ClassVar[type[OutputSettings]] = ElasticsearchSettings
    settings: ElasticsearchSettings
    longest_answer: ClassVar[int] = 1 << 26
    takes_apart = True

    def __init__(self, settings: ElasticsearchSettings) -> None:
        super().__init__(settings)
        self._index = Template.parse(settings.index)
        self._id = None if settings.id is None else Template.parse(settings.id)
        asked = {"filter_path": _WANTED}
        if settings.pipeline is not None:
            asked["pipeline"] = settings.pipeline
        self._url = f"{settings.url}/_bulk?{urlencode(asked, safe='*,')}"

    def prepare(self, block: Block) -> Prepared:
        """One bulk request: for each event a line that says what to do, and its document."""
        requests = [self._request(block, np.arange(block.num_rows))] if block.num_rows else []
        return Prepared(block.num_rows, requests)

    def _request(self, block: Block, rows: Rows) -> Request:
        lines = self._lines(chosen(block, rows))
        body, headers = self.packed(strung(lines).data, _KIND)
        return Request(self._url, body, headers, rows, partial(self._request, block))

    def _lines(self, block: Block) -> Any:  # noqa: ANN401
        documents = large(block.column("payload"))
        if self.settings.format == "raw":
            # Between the parts of JSON a line end is only space, and within none it can be.
            documents = pc.replace_substring_regex(documents, _LINE_ENDS, " ")
        index = large(for_json(self._index.fill(block)))
        parts = [_fixed(f'{{"{self.settings.action}":{{"_index":"'), index]
        ids = lasting_ids(block) if self._id is None else self._id.fill(block)
        if ids is not None:
            parts += [_fixed('","_id":"'), large(for_json(ids))]
        return joined(*parts, _fixed('"}}\n'), documents, _fixed("\n"))

    # ── answers ─────────────────────────────────────────────────────────────────────────────────

    def understand(self, request: Request, answer: Answer) -> None:
        said = self._said(answer)
        items = said.get("items")
        if not isinstance(items, list) or len(items) != len(request.rows):
            raise RetryLater(f"{shown(request.url)}: this is no answer to a bulk request")
        failures = {} if said.get("errors") is False else self._refused(items)
        if failures:
            raise PartlyDelivered(failures)

    def _said(self, answer: Answer) -> dict[str, Any]:
        try:
            said = json.loads(answer.body) if answer.whole else None
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            where, text = shown(self._url), quoted(answer.body)
            raise RetryLater(f"{where}: this is no answer of Elasticsearch{text}")
        return said

    def _refused(self, items: list[Any]) -> Failures:
        """The documents that were not taken, and why. Those to come again share their error."""
        failures: Failures = {}
        shared: dict[int, TurnlaneError] = {}
        for row, item in enumerate(items):
            status, reason = _result(item)
            if status < 300 or (status == _EXISTS and self.settings.action == "create"):
                continue
            error = shared.get(status) or error_of(Answer(status, body=reason), self._url, 0.0)
            assert error is not None
            if isinstance(error, RetryLater):
                shared[status] = error
            failures[row] = error
        return failures

    def check(self) -> None:
        """Ask who is there."""
        url = f"{self.settings.url}/"
        self._said(self.good(self.exchange(url, method="GET"), url))


def _fixed(text: str) -> Any:  # noqa: ANN401
    return pa.scalar(text.encode(), pa.large_binary())


def _result(item: Any) -> tuple[int, bytes]:  # noqa: ANN401
    """An item's status, and the reason if it failed. What makes no sense has failed for now."""
    try:
        [outcome] = item.values()
        status = int(outcome["status"])
        error = outcome.get("error") or {}
        reason = f"{error.get('type', '')}: {error.get('reason', '')}".strip(": ")
    except (AttributeError, KeyError, TypeError, ValueError):
        return 502, b"the answer does not say what became of the document"
    return status, reason.encode()
