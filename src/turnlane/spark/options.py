"""The options of ``format("turnlane")``, checked before anything is read or written; and filters.

Options have the names of Spark's Kafka source where the meaning is the same. Spark passes options
as texts, with names in any case. :class:`ReadOptions` and :class:`WriteOptions` are public. Their
subclasses for lanes are internal: with them the pipeline tells the reader and the sink of a lane
what to do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import to_jsonable_python
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    LessThan,
    LessThanOrEqual,
)

from turnlane.client.address import DEFAULT_PORT, NodeUrl
from turnlane.delivery.settings import Ordering
from turnlane.errors import ConfigError
from turnlane.formats.block_parsing import BLOCK_FORMATS
from turnlane.formats.parse_settings import ParseSettings
from turnlane.pipeline.settings import MAIN, LaneSettings
from turnlane.spark.steps import (
    DeliveryPath,
    LaneStep,
    find_strictest_ordering,
    list_required_paths,
)
from turnlane.units import Duration, Size
from turnlane.validation import (
    ConfigIssue,
    ContradictorySettings,
    convert_validation_error,
    get_message,
    suggest,
)

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
FROM_EARLIEST: Final = -2
FROM_LATEST: Final = -1
"""Earliest and latest on one node, with the numbers of the Kafka source."""
ROWS_PER_BATCH: Final = 65_536

_ALLOWED_OFFSETS: Final = 'must be earliest, latest, or JSON such as {"0": 42}'

Offsets = Literal["earliest", "latest"] | dict[int, int]
"""Where to begin or end: the same on every node, or an offset for each node by its number."""


def _parse_offsets(value: object) -> object:
    if not isinstance(value, str) or value.lower() in (EARLIEST, LATEST):
        return value.lower() if isinstance(value, str) else value
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ValueError(f"{_ALLOWED_OFFSETS}, not {value!r}: {error}") from None
    if not isinstance(found, dict) or not all(
        node.isdecimal() and type(offset) is int for node, offset in found.items()
    ):
        raise ValueError(f"{_ALLOWED_OFFSETS}, not {value!r}")
    return found


def _check_offsets(offsets: Offsets) -> Offsets:
    for node, offset in offsets.items() if isinstance(offsets, dict) else ():
        if offset < FROM_EARLIEST:
            raise ValueError(
                f"has {offset} for node {node}; use an offset, -1 (latest) or -2 (earliest)"
            )
    return offsets


def _check_ending_offsets(offsets: Offsets) -> Offsets:
    named = offsets.values() if isinstance(offsets, dict) else [offsets]
    if EARLIEST in named or FROM_EARLIEST in named:
        raise ValueError("cannot be earliest: a batch that ends there has no events")
    return offsets


StartingOffsets = Annotated[
    Offsets, BeforeValidator(_parse_offsets), AfterValidator(_check_offsets)
]
EndingOffsets = Annotated[StartingOffsets, AfterValidator(_check_ending_offsets)]


def merge_path(options: Mapping[str, str], name: str) -> dict[str, str]:
    """Return options in which the path of ``load("orders")`` or ``save("orders")`` is ``name``.

    Raises ``ConfigError`` if the option ``name`` is given too, with another value.
    """
    given = dict(options)
    path = given.pop("path", None)
    if path is None:
        return given
    named = next((each for each in given if each.lower() == name), name)
    value = given.setdefault(named, path)
    if value != path:
        raise ConfigError(name, f"is {value!r}, but {path!r} is loaded or saved: give one of them")
    return given


def _parse_json(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


def _parse_word_or_json(value: object) -> object:
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def _check_block_format(settings: ParseSettings) -> ParseSettings:
    if settings.format not in BLOCK_FORMATS:
        known = " and ".join(sorted(BLOCK_FORMATS))
        raise ValueError(f"the source parses {known}, not {settings.format}: use Spark's functions")
    return settings


BlockParseSettings = Annotated[
    ParseSettings, BeforeValidator(_parse_word_or_json), AfterValidator(_check_block_format)
]


class Options(BaseModel):
    """Options that Spark passes as texts, with names in camel case."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )

    @classmethod
    def from_spark(cls, options: Mapping[str, str]) -> Self:
        """Check options of Spark, whose names may be in any case. Raises ``ConfigError``."""
        names = {name.lower(): name for name in cls.list_names()}
        known: dict[str, Any] = {}
        for given, value in options.items():
            name = names.get(given.lower())
            if name is None:
                hint = suggest(given.lower(), names)
                for lower, proper in names.items():
                    hint = hint.replace(lower, proper)
                raise ConfigError(given, f"there is no such option{hint}")
            known[name] = value
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            raise convert_validation_error(error, cls.list_names()) from None

    @classmethod
    def list_names(cls) -> list[str]:
        """Return the names of the options as the documentation has them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class SourceOptions(Options):
    """The options of reading and writing: how to reach the nodes."""

    endpoint: str = Field(
        default_factory=lambda: os.environ.get("TURNLANE_URL", ""),
        description="The node, or nodes: `turnlane://host:port[,host:port]`, `turnlanes://` for "
        "TLS. Default: the environment variable `TURNLANE_URL`.",
    )
    token: str | None = Field(default=None, repr=False, description="The bearer token.")
    token_env: str | None = Field(
        default=None, description="The environment variable with the token."
    )
    token_file: Path | None = Field(default=None, description="The file with the token.")
    tls_ca: Path | None = Field(default=None, description="The certificates to trust.")
    tls_cert: Path | None = Field(default=None, description="The client's own certificate.")
    tls_key: Path | None = Field(default=None, description="The key of that certificate.")

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        if not self.endpoint:
            example = f"turnlane://127.0.0.1:{DEFAULT_PORT}"
            raise ContradictorySettings([ConfigIssue("endpoint", f"is required, as in {example}")])
        try:
            NodeUrl.parse(self.endpoint)
        except ConfigError as error:
            raise ContradictorySettings([ConfigIssue("endpoint", get_message(error))]) from None
        if (self.tls_cert is None) != (self.tls_key is None):
            problem = ConfigIssue("tlsCert", "and tlsKey belong together: give both or neither")
            raise ContradictorySettings([problem])
        return self

    def read_token(self) -> str | None:
        """Return the token from the option, a variable or a file. Raises ``ConfigError``."""
        if self.token_env is not None:
            found = os.environ.get(self.token_env)
            if not found:
                raise ConfigError("tokenEnv", f"the variable {self.token_env} is not set")
            return found
        if self.token_file is not None:
            try:
                return self.token_file.read_text().strip()
            except OSError as error:
                raise ConfigError("tokenFile", f"{self.token_file}: {error.strerror}") from error
        return self.token


class ReadOptions(SourceOptions):
    """The options of a reader."""

    queue: str = Field(description="The queue to read.")
    starting_offsets: StartingOffsets = Field(
        default=EARLIEST,
        description="Where a new query begins: `earliest` (the oldest event that is not settled), "
        '`latest`, or offsets by node, as in `{"0": 42}`, where -2 is earliest and -1 latest.',
    )
    ending_offsets: EndingOffsets = Field(
        default=LATEST,
        description="Where a batch query ends: `latest`, or offsets by node; -1 is latest.",
    )
    starting_timestamp: int | None = Field(
        default=None,
        description="Begin at the first event of this time or later, in milliseconds since the "
        "epoch; takes precedence over `startingOffsets`. The search assumes that events arrived in "
        "the order of their timestamps; otherwise it may include older and miss newer events.",
    )
    max_offsets_per_trigger: int | None = Field(
        default=None, ge=1, description="The most events of a batch."
    )
    max_bytes_per_trigger: Size | None = Field(
        default=None,
        ge=1,
        description="The most bytes of a batch, by the average size of events.",
    )
    min_offsets_per_trigger: int = Field(
        default=1,
        ge=1,
        description="Wait for this many events, but no longer than `maxTriggerDelay`.",
    )
    max_trigger_delay: Duration = Field(
        default=900.0, description="The longest wait for `minOffsetsPerTrigger`."
    )
    min_partitions: int = Field(
        default=1,
        ge=1,
        description="The fewest partitions of a batch, if it has that many events.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        description="The most partitions of a batch, or one for each node if there are more. "
        "Default: 2, or `minPartitions` if that is more.",
    )
    worker_minimum_events: int = Field(
        default=100_000,
        ge=1,
        description="A batch gets one more partition for each this many events.",
    )
    rows_per_batch: int = Field(
        default=ROWS_PER_BATCH, ge=1, description="Rows of an Arrow batch for Spark."
    )
    fail_on_data_loss: bool = Field(
        default=True,
        description="Fail if events are gone that the query has still to read: settled by another "
        "client, damaged, or of a queue that was dropped and created again. Otherwise log a "
        "warning and continue with the events that are left.",
    )
    skip_settled: bool = Field(
        default=False,
        description="Leave out settled events, also between events that are not settled. Events "
        "that another client settles, or that the node gives up as damaged, are then no loss.",
    )
    include_headers: bool = Field(
        default=False,
        description="Add a column `headers`.",
    )
    parse: BlockParseSettings | None = Field(
        default=None,
        description="Add the columns of a format: `syslog`, `otlp`, or JSON with the settings of "
        "[`parse`](parsing.md).",
    )
    consume: bool = Field(
        default=True,
        description="A streaming query settles the events that it has committed, so that the queue "
        "can remove them. A batch query never does.",
    )
    push_filters: bool = Field(
        default=False,
        description="Let filters on `offset` and `partition` decide what a batch query reads. "
        "Needs Spark's `spark.sql.python.filterPushdown.enabled`.",
    )
    poll_timeout: Duration = Field(
        default=1.0, description="How long a node waits for events before it answers."
    )


class SpanReadOptions(ReadOptions):
    """The options of a reader of certain events, for a lane that looks for bad ones."""

    spans: Annotated[tuple[tuple[int, int, int], ...], BeforeValidator(_parse_json)] = Field(
        description="Nodes with their first offsets and ends, as JSON."
    )


class StateReadOptions(ReadOptions):
    """The options of the reader of a lane whose query keeps state."""

    request: Path = Field(
        description="A file with a number: if it is higher than before, a batch begins at once."
    )


class WriteOptions(SourceOptions):
    """The options of a sink."""

    queue: str | None = Field(
        default=None,
        description="The queue to write to. Default: the column `queue` names it, row by row.",
    )
    writer_id: str | None = Field(
        default=None,
        description="Makes a streaming write exactly once: a batch that was committed under this "
        "id is not written again. Default: the id of the query of `checkpointLocation`.",
    )
    checkpoint_location: str | None = Field(default=None, description="Set by Spark.")
    query_name: str | None = Field(default=None, description="Set by Spark.")


# ── lanes ──


class LaneReadOptions(ReadOptions):
    """The options of a lane's reader."""

    lane: str = Field(description="The lane whose cursor the sink moves.")
    run: str = Field(description="The id of this run of the lane.")
    ways: Annotated[tuple[tuple[DeliveryPath, ...], ...], BeforeValidator(_parse_json)] = Field(
        default=(), description="The paths that must be open for a batch, as JSON; see `steps.py`."
    )
    ordering: Ordering = Field(
        default=Ordering.NONE, description="Which events must stay in order."
    )
    fresh_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The share of the newest events in a batch of a backlog.",
    )
    probe_events: int = Field(
        default=1000, ge=1, description="The events of a batch that is a probe."
    )
    batch_seconds: Duration = Field(default=5.0, gt=0, description="How long tasks send.")
    by_place: bool = Field(
        default=False, description="Give Spark spans of offsets; the sink reads the events."
    )
    into: Annotated[tuple[str, ...], BeforeValidator(_parse_json)] = Field(
        default=(), description="The queues that need room for a batch, as JSON."
    )
    grouped: bool = Field(
        default=False, description="Give Spark one row for all events that look the same."
    )


