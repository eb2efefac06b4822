"""Administration: queues are listed, shown, created and dropped; breakers are shown and reset."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, GetJsonSchemaHandler, RootModel, with_config
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from starlette.responses import Response
from typing_extensions import TypedDict

from turnlane.delivery.breaker import BreakerState
from turnlane.errors import ConfigError
from turnlane.logs import get_logger
from turnlane.node.http.consume import EndJson, LowJson
from turnlane.node.http.events import STRICT
from turnlane.node.http.request import (
    ADMIN_QUEUE,
    ANY_TOKEN,
    Access,
    Answer,
    Body,
    Call,
    CountJson,
    Endpoint,
    NoParameters,
    RequestContext,
    Scope,
    json_response,
)
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import QueueSettings
from turnlane.serving.auth import Right
from turnlane.validation import suggest

log = get_logger(__name__)

_KNOBS: Final = QueueSettings.model_fields.keys() - {"name", "path"}
"""The settings that a request may give: its path has the name, and the node chooses the path."""


class KnobsJson(RootModel[dict[str, Any]]):
    """A queue's settings; see the reference of queues. Default kind: disk."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _core: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the names and meanings of the knobs, as ``QueueSettings`` declares them.

        Types are left out. The settings check the knobs and accept more forms than JSON Schema can
        say, such as ``"5"`` for a number.
        """
        return {
            "type": "object",
            "description": cls.__doc__,
            "properties": {
                name: {"description": field.description, "examples": field.examples}
                for name, field in QueueSettings.model_fields.items()
                if name in _KNOBS
            },
            "additionalProperties": False,
            "examples": [{}, {"kind": "memory", "size": 1000}],
        }


@with_config(STRICT)
class QueueJson(TypedDict):
    """A queue: its settings, positions and counts."""

    name: str
    low: LowJson
    end: EndJson
    settings: dict[str, Any]
    stats: dict[str, Any]


@with_config(STRICT)
class QueuesJson(TypedDict):
    """The queues of a node."""

    instance: Annotated[str, Field(description="New at every start of the node.")]
    queues: list[QueueJson]


@with_config(STRICT)
class BreakerJson(TypedDict):
    """The circuit breaker of an action."""

    queue: Annotated[str, Field(description="The queue that the action's lane reads.")]
    tasks: Annotated[CountJson, Field(description="Tasks that deliver for the action.")]
    preparing: Annotated[CountJson, Field(description="Sends that the tasks prepare.")]
    sending: Annotated[CountJson, Field(description="Sends that are under way.")]
    state: Annotated[BreakerState, Field(description="Whether sends go.")]
    wait: Annotated[float, Field(description="Seconds until the next send may go.")]
    failures: Annotated[CountJson, Field(description="Failures in a row.")]
    open_for: Annotated[float | None, Field(description="Seconds since it opened.")]
    error: Annotated[str | None, Field(description="The last error of the destination.")]
    opened: Annotated[CountJson, Field(description="How often it opened.")]
    rejected: Annotated[CountJson, Field(description="Permits that it refused.")]
    concurrency: Annotated[int | None, Field(description="The most sends at a time.")]
    latency: Annotated[float | None, Field(description="Seconds that a send takes.")]
    totals: Annotated[dict[str, int], Field(description="Counts of sends and events.")]
    retry_failures: Annotated[dict[str, int], Field(description="Failed retries by reason.")]
    failure_types: Annotated[dict[str, int], Field(description="Failed sends by reason.")]


@with_config(STRICT)
class BreakersJson(TypedDict):
    """Circuit breakers by action."""

    breakers: dict[str, BreakerJson]


class AdminRoutes:
    """Administers queues, and shows and resets the breakers of actions."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    @Endpoint(
        "GET /queues",
        tag="queues",
        access=ANY_TOKEN,
        answers={200: Answer("The queues.", QueuesJson)},
    )
    async def queues(self, call: Call) -> Response:
        """List all queues that the token has a right on."""
        shown = await self._context.threads.run(self._list_visible, call.bearer)
        answer: QueuesJson = {"instance": self._context.node.instance, "queues": shown}
        return json_response(answer)

    def _list_visible(self, bearer: str | None) -> list[QueueJson]:
        authority = self._context.authority
        return [
            _describe_queue(queue)
            for name, queue in sorted(self._context.node.queues().items())
            if any(authority.allows(bearer, right, name) for right in Right)
        ]

    @Endpoint(
        "GET /queues/{queue}",
        tag="queues",
        access=Access(Scope.QUEUE, (Right.READ, Right.ADMIN)),
        answers={200: Answer("The queue.", QueueJson)},
    )
    async def queue(self, call: Call) -> Response:
        """Show a queue's settings, positions and counts."""
        found = call.find_queue()
        return json_response(await self._context.threads.run(_describe_queue, found))

    @Endpoint(
        "PUT /queues/{queue}",
        tag="queues",
        access=ADMIN_QUEUE,
        body=Body(
            {"application/json": KnobsJson},
            required=False,
            description="The queue's knobs, as in the configuration.",
        ),
        answers={
            200: Answer("The queue existed, with the same settings.", QueueJson),
            201: Answer("The queue was created.", QueueJson),
        },
        own_errors=(409,),
    )
    async def create(self, call: Call[NoParameters, KnobsJson]) -> Response:
        """Create a queue, unless it exists with the same settings."""
        knobs = (await call.read_json()).root
        for knob in knobs:
            if knob not in _KNOBS:
                raise ConfigError(knob[:80], f"there is no such knob{suggest(knob, _KNOBS)}")
        name: str = call.request.path_params["queue"]
        shown, is_new = await self._context.threads.run(self._create, name, knobs)
        return json_response(shown, 201 if is_new else 200)

    def _create(self, name: str, knobs: dict[str, Any]) -> tuple[QueueJson, bool]:
        is_new = name not in self._context.node.queues()
        return _describe_queue(self._context.node.create(name, **knobs)), is_new

    @Endpoint("DELETE /queues/{queue}", tag="queues", access=ADMIN_QUEUE)
    async def drop(self, call: Call) -> Response:
        """Drop a queue that was created at run time, with everything in it."""
        name: str = call.request.path_params["queue"]
        await self._context.threads.run(self._context.node.drop, name)
        return Response(status_code=204)

    @Endpoint(
        "GET /breakers",
        tag="actions",
        access=ANY_TOKEN,
        answers={200: Answer("The breakers of queues that the token may read.", BreakersJson)},
    )
    async def breakers(self, call: Call) -> Response:
        """List the circuit breakers of actions."""
        authority = self._context.authority
        shown = {
            action: breaker.as_dict()
            for action, breaker in self._context.node.breakers.all().items()
            if authority.allows(call.bearer, Right.READ, breaker.queue)
        }
        return json_response({"breakers": shown})

    @Endpoint(
        "POST /breakers/{action}/reset",
        tag="actions",
        access=Access(Scope.TOKEN, (Right.ADMIN,)),
        answers={200: Answer("The breaker is closed.", BreakerJson)},
    )
    async def reset(self, call: Call) -> Response:
        """Close the breaker of an action, because its destination is back."""
        action: str = call.request.path_params["action"]
        breaker = self._context.node.breakers.of(action)
        call.check_right(breaker.queue)
        breaker.destination.reset()
        log.info("breaker.reset", action=action)
        return json_response(breaker.as_dict())


def _describe_queue(queue: BufferedQueue) -> QueueJson:
    settings = queue.settings.model_dump(mode="json", exclude={"path", "name"}, exclude_none=True)
    return {
        "name": queue.name,
        "low": queue.low,
        "end": queue.end,
        "settings": settings,
        "stats": queue.stats().as_dict(),
    }
