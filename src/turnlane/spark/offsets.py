"""Where a streaming query is, as its checkpoint keeps it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from turnlane.spark.ranges import Extent, Positions

Offset = dict[str, Any]
"""As Spark has it: offsets by node, and beside them where reading began, and in which queues."""

TAKEN: Final = "taken"
"""The part of a lane's offset that counts events, those that come again too: it changes with each
batch, also if there is nothing new and something left to do."""
UNHEARD: Final = -1
"""The position on a node that has been away since the query was made."""
BEGUN: Final = "from"
QUEUES: Final = "queues"


@dataclass(frozen=True)
class Place:
    """How far a query has come, by node; a node that is missing was added to the endpoint later."""

    at: dict[int, int]
    begun: dict[int, int] = field(default_factory=dict)
    """Where it began, on nodes that had older events then: those are not the query's to settle."""
    queues: dict[int, str] = field(default_factory=dict)
    """The ids of the queues that it reads: offsets say nothing of others of their name. Checkpoints
    of old have none."""

    @classmethod
    def of(cls, offset: Mapping[str, Any]) -> Place:
        """What an offset of Spark's says."""
        at = {node: each for node, each in offset.items() if node not in (BEGUN, QUEUES)}
        begun, queues = offset.get(BEGUN, {}), offset.get(QUEUES, {})
        return cls(_by_number(at), _by_number(begun), _by_number(queues))

    def begin(self, first: Positions, extents: Mapping[int, Extent]) -> Place:
        """The place once reading begins on some nodes, or begins anew."""
        later = {node: at for node, at in first.items() if at > extents[node].low}
        others = {node: at for node, at in self.begun.items() if node not in first}
        queues = {node: extents[node].queue_id for node in first}
        return Place({**self.at, **first}, others | later, self.queues | queues)

    def knowing(self, extents: Mapping[int, Extent]) -> Place:
        """The same, with the ids of queues whose ids it has not known yet."""
        found = {node: each.queue_id for node, each in extents.items() if node in self.at}
        return replace(self, queues={**self.queues, **found, **self.queues})

    def is_other(self, node: int, queue_id: str) -> bool:
        """Whether this is known not to be the queue whose offsets these are."""
        return self.queues.get(node, queue_id) != queue_id

    def moved(self, at: Positions) -> Place:
        """The same, farther on."""
        return replace(self, at={**self.at, **at})

    def offset(self) -> Offset:
        """The same for Spark, for which offsets are the same if their texts are."""
        parts = {BEGUN: _by_text(self.begun), QUEUES: _by_text(self.queues)}
        return _by_text(self.at) | {name: part for name, part in parts.items() if part}


def _by_number(part: Mapping[str, Any]) -> dict[int, Any]:
    return {int(node): each for node, each in part.items()}


def _by_text(part: Mapping[int, Any]) -> dict[str, Any]:
    return {str(node): each for node, each in part.items()}
