"""The work of a task of an action, for tests that run it in other processes."""

from __future__ import annotations

from tests.delivery.harness import TIMEOUT, make_block
from turnlane import connect
from turnlane.client.destination import RemoteDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.settings import DeliverySettings
from turnlane.delivery.workers import SendActivity
from turnlane.outputs.http import HttpOutput, HttpOutputSettings

EVENTS = 50
LIMIT = 4


def deliver(node: str, server: str) -> None:
    """Deliver some events. The process ends with an error unless it has delivered all."""
    settings = DeliverySettings(
        batch_events=1, concurrency=8, max_in_flight=LIMIT, max_time=TIMEOUT
    )
    with (
        connect(node) as client,
        HttpOutput(HttpOutputSettings(url=server, format="raw")) as output,
    ):
        activity = SendActivity()
        with (
            RemoteDestinationState(
                client.nodes[0], "alerts", "disk", settings, activity.get_counts
            ) as gate,
            Engine(output, settings, gate, activity=activity) as engine,
        ):
            assert engine.deliver(make_block(0, EVENTS)).delivered == EVENTS
