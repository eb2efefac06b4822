"""Endpoints of the HTTP plane, and the requests to them.

Every endpoint is declared once, by the decorator :class:`Endpoint` above its handler: method, path,
rights, answers and errors. The types of the handler are the models of its parameters and its body.
The server checks each request by this record before the handler runs, and ``openapi.py`` makes the
document from the same record, so the document describes the checks that the server makes.

The order of the checks is the same for all endpoints: the token and its right, then the
parameters. The handler then finds the queue, table or lease, and reads the body last. The body of
a request without a valid token is never read.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Final, Generic, NamedTuple, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypeVar

from turnlane.node.http.events import parse_object
from turnlane.node.node import Node
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.auth import Authority, Right, parse_bearer
from turnlane.serving.http_body import BodyLimits, read_body
from turnlane.serving.http_server import ThreadLimiter
from turnlane.units import parse_duration

THREADS: Final = 32
"""The most concurrent calls that use disks and do not wait for other requests."""

LARGEST: Final = 2**63 - 1
"""The largest offset, and the largest number of a parameter."""

CountJson = Annotated[int, Field(ge=0, le=LARGEST)]

_DURATION_EXAMPLES: Final = ["500ms", "30s", "1m", "2.5"]


# ── parameters ──────────────────────────────────────────────────────────────────────────────────


class NoParameters(BaseModel):
    """The endpoint has no parameters and refuses a request that has one."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class UncheckedParameters(BaseModel):
    """The endpoint ignores all parameters, because probes and scrapers add their own."""

    model_config = ConfigDict(frozen=True, extra="ignore")


@dataclass(frozen=True, slots=True)
class Header:
    """Marks a parameter that is in a header, not in the query."""

    name: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What a field of a body allows, in the words of its error."""

    text: str


@dataclass(frozen=True)
class ParsedText:
    """A parameter whose text ``parse`` checks and converts; ``schema`` describes the text.

    ``parse`` raises ``ValueError`` that names the allowed values and the given one.
    """

    parse: Callable[[str], Any]
    schema: JsonSchemaValue

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> CoreSchema:
        """Have pydantic call ``parse`` only: the text of a URL has no other type."""
        return core_schema.no_info_plain_validator_function(self.parse)

    def __get_pydantic_json_schema__(
        self, _core: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema of the text."""
        return dict(self.schema)


def whole_number(least: int = 0, most: int = LARGEST) -> ParsedText:
    """Return the type of a whole number between two bounds."""

    def parse(text: object) -> int:
        value = str(text)
        found = int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else -1
        if not least <= found <= most:
            raise ValueError(f"a whole number from {least} to {most}, not {value[:40]!r}")
        return found

    return ParsedText(parse, {"type": "integer", "minimum": least, "maximum": most})


def duration(least: float = 0.0, *, most: float) -> ParsedText:
    """Return the type of a duration: ``30s``, or a plain number of seconds."""

    def parse(text: str) -> float:
        try:
            found = parse_duration(text)
        except ValueError:
            found = -1.0
        if not least <= found <= most:
            raise ValueError(
                f"a duration from {least:g}s to {most:g}s, such as 500ms, 30s or a plain number of "
                f"seconds, not {text[:40]!r}"
            )
        return found

    return ParsedText(parse, {"type": "string", "examples": _DURATION_EXAMPLES})


def choice(kind: type[enum.StrEnum]) -> ParsedText:
    """Return the type of one word among the values of ``kind``."""

    def parse(text: str) -> enum.StrEnum:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"one of {', '.join(kind)}, not {text[:40]!r}") from None

    return ParsedText(parse, {"type": "string", "enum": [each.value for each in kind]})


# ── the record of an endpoint ───────────────────────────────────────────────────────────────────

Parameters = TypeVar("Parameters", bound=BaseModel, default=NoParameters)
Content = TypeVar("Content", default=None)
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


class Scope(enum.Enum):
    """The thing on which a token needs a right."""

    PUBLIC = "public"
    """None: the endpoint answers without a token."""
    TOKEN = "token"  # noqa: S105 - the name of a scope, not a secret
    """Any valid token will do. The handler calls :meth:`Call.check_right` if it has to find the
    queue first, or shows only the things that the token may see."""
    NODE = "node"
    """The whole node."""
    QUEUE = "queue"
    """The queue in the path."""
    TABLE = "table"
    """The table in the path."""


class Access(NamedTuple):
    """Who may use an endpoint: tokens with one of the rights on the scope."""

    scope: Scope
    rights: tuple[Right, ...] = ()


