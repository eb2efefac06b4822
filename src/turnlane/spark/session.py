"""The Spark session of turnlane, and Spark's processes: Java, and Python processes of tasks.

In the driver, :func:`open_session` starts Spark with turnlane's defaults. In Spark's Python
processes, :func:`freeze_gc_after` keeps the garbage collector from taking more time than the work.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkContext
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from turnlane.errors import Never
from turnlane.pipeline.settings import SparkSettings
from turnlane.runtime import create_scratch_directory

JAVA_OPTIONS: Final = "spark.driver.defaultJavaOptions"
"""Spark puts ``extraJavaOptions`` behind them, and Java uses the last of two that contradict."""
_COMPILER_OPTIONS: Final = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
"""Ten times Java's defaults. Planning batches is much code that runs rarely: to optimise it took
more computing than everything else in Java, for minutes. Loops over rows still get optimised soon
enough."""

SPARK_DEFAULTS = {
    JAVA_OPTIONS: " ".join(_COMPILER_OPTIONS),
    # Lanes share the cores: a long batch of one lane does not delay the others.
    "spark.scheduler.mode": "FAIR",
    # A value that does not fit is null and passes no filter; an error would stop the lane.
    "spark.sql.ansi.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.python.filterPushdown.enabled": "true",
    # Children of this daemon need not import turnlane again.
    "spark.python.daemon.module": "turnlane.spark.daemon",
    # Half the time per batch on a local file system.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
    # A busy machine takes long to start a Python process.
    "spark.python.authenticate.socketTimeout": "60s",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.minBatchesToRetain": "10",
    # After this time a lane logs that its query has not ended, and interrupts it again.
    "spark.sql.streaming.stopTimeout": "15s",
    # Spark's default, and the environment variables of executors.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|executorEnv",
    "spark.log.level": "WARN",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


NO_ARROW_BYTE_LIMIT: Final = {"spark.sql.execution.arrow.maxBytesPerBatch": str((1 << 31) - 1)}
"""For queries with small rows. Before each row, Spark computes the size of the batch, which takes
longer than to write the row. Without a limit of bytes it does not."""
OLDEST_JAVA: Final = 17
_INSTALL: Final = (
    "On Debian or Ubuntu: apt install openjdk-17-jre-headless, or openjdk-21-jre-headless where "
    "there is no 17; elsewhere install any JDK 17 or 21. Then set JAVA_HOME to it if there are "
    "several"
)


class JavaMissing(Never):
    """There is no Java, or it is too old for Spark."""


def find_java() -> Path:
    """Return the ``java`` that Spark will use. Raises ``JavaMissing`` with what to install."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        where = f"JAVA_HOME is {home}, but there is no bin/java in it" if home else "none on PATH"
        raise JavaMissing(f"Spark needs Java 17 or 21: {where}. {_INSTALL}")
    try:
        output = subprocess.run(  # noqa: S603 - the program that Spark is about to run
            [found, "-version"], capture_output=True, text=True, timeout=30, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    version = re.search(r'version "(?:1\.)?(\d+)', output)  # Java 8 prints 1.8.
    if version is not None and int(version[1]) < OLDEST_JAVA:
        what = f"{found} is Java {version[1]}"
        raise JavaMissing(f"Spark needs Java 17 or 21, and {what}. {_INSTALL}")
    return Path(found)


def open_session(
    settings: SparkSettings, *, modules: Sequence[Path] = (), variables: Sequence[str] = ()
) -> SparkSession:
    """Return a session with the settings, or the session that exists already.

    On a cluster, the executors get the files ``modules``, to import them, and the environment
    variables ``variables``, which contain tokens: their machines have neither.
    """
    find_java()
    # Without it, Python processes outside the virtual environment would be started.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if settings.master.startswith("local"):
        use_installed_pyspark()
    builder = SparkSession.builder.master(settings.master).appName(settings.app_name)
    environment = {
        f"spark.executorEnv.{name}": os.environ[name] for name in variables if name in os.environ
    }
    for name, value in {**SPARK_DEFAULTS, **environment, **settings.conf}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    if not settings.master.startswith("local"):
        for module in modules:
            session.sparkContext.addPyFile(str(module))
    return session


def use_installed_pyspark() -> None:
    """Have Spark's Python processes import the installed pyspark.

    By default, they import the same modules from a zip file below Spark's home, which Python
    compiles again in every process: nearly a second each time. So Spark gets a home without that
    zip file, unless ``SPARK_HOME`` is set. Call it before Java starts.
    """
    installed = Path(pyspark.__file__).parent
    if "SPARK_HOME" in os.environ or not (installed / "jars").is_dir():
        return
    home = create_scratch_directory("turnlane-spark-")
    for name in ("bin", "jars"):
        (home / name).symlink_to(installed / name)
    os.environ["SPARK_HOME"] = str(home)


@contextmanager
def override_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set Spark settings for queries that start in the body; a query keeps its settings."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, known in before.items():
            if known is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, known)


# ── Spark's processes ──

DAEMONS: Final = {"pyspark.daemon", "turnlane.spark.daemon"}
"""The modules that Spark's Python processes run if Spark uses them for many calls."""

_frozen_kinds: set[str] = set()
"""The kinds of calls after which this process has frozen its objects."""


@contextmanager
def freeze_gc_after(kind: str) -> Iterator[None]:
    """Freeze the garbage collector's objects after the first call of each kind.

    Spark runs a full collection after every call, over all objects of the process. With the modules
    of turnlane that takes longer than most calls. The objects that exist after the first call,
    mostly modules, stay: frozen objects are not visited.
    """
    yield
    # Only in a process that Spark started: nothing else runs in it.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if kind not in _frozen_kinds and spec is not None and spec.name in DAEMONS:
        _frozen_kinds.add(kind)
        gc.collect()
        gc.freeze()


Session = SparkSession
"""For modules that pass a session on and use nothing else of Spark."""


def is_jvm_alive() -> bool:
    """Whether the Java process that this process has started still runs."""
    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - pyspark has no other way
    return process is None or process.poll() is None


def forget_dead_jvm() -> None:
    """Forget a Java process that has ended, and its session: the next session starts another."""
    context, gateway = SparkContext._active_spark_context, SparkContext._gateway  # noqa: SLF001
    SparkSession._instantiatedSession = SparkSession._activeSession = None  # noqa: SLF001
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001
    if context is not None:
        context._jsc = None  # noqa: SLF001 - otherwise `stop` calls it
        context.stop()
    if gateway is not None:
        with suppress(Exception):  # It closes connections to nobody.
            gateway.shutdown()


def silence_pyspark_errors() -> None:
    """Stop pyspark from logging the errors that it raises: turnlane logs each in one line."""
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