class LaneWriteOptions(WriteOptions):
    """The options of a lane's sink, and of the sink that delivers one batch of a lane."""

    lane: str | None = Field(default=None, description="The lane whose cursor a commit moves.")
    run: str | None = Field(default=None, description="The id of this run of the lane.")
    steps: Annotated[tuple[LaneStep, ...], BeforeValidator(_parse_json)] = Field(
        default=(), description="What tasks do for each action, as JSON; see `steps.py`."
    )
    routed: bool = Field(
        default=False,
        description="With `steps`: the column `queue` names queues for rows as well.",
    )
    copies: Annotated[tuple[str, ...] | None, BeforeValidator(_parse_json)] = Field(
        default=None,
        description="Rows are offsets in the lane's queue: copy these events into queues by the "
        "bits of a row's routes. The names of the queues as JSON; none if every event is "
        "discarded.",
    )
    reads: Annotated[tuple[str, ...], BeforeValidator(_parse_json)] = Field(
        default=(),
        description="Rows are spans of offsets in the lane's queue: read these columns, as JSON.",
    )

    @property
    def has_lane_rows(self) -> bool:
        """Whether rows are in the form of a lane, so that the columns of events are not checked."""
        return bool(self.steps) or self.copies is not None

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if (self.lane is None) != (self.run is None):
            raise ContradictorySettings(
                [ConfigIssue("run", "and lane belong together: give both or neither")]
            )
        return self


