"""The options of ``format("turnlane")``, checked before anything is read or written.

Named as the Kafka source names them where the meaning is the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
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

from turnlane.client.address import DEFAULT_PORT, Url
from turnlane.delivery.settings import Ordering
from turnlane.errors import ConfigError
from turnlane.pipeline.settings import MAIN, LaneSettings
from turnlane.spark.steps import Step, Way, ordering_of, ways_of
from turnlane.units import Duration, Size
from turnlane.validation import Contradiction, Problem, config_error, did_you_mean, message_of

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
ROWS_PER_BATCH: Final = 65_536
"""By default, of a block that is read."""
FROM_EARLIEST: Final = -2
FROM_LATEST: Final = -1
"""The same for one node, as the Kafka source has it."""

_ALLOWED: Final = 'is earliest, latest, or JSON such as {"0": 42}'

Offsets = Literal["earliest", "latest"] | dict[int, int]
"""Where to begin or end: everywhere the same, or an offset for each node by its number."""


def _offsets(value: object) -> object:
    if not isinstance(value, str) or value.lower() in (EARLIEST, LATEST):
        return value.lower() if isinstance(value, str) else value
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ValueError(f"{_ALLOWED}, not {value!r}: {error}") from None
    if not isinstance(found, dict) or not all(map(_is_offset, found.items())):
        raise ValueError(f"{_ALLOWED}, not {value!r}")
    return found


def _is_offset(part: tuple[str, object]) -> bool:
    node, offset = part
    return node.isdecimal() and isinstance(offset, int) and not isinstance(offset, bool)


def _known(offsets: Offsets) -> Offsets:
    for node, offset in offsets.items() if isinstance(offsets, dict) else ():
        if offset < FROM_EARLIEST:
            raise ValueError(f"an offset, -1 (latest) or -2 (earliest), not {offset} for {node}")
    return offsets


def _end(offsets: Offsets) -> Offsets:
    named = offsets.values() if isinstance(offsets, dict) else [offsets]
    if EARLIEST in named or FROM_EARLIEST in named:
        raise ValueError("there is nothing before the earliest event to read")
    return offsets


Beginning = Annotated[Offsets, BeforeValidator(_offsets), AfterValidator(_known)]
Ending = Annotated[Beginning, AfterValidator(_end)]


def with_path(options: Mapping[str, str], name: str) -> dict[str, str]:
    """Options in which the path, as in ``load("orders")`` or ``save("orders")``, is ``name``.

    Raises ``ConfigError`` if the option ``name`` is given as well, and says something else.
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


