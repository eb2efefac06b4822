"""What becomes of memory that is free: it is to be used again, not given back each time.

Blocks come and go many times a second. Each time the system would have to hand out the memory anew,
page by page and wiped: a tenth of all computing in a busy node. To be imported before Arrow is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final

# Read by Arrow's allocator when it is loaded. The system may take what is free, and does if anybody
# needs it; until then it is there to be used again.
os.environ.setdefault("MIMALLOC_PURGE_DECOMMITS", "0")

KEPT_BYTES: Final = 64 << 20
LARGEST_KEPT: Final = 32 << 20
"""Of one piece: older versions of glibc take no more."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""As glibc's ``malloc.h`` has them."""


def keep_freed() -> None:
    """Have this process, and those forked from it, keep some of what C code has freed.

    Nothing where the C library is not glibc.
    """
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(_TRIM_THRESHOLD, KEPT_BYTES)


def give_back() -> None:
    """Let the system have what is free.

    Blocks come in and go out in sizes that no allocator likes: without this a process that was busy
    once stays large for ever.
    """
    import pyarrow as pa  # not before the variable above is set

    pa.default_memory_pool().release_unused()
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc; other C libraries have none of these."""
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
