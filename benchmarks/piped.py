"""A pipeline on Spark with a node in a process of its own, as ``turnlane run`` has them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.served import CONFIG, Served, served
from turnlane.cli.spark_session import start_session
from turnlane.config import load
from turnlane.pipeline.settings import SparkSettings
from turnlane.spark.pipeline import PipelinePlan, PipelineRunner

MASTER = "local[2]"
PATIENCE = 300.0
LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class Piped:
    """A running pipeline."""

    node: Served
    runner: PipelineRunner


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """The session of ``turnlane run``, on two cores. All measurements share it: it is warm soon."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = start_session(SparkSettings(master=MASTER))
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def piped(
    spark: SparkSession,
    place: Path,
    sections: Mapping[str, Any],
    inputs: list[dict[str, Any]] | None = None,
) -> Iterator[Piped]:
    """Run a pipeline; ``sections`` are those of its configuration."""
    with served(place, {}, inputs, sections) as node:
        config = load(place / CONFIG)
        settings = config.pipeline()
        assert settings is not None
        runner = PipelineRunner(spark)
        access = {"endpoint": node.flight}
        runner.start(PipelinePlan(settings, config.knobs(), access, place / "checkpoints"))
        try:
            yield Piped(node, runner)
        finally:
            runner.stop()


def wait_until(is_so: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Look again and again, closely; raises if it takes very long."""
    deadline = time.monotonic() + patience
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {patience:.0f} s: {what}")
        time.sleep(LOOK_SECONDS)


def size_of(path: Path) -> int:
    """The bytes in a file; none if it is not there yet."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
