"""The audit: who has thrown what away, a line of JSON each, for whoever asks later."""

from __future__ import annotations

import json
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from turnlane.errors import StorageFailed

log = logging.getLogger(__name__)

FILE: Final = "audit.jsonl"


class Audit:
    """Lines in a file of the node's data directory. Safe to use from any thread."""

    def __init__(self, data: Path) -> None:
        self.path = data / FILE
        self._lock = threading.Lock()

    def note(self, what: str, **about: Any) -> None:
        """Write a line, on the device once this returns. Raises ``StorageFailed``."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "what": what, **about}, ensure_ascii=False) + "\n"
        try:
            with self._lock, self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageFailed(f"cannot write {FILE}: {error.strerror or error}") from error
        log.warning("audit: %s", line.rstrip())
