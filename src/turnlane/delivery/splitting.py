"""Splitting: which of a batch's events a destination will not have, found with few sends. Pure.

The first events are tried, always in order. What passed is behind us; a refusal of several narrows
the search to these, a refusal of one has found it. Behind the first find all the rest goes in one
piece again; only where finds are frequent the pieces get as small as the gaps between them.

One of ``n`` is found with 2 · log2(n) sends at most. If that leaves no send for the last one that
is left, where few were refused together, it is known without: all the others have gone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

FEW: Final = 5
"""Among so many that were refused together the last one is not sent alone to make sure."""


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
    together: int = 0
    """So many were refused when this search began; 0 if that was not sure to be their fault."""
    before: int = 0
    """What was behind us then."""

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

    @property
    def is_known(self) -> bool:
        """Whether the first event is the one, without its being sent alone."""
        return self.suspect == 1 and 0 < self.together <= FEW

    @property
    def is_fruitless(self) -> bool:
        """Whether nothing has gone since the search began, if there is one."""
        return not self.suspect or self.passed == self.before

    def delivered(self, count: int) -> Self:
        """After the first ``count`` have gone: whatever is wrong is behind them."""
        return replace(
            self,
            left=self.left - count,
            suspect=max(0, self.suspect - count),
            passed=self.passed + count,
        )

    def refused(self, count: int, *, sure: bool = True) -> Self:
        """After a refusal of the first ``count``; one that was alone is found, and gone.

        It is not ``sure`` if it may be the destination's fault after all.
        """
        if count == 1:
            return self._gone()
        if self.suspect:
            return replace(self, suspect=count)
        return replace(self, suspect=count, together=count if sure else 0, before=self.passed)

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
