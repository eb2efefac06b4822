"""How long to wait after failures in a row. Pure: who waits brings the numbers and the chance."""

from __future__ import annotations


def doubled(first: float, longest: float, failures: int) -> float:
    """``first`` after one failure, twice as long after each further one, ``longest`` at most."""
    # The exponent is bounded before it is used: 2.0**5000 has no float.
    return min(longest, first * 2.0 ** min(max(failures - 1, 0), 64))


def scattered(wait: float, chance: float) -> float:
    """Between half the wait and all of it, so that those who failed together come back apart."""
    return wait * (0.5 + chance / 2)
