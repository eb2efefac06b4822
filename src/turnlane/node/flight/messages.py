"""The messages of the Flight plane besides blocks: commands of clients, errors of the node, limits.

Commands are JSON objects. They are checked strictly, and an error names the wrong field.

Arrow Flight has only a few kinds of errors. So every message begins with the class of the error,
such as ``turnlane:QueueFull:``, and the extra information has the same as JSON: a turnlane client
raises the same class again. Other clients go by the kind: *unavailable* is worth another attempt,
*server error* is not.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import pyarrow as pa
from pyarrow import flight
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from turnlane.delivery.destination import SendReport
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import Bug, ConfigError, NotAllowed, QueueClosed, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.intervals import MAX_COPY_TARGETS
from turnlane.logs import get_logger
from turnlane.memory import compute_memory_share
from turnlane.node.commit_apply import NODE_PREFIX
from turnlane.queues.api import AckLevel
from turnlane.units import Duration, Size
from turnlane.validation import convert_validation_error

log = get_logger(__name__)

_RESERVED_PREFIXES: Final = {NODE_PREFIX: "the node", "files/": "the files input"}
"""The owners of producer ids that clients cannot use, by prefix."""

MAX_COMMAND = 1 << 20
"""The most bytes of a command."""
MAX_WAIT = 300.0
"""The most seconds that a call waits. Clients repeat the call for longer waits."""
MAX_LEASE = 86_400.0
"""The most seconds of a lease."""
MAX_DELAY = 36_500 * 86_400.0
"""The most seconds until a nacked event fires again: a hundred years."""

Chunks = Iterator[tuple[Block | None, pa.Buffer | None]]
"""The blocks and metadata that a client sends."""

Offset = Annotated[int, Field(ge=0, lt=1 << 62)]
Spans = list[tuple[Offset, Offset]]
"""Ranges of offsets: the first offset, and the offset after the last."""
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT)]
LeaseSeconds = Annotated[float, Field(gt=0, le=MAX_LEASE)]


def check_producer_id(producer_id: str) -> str:
    """Return a client's producer id. Raises ``ValueError`` if it is reserved."""
    for prefix, owner in _RESERVED_PREFIXES.items():
        if producer_id.startswith(prefix):
            raise ValueError(
                f"producer ids that begin with {prefix!r} are reserved for {owner}: {producer_id!r}"
            )
    return producer_id


class Command(BaseModel):
    """A request of a client; by itself one without values."""

    max_bytes: ClassVar[int] = MAX_COMMAND

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PublishCommand(Command):
    """Publish blocks to a queue. The stream ends when all events have reached ``ack``."""

    publish: Text
    producer: Annotated[Text, AfterValidator(check_producer_id)] | None = None
    ack: Annotated[AckLevel | None, Field(strict=False)] = None


class StageCommand(Command):
    """Stage blocks on the node's disk for a queue."""

    stage: Text
    spare: Offset = 0
    """How many events may wait in memory if the queue is full at the commit."""
    diskless: bool = False
    """Whether they may also wait in memory if the disk is full or fails."""


class CopyCommand(Command):
    """Stage events of a queue for other queues, by offsets and one bit for each target."""

    copy_: Text = Field(alias="copy")
    into: Annotated[list[Text], Field(min_length=1, max_length=MAX_COPY_TARGETS)]


class BlockMetadata(Command):
    """The metadata of a published block."""

    sequence: Offset | None = None
    """The sequence number of its first event."""
    urge: bool = False
    """Whether the node should persist soon all that was sent."""


class ReadCommand(Command):
    """Read the events ``first`` to ``end - 1``, which stay in the queue."""

    read: Text
    first: Offset = 0
    end: Offset | None = None
    columns: list[Text] | None = None
    """Only these columns, as far as the queue has them. ``PRIORITY`` is computed from values."""
    settled: bool = False
    """Also settled events, as far as the queue still has them."""


class ConsumeCommand(Command):
    """Take a batch under a lease."""

    consume: Text
    max_events: Annotated[int, Field(ge=1)] | None = None
    wait: Wait = 0.0
    lease: LeaseSeconds = 30.0
    holder: Text = "a Flight client"