def parse_read_options(given: Mapping[str, str]) -> ReadOptions:
    """Check the options of a reader, of a lane if they name one. Raises ``ConfigError``."""
    names = {name.lower() for name in given}
    if "spans" in names:
        return SpanReadOptions.from_spark(given)
    if "request" in names:
        return StateReadOptions.from_spark(given)
    return (LaneReadOptions if "lane" in names else ReadOptions).from_spark(given)


def parse_write_options(given: Mapping[str, str]) -> WriteOptions:
    """Check the options of a sink, of a lane if they name one. Raises ``ConfigError``."""
    is_lane = {"lane", "steps"} & {name.lower() for name in given}
    return (LaneWriteOptions if is_lane else WriteOptions).from_spark(given)


def build_lane_read_options(
    lane: str, run: str, settings: LaneSettings, steps: Sequence[LaneStep], into: Sequence[str] = ()
) -> dict[str, str]:
    """Build the options of a lane's reader; its sink writes to the queues ``into``."""
    deliveries = [step.delivery for step in steps if step.output is not None]
    ordering = find_strictest_ordering(steps)
    fresh = min((each.fresh_share for each in deliveries), default=0.0)
    options = {
        "lane": lane,
        "run": run,
        "ways": to_json(list_required_paths(steps)),
        "into": to_json(into),
        "ordering": str(ordering),
        "freshShare": str(fresh if ordering is Ordering.NONE else 0.0),
        "probeEvents": str(min((each.batch_events for each in deliveries), default=1000)),
        "batchSeconds": f"{min((each.max_time for each in deliveries), default=5.0)}s",
    }
    wanted, age = find_batch_wait(settings, steps)
    return options | {"minOffsetsPerTrigger": str(wanted), "maxTriggerDelay": f"{age}s"}


