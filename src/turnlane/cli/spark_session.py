"""What commands that need Spark have in common: that it is there, and a session."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turnlane.cli.console import LogLevel
from turnlane.errors import Never, TurnlaneError

if TYPE_CHECKING:
    from turnlane.pipeline.settings import SparkSettings
    from turnlane.spark.session import Session

_SPARK_LEVELS: Final = {
    LogLevel.ERROR: ("error", "off"),
    LogLevel.WARNING: ("error", "off"),
    LogLevel.INFO: ("warn", "error"),
    LogLevel.DEBUG: ("info", "info"),
}
"""Of Spark's words, and of those about its streaming queries."""


class SparkMissing(Never):
    """Spark is not installed, or does not start."""


def need_spark() -> None:
    """Raise, with what to install, if there is no Spark or no Java."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkMissing("Spark is not installed: pip install 'turnlane[spark]'")
    from turnlane.spark.session import find_java, silence_pyspark_errors

    find_java()
    silence_pyspark_errors()


def session(
    settings: SparkSettings,
    *,
    master: str | None = None,
    level: LogLevel = LogLevel.WARNING,
    modules: Sequence[Path] = (),
    variables: Sequence[str] = (),
) -> Session:
    """A session. Not from the main thread, whose SIGINT pyspark would take for itself.

    The executors of a cluster get these modules and variables.
    """
    from turnlane.spark.session import open_session

    conf = {**_logging(level), **settings.conf}
    settings = settings.model_copy(update={"conf": conf, "master": master or settings.master})
    try:
        return open_session(settings, modules=modules, variables=variables)
    except TurnlaneError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SparkMissing(f"Spark does not start with {settings.master}: {first}") from error


def _logging(level: LogLevel) -> dict[str, str]:
    """Spark tells of very much: one level less of it than of our own."""
    from turnlane.spark.session import JAVA_OPTIONS, SPARK_DEFAULTS

    words, lanes = _SPARK_LEVELS[level]
    place = resources.files("turnlane.spark").joinpath("log4j2.properties")
    options = (
        f"{SPARK_DEFAULTS[JAVA_OPTIONS]} -Dlog4j2.configurationFile={place} "
        f"-Dturnlane.log.level={words} -Dturnlane.lane.level={lanes}"
    )
    return {JAVA_OPTIONS: options, "spark.log.level": words.upper()}


def modules_beside(config: Path) -> list[Path]:
    """The modules that are there: files, for packages are installed."""
    return sorted(config.resolve().parent.glob("*.py"))


def find_modules_beside(config: Path) -> None:
    """Let transforms, inputs and outputs be in modules beside it, for Spark's own processes too."""
    place = str(config.resolve().parent)
    if place not in sys.path:
        sys.path.insert(0, place)
    paths = [place, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
