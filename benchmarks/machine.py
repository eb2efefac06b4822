"""Describes the machine on which the benchmarks ran."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path


def describe_machine(directory: Path) -> dict[str, str]:
    """Return cores, memory, Python, kernel, and the file system of ``directory``."""
    mount = _find_mount(directory)
    return {
        "Processor": f"{_get_processor()}, {os.cpu_count()} cores",
        "Memory": f"{_get_memory() / 2**30:.0f} GiB",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "System": f"{platform.system()} {platform.release()}",
        "File system": f"{mount[2]} on {mount[0]}" if mount else "unknown",
    }


def _get_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _get_processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _list_mounts() -> Iterator[tuple[str, str, str]]:
    for line in Path("/proc/mounts").read_text().splitlines():
        device, where, kind = line.split()[:3]
        yield device, where, kind


def _find_mount(directory: Path) -> tuple[str, str, str] | None:
    path = directory.resolve()
    over = [mount for mount in _list_mounts() if path.is_relative_to(mount[1])]
    return max(over, key=lambda mount: len(mount[1]), default=None)
