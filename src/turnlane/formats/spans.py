"""Messages as places in a buffer, and the column that is made of them."""

from __future__ import annotations

from typing import Final, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Bytes = bytes | bytearray | memoryview
Octets = NDArray[np.uint8]
Places = NDArray[np.int64]

_ENDINGS: Final = (ord("\0"), ord("\n"))


def column(buffer: Bytes, starts: Places, ends: Places) -> pa.BinaryArray:
    """A copy of the spans of a buffer, which are in order and do not overlap."""
    count = len(starts)
    # Arrow's spans touch, so the gaps are elements too; taking every other one leaves them out.
    bounds = np.empty(2 * count, np.int32)
    bounds[0::2] = starts
    bounds[1::2] = ends
    parts = pa.Array.from_buffers(
        pa.binary(),
        max(0, 2 * count - 1),
        [None, pa.py_buffer(bounds.data), pa.py_buffer(buffer)],
    )
    taken = parts.take(np.arange(0, 2 * count, 2, dtype=np.int32))
    return cast("pa.BinaryArray", taken)


def trimmed(data: Octets, starts: Places, ends: Places) -> Places:
    """The ends of the spans without one NUL and, after that, without one newline."""
    for octet in _ENDINGS:
        final = data.take(ends - 1, mode="clip") == octet
        if final.any():  # hardly ever
            ends = ends - (final & (ends > starts))
    return ends
