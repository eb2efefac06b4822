"""How large a lane's next batch is, by how the last one went. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

QUICK: Final = 0.5
"""A batch that takes less than this share of its time could have been larger."""
GROWTH: Final = 4
SLOW_GROWTH: Final = 2
"""Of one that took its time but left nothing over: it may have been Spark that took it."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The most events of the next batch.

    A task stops after ``seconds`` and leaves the rest to the next batch; reading what is left over
    again and again would cost more than sending it, so that a batch has what can be sent in time.
    """

    events: int
    least: int
    most: int
    seconds: float

    @classmethod
    def at_first(cls, least: int, most: int, seconds: float) -> Self:
        """As long as nothing is known: the most."""
        return cls(most, min(least, most), most, seconds)

    def after(self, planned: int, kept: int, took: float) -> Self:
        """After a batch of so many events, of which some were kept, that took so long."""
        done = planned - kept
        if not done:
            return self  # nothing could be sent: that says nothing of how fast it is
        if not kept:
            grown = self.events * (GROWTH if took < self.seconds * QUICK else SLOW_GROWTH)
        else:
            # Tasks were sending for no longer than that; the rest of the time was Spark's.
            sending = min(max(took, 0.001), self.seconds)
            grown = int(done / sending * self.seconds)
        return replace(self, events=max(self.least, min(grown, self.most)))
