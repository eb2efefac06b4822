"""The Spark session of turnlane."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.nodes import serving
from turnlane.spark.session import JavaMissing, find_java, override_settings


def test_python_processes_import_the_installed_pyspark(spark: SparkSession) -> None:
    """To import it from Spark's zip file takes each process nearly a second."""

    def place(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    (found,) = spark.sparkContext.parallelize([1], 1).map(place).collect()
    assert ".zip" not in found


def test_python_processes_start_with_turnlane_imported(spark: SparkSession) -> None:
    """To import it takes each process a second."""

    def place(_: int) -> list[str]:
        import sys

        main = sys.modules["__main__"].__spec__
        return [main.name if main else "", *(name for name in sys.modules if "source" in name)]

    main, *found = spark.sparkContext.parallelize([1], 1).map(place).collect()[0]
    assert main == "turnlane.spark.daemon"
    assert "turnlane.spark.source" in found


def test_java_that_does_not_start_says_why(tmp_path: Path) -> None:
    program = """
from turnlane.cli.spark_session import start_session
from turnlane.pipeline.settings import SparkSettings
conf = {"spark.driver.extraJavaOptions": "-Xss1k"}
start_session(SparkSettings(master="local[1]", conf=conf))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    why, _, error = done.stderr.partition("SparkMissing: Spark does not start with local[1]")
    assert "Could not create the Java Virtual Machine" in why
    assert error


PASS_ON = """
import os, threading
from turnlane.cli.console import pass_line_on
from turnlane.spark.session import _pass_on
read_end, write_end = os.pipe()
thread = threading.Thread(target=_pass_on, args=(read_end, pass_line_on), daemon=True)
thread.start()
with os.fdopen(write_end, "wb") as java:
    for number in range(2000):
        java.write(b"%d " % number + b"x" * 1000 + b"\\n")
thread.join()
print("all lines are taken")
"""


def start_with_stderr(stderr: int) -> subprocess.Popen[bytes]:
    """Start a process that passes 2 MB of lines on to this stderr, as for Java."""
    command = [sys.executable, "-c", PASS_ON]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
    os.close(stderr)
    return process


def test_lines_of_java_are_taken_after_stderr_is_closed() -> None:
    """Else a transform that prints fails for every event."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with start_with_stderr(write_end) as process:
        assert process.communicate()[0] == b"all lines are taken\n"


def test_lines_of_java_are_complete_in_a_pipe_that_does_not_block() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with start_with_stderr(write_end) as process, os.fdopen(read_end, "rb") as stderr:
        lines = stderr.read().splitlines()
        assert process.communicate()[0] == b"all lines are taken\n"
    assert lines == [b"%d " % number + b"x" * 1000 for number in range(2000)]


def test_users_java_options_follow_the_defaults(tmp_path: Path) -> None:
    """So they take precedence, and Spark still shows only the user's options."""
    program = """
import sys
from turnlane.cli.spark_session import start_session
from turnlane.pipeline.settings import SparkSettings
java = "-XX:Tier4InvocationThreshold=7000 -Dmine=1"
conf = {"spark.driver.extraJavaOptions": java, "spark.ui.enabled": "false"}
jvm = start_session(SparkSettings(master="local[1]", conf=conf))._jvm
print(*jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "incubator" not in done.stderr  # Java warns of a module that Spark has it load.
    given = done.stdout.split()
    thresholds = [each for each in given if each.startswith("-XX:Tier4InvocationThreshold")]
    assert thresholds[-1].endswith("=7000")
    assert "-XX:Tier4CompileThreshold=150000" in given
    assert {"-Dmine=1", "-Dturnlane.log.level=error"} <= set(given)


def test_heap_of_the_driver_is_a_share_of_the_memory(tmp_path: Path) -> None:
    program = """
from turnlane.memory import find_system_limit
from turnlane.cli.spark_session import start_session
from turnlane.pipeline.settings import SparkSettings
settings = SparkSettings(master="local[1]", driver_memory="7%")
jvm = start_session(settings)._jvm
arguments = jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
print(f"-Xmx{find_system_limit() * 7 // 100 >> 20}m" in arguments)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["True"]


def test_overridden_settings_apply_only_in_the_body(spark: SparkSession) -> None:
    unset, known = "spark.sql.test.unset", "spark.sql.shuffle.partitions"
    before = spark.conf.get(known)
    with override_settings(spark, {unset: "a", known: "7"}):
        assert (spark.conf.get(unset), spark.conf.get(known)) == ("a", "7")
    assert spark.conf.get(unset, None) is None
    assert spark.conf.get(known) == before


@pytest.mark.parametrize(
    ("says", "fault"),
    [
        ('openjdk version "11.0.22" 2024-01-16', r"bin/java is Java 11\. On Debian .* openjdk-17"),
        ('java version "1.8.0_402"', "is Java 8"),
        ('openjdk version "17.0.15" 2025-04-15', None),
        ('openjdk version "21" 2023-09-19', None),
        ("something else", None),
    ],
)
def test_old_java_is_refused_with_its_version(
    says: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if fault is None:
        assert find_java() == java
        return
    with pytest.raises(JavaMissing, match=fault):
        find_java()


def test_missing_java_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match=r"no bin/java in it\. On Debian or Ubuntu: apt install"):
        find_java()


# ── the Python of Spark's processes ──

JOB = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
events = spark.read.format("turnlane").option("endpoint", sys.argv[1]).load("orders")
print(sorted(bytes(row.value) for row in events.collect()))
"""


def run_outside_of_environment(*arguments: str, **variables: str) -> str:
    """Run this Python by its path, while ``python3`` is another one; return what it prints."""
    own = str(Path(sys.executable).parent)
    places = [each for each in os.environ["PATH"].split(os.pathsep) if each != own]
    chosen = {"VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    environment |= {"PATH": os.pathsep.join(places), **variables}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_format_is_found_in_an_environment_that_is_not_activated(tmp_path: Path) -> None:
    """By a job that neither imports turnlane nor names a Python for Spark."""
    (tmp_path / "job.py").write_text(JOB)
    with serving(tmp_path / "data", {"orders": {}}) as served:
        served.publish("orders", [b"a", b"b"])
        assert run_outside_of_environment(str(tmp_path / "job.py"), served.url) == "[b'a', b'b']"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, sys.executable),
        ({"PYSPARK_PYTHON": "mine"}, "mine"),
        ({"PYSPARK_DRIVER_PYTHON": "mine"}, None),
        ({"PYSPARK_GATEWAY_PORT": "1"}, None),
        ({"PATH": f"{Path(sys.executable).parent}:/usr/bin"}, None),
    ],
    ids=["chosen by nobody", "chosen", "chosen for the driver", "spark-submit", "activated"],
)
def test_python_of_spark_is_set_only_if_the_user_has_not_chosen_one(
    variables: dict[str, str], expected: str | None
) -> None:
    program = "import os, pyspark; print(os.environ.get('PYSPARK_PYTHON'))"
    assert run_outside_of_environment("-c", program, **variables) == str(expected)
