"""Which of several nodes a key belongs to: the same for every client, in any language.

The node is the remainder of the key's hash.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.hashing import key_hash, key_hashes


def node_of(key: str, nodes: int) -> int:
    """The number of the node that a key belongs to."""
    return key_hash(key) % nodes


def nodes_of(keys: pa.Array[Any], nodes: int) -> npt.NDArray[np.int64]:
    """For every key of a column, the number of its node; -1 where there is no key."""
    found = (key_hashes(keys) % np.uint64(nodes)).astype(np.int64)
    if keys.null_count:
        found[np.asarray(keys.is_null())] = -1
    return found
