"""How much memory this process may use: the least of every limit that can be found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from turnlane.errors import ConfigError


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes this process may use: control groups, ``RLIMIT_AS`` and physical memory considered.

    ``root`` is the root of the file system that holds ``/proc`` and ``/sys``.
    """
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


def cgroup_v2_limit(root: Path) -> int | None:
    """The least ``memory.max`` from this process's control group up to the top."""
    for controllers, path in _groups(root):
        if controllers == "":
            mounts = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
            return _least(_upwards(mounts, path, "memory.max"))
    return None


def cgroup_v1_limit(root: Path) -> int | None:
    """The least ``memory.limit_in_bytes`` from this process's memory group up to the top."""
    for controllers, path in _groups(root):
        if "memory" in controllers.split(","):
            mounts = (root / "sys/fs/cgroup/memory",)
            return _least(_upwards(mounts, path, "memory.limit_in_bytes"))
    return None


def address_space_limit() -> int | None:
    """The soft ``RLIMIT_AS``, where there is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def physical_memory(root: Path) -> int | None:
    """The machine's memory, from ``/proc/meminfo`` or else from the C library."""
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemTotal":
            return int(amount.split()[0]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """The controllers and path of every hierarchy this process is in."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            yield controllers, path


def _upwards(mounts: tuple[Path, ...], path: str, name: str) -> Iterator[Path]:
    """The file of this name in the group and in each above it.

    A container may see its host's path but only its own part of the tree: groups that are not
    there are passed over, and ``..`` (above the container's own root) is ignored.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for mount in mounts:
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth], name)


def _least(files: Iterator[Path]) -> int | None:
    """The least number in these files; ``max``, which means no limit, is none."""
    texts = (_text(file).strip() for file in files)
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
