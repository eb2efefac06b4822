"""The memory of this process: how much it may use, and what happens to memory that is free.

Blocks of events are allocated and freed many times a second. If the allocators returned the memory
to the system each time, the system would hand it out again page by page, and clear every page: a
tenth of the computing time of a busy node. So freed memory is kept and used again. A variable of
the environment tells this to Arrow's allocator, which reads it when Arrow is loaded. Therefore this
module must be imported before Arrow, and does not import Arrow itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import Final

from turnlane.errors import ConfigError
from turnlane.units import Percentage, compute_share

# The system may still take the free pages, and does so when another process needs them.
os.environ.setdefault("MIMALLOC_PURGE_DECOMMITS", "0")

KEPT_BYTES: Final = 64 << 20
LARGEST_KEPT: Final = 32 << 20
"""The largest block that is kept. Older versions of glibc accept no higher value."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Options of ``mallopt``, from glibc's ``malloc.h``."""

# ── free memory ──────────────────────────────────────────────────────────────────────────────────


def keep_freed_memory() -> None:
    """Let this process and its forks keep memory that C code frees. Does nothing without glibc."""
    set_option = _find_glibc_function("mallopt")
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(_TRIM_THRESHOLD, KEPT_BYTES)


def release_free_memory() -> None:
    """Return free memory to the system.

    Blocks have very different sizes, which fragments the memory: without this call, a process that
    was busy once stays large.
    """
    import pyarrow as pa  # only after the variable above is set

    pa.default_memory_pool().release_unused()
    trim = _find_glibc_function("malloc_trim")
    if trim is not None:
        trim(0)


def _find_glibc_function(name: str) -> Callable[..., int] | None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return function


# ── the limit ────────────────────────────────────────────────────────────────────────────────────

_process_limit: int | Percentage | None = None
_assumed_limit: ContextVar[int | Percentage | None] = ContextVar("assumed_limit")


def set_process_limit(limit: int | Percentage | None) -> None:
    """Lower the limit of this process: to a size, or to a share of what the system allows it.

    Everything that takes a share of the memory from now on takes it of this limit. Nothing
    enforces the limit as such. ``None`` is no limit beyond those of the system.
    """
    global _process_limit  # noqa: PLW0603 - the process has one limit
    _process_limit = limit


@contextlib.contextmanager
def assume_process_limit(limit: int | Percentage | None) -> Iterator[None]:
    """Compute with this limit in the block, to check the settings of another process."""
    token = _assumed_limit.set(limit)
    try:
        yield
    finally:
        _assumed_limit.reset(token)


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes that this process may use: the least of all limits that exist.

    ``root`` is the root of the file system that holds ``/proc`` and ``/sys``.
    """
    found = find_system_limit(root)
    limit = _assumed_limit.get(_process_limit)
    return found if limit is None else compute_share(limit, found)


def find_system_limit(root: Path = Path("/")) -> int:
    """Return the bytes that the system lets this process use."""
    found = [
        limit
        for limit in (
            cgroup_v2_limit(root),
            cgroup_v1_limit(root),
            address_space_limit(),
            physical_memory(root),
        )
        if limit is not None
    ]
    if not found:
        raise ConfigError("memory_percent", "no memory limit can be found; set max_bytes instead")
    return min(found)


def compute_memory_share(share: float) -> int:
    """Return this share of the bytes that the process may use; no limit if none is known."""
    try:
        return int(memory_limit() * share)
    except ConfigError:
        return sys.maxsize


def measure_process_memory(root: Path = Path("/")) -> int:
    """Return the bytes of physical memory that this process uses; 0 if the system does not say."""
    fields = _text(root / "proc/self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def cgroup_v2_limit(root: Path) -> int | None:
    """Return the least ``memory.max`` from this process's control group up to the top."""
    for controllers, path in _groups(root):
        if controllers == "":
            mounts = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
            return _least(_upwards(mounts, path, "memory.max"))
    return None


def cgroup_v1_limit(root: Path) -> int | None:
    """Return the least ``memory.limit_in_bytes`` from this process's group up to the top."""
    for controllers, path in _groups(root):
        if "memory" in controllers.split(","):
            mounts = (root / "sys/fs/cgroup/memory",)
            return _least(_upwards(mounts, path, "memory.limit_in_bytes"))
    return None


def address_space_limit() -> int | None:
    """Return the soft ``RLIMIT_AS``, if there is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def physical_memory(root: Path) -> int | None:
    """Return the machine's memory, from ``/proc/meminfo`` or else from the C library."""
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemTotal":
            return int(amount.split()[0]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Return the controllers and the path of every hierarchy that this process is in."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            yield controllers, path


def _upwards(mounts: tuple[Path, ...], path: str, name: str) -> Iterator[Path]:
    """Return the paths of a file in the group and in every group above it.

    A container may see the host's path but only its own part of the tree: missing groups are
    skipped, and ``..`` (above the container's own root) is ignored.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for mount in mounts:
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth], name)


def _least(files: Iterator[Path]) -> int | None:
    """Return the least number in these files; ``max``, which means no limit, does not count."""
    texts = (_text(file).strip() for file in files)
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
