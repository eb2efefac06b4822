"""The commands of the Flight plane: JSON, checked, every mistake named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from turnlane.delivery.destination import SendReport
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import ConfigError
from turnlane.intervals import MOST_COPIES
from turnlane.node.commits import foreign
from turnlane.queues.api import AckLevel
from turnlane.validation import config_error

# ── producer_ids ──
# The names under which clients number what they publish.

_FILES: Final = "files/"
"""Under such ids the ``files`` input numbers lines."""


def checked(producer_id: str) -> str:
    """A client's producer id. Raises ``ValueError`` for one that the node itself may use."""
    if producer_id.startswith(_FILES):
        raise ValueError(f"producer ids that begin with {_FILES!r} are those of files")
    return foreign(producer_id)


MAX_COMMAND = 1 << 20
"""Bytes: a commit may name many stages, but not endlessly many."""
MAX_WAIT = 300.0
"""Seconds that a call may wait at most: longer waits are asked for again."""
MAX_LEASE = 86_400.0
"""Seconds."""
MAX_DELAY = 36_500 * 86_400.0
"""Seconds: a hundred years."""

Offset = Annotated[int, Field(ge=0, lt=1 << 62)]
Spans = list[tuple[Offset, Offset]]
"""Offsets, each pair a first one and the one after the last."""
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT)]
LeaseSeconds = Annotated[float, Field(gt=0, le=MAX_LEASE)]


class Command(BaseModel):
    """What a client asks for."""

    max_bytes: ClassVar[int] = MAX_COMMAND

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Publish(Command):
    """Blocks into a queue. The stream ends well once all of it is at level ``ack``."""

    publish: Text
    producer: Annotated[Text, AfterValidator(checked)] | None = None
    ack: Annotated[AckLevel | None, Field(strict=False)] = None


class StageBlocks(Command):
    """Blocks to the node's disk, into no queue yet."""

    stage: Text
    spare: Offset = 0
    """So many of them may wait in memory if the queue is full when they are committed."""
    diskless: bool = False
    """They may do so if the disk is full, or fails, too."""


class Copy(Command):
    """Events of a queue to the node's disk, for other queues: by offsets, and a bit for each."""

    copy_: Text = Field(alias="copy")
    into: Annotated[list[Text], Field(min_length=1, max_length=MOST_COPIES)]


class Numbered(Command):
    """What goes with a published block: the number of its first event, and whether it is urgent."""

    sequence: Offset | None = None
    urge: bool = False


class Read(Command):
    """Events ``first`` to ``end - 1``, left in the queue."""

    read: Text
    first: Offset = 0
    end: Offset | None = None
    columns: list[Text] | None = None
    """Only these, as far as the queue has them; ``PRIORITY`` is made of values."""


class Consume(Command):
    """A batch, to be settled by its lease."""

    consume: Text
    max_events: Annotated[int, Field(ge=1)] | None = None
    wait: Wait = 0.0
    lease: LeaseSeconds = 30.0
    holder: Text = "a Flight client"


class Receive(Command):
    """Events of a queue table, as they fire."""

    receive: Text
    key_range: Text = "-"
    prefetch: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """So many events may be sent and not settled."""


class Settle(Command):
    """What a receiver says of the events it got, by their numbers."""

    ack: Spans = []
    nack: Spans = []
    delay: Annotated[float, Field(ge=0, le=MAX_DELAY)] | None = None
    """Seconds until those that were nacked fire again; by default their backoff."""
    error: Annotated[str, Field(max_length=4096)] | None = None
    flush: Offset | None = None
    """Say this number when all acks so far are stored."""


class Nothing(Command):
    """An action that needs nothing."""


class OfQueue(Command):
    """An action on a queue."""

    queue: Text


class OfQueues(Command):
    """An action on a queue, or on all."""

    queue: Text | None = None


class Create(Command):
    """A new queue with these knobs; for an action, if a pipeline asks."""

    queue: Text
    knobs: dict[str, Any] = {}
    by_pipeline: bool = False


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


class SettleSpan(Span):
    """Offsets of a queue that were read."""

    queue_id: Text | None = None
    """Only if it is this one, and no other of its name."""


class CommitStages(Command):
    """Publish stages and settle ranges, all or nothing."""

    stages: list[Text] = []
    ranges: list[Span] = []
    writer: Text | None = None
    epoch: Offset = 0
    lane: Text | None = None
    """Settle what this lane was planned to read, too."""
    run: Text = "-"
    kept: Spans = []
    """But not these offsets of it,"""
    dead: Spans = []
    """and these as undeliverable."""
    batch: Offset | None = None
    """Only if it is this batch that was planned last."""
    exact: bool = False
    """Not if some of the ranges are settled already."""

    max_bytes: ClassVar[int] = 64 * MAX_COMMAND
    # What an output has refused here and there may be half of a large batch, event by event.


class Unsettled(OfQueue):
    """Which offsets of a queue are not settled; waits until some are not."""

    events: Annotated[int, Field(ge=1)]
    newest: Offset = 0
    first: Offset = 0
    timeout: Wait = 0.0
    lane: Text | None = None
    into: list[Text] = []
    """Where the lane's commits go: no more events are named than there is room for."""


class OfRun(Command):
    """A question about a run of a lane."""

    lane: Text
    run: Text


class Plan(OfRun):
    """A run of a lane reads these offsets now."""

    queue: Text
    spans: Spans
    batch: Offset = 0


class Purge(OfQueue):
    """Throw events away, which is written down."""

    spans: Spans
    why: Annotated[str, Field(max_length=4096)] = ""


class OfRoom(Command):
    """A question about the room in queues."""

    queues: list[Text]


class OfBreakers(Command):
    """A question about the breakers of these actions, or of all."""

    actions: list[Text] | None = None


class OfBreaker(Command):
    """An action on a breaker."""

    action: Text


class AskPermit(OfBreaker):
    """A task asks what an action may send."""

    queue: Text
    task: Text
    settings: DeliverySettings = DeliverySettings()
    preparing: Offset = 0
    sending: Offset = 0
    probe: Text | None = None
    """The probe that it has under way."""
    workers: Offset = 0
    """How many tasks its lane may have at a time."""


class GiveReport(AskPermit):
    """A task tells how its sends went, and whether it has ended."""

    report: SendReport = SendReport()
    ended: bool = False


class ClaimRate(AskPermit):
    """A task wants to send so many events, of what the rate of its action allows."""

    count: Annotated[int, Field(ge=1)]
    within: Annotated[float, Field(ge=0)]


class AbortStages(Command):
    """Give stages up."""

    stages: list[Text]


class OfWriter(Command):
    """A question about a writer."""

    writer: Text


Any_ = TypeVar("Any_", bound=Command)


def one_of(kinds: Mapping[str, type[Command]], data: bytes | None) -> Command:
    """A command of the kind whose name stands in it. Raises ``ConfigError``."""
    _check_size(len(data or b""))
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
    if data is not None:
        _check_size(data.size if isinstance(data, pa.Buffer) else len(data), kind.max_bytes)
    text = b"" if data is None else bytes(data)
    try:
        return kind.model_validate_json(text or b"{}")
    except ValidationError as error:
        raise config_error(error, kind.model_fields) from None


def _check_size(size: int, most: int = MAX_COMMAND) -> None:
    if size > most:
        raise ConfigError("command", f"is {size} bytes long, {most} are allowed")
