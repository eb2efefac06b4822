"""The sends under way in this process, all actions together, so that there are not too many.

Tasks in other processes have shares of their own: ``shares.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class InFlight:
    """Counts sends. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return self._count

    def take(self, most: int, wake: Callable[[], object]) -> bool:
        """Count one more, unless there are ``most``; then ``wake`` is called once there are fewer.

        ``wake`` is called on the thread that gives back, once, and must not block.
        """
        with self._lock:
            if self._count < most:
                self._count += 1
                return True
            if wake not in self._waiting:
                self._waiting.append(wake)
            return False

    def give_back(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


IN_FLIGHT = InFlight()
"""Those of this process."""
