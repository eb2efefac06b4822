"""The sections of a configuration that describe a pipeline, with the outputs that are installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, PlainValidator, SerializeAsAny, WithJsonSchema

from turnlane.config.plugged import Plugged
from turnlane.delivery.settings import DeliverySettings, FailoverSettings
from turnlane.outputs import registry
from turnlane.outputs.contract import OutputSettings
from turnlane.pipeline.settings import ActionSettings
from turnlane.queues.kinds import ON_DISK, Kind

ANY_OUTPUT: Final = "any output"
"""Marks the place in the JSON Schema where the settings of every output type go."""


OUTPUTS: Final = Plugged(registry)

AnyOutput = Annotated[
    SerializeAsAny[OutputSettings],
    PlainValidator(OUTPUTS.validated),
    WithJsonSchema({"type": "object", "title": ANY_OUTPUT}),
    OUTPUTS,
]


class FailoverSection(FailoverSettings):
    """A second output, for when the first one stays away."""

    output: AnyOutput = Field(description="Where the events go then.")


class DeliverySection(DeliverySettings):
    """How an action's events are delivered."""

    failover: FailoverSection | None = Field(
        default=None, description="A second output, for when the first one stays away."
    )


class ActionSection(ActionSettings):
    """Filter, queue and output: where some of the events go."""

    delivery: DeliverySection = Field(
        default_factory=DeliverySection, description="How the events are brought to the output."
    )
    output: AnyOutput = Field(description="Where the events go; `type` says which output it is.")


def queue_knobs(name: object, knobs: object) -> object:
    """A queue's knobs as its settings take them: with its name, its kind, and a path if needed.

    The path is a stand-in; the node puts queues below its data directory.
    """
    if isinstance(knobs, BaseModel):
        return knobs
    if knobs is None:
        knobs = {}
    if not isinstance(knobs, Mapping):
        return knobs
    kind = Kind.DISK if knobs.get("kind") is None else knobs["kind"]
    place = {"path": Path("queues") / str(name)} if kind in ON_DISK else {}
    return {**knobs, "name": name, "kind": kind, **place}


def with_queue(action: object) -> object:
    """An action whose queue, if it has one, is called as it is. A bare word is the queue's kind."""
    if not isinstance(action, Mapping) or "queue" not in action:
        return action
    queue: Any = action["queue"]
    if isinstance(queue, str):
        queue = {"kind": queue}
    return {**action, "queue": queue_knobs(action.get("name"), queue)}
