"""One Spark session for all tests of a process: it costs seconds to start."""

from __future__ import annotations

import os
import shutil
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
    """A local session like the pipeline's: two threads, FAIR pools, no web page, few log lines."""
    if not (shutil.which("java") or "JAVA_HOME" in os.environ):
        skip_or_fail("Spark needs Java 17 or later")
    from turnlane.pipeline.settings import SparkSettings
    from turnlane.spark.session import open_session

    place = tmp_path_factory.mktemp("spark")
    quiet = _write_log_settings(place)
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
        "spark.sql.python.filterPushdown.enabled": "false",
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={quiet}",
    }
    session = open_session(SparkSettings(master="local[2]", app_name="turnlane-tests", conf=conf))
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def _write_log_settings(place: Path) -> Path:
    """Write Log4j settings that log errors only."""
    found = place / "log4j2.properties"
    found.write_text("rootLogger.level = error\nrootLogger.appenderRef.stdout.ref = console\n"
                     "appender.console.type = Console\nappender.console.name = console\n"
                     "appender.console.target = SYSTEM_ERR\n"
                     "appender.console.layout.type = PatternLayout\n"
                     "appender.console.layout.pattern = %d %p %c{1}: %m%n\n")  # fmt: skip
    return found
