"""Output ``elasticsearch``: writes events as documents with the bulk API, also to OpenSearch.

Elasticsearch accepts or refuses each document on its own, so only the failed ones are sent again. A
document's id is made of the event's position and time: an event that is sent again is the same
document.
"""

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
from turnlane.formats.lines import join_columns, join_texts, to_large_binary
from turnlane.outputs.api import Output, OutputSettings
from turnlane.outputs.http_client import (
    HttpResponse,
    get_response_error,
    quote_body,
    remove_query,
)
from turnlane.outputs.http_requests import (
    BaseHttpUrl,
    BlockRows,
    HttpRequest,
    RequestOutputSettings,
    RequestSender,
    RowErrors,
    require_success,
    select_rows,
)
from turnlane.outputs.templates import (
    Template,
    TemplateText,
    escape_json,
    find_template_columns,
    make_dated_event_ids,
)

_CONTENT_TYPE: Final = "application/x-ndjson"
_RESPONSE_FIELDS: Final = "errors,items.*.status,items.*.error.type,items.*.error.reason"
"""The fields of a response that are read. Without the others it is a tenth as long."""
_MAX_RESPONSE_BYTES: Final = 1 << 26
_ALREADY_EXISTS: Final = 409
_LINE_ENDS: Final = "[\r\n]"


class ElasticsearchOutputSettings(RequestOutputSettings, OutputSettings):
    """The settings of the output ``elasticsearch``."""

    type: Literal["elasticsearch"] = "elasticsearch"
    url: BaseHttpUrl = Field(
        description="The URL of Elasticsearch.", examples=["https://host:9200"]
    )
    index: TemplateText = Field(
        description="The index or data stream of each event; it may contain `{column}`.",
        examples=["logs-{timestamp:%Y.%m.%d}"],
    )
    action: Literal["create", "index"] = Field(
        default="create",
        description="What happens to a document whose id exists already: it stays (`create`, which "
        "data streams require), or it is replaced (`index`).",
    )
    id: TemplateText | None = Field(
        default=None,
        description="The document's id. Default: the event's id and time, so that an event that "
        "is sent again is the same document.",
    )
    format: Literal["json", "raw"] = Field(
        default="json",
        description="The document is the whole event (`json`), or the event's value (`raw`), which "
        "must be a JSON object then.",
    )
    pipeline: str | None = Field(
        default=None, description="The ingest pipeline that Elasticsearch applies."
    )
    compression: Literal["none", "gzip"] = Field(
        default="gzip", description="How the bodies of requests are compressed."
    )

    @property
    def wanted_columns(self) -> frozenset[str]:
        """The columns of the templates, and the time for ids."""
        return find_template_columns(self.index, self.id) | {"timestamp"}


class ElasticsearchOutput(Output):
    """Writes each block with one bulk request."""

    settings_type: ClassVar[type[OutputSettings]] = ElasticsearchOutputSettings
    settings: ElasticsearchOutputSettings
    can_deliver_partly = True

    def __init__(self, settings: ElasticsearchOutputSettings) -> None:
        super().__init__(settings)
        self._sender = RequestSender(
            settings, self._check_response, max_response_bytes=_MAX_RESPONSE_BYTES
        )
        self._index = Template.parse(settings.index)
        self._id = None if settings.id is None else Template.parse(settings.id)
        parameters = {"filter_path": _RESPONSE_FIELDS}
        if settings.pipeline is not None:
            parameters["pipeline"] = settings.pipeline
        self._url = f"{settings.url}/_bulk?{urlencode(parameters, safe='*,')}"

    def prepare(self, block: Block) -> list[HttpRequest]:
        """Make one bulk request: for each event a line with the action, and its document."""
        return [self._make_request(block, np.arange(block.num_rows))] if block.num_rows else []

    def _make_request(self, block: Block, rows: BlockRows) -> HttpRequest:
        rebuild = partial(self._make_request, block)
        block = select_rows(block, rows)
        documents = to_large_binary(block.column("payload"))
        if self.settings.format == "raw":
            # In JSON a line end can only stand between tokens, where a space means the same.
            documents = pc.replace_substring_regex(documents, _LINE_ENDS, " ")
        index = to_large_binary(escape_json(self._index.fill(block)))
        parts = [_make_scalar(f'{{"{self.settings.action}":{{"_index":"'), index]
        ids = make_dated_event_ids(block) if self._id is None else self._id.fill(block)
        if ids is not None:
            parts += [_make_scalar('","_id":"'), to_large_binary(escape_json(ids))]
        lines = join_columns(*parts, _make_scalar('"}}\n'), documents, _make_scalar("\n"))
        body, headers = self._sender.encode_body(join_texts(lines).data, _CONTENT_TYPE)
        return HttpRequest(self._url, body, headers, rows, rebuild)

    def send(self, prepared: list[HttpRequest]) -> None:
        self._sender.send(prepared)

    def cancel(self) -> None:
        self._sender.cancel()

    def close(self) -> None:
        self._sender.close()

    def _check_response(self, request: HttpRequest, response: HttpResponse) -> None:
        """Raise ``PartlyDelivered`` with the documents that were not accepted."""
        result = self._parse(response)
        items = result.get("items")
        if not isinstance(items, list) or len(items) != len(request.rows):
            raise RetryLater(f"{remove_query(request.url)}: not a response to a bulk request")
        errors = {} if result.get("errors") is False else self._find_errors(items)
        if errors:
            raise PartlyDelivered(errors)

    def _parse(self, response: HttpResponse) -> dict[str, Any]:
        try:
            result = json.loads(response.body) if response.is_complete else None
        except (ValueError, RecursionError):
            result = None
        if not isinstance(result, dict):
            url, text = remove_query(self._url), quote_body(response.body)
            raise RetryLater(f"{url}: not a response of Elasticsearch{text}")
        return result

    def _find_errors(self, items: list[Any]) -> RowErrors:
        """Return the errors of documents that were not accepted. Retryable ones are shared."""
        errors: RowErrors = {}
        shared: dict[int, TurnlaneError] = {}
        for row, item in enumerate(items):
            status, reason = _read_item(item)
            is_old = status == _ALREADY_EXISTS and self.settings.action == "create"
            if 200 <= status < 300 or is_old:
                continue
            error = shared.get(status)
            if error is None:
                error = get_response_error(HttpResponse(status, body=reason), self._url, 0.0)
            assert error is not None
            if isinstance(error, RetryLater):
                shared[status] = error
            errors[row] = error
        return errors

    def check(self) -> None:
        """Ask for the information about the cluster."""
        url = f"{self.settings.url}/"
        self._parse(require_success(self._sender.request_once(url, method="GET"), url))


def _make_scalar(text: str) -> Any:  # noqa: ANN401
    return pa.scalar(text.encode(), pa.large_binary())


def _read_item(item: Any) -> tuple[int, bytes]:  # noqa: ANN401
    """Return the status of an item and the reason of a failure. A malformed item may be retried."""
    try:
        [outcome] = item.values()
        status = int(outcome["status"])
        error = outcome.get("error") or {}
        reason = f"{error.get('type', '')}: {error.get('reason', '')}".strip(": ")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return 502, b"the response does not say what happened to the document"
    return status, reason.encode(errors="replace")  # JSON can hold half a surrogate pair
