"""The options ``--log-level`` and ``--log-format``, and logging to stderr as they say."""

from __future__ import annotations

import enum
import logging

from turnlane.logs import JsonFormatter, TerminalFormatter


class LogFormat(enum.StrEnum):
    """The form of log lines."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    """Write the log records of this process to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TerminalFormatter())
    logging.basicConfig(level=level.value.upper(), handlers=[handler])
    if level is not LogLevel.DEBUG:
        for name in ("uvicorn", "py4j"):  # these log every start and stop at level INFO
            logging.getLogger(name).setLevel(logging.WARNING)
