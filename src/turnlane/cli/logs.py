"""Logs of a service on stderr: a line for people, or a JSON object for programs."""

from __future__ import annotations

import enum
import json
import logging
import time
from typing import Any, Final


class LogFormat(enum.StrEnum):
    """How a record is written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """The least important records that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_TIME: Final = "%Y-%m-%dT%H:%M:%S"


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", _TIME)
        self.converter = time.gmtime


class _Json(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(datefmt=_TIME)
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": f"{self.formatTime(record, _TIME)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    """Write the process's log records to stderr from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form is LogFormat.JSON else _Text())
    logging.basicConfig(level=level.value.upper(), handlers=[handler])
    if level is not LogLevel.DEBUG:
        for chatty in ("uvicorn", "py4j"):  # they tell of every start and stop
            logging.getLogger(chatty).setLevel(logging.WARNING)
