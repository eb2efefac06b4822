"""Output ``otlp``: sends telemetry to OpenTelemetry collectors, and other events as log records.

Telemetry that came in as OTLP goes out unchanged. All events of a signal are one export request.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from turnlane.errors import Never, PartlyDelivered, RetryLater
from turnlane.events import Block
from turnlane.formats.lines import join_texts, to_large_binary
from turnlane.formats.otlp import (
    JSON,
    PROTOBUF,
    SIGNAL_HEADER,
    Malformed,
    Signal,
    count_records,
    decode,
    decode_rejected,
    encode_logs_request,
)
from turnlane.logs import get_logger
from turnlane.outputs.api import Output, OutputSettings
from turnlane.outputs.http_client import HttpResponse, quote_body
from turnlane.outputs.http_requests import (
    BaseHttpUrl,
    BlockRows,
    HttpRequest,
    RequestOutputSettings,
    RequestSender,
    require_success,
    select_rows,
)
from turnlane.outputs.templates import make_dated_event_ids, make_idempotency_key

log = get_logger(__name__)

_CONTENT_TYPE_HEADER: Final = "content-type"
_SIGNALS: Final = pa.array([signal.value for signal in Signal])
_NO_SIGNAL: Final = -1


class OtlpOutputSettings(RequestOutputSettings, OutputSettings):
    """The settings of the output ``otlp``."""

    type: Literal["otlp"] = "otlp"
    url: BaseHttpUrl = Field(
        description="The URL of the collector; `/v1/logs` and so on are appended.",
        examples=["http://collector:4318"],
    )
    resource: dict[str, str] = Field(
        default={},
        description="The attributes of the resource for events that are not telemetry.",
        examples=[{"service.name": "shop"}],
    )
    compression: Literal["none", "gzip", "zstd"] = Field(
        default="gzip", description="How the bodies of requests are compressed."
    )

    format: ClassVar[str] = "raw"
    """``raw`` saves making payloads, which this output does not use."""


class _Export(NamedTuple):
    """The contents of an export request, to compare them with the response."""

    signal: Signal
    body: bytes
    events: int

    def count_records(self) -> int:
        return count_records(self.signal, decode(self.signal, self.body))


class OtlpOutput(Output):
    """Sends one export request for each signal of a block."""

    settings_type: ClassVar[type[OutputSettings]] = OtlpOutputSettings
    settings: OtlpOutputSettings
    can_deliver_partly = True

    def __init__(self, settings: OtlpOutputSettings) -> None:
        super().__init__(settings)
        self._sender = RequestSender(settings, self._check_response)
        self._rejected = 0
        self._rejected_lock = threading.Lock()

    @property
    def rejected(self) -> int:
        """The number of records that collectors refused for good while they took the others."""
        return self._rejected

    def prepare(self, block: Block) -> list[HttpRequest]:
        """Make one request for each signal in the block."""
        signals, requests = _find_signals(block), []
        for number, signal in enumerate(Signal):
            is_wanted = signals == number
            if signal is Signal.LOGS:
                is_wanted |= signals == _NO_SIGNAL
            if is_wanted.any():
                rows = np.flatnonzero(is_wanted)
                requests.append(self._make_request(block, signals, signal, rows))
        return requests

    def _make_request(
        self, block: Block, signals: BlockRows, signal: Signal, rows: BlockRows
    ) -> HttpRequest:
        rebuild = partial(self._make_request, block, signals, signal)
        is_other = signals[rows] == _NO_SIGNAL
        # Serialised export requests, concatenated, are one request with the records of all.
        body = b""
        if not is_other.all():
            telemetry = select_rows(block, rows[~is_other])
            body += join_texts(to_large_binary(telemetry.column("value"))).data.to_pybytes()
        if is_other.any():
            others = select_rows(block, rows[is_other])
            ids = make_dated_event_ids(others)
            body += encode_logs_request(others, resource=self.settings.resource, ids=ids)
        key = make_idempotency_key(select_rows(block, rows), body)
        packed, headers = self._sender.encode_body(body, PROTOBUF, key)
        export = _Export(signal, body, len(rows))
        return HttpRequest(self._get_url(signal), packed, headers, rows, rebuild, context=export)

    def _get_url(self, signal: Signal) -> str:
        return f"{self.settings.url}/v1/{signal}"

    def send(self, prepared: list[HttpRequest]) -> None:
        self._sender.send(prepared)

    def cancel(self) -> None:
        self._sender.cancel()

    def close(self) -> None:
        self._sender.close()

    def _check_response(self, request: HttpRequest, response: HttpResponse) -> None:
        """Count rejected records, or raise if all were rejected.

        OTLP forbids sending rejected records again, and does not say which ones they are.
        """
        export: _Export = request.context
        rejections, reason = self._read_rejections(export.signal, response)
        if not rejections:
            if reason:
                log.warning("otlp.accepted_with_warning", url=request.url, warning=reason)
            return
        if rejections >= export.count_records():
            text = f"{request.url}: rejected for good: {reason}"
            raise PartlyDelivered({row: Never(text) for row in range(export.events)})
        with self._rejected_lock:
            self._rejected += rejections
        log.warning("otlp.records_rejected", url=request.url, records=rejections, reason=reason)

    def _read_rejections(self, signal: Signal, response: HttpResponse) -> tuple[int, str]:
        kind = response.headers.get(_CONTENT_TYPE_HEADER, PROTOBUF).partition(";")[0]
        kind = kind.strip().lower()
        text = quote_body(response.body)
        malformed = RetryLater(f"{self._get_url(signal)}: not a response of OTLP: {kind}{text}")
        if not response.is_complete:
            raise malformed
        if not response.body:
            return 0, ""
        if kind not in (PROTOBUF, JSON):
            raise malformed
        try:
            return decode_rejected(signal, response.body, kind)
        except Malformed as error:
            raise malformed from error

    def check(self) -> None:
        """Export no records, which every collector accepts."""
        url = self._get_url(Signal.LOGS)
        headers = {**self._sender.headers, "Content-Type": PROTOBUF.encode()}
        response = self._sender.request_once(url, b"", headers)
        self._read_rejections(Signal.LOGS, require_success(response, url))


def _find_signals(block: Block) -> BlockRows:
    """Return the number of each event's signal; -1 for events that are not telemetry."""
    at = block.schema.get_field_index("headers")
    if at < 0 or "value" not in block.schema.names:
        return np.full(block.num_rows, _NO_SIGNAL)
    headers = block.column(at)
    signals = pc.map_lookup(headers, pa.scalar(SIGNAL_HEADER), "last")
    content_types = pc.map_lookup(headers, pa.scalar(_CONTENT_TYPE_HEADER), "last")
    is_protobuf = pc.equal(content_types, pa.scalar(PROTOBUF))
    numbers: Any = pc.index_in(pc.if_else(is_protobuf, signals, None), _SIGNALS)
    found: BlockRows = numbers.fill_null(_NO_SIGNAL).to_numpy(zero_copy_only=False)
    return found
