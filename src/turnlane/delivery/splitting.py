"""Splitting: which of a batch's events a destination will not have, found with few sends. Pure.

The first events are tried, always in order. What passed is behind us; a refusal of several narrows
the search to these, a refusal of one has found it. Behind the first find all the rest goes in one
piece again; only where finds are frequent the pieces get as small as the gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Search:
    """How far a batch has got: ``left`` events are still to go."""

    left: int
    suspect: int = 0
    """Among so many first ones is one that was refused."""
    most: int | None = None
    """More than so many at a time were too large."""
    passed: int = 0
    """Events behind us, found ones included."""
    found: int = 0

    @property
    def trial(self) -> int:
        """How many of the first events to send next."""
        if self.suspect:
            trial = max(1, self.suspect // 2)
        elif self.found > 1:
            trial = max(1, self.passed // self.found)
        else:
            trial = self.left
        return min(trial, self.left, self.most or trial)

    def delivered(self, count: int) -> Self:
        """After the first ``count`` have gone: whatever is wrong is behind them."""
        return replace(
            self,
            left=self.left - count,
            suspect=max(0, self.suspect - count),
            passed=self.passed + count,
        )

    def refused(self, count: int) -> Self:
        """After a refusal of the first ``count``; one that was alone is found, and gone."""
        return self._gone() if count == 1 else replace(self, suspect=count)

    def too_large(self, count: int) -> Self:
        """After the first ``count`` were too large: half of them, or one that is found, and gone.

        What was too large may have been that one alone, so the rest is tried whole again.
        """
        return replace(self._gone(), most=None) if count == 1 else replace(self, most=count // 2)

    def _gone(self) -> Self:
        return replace(
            self,
            left=self.left - 1,
            suspect=0,
            passed=self.passed + 1,
            found=self.found + 1,
        )
