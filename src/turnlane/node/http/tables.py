"""Endpoints of queue tables: events as they fire, one JSON object a line, and acks by POST."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, with_config
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from turnlane.errors import LeadLost, QueueClosed, TransportDown
from turnlane.node.http.consume import OffsetJson
from turnlane.node.http.events import STRICT
from turnlane.node.http.request import (
    ANY_TOKEN,
    READ_TABLE,
    Answer,
    Call,
    Endpoint,
    Expected,
    NoParameters,
    ParsedText,
    RequestContext,
    encode_json,
    json_response,
    whole_number,
)
from turnlane.node.tables import ServedTable, Tables, TableStream, convert_rows_to_json
from turnlane.serving.auth import Right
from turnlane.serving.http_server import ThreadLimiter
from turnlane.table.shards import KeyRange

STREAMS: Final = 256
"""The most concurrent receivers, each on a thread."""

PREFETCH: Final = 100
MOST_PREFETCH: Final = 100_000

_SLICE: Final = 1.0
"""Seconds of one wait. Between two waits a stream checks that its client may still receive."""

_BEAT: Final = 10.0
"""Seconds after which an empty line is sent, which fails if the client has left."""

_FLUSH: Final = 30.0
"""Seconds for which an ack may wait for the database."""

_MOST_DELAY: Final = 36_500 * 86_400.0


class ReceiveParameters(NoParameters):
    """Which events to receive, and how many at a time."""

    key_range: Annotated[
        KeyRange,
        ParsedText(
            KeyRange.parse,
            {
                "type": "string",
                "pattern": "^([0-9a-fA-F]{2}){0,8}-([0-9a-fA-F]{2}){0,8}$",
                "examples": ["-80", "40-80"],
            },
        ),
    ] = Field("-", validate_default=True, description="Only events whose keys lie in this range.")
    prefetch: Annotated[int, whole_number(1, MOST_PREFETCH)] = Field(
        PREFETCH, description="The most events that are sent and not settled."
    )


NumbersJson = Annotated[
    list[OffsetJson | tuple[OffsetJson, OffsetJson]],
    FailFast(),  # the first error is enough, and a request may hold millions
    Expected("a list of numbers, or of pairs [first, end]"),
    Field(
        description="Numbers of events, or pairs of a first number and the one after the last.",
        examples=[[0, 1, [5, 9]]],
    ),
]


class AckedJson(BaseModel):
    """Events to settle."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    events: NumbersJson


