"""Which of equal values each is: the first, the second, and so on. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def repeats(*columns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How many rows before each are the same in all columns."""
    order = np.lexsort(columns)
    at = np.arange(len(order))
    begins = np.zeros(len(order), dtype=np.bool_)
    begins[:1] = True
    for column in columns:
        ordered = column[order]
        begins[1:] |= ordered[1:] != ordered[:-1]
    found = np.empty(len(order), dtype=np.int64)
    found[order] = at - np.maximum.accumulate(np.where(begins, at, 0))
    return found
