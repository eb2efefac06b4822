"""A Spark session as turnlane needs it."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkContext
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from turnlane.errors import Never
from turnlane.pipeline.settings import SparkSettings
from turnlane.runtime import scratch

JAVA_OPTIONS: Final = "spark.driver.defaultJavaOptions"
"""Spark puts ``extraJavaOptions`` behind them; of two that contradict each other Java takes the
last."""
_COMPILING: Final = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
"""Ten times what Java has by itself. Planning batches is a lot of code that runs a little: to
compile it with all skill took more computing than all else in Java, for minutes. Loops over rows
get there soon enough."""

DEFAULTS = {
    JAVA_OPTIONS: " ".join(_COMPILING),
    # Lanes share the cores fairly: a long batch of one does not keep the others waiting.
    "spark.scheduler.mode": "FAIR",
    # What does not fit is null, and passes no filter; else one such event stops a lane for good.
    "spark.sql.ansi.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.python.filterPushdown.enabled": "true",
    # Its children need not import turnlane again.
    "spark.python.daemon.module": "turnlane.spark.daemon",
    # Half the time per batch on a local file system.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
    # A machine under load takes its time to start a Python process.
    "spark.python.authenticate.socketTimeout": "60s",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.minBatchesToRetain": "10",
    # Then a lane says that its query has not ended, and interrupts it again.
    "spark.sql.streaming.stopTimeout": "15s",
    # Spark's own, and the variables that executors get.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|executorEnv",
    "spark.log.level": "WARN",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


UNMEASURED: Final = {"spark.sql.execution.arrow.maxBytesPerBatch": str((1 << 31) - 1)}
"""For queries whose rows are small. Spark asks before each row how large the batch has become,
which takes longer than to write it, unless there is no limit but the number of rows."""


OLDEST_JAVA: Final = 17
_INSTALL: Final = (
    "On Debian or Ubuntu: apt install openjdk-17-jre-headless, or openjdk-21-jre-headless where "
    "there is no 17; elsewhere install any JDK 17 or 21. Then set JAVA_HOME to it if there are "
    "several"
)


class JavaMissing(Never):
    """Spark runs on Java, and there is none that would do."""


def find_java() -> Path:
    """The ``java`` that Spark will use. Raises ``JavaMissing``, which says what to install."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        where = f"JAVA_HOME is {home}, but there is no bin/java in it" if home else "none on PATH"
        raise JavaMissing(f"Spark needs Java 17 or 21: {where}. {_INSTALL}")
    version = _version_of(found)
    if version is not None and version < OLDEST_JAVA:
        raise JavaMissing(f"Spark needs Java 17 or 21, and {found} is Java {version}. {_INSTALL}")
    return Path(found)


def _version_of(java: str) -> int | None:
    """The first number of a Java's version, ``None`` if it does not say: ``1.8`` is 8."""
    try:
        said = subprocess.run(  # noqa: S603 - the program that Spark is about to run
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    return None if match is None else int(match[1])


def open_session(
    settings: SparkSettings, *, modules: Sequence[Path] = (), variables: Sequence[str] = ()
) -> SparkSession:
    """A session with the settings, or the one that there is already.

    On a cluster executors get these files, to import them, and these variables of this process, in
    which tokens are: their machines have neither.
    """
    find_java()
    # Without it, workers in a virtual environment do not connect back.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if settings.master.startswith("local"):
        use_installed_pyspark()
    builder = SparkSession.builder.master(settings.master).appName(settings.app_name)
    environment = {
        f"spark.executorEnv.{name}": os.environ[name] for name in variables if name in os.environ
    }
    for name, value in {**DEFAULTS, **environment, **settings.conf}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    if not settings.master.startswith("local"):
        for module in modules:
            session.sparkContext.addPyFile(str(module))
    return session


def use_installed_pyspark() -> None:
    """Have Spark's Python processes import pyspark from where it is installed.

    Before that Spark lets them look into a zip of the same modules, below its home, which Python
    compiles anew in every process: nearly a second each time. So Spark gets a home without that
    zip, unless somebody has given it one. To be called before Java is started.
    """
    installed = Path(pyspark.__file__).parent
    if "SPARK_HOME" in os.environ or not (installed / "jars").is_dir():
        return
    home = scratch("turnlane-spark-")
    for name in ("bin", "jars"):
        (home / name).symlink_to(installed / name)
    os.environ["SPARK_HOME"] = str(home)


@contextmanager
def set_to(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Settings for a query that is started meanwhile, and for no other: it keeps what it found."""
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


# ── lasting ──
# What a Python process of Spark holds from call to call.

DAEMONS: Final = {"pyspark.daemon", "turnlane.spark.daemon"}
"""The modules that Spark's Python processes run, those that are used again and again."""

_done: set[str] = set()
"""The kinds of calls that this process has had."""


@contextmanager
def lasting(kind: str) -> Iterator[None]:
    """A call of some kind. What there is after the first one, modules mostly, is there to stay.

    Spark has its Python processes look for garbage after every call, among all that they hold,
    which with so many modules takes longer than most calls themselves. What is known to stay is
    left out of that.
    """
    yield
    if kind not in _done and _is_sparks():
        _done.add(kind)
        gc.collect()
        gc.freeze()


def _is_sparks() -> bool:
    """Whether this process is one of those, and nobody's own."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name in DAEMONS


# ── process ──
# Spark as a process beside this one: whether it lives, and what it says.

Session = SparkSession
"""For those who hold a session and do nothing else with Spark."""


def is_alive() -> bool:
    """Whether the Java process that this one has started still runs."""
    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - nothing else tells
    return process is None or process.poll() is None


def say_errors_once() -> None:
    """Pyspark logs what it raises, with its stack; what is raised, we say ourselves, in a line."""
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
