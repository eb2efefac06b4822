"""Spark for the commands: whether it is installed, its log level, and a session."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turnlane.cli.console import LogFormat, LogLevel, pass_line_on
from turnlane.cli.process import HEALTHY_AFTER, RESTART_BACKOFF
from turnlane.errors import Never, TurnlaneError
from turnlane.runtime import call_in_thread

if TYPE_CHECKING:
    from turnlane.pipeline.settings import SparkSettings
    from turnlane.spark.session import Session

STARTUP_SECONDS: Final = 30.0
"""How long a stop waits for a Spark that is still starting: if abandoned, it would leave files."""

_SPARK_LEVELS: Final = {
    LogLevel.ERROR: ("error", "off"),
    LogLevel.WARNING: ("error", "off"),
    LogLevel.INFO: ("error", "off"),
    LogLevel.DEBUG: ("info", "info"),
}
"""The log levels of Spark and of its streaming queries. Spark logs a lot, so they are lower."""


class SparkMissing(Never):
    """Spark is not installed, or does not start."""


def require_spark() -> None:
    """Raise an error that says what to install if there is no Spark or no Java."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkMissing("Spark is not installed: pip install 'turnlane[spark]'")
    from turnlane.spark.session import find_java, silence_pyspark_errors

    find_java()
    silence_pyspark_errors()


def start_session(
    settings: SparkSettings,
    *,
    master: str | None = None,
    level: LogLevel = LogLevel.WARNING,
    log_format: LogFormat = LogFormat.TEXT,
    modules: Sequence[Path] = (),
    variables: Sequence[str] = (),
) -> Session:
    """Start a session. Do not call it from the main thread: pyspark would take its SIGINT.

    The executors of a cluster get these modules and variables.
    """
    from turnlane.spark.session import JAVA_OPTIONS, SPARK_DEFAULTS, open_session

    spark_level, query_level = _SPARK_LEVELS[level]
    log_settings = resources.files("turnlane.spark").joinpath("log4j2.properties")
    options = (
        f"{SPARK_DEFAULTS[JAVA_OPTIONS]} -Dlog4j2.configurationFile={log_settings} "
        f"-Dturnlane.log.level={spark_level} -Dturnlane.lane.level={query_level} "
        f"-Dturnlane.log.format={log_format}"
    )
    conf = {JAVA_OPTIONS: options, "spark.log.level": spark_level.upper(), **settings.conf}
    settings = settings.model_copy(update={"conf": conf, "master": master or settings.master})
    try:
        return open_session(settings, modules=modules, variables=variables, write_line=pass_line_on)
    except TurnlaneError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SparkMissing(f"Spark does not start with {settings.master}: {first}") from error


class SparkStartup:
    """Starts a Spark session on a thread of its own, because that takes seconds.

    If Spark's process dies, it is started again, with a pause that doubles.
    """

    def __init__(self, make: Callable[[], Session]) -> None:
        self._make = make
        self._failures = 1
        """How often in a row it has died, if it dies now."""
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self._started = time.monotonic()
        self._future = call_in_thread("turnlane-spark", self._make)

    def session(self) -> Session:
        """Wait for the session and return it. Raises the error that prevented it."""
        return self._future.result()

    def has_died(self) -> bool:
        """Whether Spark has started and has ended, or does not start again: no lane can run."""
        if not self._future.done():
            return False
        if self._future.exception() is not None:
            return self.starts > 1
        from turnlane.spark.session import is_jvm_alive

        return not is_jvm_alive()

    def restart_if_due(self) -> bool:
        """Start Spark again if it has died and the pause is over; return whether it did."""
        from turnlane.spark.session import forget_dead_jvm

        if time.monotonic() - self._started > HEALTHY_AFTER:
            self._failures = 1
        pause = RESTART_BACKOFF.get_wait(self._failures)
        if not self.has_died() or time.monotonic() < self._started + pause:
            return False
        self._failures += 1
        forget_dead_jvm()
        self._start()
        return True

    def stop(self) -> None:
        """End the session if there is one, or one starts within ``STARTUP_SECONDS``."""
        wait([self._future], STARTUP_SECONDS)
        if self._future.done() and self._future.exception() is None and not self.has_died():
            self._future.result().stop()