class Options(BaseModel):
    """Options as Spark has them: texts, their names in camel case."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Options as Spark has them, whose names may be in any case. Raises ``ConfigError``."""
        names = {name.lower(): name for name in cls.names()}
        known: dict[str, Any] = {}
        for given, value in options.items():
            name = names.get(given.lower())
            if name is None:
                hint = did_you_mean(given.lower(), names)
                for lower, proper in names.items():
                    hint = hint.replace(lower, proper)
                raise ConfigError(given, f"there is no such option{hint}")
            known[name] = value
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            raise config_error(error, cls.names()) from None

    @classmethod
    def names(cls) -> list[str]:
        """The options' names, as they are documented."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class SourceOptions(Options):
    """What reading and writing have in common."""

    endpoint: str = Field(
        default_factory=lambda: os.environ.get("TURNLANE_URL", ""),
        description="The node, or nodes: `turnlane://host:port[,host:port]`, `turnlanes://` for "
        "TLS. Default: the environment variable `TURNLANE_URL`.",
    )
    token: str | None = Field(default=None, repr=False, description="The bearer token.")
    token_env: str | None = Field(default=None, description="The environment variable that has it.")
    token_file: Path | None = Field(default=None, description="The file that has it.")
    tls_ca: Path | None = Field(default=None, description="The certificates to trust.")
    tls_cert: Path | None = Field(default=None, description="The client's own certificate.")
    tls_key: Path | None = Field(default=None, description="Its key.")

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if not self.endpoint:
            example = f"turnlane://127.0.0.1:{DEFAULT_PORT}"
            raise Contradiction([Problem("endpoint", f"is required, as in {example}")])
        try:
            Url.parse(self.endpoint)
        except ConfigError as error:
            raise Contradiction([Problem("endpoint", message_of(error))]) from None
        if (self.tls_cert is None) != (self.tls_key is None):
            problem = Problem("tlsCert", "and tlsKey belong together: give both or neither")
            raise Contradiction([problem])
        return self

    def secret(self) -> str | None:
        """The token, wherever it is kept. Raises ``ConfigError``."""
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
    """The options of reading."""

    queue: str = Field(description="The queue to read.")
    starting_offsets: Beginning = Field(
        default=EARLIEST,
        description="Where a new query begins: `earliest` (the oldest event that is not settled), "
        '`latest`, or offsets by node, as in `{"0": 42}`, where -2 is earliest and -1 latest.',
    )
    ending_offsets: Ending = Field(
        default=LATEST,
        description="Where a batch query ends: `latest`, or offsets by node; -1 is latest.",
    )
    starting_timestamp: int | None = Field(
        default=None,
        description="Begin at the first event of this time or later, in milliseconds since the "
        "epoch; before `startingOffsets`. It is looked for as if events had come in the order of "
        "their timestamps: where they have not, older ones may be read, and newer ones left out.",
    )
    max_offsets_per_trigger: int | None = Field(
        default=None, ge=1, description="The most events a batch."
    )
    max_bytes_per_trigger: Size | None = Field(
        default=None,
        ge=1,
        description="The most bytes a batch, by the average size of events.",
    )
    min_offsets_per_trigger: int = Field(
        default=1, ge=1, description="Wait for so many events, `maxTriggerDelay` at most."
    )
    max_trigger_delay: Duration = Field(default=900.0, description="See `minOffsetsPerTrigger`.")
    min_partitions: int = Field(
        default=1,
        ge=1,
        description="The fewest partitions of a batch, if it has so many events.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        description="The most partitions of a batch, or one for each node if there are more. "
        "Default: 2, or `minPartitions` if that is more.",
    )
    worker_minimum_events: int = Field(
        default=100_000, ge=1, description="One more partition for every so many events."
    )
    rows_per_batch: int = Field(
        default=ROWS_PER_BATCH, ge=1, description="Rows of an Arrow batch given to Spark."
    )
    fail_on_data_loss: bool = Field(
        default=True,
        description="Fail if events that were to be read are gone, settled by somebody else, "
        "damaged, or with a queue that was made anew; else warn, and go on with what there is.",
    )
    skip_settled: bool = Field(
        default=False,
        description="Leave out events that are settled, also those that lie between others that "
        "are not. What somebody else settles is then no loss, nor what the node gives up because "
        "it is damaged.",
    )
    include_headers: bool = Field(
        default=False,
        description="Whether there is a column `headers`.",
    )
    consume: bool = Field(
        default=True,
        description="Whether a streaming query settles what it has read and committed, so that the "
        "queue can let go of it. A batch query never does.",
    )
    push_filters: bool = Field(
        default=False,
        description="Let filters on `offset` and `partition` decide what a batch query reads. "
        "Needs Spark's `spark.sql.python.filterPushdown.enabled`.",
    )
    poll_timeout: Duration = Field(default=1.0, description="How long a node is asked to wait.")


class WriteOptions(SourceOptions):
    """The options of writing."""

    queue: str | None = Field(
        default=None,
        description="The queue to write to. Default: the column `queue` says, row by row.",
    )
    writer_id: str | None = Field(
        default=None,
        description="Makes a streaming write exactly once: a batch that was committed under this "
        "id is not written again. Default: by the query to which `checkpointLocation` belongs.",
    )
    checkpoint_location: str | None = Field(default=None, description="Spark's own.")
    query_name: str | None = Field(default=None, description="Spark's own.")


# ── lane_options ──
# The options by which a lane's reader and sink are told what the lane is. Pure.


def _json(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


class LaneReadOptions(ReadOptions):
    """The options of a lane's reader."""

    lane: str = Field(description="The lane whose cursor the sink moves.")
    run: str = Field(description="Tells this start of a lane from earlier ones.")
    ways: Annotated[tuple[tuple[Way, ...], ...], BeforeValidator(_json)] = Field(
        default=(), description="What must be free for a batch, as JSON; see `suspension.py`."
    )
    ordering: Ordering = Field(default=Ordering.NONE, description="What waits for what.")
    fresh_share: float = Field(
        default=0.0, ge=0, le=1, description="The share of the newest of a backlog."
    )
    probe_events: int = Field(
        default=1000, ge=1, description="The events of a batch that is a probe."
    )
    batch_seconds: Duration = Field(default=5.0, gt=0, description="How long tasks go on sending.")
    by_place: bool = Field(
        default=False, description="Whether rows are shares of the queue, for the sink to read."
    )
    into: Annotated[tuple[str, ...], BeforeValidator(_json)] = Field(
        default=(), description="The queues that need room for a batch, as JSON."
    )
    grouped: bool = Field(
        default=False, description="Whether events that look the same are one row."
    )


