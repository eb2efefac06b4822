"""One Spark session for all tests of a process: it costs seconds to start."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import skip_or_fail

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark.sql")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local session as the pipeline starts it: two threads, FAIR pools, no page, few words."""
    if not (shutil.which("java") or "JAVA_HOME" in os.environ):
        skip_or_fail("Spark needs Java 17 or later")
    from pyspark.sql import SparkSession

    from turnlane.spark.session import SPARK_DEFAULTS, use_installed_pyspark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    use_installed_pyspark()
    place = tmp_path_factory.mktemp("spark")
    quiet = _quiet(place)
    same = (
        "sql.ansi.enabled",
        "sql.streaming.checkpointFileManagerClass",
        "sql.streaming.stopTimeout",
        "python.daemon.module",
    )
    session = (
        SparkSession.builder.master("local[2]")
        .appName("turnlane-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.scheduler.mode", "FAIR")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config(map={f"spark.{name}": SPARK_DEFAULTS[f"spark.{name}"] for name in same})
        .config("spark.sql.warehouse.dir", str(place / "warehouse"))
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={quiet}")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def _quiet(place: Path) -> Path:
    """Log4j's settings: errors only, from the first line on."""
    found = place / "log4j2.properties"
    found.write_text("rootLogger.level = error\nrootLogger.appenderRef.stdout.ref = console\n"
                     "appender.console.type = Console\nappender.console.name = console\n"
                     "appender.console.target = SYSTEM_ERR\n"
                     "appender.console.layout.type = PatternLayout\n"
                     "appender.console.layout.pattern = %d %p %c{1}: %m%n\n")  # fmt: skip
    return found
