"""Output ``queue``: publishes events into a queue of another node, or of the same node.

With a ``producer`` the events are numbered by their offsets, so that the node drops events that are
sent again. Sequence numbers must be consecutive within a publish, so a block is cut where they are
not.
"""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from pydantic import AfterValidator, Field, model_validator

from turnlane.client.address import NodeUrl, raise_node_errors
from turnlane.client.node_client import Credentials, RemoteNode, parse_metadata
from turnlane.delivery.settings import INTERNAL_COLUMNS, ROW_NUMBER_COLUMN
from turnlane.errors import (
    EventTooLarge,
    Never,
    NoSuchQueue,
    PayloadTooLarge,
    RetryLater,
    TransportDown,
)
from turnlane.events import Block, cast_base_columns
from turnlane.logs import get_logger
from turnlane.outputs.api import Output, OutputSettings
from turnlane.outputs.connections import ClientTls
from turnlane.runtime import read_secret
from turnlane.units import Duration
from turnlane.validation import ConfigIssue, ContradictorySettings

log = get_logger(__name__)


def _check_single_node(endpoint: str) -> str:
    places = NodeUrl.from_setting(endpoint).places
    if len(places) > 1:
        raise ValueError(f"must name one node, not {len(places)}")
    return endpoint


class QueueOutputSettings(OutputSettings):
    """The settings of the output ``queue``."""

    endpoint: Annotated[str, AfterValidator(_check_single_node)] = Field(
        description="The URL of the node; `turnlanes://` uses TLS.",
        examples=["turnlanes://host:8815"],
    )
    queue: str = Field(min_length=1, description="The queue on that node, which must exist.")
    token_env: str | None = Field(
        default=None, description="The environment variable that has the token."
    )
    token_file: Path | None = Field(default=None, description="The file that has the token.")
    tls: ClientTls = Field(
        default_factory=ClientTls,
        description="For `turnlanes://`: the authorities to trust, and the certificate to present.",
    )
    producer: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="A name by which the node recognises this action and drops events that are "
        "sent again. Only with `ordering: strict`, because the node may drop events that arrive "
        "out of order. Use another name if the action's queue was created again.",
    )
    timeout: Duration = Field(
        default=20.0,
        gt=0,
        description="How long a batch may take, including the wait for room in the queue.",
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        issues = []
        if self.tls != ClientTls() and not NodeUrl.parse(self.endpoint).tls:
            issues.append(ConfigIssue("tls", "needs an endpoint that begins with turnlanes://"))
        if not self.tls.verify:
            issues.append(
                ConfigIssue(
                    "tls.verify", "cannot be false: the certificate of a node is always checked"
                )
            )
        if issues:
            raise ContradictorySettings(issues)
        return self


class SequencedBlock(NamedTuple):
    """Events that are published together."""

    producer: str | None
    sequence: int | None
    """The sequence number of the first event. The others follow without a gap."""
    block: Block


class QueueOutput(Output):
    """Publishes, and waits until the queue has stored the events as durably as it promises."""

    settings_type = QueueOutputSettings
    settings: QueueOutputSettings

    def __init__(self, settings: QueueOutputSettings) -> None:
        super().__init__(settings)
        self._connect_lock = threading.Lock()
        self._node: RemoteNode | None = None

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Return blocks with consecutive sequence numbers, without the positions in this queue."""
        if self.settings.producer is None:
            return [SequencedBlock(None, None, cast_base_columns(block, without=INTERNAL_COLUMNS))]
        return _cut_by_sequence(block, self.settings.producer)

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        """Publish the blocks one after another."""
        blocks: list[SequencedBlock] = prepared
        try:
            for each in blocks:
                self._publish(self._get_node(), each)
        except EventTooLarge as error:
            raise PayloadTooLarge(str(error)) from error
        except Never as error:  # about the queue, the token or the columns: a person can correct it
            raise RetryLater(f"queue {self.settings.queue!r}: {error}") from error

    def check(self) -> None:
        """Ask the node whether the queue exists and the token may use it."""
        try:
            if self.settings.queue not in self._get_node().queues():
                raise NoSuchQueue(f"there is no queue {self.settings.queue!r}")
        except Never as error:
            raise RetryLater(f"{self.settings.endpoint}: {error}") from error

    def close(self) -> None:
        if self._node is not None:
            self._node.close()

    def _get_node(self) -> RemoteNode:
        with self._connect_lock:
            if self._node is None:
                settings = self.settings
                url, tls = NodeUrl.parse(settings.endpoint), settings.tls
                token = read_secret("token", settings.token_env, settings.token_file)
                credentials = Credentials(token, tls.ca, tls.cert, tls.key)
                self._node = RemoteNode(url.places[0], url.locations()[0], credentials)
            return self._node

    def _publish(self, node: RemoteNode, part: SequencedBlock) -> None:
        command = {"publish": self.settings.queue}
        if part.producer is not None:
            command["producer"] = part.producer
        metadata = {} if part.sequence is None else {"sequence": part.sequence}
        with raise_node_errors(node.place):
            writer, answers = node.put(command, part.block.schema, self.settings.timeout)
            writer.write_with_metadata(part.block, pa.py_buffer(json.dumps(metadata).encode()))
            writer.done_writing()
            # The stream ends without an error once all events are stored.
            while (buffer := answers.read()) is not None:
                answer = parse_metadata(buffer)
                if "ended" in answer:
                    raise TransportDown(f"{self.settings.endpoint}: {answer['ended']}")
                known = answer.get("resume_at", 0) - (part.sequence or 0)
                if part.sequence is not None and known > 0:
                    count, queue = min(known, part.block.num_rows), self.settings.queue
                    log.info("queue_output.repeats_dropped", queue=queue, events=count)
            writer.close()


def _cut_by_sequence(block: Block, producer: str) -> list[SequencedBlock]:
    """Cut a block into parts with consecutive offsets, which are the sequence numbers.

    If a transform made several rows of an event, these have the same offset: the second and later
    rows are numbered under producer names of their own.
    """
    names = block.schema.names
    if not {"partition", "offset"} <= set(names):
        raise RetryLater("producer: needs events with offsets; rows that sql made have none")
    offsets = block.column("offset").to_numpy()
    partitions = block.column("partition").to_numpy()
    numbers = (
        block.column(ROW_NUMBER_COLUMN).to_numpy()
        if ROW_NUMBER_COLUMN in names
        else np.zeros_like(offsets)
    )
    events = cast_base_columns(block, without=INTERNAL_COLUMNS)
    is_break = (np.diff(offsets) != 1) | (np.diff(partitions) != 0) | (np.diff(numbers) != 0)
    breaks = np.flatnonzero(is_break) + 1
    starts = [0, *breaks.tolist()] if block.num_rows else []
    parts = []
    for start, end in pairwise([*starts, block.num_rows]):
        name, first = f"{producer}/{partitions[start]}", int(offsets[start])
        if numbers[start]:
            name = f"{name}.{numbers[start]}"
        parts.append(SequencedBlock(name, first, events.slice(start, end - start)))
    return parts
