"""Output ``otlp``: telemetry on to OpenTelemetry's collectors, and anything else as log records."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from turnlane.errors import Never, PartlyDelivered, RetryLater
from turnlane.events import Block
from turnlane.formats.lines import large, strung
from turnlane.formats.otlp import (
    JSON,
    PROTOBUF,
    SIGNAL_HEADER,
    Malformed,
    Signal,
    count,
    decode,
    logs_request,
    rejected,
)
from turnlane.outputs.api import OutputSettings, key_of, lasting_ids
from turnlane.outputs.http_connections import Answer, quoted
from turnlane.outputs.http_requests import (
    BaseAddress,
    Compression,
    Prepared,
    Request,
    Rows,
    WebOutput,
    WebOutputSettings,
    chosen,
)

log = logging.getLogger(__name__)

_KIND: Final = "content-type"
_SIGNALS: Final = pa.array([signal.value for signal in Signal])
_OTHER: Final = -1


class OtlpSettings(WebOutputSettings):
    """The settings of the output ``otlp``."""

    type: Literal["otlp"] = "otlp"
    url: BaseAddress = Field(
        description="Where the collector is; `/v1/logs` and so on are put behind it.",
        examples=["http://collector:4318"],
    )
    resource: dict[str, str] = Field(
        default={},
        description="The resource's attributes for events that are no telemetry.",
        examples=[{"service.name": "shop"}],
    )
    compression: Compression = Field(
        default=Compression.GZIP, description="How bodies are made smaller."
    )

    format: ClassVar[str] = "raw"
    """So that no payloads are made, which would not be used."""


class _Asked(NamedTuple):
    """What a request has asked a collector to take."""

    signal: Signal
    body: bytes
    events: int

    @property
    def records(self) -> int:
        """How many, as OTLP counts."""
        return count(self.signal, decode(self.signal, self.body))


class OtlpOutput(WebOutput):
    """Telemetry that came in as OTLP goes out as it came; all of a signal in one request."""

    settings_type: ClassVar[type[OutputSettings]] = OtlpSettings
    settings: OtlpSettings

    def __init__(self, settings: OtlpSettings) -> None:
        super().__init__(settings)
        self._rejected = 0
        self._counting = threading.Lock()

    takes_apart = True
    """There is a request for each signal."""

    @property
    def rejected(self) -> int:
        """Records that collectors have refused for good while they took the rest."""
        return self._rejected

    # ── preparing ───────────────────────────────────────────────────────────────────────────────

    def prepare(self, block: Block) -> Prepared:
        """A request for each signal that there is."""
        return Prepared(block.num_rows, list(self._requests(block)))

    def _requests(self, block: Block) -> Iterator[Request]:
        kinds = _signals(block)
        for number, signal in enumerate(Signal):
            wanted = kinds == number
            if signal is Signal.LOGS:
                wanted |= kinds == _OTHER
            if wanted.any():
                yield self._request(block, kinds, signal, np.flatnonzero(wanted))

    def _request(self, block: Block, kinds: Rows, signal: Signal, rows: Rows) -> Request:
        part = partial(self._request, block, kinds, signal)
        others = kinds[rows] == _OTHER
        # Export requests behind each other are one that holds everything.
        body = self._telemetry(block, rows[~others]) + self._records(block, rows[others])
        packed, headers = self.packed(body, PROTOBUF, key_of(chosen(block, rows), body))
        asked = _Asked(signal, body, len(rows))
        return Request(self._url(signal), packed, headers, rows, part, about=asked)

    def _telemetry(self, block: Block, rows: Rows) -> bytes:
        if not len(rows):
            return b""
        return strung(large(chosen(block, rows).column("value"))).data.to_pybytes()

    def _records(self, block: Block, rows: Rows) -> bytes:
        if not len(rows):
            return b""
        events = chosen(block, rows)
        return logs_request(events, resource=self.settings.resource, ids=lasting_ids(events))

    def _url(self, signal: Signal) -> str:
        return f"{self.settings.url}/v1/{signal}"

    # ── answers ─────────────────────────────────────────────────────────────────────────────────

    def understand(self, request: Request, answer: Answer) -> None:
        """Nothing that a collector has rejected may be sent again: so OTLP has it.

        It does not say which records those are, unless they are all.
        """
        asked: _Asked = request.about
        rejections, why = self._rejections(asked.signal, answer)
        if not rejections:
            if why:
                log.warning("%s took all records, with a warning: %s", request.url, why)
            return
        if rejections >= asked.records:
            text = f"{request.url}: rejected for good: {why}"
            raise PartlyDelivered({row: Never(text) for row in range(asked.events)})
        with self._counting:
            self._rejected += rejections
        log.warning("%s rejected %d records for good: %s", request.url, rejections, why)

    def _rejections(self, signal: Signal, answer: Answer) -> tuple[int, str]:
        kind = answer.headers.get(_KIND, PROTOBUF).partition(";")[0].strip().lower()
        garbage = RetryLater(f"{self._url(signal)}: no answer to OTLP: {kind}{quoted(answer.body)}")
        if not answer.whole:
            raise garbage
        if not answer.body:
            return 0, ""
        if kind not in (PROTOBUF, JSON):
            raise garbage
        try:
            return rejected(signal, answer.body, kind)
        except Malformed as error:
            raise garbage from error

    def check(self) -> None:
        """Export nothing, which every collector takes."""
        url = self._url(Signal.LOGS)
        answer = self.exchange(url, b"", {**self.headers(), "Content-Type": PROTOBUF.encode()})
        self._rejections(Signal.LOGS, self.good(answer, url))


def _signals(block: Block) -> Rows:
    """Each event's signal, by number; -1 for those that are no telemetry."""
    at = block.schema.get_field_index("headers")
    if at < 0 or "value" not in block.schema.names:
        return np.full(block.num_rows, _OTHER)
    headers = block.column(at)
    signals = pc.map_lookup(headers, pa.scalar(SIGNAL_HEADER), "last")
    is_protobuf = pc.equal(pc.map_lookup(headers, pa.scalar(_KIND), "last"), pa.scalar(PROTOBUF))
    numbers: Any = pc.index_in(pc.if_else(is_protobuf, signals, None), _SIGNALS)
    found: Rows = numbers.fill_null(_OTHER).to_numpy(zero_copy_only=False)
    return found
