"""What becomes of an event that was fired and not acked. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turnlane.table.backoff import backoff
from turnlane.table.settings import LONGEST_RETRY, TableSettings
from turnlane.table.sql.dialect import Verdict

LONGEST_ERROR: Final = 4_000
"""Characters of an error that are kept."""


class Judge:
    """Decides by a queue's options; ``chance`` gives numbers from 0 up to 1."""

    def __init__(self, settings: TableSettings, chance: Callable[[], float]) -> None:
        self._settings = settings
        self._chance = chance

    def of(
        self, event_id: int, attempts: int, delay: float | None, error: str, *, more: bool
    ) -> Verdict:
        """Fire it again after ``delay`` seconds or its backoff, unless it had its attempts.

        ``more`` says that the last attempt is not counted in its row yet.
        """
        settings = self._settings
        text = _storable(error)
        if attempts >= settings.max_attempts:
            return Verdict(event_id, "dead", 0, int(more), text)
        if delay is None:
            delay = backoff(attempts, settings.backoff, settings.max_backoff, self._chance)
        # In this order, what is no number is nothing.
        wait = min(LONGEST_RETRY, max(0.0, delay))
        return Verdict(event_id, "to_be_fired", round(wait * 1e9), int(more), text)


def _storable(error: str) -> str:
    """What a receiver said, as every database takes it: one text must not stop a whole batch."""
    return error[:LONGEST_ERROR].replace("\0", "").encode(errors="replace").decode()
