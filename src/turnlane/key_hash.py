"""The hash of a key: the same for every client, in any language.

The hash of a key's UTF-8 bytes b₀ … bₙ₋₁ is Σ (bᵢ + 1)·Pⁱ modulo 2⁶⁴, mixed like splitmix64. A sum
of products can be computed for a whole column at once.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

P: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

Numbers = npt.NDArray[np.uint64]


def hash_key(key: str) -> int:
    """Return the hash of one key."""
    total, power = 0, 1
    for byte in key.encode():
        total = (total + (byte + 1) * power) & _MASK
        power = power * P & _MASK
    return _mix(total)


def _mix(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def hash_keys(keys: pa.Array[Any]) -> Numbers:
    """Return the hash of every key of a column; the hash of a null is arbitrary."""
    column: Any = keys.cast(pa.large_binary())
    ends = np.frombuffer(column.buffers()[1], dtype=np.int64)[
        column.offset : column.offset + len(column) + 1
    ]
    first = ends[0] if len(ends) else 0
    data = column.buffers()[2]
    text = np.frombuffer(data or b"", dtype=np.uint8)[first : ends[-1] if len(ends) else 0]
    return _mix_all(_sums(text.astype(np.uint64) + np.uint64(1), ends - first))


def _sums(letters: Numbers, ends: npt.NDArray[np.int64]) -> Numbers:
    """Return the sum of products of each key: a difference of running sums."""
    starts, lengths = ends[:-1], np.diff(ends)
    places = np.arange(len(letters)) - np.repeat(starts, lengths)
    running = np.zeros(len(letters) + 1, dtype=np.uint64)
    powers = _powers(int(lengths.max(initial=0)))
    np.cumsum(letters * powers[places], out=running[1:])
    result: Numbers = running[ends[1:]] - running[starts]
    return result


def _powers(count: int) -> Numbers:
    powers = np.full(max(1, count), P, dtype=np.uint64)
    powers[0] = 1
    result: Numbers = np.multiply.accumulate(powers)
    return result


def _mix_all(numbers: Numbers) -> Numbers:
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


# ── nodes ──
# The node of a key is the remainder of its hash: the same for every client, in any language.


def find_node(key: str, nodes: int) -> int:
    """Return the number of the node that a key belongs to."""
    return hash_key(key) % nodes


def find_nodes(keys: pa.Array[Any], nodes: int) -> npt.NDArray[np.int64]:
    """Return the number of the node for every key of a column; -1 where there is no key."""
    found = (hash_keys(keys) % np.uint64(nodes)).astype(np.int64)
    if keys.null_count:
        found[np.asarray(keys.is_null())] = -1
    return found


# ── repeats ──


def count_earlier_equals(*columns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return for each row how many rows before it are the same in all columns."""
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
