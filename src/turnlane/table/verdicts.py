"""What becomes of an event that was fired and not acked. Pure."""

from __future__ import annotations

from collections.abc import Callable

from turnlane.table.backoff import backoff
from turnlane.table.settings import TableSettings
from turnlane.table.sql.dialect import Verdict


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
        if attempts >= settings.max_attempts:
            return Verdict(event_id, "dead", 0, int(more), error)
        if delay is None:
            delay = backoff(attempts, settings.backoff, settings.max_backoff, self._chance)
        return Verdict(event_id, "to_be_fired", round(delay * 1e9), int(more), error)
