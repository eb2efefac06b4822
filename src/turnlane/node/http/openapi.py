"""The OpenAPI 3.1 document, generated from the endpoints as they are declared.

Nothing here knows a certain endpoint: paths, parameters, bodies, answers and errors come from the
:class:`Endpoint` records, and the schemas from the models that check the requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from turnlane.node.http.request import Answer, Endpoint, Header, Scope
from turnlane.serving.http_problems import PROBLEM_TYPE, ProblemJson

Json = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{model}"

_PATH_PARAMETERS: Final = {
    "queue": "The queue's name.",
    "lease": "The lease's id.",
    "action": "The action's name.",
    "table": "The queue table's name.",
    "stream": "The stream's id: its first line has it.",
}

_ERRORS: Final = {
    400: "The request is wrong; `detail` names the place. Nothing has happened.",
    401: "The request has no token, or its token is unknown or has expired.",
    403: "The token does not give the right to do that.",
    404: "There is no such queue, lease, breaker, table or stream.",
    409: "There is a queue of this name with other settings; or too many of a producer's numbers "
    "are missing.",
    413: "An event, or the request, is larger than can ever be taken.",
    415: "The body's encoding is not known; use gzip, deflate, zstd, snappy or none.",
    429: "The queue is full. Nothing was taken; try again later.",
    503: "The disk is failing, the node is closing, or an ack did not come in time. Try later.",
}

_RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "Seconds after which to try again.",
        "schema": {"type": "integer", "minimum": 1},
    }
}

_INFO: Final = {
    "title": "turnlane",
    "summary": "A durable event queue and delivery pipeline.",
    "description": "Publish events with `POST /queues/{queue}/events`; the queue keeps them until "
    "a consumer has settled them. An answer of 200 with `ack: persisted` means that they survive a "
    "crash.",
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}


def make_document(endpoints: Iterable[Endpoint]) -> Json:
    """Return the document of some endpoints."""
    listed = list(endpoints)
    schemas = _Schemas(listed)
    paths: Json = {}
    for each in listed:
        item = paths.setdefault(each.path, _describe_path(each.path))
        item[each.method.lower()] = _describe_endpoint(each, schemas)
    return {
        "openapi": "3.1.0",
        "info": _INFO | {"version": version("turnlane")},
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas.components,
        },
    }


class _SchemaGenerator(GenerateJsonSchema):
    """Names schemas without the suffix that tells JSON forms from the classes of the node."""

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name).removesuffix("Json")


class _Schemas:
    """The schemas of all types that the endpoints name."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        types: dict[str, Any] = {repr(ProblemJson): ProblemJson}
        for each in endpoints:
            bodies = [] if each.body is None else list(each.body.content.values())
            answers = [answer.content for answer in each.answers.values() if answer.content]
            types |= {repr(kind): kind for kind in [*bodies, *answers]}
        made, definitions = TypeAdapter.json_schemas(
            [(name, "validation", TypeAdapter(each)) for name, each in types.items()],
            ref_template=_REFERENCE,
            schema_generator=_SchemaGenerator,
        )
        self._schemas = {name: _drop_titles(schema) for (name, _), schema in made.items()}
        self.components: Json = _drop_titles(definitions["$defs"])

    def get(self, kind: object) -> Json:
        """Return the schema of a type, or the reference to it."""
        found: Json = self._schemas[repr(kind)]
        return found


def _drop_titles(schema: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a schema without titles: pydantic repeats there the names of fields and classes."""
    if isinstance(schema, list):
        return [_drop_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _drop_titles(each)
        for name, each in schema.items()
        if not (name == "title" and isinstance(each, str))
    }


def _describe_path(path: str) -> Json:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PATH_PARAMETERS[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    return {"parameters": parameters} if parameters else {}


def _describe_endpoint(each: Endpoint, schemas: _Schemas) -> Json:
    described: Json = {"operationId": each.name, "summary": each.summary, "tags": [each.tag]}
    if parameters := list(_describe_parameters(each)):
        described["parameters"] = parameters
    if each.body is not None:
        content = {kind: {"schema": schemas.get(it)} for kind, it in each.body.content.items()}
        described["requestBody"] = {"required": each.body.required, "content": content}
        if each.body.description:
            described["requestBody"]["description"] = each.body.description
    if each.access.scope is Scope.PUBLIC:
        described["security"] = []
    elif each.access.rights:
        # The roles that the document allows beside a scheme are the rights of turnlane.
        described["security"] = [{}, *({"token": [right.value]} for right in each.access.rights)]
    described["responses"] = {
        str(status): _describe_answer(status, answer, schemas)
        for status, answer in each.answers.items()
    } | {
        str(status): _describe_answer(
            status, Answer(_ERRORS[status], ProblemJson, PROBLEM_TYPE), schemas
        )
        for status in each.errors
    }
    return described


def _describe_parameters(each: Endpoint) -> Iterator[Json]:
    properties: Json = _drop_titles(each.parameters.model_json_schema()).get("properties", {})
    for name, field in each.parameters.model_fields.items():
        header = next((mark.name for mark in field.metadata if isinstance(mark, Header)), None)
        yield {
            "name": header or name,
            "in": "query" if header is None else "header",
            "description": field.description,
            "schema": _describe_text(properties[name]),
        }


def _describe_text(schema: Json) -> Json:
    """Return the schema of a parameter that is given: the text of a URL is never null."""
    kept = {name: each for name, each in schema.items() if name != "description"}
    if "default" in kept and kept["default"] is None:
        del kept["default"]
    forms = [form for form in kept.pop("anyOf", []) if form != {"type": "null"}]
    return kept | forms[0] if forms else kept


def _describe_answer(status: int, answer: Answer, schemas: _Schemas) -> Json:
    described: Json = {"description": answer.description}
    if answer.content is not None:
        described["content"] = {answer.media_type: {"schema": schemas.get(answer.content)}}
    if status in (429, 503):
        described["headers"] = _RETRY_AFTER
    return described