class NackedJson(BaseModel):
    """Events to fire again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    events: NumbersJson
    delay: Annotated[
        Annotated[float, Strict(), Field(ge=0, le=_MOST_DELAY)] | None,
        Expected("seconds from 0 on"),
    ] = Field(None, description="Seconds until they fire again. Default: their backoff.")
    error: Annotated[str | None, Expected("a text")] = Field(
        None, description="The reason, stored with the events."
    )


@with_config(STRICT)
class ShardJson(TypedDict):
    """A shard of a queue table."""

    range: Annotated[str, Field(description="The key range.")]
    leads: Annotated[bool, Field(description="Whether this node fires its events.")]


@with_config(STRICT)
class TableJson(TypedDict):
    """A queue table."""

    name: str
    open: Annotated[bool, Field(description="Whether the node has reached it.")]
    shards: list[ShardJson]


@with_config(STRICT)
class TablesJson(TypedDict):
    """The queue tables of a node."""

    tables: list[TableJson]


_LINES = Annotated[
    str,
    Field(
        description="One JSON object a line: the first has `stream` and `fields`, each later one "
        "`first`, the number of its first event, and `rows`. An empty line says that the node is "
        "still there."
    ),
]


class TableRoutes:
    """Sends events of queue tables to receivers, and takes their acks."""

    def __init__(self, context: RequestContext, tables: Tables) -> None:
        self._context = context
        self._tables = tables
        self._threads = ThreadLimiter(STREAMS)

    @Endpoint(
        "GET /tables",
        tag="tables",
        access=ANY_TOKEN,
        answers={200: Answer("The tables.", TablesJson)},
    )
    async def tables(self, call: Call) -> Response:
        """List the queue tables that the node serves and the token may read."""
        authority = self._context.authority
        answer: TablesJson = {
            "tables": [
                _describe_table(table)
                for name, table in sorted(self._tables.all().items())
                if authority.allows(call.bearer, Right.READ, name)
            ]
        }
        return json_response(answer)

    @Endpoint(
        "GET /tables/{table}/events",
        tag="tables",
        access=READ_TABLE,
        answers={
            200: Answer(
                "Events, to settle under `/tables/{table}/streams/{stream}`.",
                _LINES,
                "application/x-ndjson",
            )
        },
        allows_head=False,  # it would open a stream that no one reads
    )
    async def receive(self, call: Call[ReceiveParameters]) -> Response:
        """Receive events of a queue table as they fire, until the client leaves."""
        name: str = call.request.path_params["table"]
        _ = self._tables.table(name).queue  # raises the error that the client gets, if any
        if self._threads.is_exhausted:
            raise TransportDown("the node has too many receivers at a time", after=1.0)
        asked = call.parameters
        return StreamingResponse(
            self._lines(name, asked.key_range, asked.prefetch, call.bearer),
            media_type="application/x-ndjson",
            headers={"cache-control": "no-store"},
        )

    async def _lines(
        self, name: str, key_range: KeyRange, prefetch: int, bearer: str | None
    ) -> AsyncIterator[bytes]:
        # The stream opens when the server reads the first line; only then does the server close it.
        with self._tables.stream(name, key_range, prefetch) as stream:
            fields = [{"name": each.name, "type": str(each.type)} for each in stream.schema]
            yield _encode_line({"stream": stream.id, "fields": fields})
            said, authority = time.monotonic(), self._context.authority
            while not self._context.stopping and authority.allows(bearer, Right.READ, name):
                try:
                    blocks = await self._threads.run(stream.take, _SLICE)
                except QueueClosed:
                    return
                for first, block in blocks:
                    yield _encode_line({"first": first, "rows": convert_rows_to_json(block)})
                if not blocks and time.monotonic() - said >= _BEAT:
                    yield b"\n"
                elif not blocks:
                    continue
                said = time.monotonic()

    @Endpoint("POST /tables/{table}/streams/{stream}/ack", tag="tables", access=READ_TABLE)
    async def ack_events(self, call: Call[NoParameters, AckedJson]) -> Response:
        """Settle events, so that they never fire again; the answer comes once that is stored."""
        stream = self._find_stream(call)
        asked = await call.read_json()
        await self._threads.run(_store, stream, _list_spans(asked.events))
        return Response(status_code=204)

    @Endpoint("POST /tables/{table}/streams/{stream}/nack", tag="tables", access=READ_TABLE)
    async def nack_events(self, call: Call[NoParameters, NackedJson]) -> Response:
        """Make events fire again."""
        stream = self._find_stream(call)
        asked = await call.read_json()
        stream.nack(_list_spans(asked.events), asked.delay, asked.error)
        return Response(status_code=204)

    def _find_stream(
        self, call: Call[NoParameters, AckedJson] | Call[NoParameters, NackedJson]
    ) -> TableStream:
        name: str = call.request.path_params["table"]
        self._tables.table(name)
        return self._tables.find_stream(name, call.request.path_params["stream"])


def _describe_table(table: ServedTable) -> TableJson:
    if not table.is_open:
        return {"name": table.name, "open": False, "shards": []}
    shards: list[ShardJson] = [
        {"range": str(shard.key_range), "leads": manager.can_fire}
        for shard, manager in table.queue.managers().items()
    ]
    return {"name": table.name, "open": True, "shards": shards}


def _store(stream: TableStream, spans: list[tuple[int, int]]) -> None:
    if not stream.store(spans, _FLUSH):
        raise LeadLost("the acks are not stored yet; they may be later", after=1.0)


def _list_spans(events: list[int | tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pairs of a first number and an end (exclusive). Raises ``ValueError``."""
    spans = [(each, each + 1) if isinstance(each, int) else each for each in events]
    for first, end in spans:
        if first > end:
            raise ValueError(f"events: the first number, {first}, is greater than the end, {end}")
    return spans


def _encode_line(content: object) -> bytes:
    return encode_json(content) + b"\n"
