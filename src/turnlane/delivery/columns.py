"""The columns that turnlane itself adds to rows on their way to outputs."""

from __future__ import annotations

from typing import Final

OURS: Final = "turnlane_"
"""How the names of columns begin that are ours alone: no parser and no transform may make one."""
DIRECT: Final = f"{OURS}direct"
"""Which outputs are called at once."""
PRIORITY: Final = f"{OURS}priority"
"""The number in the ``<PRI>`` of a syslog message, if nothing else of it is wanted."""
ROUTES: Final = f"{OURS}routes"
"""A bit for every queue that a row goes into."""
DISCARDED: Final = f"{OURS}discarded_"
"""How the names of columns begin that say what a discard takes by chance; its number follows."""
PLACES: Final = f"{OURS}places"
"""The places of all events that a row stands for."""
HOLLOWS: Final = f"{OURS}hollows"
"""A bit for every column of lists or maps: whether it is null."""
PAYLOAD: Final = "payload"
"""The event as the output sends it. Outputs of others read it, so it has a plain name."""
