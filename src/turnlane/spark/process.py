"""Spark as a process beside this one: whether it lives, and what it says."""

from __future__ import annotations

import logging

from pyspark import SparkContext
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

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
