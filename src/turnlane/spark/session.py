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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from turnlane.errors import Never
from turnlane.logs import get_logger, write_to_stderr
from turnlane.memory import find_system_limit
from turnlane.pipeline.settings import DRIVER_MEMORY, SparkSettings
from turnlane.runtime import create_scratch_directory, start_thread
from turnlane.units import compute_share

log = get_logger(__name__)

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

SECRET_NAMES: Final = "(?i)secret|password|token|access[.]?key|executorEnv"  # noqa: S105 - no secret
"""Settings whose values Spark does not show: its own default, and the variables of executors. They
are not on the command line of Java either, which all users of the machine can read."""

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
    # Spark warns about each function of a user if it should use pandas and there is none.
    "spark.sql.execution.pythonUDF.arrow.enabled": str(find_spec("pandas") is not None).lower(),
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.minBatchesToRetain": "10",
    # After this time a lane logs that its query has not ended, and interrupts it again.
    "spark.sql.streaming.stopTimeout": "15s",
    "spark.redaction.regex": SECRET_NAMES,
    "spark.log.level": "WARN",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

LOCAL_DEFAULTS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
"""For a local master. Nobody outside needs the driver, and who reaches it can run code in it."""
CLUSTER_DEFAULTS: Final = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
}
"""For a cluster: only the driver and its executors know the secret with which they encrypt."""
CLUSTER_SECRET: Final = "spark.authenticate.secret"  # noqa: S105 - the name of a setting


NO_ARROW_BYTE_LIMIT: Final = {"spark.sql.execution.arrow.maxBytesPerBatch": str((1 << 31) - 1)}
"""For queries with small rows. Before each row, Spark computes the size of the batch, which takes
longer than to write the row. Without a limit of bytes it does not."""
OLDEST_JAVA: Final = 17
_INSTALL: Final = (
    "On Debian or Ubuntu: apt install openjdk-17-jre-headless, or openjdk-21-jre-headless where "
    "there is no 17; elsewhere install any JDK 17 or 21. Then set JAVA_HOME to it if there are "
    "several"
)


JAVA_ERROR_SECONDS: Final = 5.0
"""How long to wait for the last lines of a Java process that does not start."""
INCUBATOR_WARNING: Final = b"WARNING: Using incubator modules: jdk.incubator.vector"
"""Spark always has Java load this module, and then Java warns of it. Only Spark's library for
machine learning uses it."""


class JavaMissing(Never):
    """There is no Java, or it is too old for Spark."""


WriteLine = Callable[[bytes], None]
"""Writes a line, given without its end. It must not block for long: Java would wait with it."""


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
    settings: SparkSettings,
    *,
    modules: Sequence[Path] = (),
    variables: Sequence[str] = (),
    write_line: WriteLine = write_to_stderr,
) -> SparkSession:
    """Return a session with the settings, or the session that exists already.

    On a cluster, the executors get the files ``modules``, to import them, and the environment
    variables ``variables``, which contain tokens: their machines have neither. ``write_line`` gets
    what Java and its Python processes print to stderr.
    """
    find_java()
    # Without it, Python processes outside the virtual environment would be started.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    is_local = settings.master.startswith("local")
    conf = {**SPARK_DEFAULTS, **_get_network_defaults(settings), **settings.conf}
    if settings.driver_memory is not None:
        heap = compute_share(settings.driver_memory, find_system_limit())
        conf[DRIVER_MEMORY] = f"{heap >> 20}m"
    if is_local:
        use_installed_pyspark()
    else:
        known = (name for name in variables if name in os.environ)
        conf = {f"spark.executorEnv.{name}": os.environ[name] for name in known} | conf
    _start_java(settings.master, conf, write_line)
    builder = SparkSession.builder.master(settings.master).appName(settings.app_name)
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    for module in () if is_local else modules:
        session.sparkContext.addPyFile(str(module))
    return session


def register_sources(session: SparkSession) -> None:
    """Register turnlane's data sources, unless Spark has found them by itself.

    Spark looks for them once, with a Python process. If that is killed, or does not start in time,
    Spark never looks again, and each query would fail with ``DATA_SOURCE_NOT_FOUND``.
    """
    from turnlane.spark.source import TurnlaneSource
    from turnlane.spark.table_source import TurnlaneTableSource

    known: Any = session._jsparkSession.sessionState().dataSourceManager()  # noqa: SLF001
    for source in (TurnlaneSource, TurnlaneTableSource):
        if not known.dataSourceExists(source.name()):
            log.warning("spark.source_registered", format=source.name())
            session.dataSource.register(source)


def _get_network_defaults(settings: SparkSettings) -> Mapping[str, str]:
    """Return the settings that keep others away from Spark's processes."""
    if settings.master.startswith("local"):
        return LOCAL_DEFAULTS
    # Kubernetes and YARN make a secret for each application. A standalone cluster has one for all.
    is_standalone = settings.master.startswith("spark:")
    if not is_standalone or CLUSTER_SECRET in settings.conf:
        return CLUSTER_DEFAULTS
    log.warning(
        "spark.unauthenticated",
        master=settings.master,
        hint=f"everyone who reaches the cluster can run code in it: set {CLUSTER_SECRET} in "
        "spark.conf, and spark.authenticate with the same secret on its machines",
    )
    return {}


def _start_java(master: str, conf: Mapping[str, str], write_line: WriteLine) -> None:
    """Start Java, unless it runs. It gets secrets later, over a connection of its own.

    Java's stderr is a pipe, because Java itself prints a warning at each start that no option
    prevents. Java notices by its stdin, not by this pipe, that this process has ended.
    """
    if SparkContext._gateway is not None:  # noqa: SLF001 - pyspark has no other way
        return
    public = SparkConf(loadDefaults=False).setMaster(master)
    for name, value in conf.items():
        if not re.search(SECRET_NAMES, name):
            public.set(name, value)
    read_end, write_end = os.pipe()
    lines = start_thread("turnlane-java-stderr", lambda: _pass_on(read_end, write_line))
    try:
        gateway = launch_gateway(public, {"stderr": write_end})  # type: ignore[no-untyped-call]
    except BaseException:
        os.close(write_end)
        lines.join(JAVA_ERROR_SECONDS)  # they say why
        raise
    os.close(write_end)
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001


def _pass_on(read_end: int, write_line: WriteLine) -> None:
    """Pass the lines of a pipe on until its other end is closed, except for Java's warning.

    A line that cannot be written is lost. The pipe stays open: without a reader, every later line
    of Java, and every ``print`` of a transform, would fail.
    """
    with os.fdopen(read_end, "rb") as lines:
        for line in lines:
            if line.strip() != INCUBATOR_WARNING:
                with suppress(OSError):  # a log line about it would fail as well
                    write_line(line.rstrip(b"\n"))


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


READER_PROCESS: Final = "pyspark.sql.streaming.python_streaming_source_runner"
"""The module that the process of a stream's reader runs."""
_CLOSED_CONNECTION: Final = (EOFError, BrokenPipeError, ConnectionResetError)


def end_quietly_with_query() -> None:
    """Have the process of a stream's reader end without a traceback when its query ends.

    Spark ends such a process by closing the connection. pyspark takes that for a failure, tries to
    report it over the same connection, and fails with three tracebacks.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == READER_PROCESS:
        sys.excepthook = _report_uncaught


def _report_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    each: BaseException | None = error
    while isinstance(each, _CLOSED_CONNECTION):
        each = each.__context__
    if each is not None:
        sys.__excepthook__(kind, error, trace)


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
