"""Lanes without Spark that run until they are killed; the arguments are a node and a server."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.spark.loop import Pipe
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import LaneTaken, RetryLater
from turnlane.outputs.http import HttpOutputSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings
from turnlane.queues.settings import QueueSettings


def action(server: str) -> ActionSettings:
    """Post small batches, so that one is always in flight."""
    delivery = DeliverySettings(
        batch_events=20, backoff=0.05, max_backoff=0.1, breaker_reset=0.1, max_time=0.5
    )
    return ActionSettings(
        name="a",
        filter="a",
        queue=QueueSettings.of(kind="disk", name="a", path=Path("a")),
        delivery=delivery,
        lane=LaneSettings(max_events=200),
        output=HttpOutputSettings(url=server, format="raw"),
    )


def main(node: str, server: str) -> None:
    """Run the lanes; start a lane again after a failure, as a pipeline does."""
    while True:
        pipe = Pipe(node, action(server), lane=LaneSettings(max_events=500))
        try:
            while True:
                for lane in pipe.lanes.values():
                    lane.turn()
        except (LaneTaken, RetryLater) as error:
            sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
