"""Where a streaming query is, as its checkpoint keeps it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from turnlane.spark.ranges import Positions

Offset = dict[str, Any]
"""As Spark has it: offsets by node, and beside them where reading began."""

TAKEN: Final = "taken"
"""The part of a lane's offset that counts events, those that come again too: it changes with each
batch, also if there is nothing new and something left to do."""
UNHEARD: Final = -1
"""The position on a node that has been away since the query was made."""
BEGUN: Final = "from"


@dataclass(frozen=True)
class Place:
    """How far a query has come, by node; a node that is missing was added to the endpoint later."""

    at: dict[int, int]
    begun: dict[int, int] = field(default_factory=dict)
    """Where it began, on nodes that had older events then: those are not the query's to settle."""

    @classmethod
    def of(cls, offset: Mapping[str, Any]) -> Place:
        """What an offset of Spark's says."""
        at = {int(node): each for node, each in offset.items() if node != BEGUN}
        begun = {int(node): each for node, each in offset.get(BEGUN, {}).items()}
        return cls(at, begun)

    def begin(self, first: Positions, lows: Positions) -> Place:
        """The place once reading begins on some nodes, or begins anew."""
        later = {node: at for node, at in first.items() if at > lows[node]}
        others = {node: at for node, at in self.begun.items() if node not in first}
        return Place({**self.at, **first}, others | later)

    def moved(self, at: Positions) -> Place:
        """The same, farther on."""
        return Place({**self.at, **at}, self.begun)

    def offset(self) -> Offset:
        """The same for Spark, for which offsets are the same if their texts are."""
        at = {str(node): each for node, each in self.at.items()}
        begun = {str(node): each for node, each in self.begun.items()}
        return at | {BEGUN: begun} if begun else at
