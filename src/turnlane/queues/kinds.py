"""The kinds of queue, and the groups of kinds that share a knob."""

from __future__ import annotations

import enum
from typing import Final


class Kind(enum.StrEnum):
    """Where events wait."""

    DIRECT = "direct"
    MEMORY = "memory"
    DISK = "disk"
    DISK_ASSISTED = "disk_assisted"
    PROXY = "proxy"


ALL: Final = tuple(Kind)
WAITING: Final = (Kind.MEMORY, Kind.DISK, Kind.DISK_ASSISTED, Kind.PROXY)
STORING: Final = (Kind.MEMORY, Kind.DISK, Kind.DISK_ASSISTED)
IN_MEMORY: Final = (Kind.MEMORY, Kind.DISK_ASSISTED, Kind.PROXY)
ON_DISK: Final = (Kind.DISK, Kind.DISK_ASSISTED)
