"""Queue tables over HTTP: events as they fire, a JSON object a line; acks by POST."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turnlane.errors import LeadLost, QueueClosed, TransportDown
from turnlane.node import http_queries as queries
from turnlane.node.http_events import parsed_object
from turnlane.node.http_requests import Requests, json_bytes, json_response, token_of
from turnlane.node.tables import ServedTable, Tables, TableStream, rows_of
from turnlane.serving.auth import Right
from turnlane.serving.threads import Threads
from turnlane.table.shards import KeyRange

STREAMS: Final = 256
"""Receivers at a time, each on a thread."""

PREFETCH: Final = 100
MOST_PREFETCH: Final = 100_000

_SLICE: Final = 1.0
"""A stream waits in slices, and looks between them whether there is still a point."""

_BEAT: Final = 10.0
"""Seconds after which a line without events is sent, which finds out whether anybody is there."""

_FLUSH: Final = 30.0
"""Seconds for which an ack may wait for the database."""

_MOST_DELAY: Final = 36_500 * 86_400.0


class TableRoutes:
    """Gives events of queue tables out."""

    def __init__(self, requests: Requests, tables: Tables) -> None:
        self._requests = requests
        self._tables = tables
        self._threads = Threads(STREAMS)

    def routes(self) -> list[Route]:
        """The routes."""
        get = Route("/tables/{table}/events", self.receive, methods=["GET"])
        assert get.methods is not None
        get.methods.discard("HEAD")
        return [
            Route("/tables", self.all, methods=["GET"]),
            get,
            Route("/tables/{table}/streams/{stream}/ack", self.ack, methods=["POST"]),
            Route("/tables/{table}/streams/{stream}/nack", self.nack, methods=["POST"]),
        ]

    def _allowed(self, request: Request) -> str:
        table: str = request.path_params["table"]
        self._requests.authority.check(token_of(request), Right.READ, table)
        return table

    async def all(self, request: Request) -> Response:
        """The tables that the token may read."""
        queries.only(request)
        bearer = token_of(request)
        authority = self._requests.authority
        authority.identify(bearer)
        shown = [
            _shown(table)
            for name, table in sorted(self._tables.all().items())
            if authority.allows(bearer, Right.READ, name)
        ]
        return json_response({"tables": shown})

    async def receive(self, request: Request) -> Response:
        """Send events as they fire, until the client leaves."""
        name = self._allowed(request)
        queries.only(request, "key_range", "prefetch")
        key_range = KeyRange.parse(request.query_params.get("key_range", "-"))
        prefetch = queries.whole(request, "prefetch", PREFETCH, least=1, most=MOST_PREFETCH)
        _ = self._tables.table(name).queue  # or the answer says what is wrong
        if self._threads.exhausted:
            raise TransportDown("the node has too many receivers at a time", after=1.0)
        return StreamingResponse(
            self._lines(name, key_range, prefetch, token_of(request)),
            media_type="application/x-ndjson",
            headers={"cache-control": "no-store"},
        )

    async def _lines(
        self, name: str, key_range: KeyRange, prefetch: int, bearer: str | None
    ) -> AsyncIterator[bytes]:
        # Not before somebody reads: what nobody begins, nobody ends.
        with self._tables.stream(name, key_range, prefetch) as stream:
            fields = [{"name": each.name, "type": str(each.type)} for each in stream.schema]
            yield _line({"stream": stream.id, "fields": fields})
            said, authority = time.monotonic(), self._requests.authority
            while not self._requests.stopping and authority.allows(bearer, Right.READ, name):
                try:
                    blocks = await self._threads.run(stream.take, _SLICE)
                except QueueClosed:
                    return
                for first, block in blocks:
                    yield _line({"first": first, "rows": rows_of(block)})
                if not blocks and time.monotonic() - said >= _BEAT:
                    yield b"\n"
                elif not blocks:
                    continue
                said = time.monotonic()

    async def ack(self, request: Request) -> Response:
        """Settle events; the answer comes once that is stored."""
        stream = self._stream(request)
        asked = await self._asked(request, "events")
        await self._threads.run(_store, stream, _spans(asked))
        return Response(status_code=204)

    async def nack(self, request: Request) -> Response:
        """Have events fired again."""
        stream = self._stream(request)
        asked = await self._asked(request, "events", "delay", "error")
        delay, error = asked.get("delay"), asked.get("error")
        if delay is not None and not (_is_number(delay) and 0 <= delay <= _MOST_DELAY):
            raise ValueError("delay: seconds from 0 on")
        if error is not None and not isinstance(error, str):
            raise ValueError("error: a text")
        stream.nack(_spans(asked), delay, error)
        return Response(status_code=204)

    def _stream(self, request: Request) -> TableStream:
        name = self._allowed(request)
        queries.only(request)
        self._tables.table(name)
        return self._tables.stream_of(name, request.path_params["stream"])

    async def _asked(self, request: Request, *known: str) -> dict[str, Any]:
        asked = parsed_object(await self._requests.body(request))
        for name in asked:
            if name not in known:
                raise ValueError(f"{name[:80]!r}: no such field; there are: {', '.join(known)}")
        return asked


def _shown(table: ServedTable) -> dict[str, Any]:
    if not table.is_open:
        return {"name": table.name, "open": False, "shards": []}
    shards = [
        {"range": str(shard.key_range), "leads": manager.fires}
        for shard, manager in table.queue.managers().items()
    ]
    return {"name": table.name, "open": True, "shards": shards}


def _store(stream: TableStream, spans: list[tuple[int, int]]) -> None:
    if not stream.store(spans, _FLUSH):
        raise LeadLost("the acks are not stored yet; they may be later", after=1.0)


def _spans(asked: dict[str, Any]) -> list[tuple[int, int]]:
    """Numbers, or pairs of a first number and the one after the last."""
    given = asked.get("events")
    if not isinstance(given, list):
        raise ValueError("events: a list of numbers, or of pairs [first, end]")  # noqa: TRY004
    return [_span(each) for each in given]


def _span(given: Any) -> tuple[int, int]:  # noqa: ANN401 - any JSON
    pair = [given, given + 1] if _is_whole(given) else given
    if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_whole, pair))):
        raise ValueError("events: a list of numbers, or of pairs [first, end]")
    first, end = pair
    if not 0 <= first <= end:
        raise ValueError(f"events: {first} to {end} is no span")
    return first, end


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(content: object) -> bytes:
    return json_bytes(content) + b"\n"