ANY_TOKEN: Final = Access(Scope.TOKEN)
PUBLIC: Final = Access(Scope.PUBLIC)
READ_QUEUE: Final = Access(Scope.QUEUE, (Right.READ,))
READ_TABLE: Final = Access(Scope.TABLE, (Right.READ,))
ADMIN_QUEUE: Final = Access(Scope.QUEUE, (Right.ADMIN,))


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request: its types by media type."""

    content: Mapping[str, Any]
    required: bool = True
    description: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of an endpoint; ``content`` is the type of its body, ``None`` if it has none."""

    description: str
    content: Any = None
    media_type: str = "application/json"


@dataclass(kw_only=True)
class Endpoint:
    """An endpoint, declared as the decorator of the method that handles its calls."""

    route: str = field(kw_only=False)
    """The method and the path."""
    tag: str
    access: Access
    body: Body | None = None
    """Given only if the body is not plain JSON that the model of the call describes."""
    answers: Mapping[int, Answer] = field(default_factory=lambda: {204: Answer("Done.")})
    own_errors: tuple[int, ...] = ()
    """The statuses of errors that only this endpoint has."""
    allows_head: bool = True

    def __call__(self, handler: Handler) -> Handler:
        """Complete the record: the handler has the name, the summary and the models."""
        self.method, _, self.path = self.route.partition(" ")
        self.name = handler.__name__
        self.summary = (handler.__doc__ or "").partition("\n")[0]
        call = next(iter(get_type_hints(handler).values()))
        # The versions of Python differ in whether they fill in the defaults, None among them.
        models = [each for each in get_args(call) if each not in (None, NoneType)]
        self.parameters: type[BaseModel] = models[0] if models else NoParameters
        self.model: type[BaseModel] | None = models[1] if len(models) > 1 else None
        if self.model is not None and self.body is None:
            self.body = Body({"application/json": self.model})
        vars(handler)["endpoint"] = self
        return handler

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods it answers: with GET also HEAD, unless a look would change something."""
        return ("GET", "HEAD") if self.method == "GET" and self.allows_head else (self.method,)

    @property
    def errors(self) -> list[int]:
        """The statuses of all errors, each of which has a JSON problem as its body."""
        checks_parameters = self.parameters.model_config.get("extra") == "forbid"
        finds_something = "{" in self.path and self.method != "PUT"  # which creates it
        is_public = self.access.scope is Scope.PUBLIC
        by_status = {
            400: checks_parameters,
            401: not is_public,
            403: bool(self.access.rights),
            404: finds_something,
            413: self.body is not None,
            415: self.body is not None,
            503: not is_public,
        }
        possible = [status for status, is_possible in by_status.items() if is_possible]
        return sorted([*self.own_errors, *possible])


class Call(Generic[Parameters, Content]):
    """One request to an endpoint. Its token and its parameters are already checked.

    A handler declares by the type of its call what the endpoint takes: the model of its parameters,
    and the model of a JSON body.
    """

    def __init__(self, context: RequestContext, endpoint: Endpoint, request: Request) -> None:
        self.request = request
        self.bearer = parse_bearer(request.headers.get("authorization"))
        self._context = context
        self._endpoint = endpoint
        context.authorize(endpoint, request, self.bearer)
        parameters: Any = read_parameters(request, endpoint.parameters)
        self.parameters: Parameters = parameters

    def check_right(self, queue: str) -> None:
        """Raise ``NotAllowed`` unless the token has the endpoint's right on the queue."""
        self._context.check_rights(self.bearer, self._endpoint.access.rights, queue)

    def find_queue(self) -> BufferedQueue:
        """Return the queue in the path. Raises ``NoSuchQueue``."""
        return self._context.node.queue(self.request.path_params["queue"])

    async def read_body(self) -> bytes:
        """Return the body, decompressed, within the limits of the server."""
        return await read_body(self.request, self._context.limits)

    async def read_json(self) -> Content:
        """Return the JSON body, checked by the endpoint's model. Raises ``ValueError``."""
        model: Any = self._endpoint.model
        given = parse_object(await self.read_body())
        try:
            content: Content = model.model_validate(given)
        except ValidationError as error:
            raise ValueError(_explain_body(model, error)) from None
        return content


def list_endpoints(*classes: type) -> Iterator[Endpoint]:
    """Yield the endpoints that the methods of some classes handle, in the order of the source."""
    for each in classes:
        for member in vars(each).values():
            if isinstance(found := getattr(member, "endpoint", None), Endpoint):
                yield found


