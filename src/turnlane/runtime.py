"""What becomes of memory that is free: it is to be used again, not given back each time.

Blocks come and go many times a second. Each time the system would have to hand out the memory anew,
page by page and wiped: a tenth of all computing in a busy node. To be imported before Arrow is.
"""

from __future__ import annotations

import abc
import atexit
import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from turnlane.errors import RetryLater

# ── closing ──
# Things that are to be closed, and can be used in a ``with`` statement to that end.


class Closeable(abc.ABC):
    """Closed when the ``with`` block ends, however it ends."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# Read by Arrow's allocator when it is loaded. The system may take what is free, and does if anybody
# needs it; until then it is there to be used again.
os.environ.setdefault("MIMALLOC_PURGE_DECOMMITS", "0")

KEPT_BYTES: Final = 64 << 20
LARGEST_KEPT: Final = 32 << 20
"""Of one piece: older versions of glibc take no more."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""As glibc's ``malloc.h`` has them."""


def keep_freed_memory() -> None:
    """Have this process, and those forked from it, keep some of what C code has freed.

    Nothing where the C library is not glibc.
    """
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(_TRIM_THRESHOLD, KEPT_BYTES)


def release_free_memory() -> None:
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


# ── scratch ──
# Directories that this process needs as long as it lives, and that are gone after it.
#
# ``atexit`` alone is not enough: a process that ends at once, threads or not (``os._exit``),
# never
# comes there, and has to clear up itself.

_made: Final[list[Path]] = []


def create_scratch_directory(prefix: str) -> Path:
    """A new directory, for this process only."""
    _made.append(Path(tempfile.mkdtemp(prefix=prefix)))
    return _made[-1]


@atexit.register
def remove_scratch_directories() -> None:
    """Delete all of them; nobody uses them any more."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)


# ── secret ──
# Passwords and tokens: in a variable of the environment or in a file, never shown.


def read_secret(what: str, variable: str | None, file: Path | None) -> str | None:
    """The secret; ``None`` if neither place is named.

    Looked up when it is needed, where it is needed. Raises ``RetryLater`` if it is not there:
    events wait until somebody has put it right.
    """
    if variable is not None:
        found = os.environ.get(variable, "")
        where = f"the variable {variable}"
    elif file is not None:
        where = str(file)
        try:
            found = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RetryLater(f"the {what} cannot be read: {where}: {error}") from None
    else:
        return None
    if not found:
        raise RetryLater(f"there is no {what}: {where} is empty or not set")
    return found