def find_batch_wait(settings: LaneSettings, steps: Sequence[LaneStep]) -> tuple[int, float]:
    """Return for how many events a lane waits before a batch, and for how many seconds at most."""
    deliveries = [step.delivery for step in steps if step.output is not None]
    age = max((each.batch_age for each in deliveries), default=0.0)
    if age and settings.min_events == 1:
        return max(each.batch_events for each in deliveries), age
    return settings.min_events, settings.max_age


def build_lane_write_options(lane: str, run: str, steps: Sequence[LaneStep]) -> dict[str, str]:
    """Build the options of a lane's sink."""
    routed = str(lane == MAIN).lower()
    return {"lane": lane, "run": run, "steps": to_json(steps), "routed": routed}


def to_json(parts: Sequence[Any]) -> str:
    """Encode settings as JSON, for options that have JSON."""
    return json.dumps(to_jsonable_python(parts))


# ── writer ids ──

_LOCAL: Final = re.compile(r"^file:(?://[^/]*)?(?=/)")
"""The scheme of a local path. Hadoop escapes nothing in the path that follows."""
_SCHEME: Final = re.compile(r"[A-Za-z][\w+.-]*:")


def find_writer_id(writer_id: str | None, checkpoint: str | None) -> str | None:
    """Return the id by which nodes and databases know the batches of a streaming query, if any.

    By default it is the path of the checkpoint with the id that Spark gave the query. A new
    checkpoint at the same path is another writer: its batches start at 0 again and are no repeats.
    """
    if writer_id is not None or checkpoint is None:
        return writer_id
    place = _LOCAL.sub("", checkpoint)  # The same writer in every spelling of the path.
    if _SCHEME.match(place):
        return place
    try:
        found = json.loads((Path(place) / "metadata").read_bytes())
    except FileNotFoundError:  # A path without a scheme may be on Hadoop's file system.
        return place
    return f"{place}#{found['id']}"


# ── filters ──


Bounds = tuple[int | None, int | None]
"""The first number and the end of a range; ``None`` if the range has no such bound."""


def get_range(
    each: Filter, column: str, kind: type, convert: Callable[[Any], int] = int, step: int = 1
) -> Bounds | None:
    """Return the range that a comparison of a column leaves; ``None`` for other filters.

    ``convert`` makes a number of the value, which must have the type ``kind``. The next higher
    value has a number that is higher by ``step``.
    """
    if getattr(each, "attribute", None) != (column,):
        return None
    value = getattr(each, "value", None)
    if not isinstance(value, kind):
        return None
    at = convert(value)
    ranges: dict[type[Filter], Bounds] = {
        EqualTo: (at, at + step),
        GreaterThan: (at + step, None),
        GreaterThanOrEqual: (at, None),
        LessThan: (None, at),
        LessThanOrEqual: (None, at + step),
    }
    return ranges.get(type(each))
