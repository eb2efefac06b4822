"""A column of texts as one piece of memory, without a Python object for any of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_EMPTY = pa.scalar(b"", pa.large_binary())
_NEWLINE = pa.scalar(b"\n", pa.large_binary())


class Strung(NamedTuple):
    """Texts one after another."""

    data: pa.Buffer
    ends: npt.NDArray[np.int64]
    """Where each of them ends in ``data``."""


NOTHING = Strung(pa.py_buffer(b""), np.zeros(0, dtype=np.int64))
"""No texts at all."""


def large(texts: Any) -> Any:  # noqa: ANN401
    """The column as bytes that may be of any length; null is empty."""
    whole = texts.cast(pa.large_binary())
    return pc.fill_null(whole, _EMPTY) if whole.null_count else whole


def joined(*parts: Any) -> Any:  # noqa: ANN401
    """Texts made of several columns, or of scalars, row by row."""
    return pc.binary_join_element_wise(*parts, _EMPTY)


def strung(texts: Any) -> Strung:  # noqa: ANN401
    """The texts of a column made by :func:`large` or :func:`joined`."""
    if not len(texts):
        return NOTHING
    offsets, values = texts.buffers()[1:]
    bounds = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    data = values.slice(first, last - first) if values is not None else NOTHING.data
    return Strung(data, bounds[1:] - first)


def lines_of(payloads: Any) -> pa.Buffer:  # noqa: ANN401
    """Texts, each with a newline after it."""
    return strung(joined(large(payloads), _NEWLINE)).data
