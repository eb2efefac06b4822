"""Output ``queue``: events into a queue of another node, or of the same."""

from __future__ import annotations

import json
import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from pydantic import AfterValidator, Field, model_validator

from turnlane.client.address import Url, understood
from turnlane.client.node_client import Credentials, RemoteNode, said
from turnlane.errors import (
    EventTooLarge,
    Never,
    NoSuchQueue,
    PayloadTooLarge,
    RetryLater,
    TransportDown,
)
from turnlane.events import Block, typed
from turnlane.outputs.api import NOT_OF_EVENTS, ROW, Output, OutputSettings
from turnlane.outputs.http_connections import ClientTls
from turnlane.runtime import revealed
from turnlane.units import Duration
from turnlane.validation import Contradiction, Problem

log = logging.getLogger(__name__)


def _one_node(endpoint: str) -> str:
    places = Url.of_setting(endpoint).places
    if len(places) > 1:
        raise ValueError(f"names {len(places)} nodes; an action sends to one")
    return endpoint


class QueueOutputSettings(OutputSettings):
    """The settings of a queue output."""

    endpoint: Annotated[str, AfterValidator(_one_node)] = Field(
        description="The node, with TLS if it is `turnlanes://`.",
        examples=["turnlanes://host:8815"],
    )
    queue: str = Field(min_length=1, description="The queue there, which has to exist.")
    token_env: str | None = Field(
        default=None, description="The environment variable that has the token."
    )
    token_file: Path | None = Field(default=None, description="The file that has the token.")
    tls: ClientTls = Field(
        default_factory=ClientTls, description="For `turnlanes://`: whom to trust, what to show."
    )
    producer: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="A name by which the node there knows this action, and drops what comes "
        "again. Only with `ordering: strict`: it may drop what comes out of order. Another one "
        "if the action's queue was made anew.",
    )
    timeout: Duration = Field(
        default=20.0, gt=0, description="How long a batch may take, with waiting for room."
    )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        problems = []
        if self.tls != ClientTls() and not Url.parse(self.endpoint).tls:
            problems.append(Problem("tls", "is for turnlanes://, and the endpoint is none"))
        if not self.tls.verify:
            problems.append(Problem("tls.verify", "a node's certificate is always checked"))
        if problems:
            raise Contradiction(problems)
        return self


class Piece(NamedTuple):
    """Events that are published together."""

    producer: str | None
    sequence: int | None
    """The first event's number. Those after it go on from there."""
    block: Block


class QueueOutput(Output):
    """Publishes, and waits until events are as safe there as that queue makes them."""

    settings_type = QueueOutputSettings
    settings: QueueOutputSettings

    def __init__(self, settings: QueueOutputSettings) -> None:
        super().__init__(settings)
        self._connecting = threading.Lock()
        self._node: RemoteNode | None = None

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """The events without their place here, in pieces whose numbers are consecutive."""
        if self.settings.producer is None:
            return [Piece(None, None, typed(block, without=NOT_OF_EVENTS))]
        return list(_numbered(block, self.settings.producer))

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        pieces: list[Piece] = prepared
        try:
            for piece in pieces:
                self._publish(self._connected(), piece)
        except EventTooLarge as error:
            raise PayloadTooLarge(str(error)) from error
        except Never as error:  # of the queue, the token or the columns, which a person can change
            raise RetryLater(f"queue {self.settings.queue!r}: {error}") from error

    def check(self) -> None:
        """Ask the node whether there is the queue, and whether the token may use it."""
        try:
            if self.settings.queue not in self._connected().queues():
                raise NoSuchQueue(f"there is no queue {self.settings.queue!r}")
        except Never as error:
            raise RetryLater(f"{self.settings.endpoint}: {error}") from error

    def close(self) -> None:
        if self._node is not None:
            self._node.close()

    def _connected(self) -> RemoteNode:
        with self._connecting:
            if self._node is None:
                settings = self.settings
                url, tls = Url.parse(settings.endpoint), settings.tls
                token = revealed("token", settings.token_env, settings.token_file)
                credentials = Credentials(token, tls.ca, tls.cert, tls.key)
                self._node = RemoteNode(url.places[0], url.locations()[0], credentials)
            return self._node

    def _publish(self, node: RemoteNode, piece: Piece) -> None:
        command = {"publish": self.settings.queue}
        if piece.producer is not None:
            command["producer"] = piece.producer
        numbers = {} if piece.sequence is None else {"sequence": piece.sequence}
        with understood(node.place):
            writer, answers = node.put(command, piece.block.schema, self.settings.timeout)
            writer.write_with_metadata(piece.block, pa.py_buffer(json.dumps(numbers).encode()))
            writer.done_writing()
            # The stream ends well once everything is there.
            while (answer := answers.read()) is not None:
                self._hear(said(answer), piece)
            writer.close()

    def _hear(self, news: dict[str, Any], piece: Piece) -> None:
        if "ended" in news:
            raise TransportDown(f"{self.settings.endpoint}: {news['ended']}")
        first = piece.sequence
        if first is not None and news.get("resume_at", 0) > first:
            count = min(news["resume_at"] - first, piece.block.num_rows)
            log.info("queue %s: up to %d events were there already", self.settings.queue, count)


def _numbered(block: Block, producer: str) -> list[Piece]:
    """Events numbered by their offsets, which are consecutive within a piece.

    Further rows that a transform has made of events are numbered apart, as another producer's: they
    have the same offsets.
    """
    names = block.schema.names
    if not {"partition", "offset"} <= set(names):
        raise RetryLater("producer: these events come from no queue; sql made them")
    offsets = block.column("offset").to_numpy()
    partitions = block.column("partition").to_numpy()
    numbers = block.column(ROW).to_numpy() if ROW in names else np.zeros_like(offsets)
    events = typed(block, without=NOT_OF_EVENTS)
    apart = (np.diff(offsets) != 1) | (np.diff(partitions) != 0) | (np.diff(numbers) != 0)
    breaks = np.flatnonzero(apart) + 1
    starts = [0, *breaks.tolist()] if block.num_rows else []
    pieces = []
    for start, end in pairwise([*starts, block.num_rows]):
        name, first = f"{producer}/{partitions[start]}", int(offsets[start])
        if numbers[start]:
            name = f"{name}.{numbers[start]}"
        pieces.append(Piece(name, first, events.slice(start, end - start)))
    return pieces
