"""Shares: how many sends each task of an action may have under way, of a limit for all. Pure.

Each has the same share, as if there were as many tasks as there were of late: those of a batch do
not begin at one moment, and whoever comes first is not to have it all. What a task still has under
way is its own until it has ended, so that all together never have more than the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LATELY: Final = 60.0
"""Seconds for which it counts how many tasks there were."""


class Shares:
    """The shares that were given away. Times are monotonic. Not safe from several threads."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        self._most = 0
        self._until = 0.0

    def of(
        self, task: str, limit: int, busy: Mapping[str, int], now: float, most: int | None = None
    ) -> int:
        """The share of a task; ``busy`` has all that are alive, and how much each is sending.

        It is nothing as long as the others have it all, and never more than ``most``, which is all
        that the task could use.
        """
        if len(busy) >= self._most or now > self._until:
            self._most, self._until = len(busy), now + LATELY
        self._given = {each: given for each, given in self._given.items() if each in busy}
        others = sum(given for each, given in self._given.items() if each != task)
        fair = max(1, limit // self._most)
        share = max(0, min(fair, limit - others, most or limit))
        self._given[task] = max(share, busy[task])
        return share
