"""The commands of the Flight plane: JSON, checked, every mistake named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from turnlane.errors import ConfigError
from turnlane.node.commits import foreign
from turnlane.problems import config_error
from turnlane.queues.contract import AckLevel

MAX_COMMAND = 1 << 20
"""Bytes: a commit may name many stages, but not endlessly many."""
MAX_WAIT = 300.0
"""Seconds that a call may wait at most: longer waits are asked for again."""
MAX_LEASE = 86_400.0
"""Seconds."""

Offset = Annotated[int, Field(ge=0, lt=1 << 62)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT)]
LeaseSeconds = Annotated[float, Field(gt=0, le=MAX_LEASE)]


class Command(BaseModel):
    """What a client asks for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Publish(Command):
    """Blocks into a queue. The stream ends well once all of it is at level ``ack``."""

    publish: Text
    producer: Annotated[Text, AfterValidator(foreign)] | None = None
    ack: Annotated[AckLevel | None, Field(strict=False)] = None


class StageBlocks(Command):
    """Blocks to the node's disk, into no queue yet."""

    stage: Text


class Numbered(Command):
    """What goes with a published block: the number of its first event, and whether it is urgent."""

    sequence: Offset | None = None
    urge: bool = False


class Read(Command):
    """Events ``first`` to ``end - 1``, left in the queue."""

    read: Text
    first: Offset = 0
    end: Offset | None = None


class Consume(Command):
    """A batch, to be settled by its lease."""

    consume: Text
    max_events: Annotated[int, Field(ge=1)] | None = None
    wait: Wait = 0.0
    lease: LeaseSeconds = 30.0
    holder: Text = "a Flight client"


class Nothing(Command):
    """An action that needs nothing."""


class OfQueue(Command):
    """An action on a queue."""

    queue: Text


class OfQueues(Command):
    """An action on a queue, or on all."""

    queue: Text | None = None


class Create(Command):
    """A new queue with these knobs."""

    queue: Text
    knobs: dict[str, Any] = {}


class WaitBeyond(Command):
    """Wait until a queue's end is beyond an offset."""

    queue: Text
    beyond: Annotated[int, Field(ge=-1, lt=1 << 62)]
    timeout: Wait = 0.0


class OfLease(Command):
    """An action on a lease."""

    lease: Text


class Extend(OfLease):
    """Keep a lease for so long from now."""

    seconds: LeaseSeconds | None = None


class Span(Command):
    """Offsets of a queue."""

    queue: Text
    first: Offset
    end: Offset


class CommitStages(Command):
    """Publish stages and settle ranges, all or nothing."""

    stages: list[Text] = []
    ranges: list[Span] = []
    writer: Text | None = None
    epoch: Offset = 0
    lane: Text | None = None
    """Settle what this lane was planned to read, too."""
    run: Text = "-"


class Plan(Span):
    """A run of a lane reads this range now."""

    lane: Text
    run: Text


class AbortStages(Command):
    """Give stages up."""

    stages: list[Text]


class OfWriter(Command):
    """A question about a writer."""

    writer: Text


Any_ = TypeVar("Any_", bound=Command)


def one_of(kinds: Mapping[str, type[Command]], data: bytes | None) -> Command:
    """A command of the kind whose name stands in it. Raises ``ConfigError``."""
    _check_size(data or b"")
    try:
        values = from_json(data or b"{}")
    except ValueError as error:
        raise ConfigError("command", f"is not JSON: {error}") from None
    for name, kind in kinds.items():
        if isinstance(values, dict) and name in values:
            return parsed(kind, data)
    raise ConfigError("command", f"is to be a JSON object with one of {', '.join(kinds)}")


def parsed(kind: type[Any_], data: bytes | pa.Buffer | None) -> Any_:
    """A command from JSON. Raises ``ConfigError``, which names what is wrong."""
    text = b"" if data is None else bytes(data)
    _check_size(text)
    try:
        return kind.model_validate_json(text or b"{}")
    except ValidationError as error:
        raise config_error(error, kind.model_fields) from None


def _check_size(text: bytes) -> None:
    if len(text) > MAX_COMMAND:
        raise ConfigError("command", f"is {len(text)} bytes long, {MAX_COMMAND} are allowed")