# ── requests ────────────────────────────────────────────────────────────────────────────────────


class RequestContext:
    """The node, rights, threads and limits that all endpoints share."""

    def __init__(self, node: Node, authority: Authority, limits: BodyLimits) -> None:
        self.node = node
        self.authority = authority
        self.limits = limits
        self.threads = ThreadLimiter(THREADS)
        self.stopping = False
        """Set when the server stops: requests that wait for events then return."""

    def bind(
        self, routes: object
    ) -> Iterator[tuple[Endpoint, Callable[[Request], Awaitable[Response]]]]:
        """Yield the endpoints of an object, each with the function that answers requests to it."""
        for found in list_endpoints(type(routes)):
            handler = getattr(routes, found.name)
            yield found, functools.partial(self._answer, found, handler)

    async def _answer(
        self,
        found: Endpoint,
        handler: Callable[[Call[Any, Any]], Awaitable[Response]],
        request: Request,
    ) -> Response:
        return await handler(Call(self, found, request))

    def authorize(self, found: Endpoint, request: Request, bearer: str | None) -> None:
        """Raise ``NotAllowed`` unless the token may use the endpoint."""
        scope, rights = found.access
        match scope:
            case Scope.PUBLIC:
                pass
            case Scope.TOKEN:
                self.authority.identify(bearer)
            case Scope.NODE:
                self.check_rights(bearer, rights, None)
            case Scope.QUEUE | Scope.TABLE:
                self.check_rights(bearer, rights, request.path_params[scope.value])

    def check_rights(self, bearer: str | None, rights: tuple[Right, ...], name: str | None) -> None:
        """Raise ``NotAllowed`` unless the token has one of the rights."""
        if not any(self.authority.allows(bearer, right, name) for right in rights[1:]):
            self.authority.check(bearer, rights[0], name)


@functools.cache
def _find_headers(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the names of the fields that are in headers, by header."""
    return {
        mark.name: name
        for name, each in model.model_fields.items()
        for mark in each.metadata
        if isinstance(mark, Header)
    }


@functools.cache
def _make_default(model: type[Parameters]) -> Parameters:
    """Return the parameters of a request that gives none, as most do. They are frozen."""
    return model.model_validate({})


def read_parameters(request: Request, model: type[Parameters]) -> Parameters:
    """Return the parameters of a request. Raises ``ValueError`` that names the parameter."""
    default: Parameters = _make_default(model)
    if model.model_config.get("extra") == "ignore":
        return default
    headers = _find_headers(model)
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in model.model_fields or name in headers.values():
            names = [each for each in model.model_fields if each not in headers.values()]
            known = f"there are: {', '.join(names)}" if names else "there are none"
            raise ValueError(f"parameter {name[:80]!r}: no such parameter; {known}")
        if name in given:
            raise ValueError(f"parameter {name!r}: given more than once")
        given[name] = value
    for header, name in headers.items():
        if (value_of := request.headers.get(header)) is not None:
            given[name] = value_of
    if not given:
        return default
    places = {name: f"header {header}" for header, name in headers.items()}
    return check_texts(model, given, lambda name: places.get(name, f"parameter {name!r}"))


def check_texts(
    model: type[Parameters], given: Mapping[str, str], place: Callable[[str], str]
) -> Parameters:
    """Return the model of some texts. ``place`` names a field in the ``ValueError``."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        cause = detail.get("ctx", {}).get("error", detail["msg"])
        if not detail["loc"]:  # a check of several fields names them itself
            raise ValueError(str(cause)) from None
        raise ValueError(f"{place(str(detail['loc'][0]))}: {cause}") from None


def _explain_body(model: type[BaseModel], error: ValidationError) -> str:
    detail = error.errors(include_url=False)[0]
    if not detail["loc"]:
        return str(detail.get("ctx", {}).get("error", detail["msg"]))
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields)
        return f"{name[:80]!r}: no such field; there are: {known}"
    marks = model.model_fields[name].metadata
    expected = (mark.text for mark in marks if isinstance(mark, Expected))
    return f"{name}: {next(expected, detail['msg'])}"


def json_response(content: object, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(encode_json(content), status, media_type="application/json")


def encode_json(content: object) -> bytes:
    """Return JSON as it is sent. A number that JSON has no form for is a bug."""
    text: str = json.dumps(content, ensure_ascii=False, allow_nan=False, default=str)
    return text.encode()
