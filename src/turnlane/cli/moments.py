"""Moments as people write them: a time, so long ago, or so long from now."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from turnlane.errors import ConfigError
from turnlane.quantities import parse_duration


def moment(option: str, text: str | None) -> datetime | None:
    """A moment: itself, ``2h`` ago, or ``+2h`` from now. Without a zone it is UTC.

    Raises ``ConfigError``, which names the option.
    """
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            span = timedelta(seconds=parse_duration(text.removeprefix("+")))
        except ValueError:
            message = "is a time such as 2026-01-31T12:00, or how long ago, such as 2h"
            raise ConfigError(option, f"{message}: not {text!r}") from None
        return datetime.now(UTC) + (span if text.startswith("+") else -span)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