class ReceiveCommand(Command):
    """Receive the events of a queue table as they fire."""

    receive: Text
    key_range: Text = "-"
    prefetch: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """The most events that are sent and not settled."""


class SettleCommand(Command):
    """Settle received events by their numbers."""

    ack: Spans = []
    nack: Spans = []
    delay: Annotated[float, Field(ge=0, le=MAX_DELAY)] | None = None
    """Seconds until the nacked events fire again; default: their backoff."""
    error: Annotated[str, Field(max_length=4096)] | None = None
    flush: Offset | None = None
    """Ask for an answer with this number when all earlier acks are stored."""


class QueueCommand(Command):
    """A command about a queue."""

    queue: Text


class OptionalQueueCommand(Command):
    """A command about a queue, or about all queues."""

    queue: Text | None = None


class CreateCommand(QueueCommand):
    """Create a queue with these settings."""

    knobs: dict[str, Any] = {}
    by_pipeline: bool = False
    """Whether a pipeline creates it for an action."""


class WaitCommand(QueueCommand):
    """Wait until a queue's end is beyond an offset."""

    beyond: Annotated[int, Field(ge=-1, lt=1 << 62)]
    timeout: Wait = 0.0


class LeaseCommand(Command):
    """A command about a lease."""

    lease: Text


class ExtendCommand(LeaseCommand):
    """Extend a lease, counted from now."""

    seconds: LeaseSeconds | None = None


class QueueSpan(Command):
    """A range of offsets of a queue."""

    queue: Text
    first: Offset
    end: Offset


class SettleSpanCommand(QueueSpan):
    """Settle offsets of a queue that were read."""

    queue_id: Text | None = None
    """Settle only if the queue has this id."""


class CommitCommand(Command):
    """Publish stages and settle ranges atomically."""

    stages: list[Text] = []
    ranges: list[QueueSpan] = []
    writer: Text | None = None
    epoch: Offset = 0
    lane: Text | None = None
    """Also settle the offsets of this lane's last plan."""
    run: Text = "-"
    kept: Spans = []
    """Offsets of the plan that are not settled."""
    dead: Spans = []
    """Offsets of the plan that are settled as undeliverable."""
    batch: Offset | None = None
    """Settle the plan only if it is the plan of this batch."""
    exact: bool = False
    """Refuse the commit if some of the ranges are settled already."""

    max_bytes: ClassVar[int] = 64 * MAX_COMMAND
    # The refused events of an output can be half of a large batch, each a range of its own.


class UnsettledCommand(QueueCommand):
    """Ask for the unsettled offsets of a queue, and wait until there are some."""

    events: Annotated[int, Field(ge=1)]
    newest: Offset = 0
    first: Offset = 0
    timeout: Wait = 0.0
    lane: Text | None = None
    into: list[Text] = []
    """The target queues of the lane. The answer has at most as many events as they have room."""


class LaneRunCommand(Command):
    """A command about a run of a lane."""

    lane: Text
    run: Text


class PlanCommand(LaneRunCommand):
    """Store the offsets that a run of a lane reads now."""

    queue: Text
    spans: Spans
    batch: Offset = 0


class PurgeCommand(QueueCommand):
    """Throw events away, with an entry in the audit log."""

    spans: Spans
    why: Annotated[str, Field(max_length=4096)] = ""


class FullCommand(Command):
    """Ask which queues are full."""

    queues: list[Text]


class BreakersCommand(Command):
    """Ask for the breakers of these actions, or of all."""

    actions: list[Text] | None = None


class BreakerCommand(Command):
    """A command about the breaker of an action."""

    action: Text


class PermitCommand(Command):
    """Ask what a task of an action may send."""

    action: Text
    queue: Text
    task: Text
    settings: DeliverySettings = DeliverySettings()
    preparing: Offset = 0
    sending: Offset = 0
    probe: Text | None = None
    """The id of the probe that the task is sending."""
    workers: Offset = 0
    """How many tasks the lane may run at a time."""


class ReportCommand(PermitCommand):
    """Report the results of a task's sends, and whether the task has ended."""

    report: SendReport = SendReport()
    ended: bool = False


class ClaimCommand(PermitCommand):
    """Claim events of the rate limit of an action."""

    count: Annotated[int, Field(ge=1)]
    within: Annotated[float, Field(ge=0)]


