"""The memory that a process has for itself."""

from __future__ import annotations

from pathlib import Path


def get_own_bytes(pid: int | str) -> int:
    """Return the private bytes of a process, without page cache and lazily freed pages."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    private = sum(size for name, size in found.items() if name.startswith("Private_"))
    return 1024 * (private - found.get("LazyFree:", 0))
