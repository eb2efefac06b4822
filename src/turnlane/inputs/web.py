"""What inputs that are web servers have in common: settings, tokens, threads, counting."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from turnlane.errors import RetryLater
from turnlane.inputs.answering import THREADS, AnsweringPublisher, AnsweringSettings
from turnlane.inputs.contract import Counters, Host, Input, InputSettings
from turnlane.serving.address import named
from turnlane.serving.body import PROBLEM_HANDLERS, problem, read_body, status_of
from turnlane.serving.rights import Authority, Right, bearer_of
from turnlane.serving.threads import ThreadsByQueue
from turnlane.serving.web import WebServer, WebSettings

Result = TypeVar("Result")


class WebInputSettings(AnsweringSettings, WebSettings):
    """The settings of an input that is a web server."""


class WebInput(Input):
    """An input that is a web server. One of its own adds routes, and how it refuses."""

    settings_type: ClassVar[type[InputSettings]] = WebInputSettings
    settings: WebInputSettings

    def __init__(self, settings: WebInputSettings, host: Host) -> None:
        self._server = WebServer(self._app(), settings, settings.label)
        super().__init__(settings, host)
        self.publisher = AnsweringPublisher(host, settings)
        self._threads = ThreadsByQueue(THREADS)
        self._authority = Authority(settings.tokens)

    @property
    def counters(self) -> Counters:
        """What it has seen; the connections are those of this moment."""
        self._counters.connections = self._server.connections
        return self._counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._counters = counters

    @abc.abstractmethod
    def routes(self) -> Sequence[BaseRoute]:
        """The paths that it answers."""

    def queues(self) -> Iterable[tuple[str, str]]:
        """The queues that it publishes to, each after the knob that names it."""
        return [("queue", self.settings.queue)]

    def refusal(self, _request: Request, error: Exception) -> Response:
        """The answer to an error."""
        return problem(error)

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return str(self._server.address)

    def start(self) -> None:
        self.settings.check_exposed()
        for knob, name in self.queues():
            self.publisher.check(knob, name)
        self._server.start()

    def stop(self, timeout: float) -> None:
        self._server.stop(timeout)

    # ── requests ────────────────────────────────────────────────────────────────────────────────

    def authorize(self, request: Request, queue: str) -> None:
        """Raise ``NotAllowed`` unless the request's token allows it to publish."""
        self._authority.check(self.token_of(request), Right.PUBLISH, queue)

    def token_of(self, request: Request) -> str | None:
        """The secret that the request shows."""
        return bearer_of(request.headers.get("authorization"))

    async def in_time(
        self, queue: str, call: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Run a call that blocks on a thread for the queue, its deadline behind its arguments.

        The time spent waiting for a thread counts: under pressure everybody is answered in time.
        """
        with _told_of_a_close():
            threads = self._threads.of(queue)
            return await threads.run(call, *args, self.publisher.deadline(), **kwargs)

    async def body_of(self, request: Request) -> bytes:
        """The request's body, unpacked, within the limits."""
        with _told_of_a_close():
            body = await read_body(request, self.settings)
        self.count(bytes=len(body))
        return body

    def _app(self) -> Starlette:
        handlers = dict.fromkeys(PROBLEM_HANDLERS, self._refuse)
        return Starlette(routes=self.routes(), exception_handlers=handlers)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if status_of(error) in (429, 503):
            self.count(refused=1)
        else:
            self.count(invalid=1)
        return self.refusal(request, error)


@contextlib.contextmanager
def _told_of_a_close() -> Iterator[None]:
    """A server that cannot wait any longer cancels its requests: their senders are told.

    Left to uvicorn they would get a 500, which makes some senders drop what they hold.
    """
    try:
        yield
    except asyncio.CancelledError:
        raise RetryLater("the node is closing; send it again") from None


def source_of(request: Request) -> str | None:
    """Where the request came from."""
    return None if request.client is None else named(request.client.host)