class AbortCommand(Command):
    """Discard stages."""

    stages: list[Text]


class WriterCommand(Command):
    """A command about a writer."""

    writer: Text


AnyCommand = TypeVar("AnyCommand", bound=Command)


def parse_one_of(kinds: Mapping[str, type[Command]], data: bytes | None) -> Command:
    """Parse a command; its kind is the first of ``kinds`` that is a key. ``ConfigError``."""
    data = data or b"{}"
    _check_size(data, MAX_COMMAND)
    try:
        values = from_json(data)
    except ValueError as error:
        raise ConfigError("command", f"not valid JSON: {error}") from None
    for name, kind in kinds.items():
        if isinstance(values, dict) and name in values:
            return parse_command(kind, data)
    raise ConfigError("command", f"must be a JSON object with one of {', '.join(kinds)}")


def parse_command(kind: type[AnyCommand], data: bytes | pa.Buffer | None) -> AnyCommand:
    """Parse a command. Raises ``ConfigError`` with the wrong field."""
    data = b"" if data is None else data
    _check_size(data, kind.max_bytes)
    try:
        return kind.model_validate_json(bytes(data) or b"{}")
    except ValidationError as error:
        raise convert_validation_error(error, kind.model_fields) from None


def _check_size(data: bytes | pa.Buffer, most: int) -> None:
    size = data.size if isinstance(data, pa.Buffer) else len(data)
    if size > most:
        raise ConfigError("command", f"is {size} bytes long, {most} are allowed")


# ── errors ───────────────────────────────────────────────────────────────────────────────────────

MAX_MESSAGE = 2000
"""The most characters of a message: gRPC sends it in headers, which are limited to 8 KiB."""


def build_flight_error(error: Exception) -> flight.FlightError:
    """Return the error that Flight sends."""
    name = type(error).__name__ if isinstance(error, TurnlaneError) else ValueError.__name__
    text = str(error)[:MAX_MESSAGE]
    details: dict[str, object] = {"error": name, "message": text}
    if isinstance(error, RetryLater) and error.after is not None:
        details["after"] = error.after
    # Not ArrowInvalid (INVALID_ARGUMENT): pyarrow adds a traceback to it, which shows the paths of
    # this machine.
    kind: Any = flight.FlightServerError  # Any: the stubs lack the arguments
    if isinstance(error, NotAllowed):
        known = error.known
        kind = flight.FlightUnauthorizedError if known else flight.FlightUnauthenticatedError
    elif isinstance(error, RetryLater | QueueClosed):
        # A queue is closed because the node is stopping; the node will start again.
        kind = flight.FlightUnavailableError
    elif isinstance(error, Bug):
        kind = flight.FlightInternalError
    made: flight.FlightError = kind(
        f"turnlane:{name}: {text}", extra_info=json.dumps(details).encode()
    )
    return made


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Convert every error of the block to an error that Flight sends to the client."""
    try:
        yield
    except flight.FlightError:
        raise
    except (TurnlaneError, ValueError, pa.ArrowException) as error:
        raise build_flight_error(error) from None
    except Exception:
        log.exception("flight.call_failed")
        raise build_flight_error(Bug("the node failed; its log says why")) from None


# ── limits ───────────────────────────────────────────────────────────────────────────────────────

_SHARE_OF_MEMORY = 0.75


class FlightLimits(BaseModel):
    """Limits on calls, connections and blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    max_calls: int = Field(
        default=1000, ge=1, description="The most calls at a time; a consumer or publisher is one."
    )
    max_connections: int = Field(default=1000, ge=1, description="The most connections at a time.")
    idle_timeout: Duration = Field(
        default=600.0,
        gt=MAX_WAIT,
        description="How long a connection stays open on which nothing goes either way.",
    )
    max_block_bytes: Size = Field(
        default=512 * 2**20, ge=1, description="The largest block once it is unpacked."
    )
    max_memory: Size | None = Field(
        default=None,
        ge=1,
        description="No new stream may bring blocks while Arrow uses more memory than this; "
        "default: three quarters of what the process may use.",
    )

    def get_max_memory(self) -> int:
        """Return ``max_memory`` in bytes, or its default."""
        return self.max_memory or compute_memory_share(_SHARE_OF_MEMORY)