class LaneWriteOptions(WriteOptions):
    """The options of a lane's sink, and of one that delivers a batch for a lane."""

    lane: str | None = Field(default=None, description="The lane whose cursor a commit moves.")
    run: str | None = Field(
        default=None, description="Tells this start of a lane from earlier ones."
    )
    steps: Annotated[tuple[Step, ...], BeforeValidator(_json)] = Field(
        default=(), description="What tasks do for each action, as JSON; see `steps.py`."
    )
    routed: bool = Field(
        default=False,
        description="Beside `steps`: whether the column `queue` sends rows on to queues, too.",
    )
    copies: Annotated[tuple[str, ...] | None, BeforeValidator(_json)] = Field(
        default=None,
        description="Rows are places in the lane's queue: copy its events into these queues, as "
        "JSON, by the bits of a row's routes. There may be none, if all events are discarded.",
    )
    reads: Annotated[tuple[str, ...], BeforeValidator(_json)] = Field(
        default=(),
        description="Rows are shares of the lane's queue: read these columns of it, as JSON.",
    )

    @property
    def has_own_rows(self) -> bool:
        """Whether rows are no events to be stored, but what the lane's tasks make something of."""
        return bool(self.steps) or self.copies is not None

    @model_validator(mode="after")
    def _run_given(self) -> Self:
        if (self.lane is None) != (self.run is None):
            raise Contradiction([Problem("run", "goes with lane")])
        return self


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """The options of a lane's reader if they name one, else anyone's. Raises ``ConfigError``."""
    return (LaneReadOptions if _named(given) & {"lane"} else ReadOptions).of(given)


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """The same of sinks."""
    return (LaneWriteOptions if _named(given) & {"lane", "steps"} else WriteOptions).of(given)


def _named(given: Mapping[str, str]) -> set[str]:
    return {name.lower() for name in given}


def reading(
    lane: str, run: str, settings: LaneSettings, steps: Sequence[Step], into: Sequence[str] = ()
) -> dict[str, str]:
    """For the reader of a lane's queue, whose sink settles what it has read and fills ``into``."""
    mine = [step.delivery for step in steps if step.output is not None]
    ordering = ordering_of(steps)
    fresh = min((each.fresh_share for each in mine), default=0.0)
    options = {
        "lane": lane,
        "run": run,
        "ways": in_json(ways_of(steps)),
        "into": in_json(into),
        "ordering": str(ordering),
        "freshShare": str(fresh if ordering is Ordering.NONE else 0.0),
        "probeEvents": str(min((each.batch_events for each in mine), default=1000)),
        "batchSeconds": f"{min((each.max_time for each in mine), default=5.0)}s",
    }
    age = max((each.batch_age for each in mine), default=0.0)
    if age and settings.min_events == 1:
        full = max(each.batch_events for each in mine)
        options |= {"minOffsetsPerTrigger": str(full), "maxTriggerDelay": f"{age}s"}
    return options


def writing(lane: str, run: str, steps: Sequence[Step]) -> dict[str, str]:
    """For a lane's sink."""
    routed = str(lane == MAIN).lower()
    return {"lane": lane, "run": run, "steps": in_json(steps), "routed": routed}


def in_json(parts: Sequence[Any]) -> str:
    """Steps, or ways, as the source's options have them."""
    return json.dumps(to_jsonable_python(parts))


# ── writers ──
# Who writes: the name by which nodes and databases know the batches of a streaming query.

_LOCAL: Final = re.compile(r"^file:(?://[^/]*)?(?=/)")
"""What may stand before a path that is here. Nothing in the path is escaped: Hadoop says so."""
_SCHEME: Final = re.compile(r"[A-Za-z][\w+.-]*:")


def writer_of(writer_id: str | None, checkpoint: str | None) -> str | None:
    """The name, if the query has one: as it was given, or that of its checkpoint.

    A new checkpoint in the place of an old one is another writer: its batches begin at 0 again, and
    are no repeats.
    """
    if writer_id is not None or checkpoint is None:
        return writer_id
    place = _LOCAL.sub("", checkpoint)  # the same writer, however the place is written
    query = None if _SCHEME.match(place) else _query_of(Path(place))
    return place if query is None else f"{place}#{query}"


def _query_of(checkpoint: Path) -> str | None:
    """The id that Spark has given to a query, or nothing if it is kept on another file system."""
    try:
        found = json.loads((checkpoint / "metadata").read_bytes())
    except FileNotFoundError:  # a path without a scheme may mean Hadoop's own file system
        return None
    return str(found["id"])
