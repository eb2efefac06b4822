"""How long a publisher waits, over all that it waits for in turn."""

from __future__ import annotations

import time
from typing import Final, NamedTuple


class Patience(NamedTuple):
    """So many seconds from its making on; ``None`` is for ever."""

    seconds: float | None
    until: float | None

    @classmethod
    def of(cls, seconds: float | None) -> Patience:
        """The patience that begins now."""
        return FOR_EVER if seconds is None else cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float | None:
        """The seconds that are left of it, 0 at least."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())


FOR_EVER: Final = Patience(None, None)
