"""The options of ``format("turnlane")``, checked before anything is read or written.

Named as the Kafka source names them where the meaning is the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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

from turnlane.client.url import DEFAULT_PORT, Url
from turnlane.errors import ConfigError
from turnlane.problems import Contradiction, Problem, config_error, did_you_mean, message_of
from turnlane.quantities import Duration, Size

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
