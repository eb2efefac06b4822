"""What a process has in memory for itself."""

from __future__ import annotations

from pathlib import Path


def own_bytes(pid: int | str) -> int:
    """The page cache, libraries it shares, and what the system may take at once left out."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    private = sum(size for name, size in found.items() if name.startswith("Private_"))
    return 1024 * (private - found.get("LazyFree:", 0))
