"""What a configuration may say, and whoever wrote it may not have meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from turnlane.config.settings import Config
from turnlane.errors import ConfigError
from turnlane.queues.kinds import Kind

_IN_MEMORY: Final = {
    Kind.MEMORY: "is kept in memory",
    Kind.DISK_ASSISTED: "is kept in memory until it spills",
}


def cautions(config: Config) -> Iterator[ConfigError]:
    """Each with its place, as errors have one; none of them is raised."""
    for at, action in enumerate(config.actions):
        where = None if action.queue is None else _IN_MEMORY.get(action.queue.kind)
        if where is not None:
            message = (
                f"what the main lane commits here {where}: if the node is killed it is lost, "
                "though it is settled in the main queue; use disk to keep it"
            )
            yield config.placed(ConfigError(f"actions[{at}].queue", message))
