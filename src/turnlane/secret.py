"""Passwords and tokens: in a variable of the environment or in a file, never shown."""

from __future__ import annotations

import os
from pathlib import Path

from turnlane.errors import RetryLater


def revealed(what: str, variable: str | None, file: Path | None) -> str | None:
    """The secret; ``None`` if neither place is named.

    Looked up when it is needed, where it is needed. Raises ``RetryLater`` if it is not there:
    events wait until somebody has put it right.
    """
    if variable is not None:
        found = os.environ.get(variable, "")
        where = f"the variable {variable}"
    elif file is not None:
        where = str(file)
        try:
            found = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RetryLater(f"the {what} cannot be read: {where}: {error}") from None
    else:
        return None
    if not found:
        raise RetryLater(f"there is no {what}: {where} is empty or not set")
    return found
