"""Runs a pipeline on Spark, and its node in another process, as ``turnlane run`` does."""

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

from benchmarks.node_process import CONFIG, NodeProcess, run_node
from turnlane.cli.spark_session import start_session
from turnlane.config import load
from turnlane.pipeline.settings import SparkSettings
from turnlane.spark.pipeline import PipelinePlan, PipelineRunner

MASTER = "local[2]"
PATIENCE = 300.0
LOOK_SECONDS = 0.005


@dataclass(frozen=True)
class RunningPipeline:
    """A running pipeline."""

    node: NodeProcess
    runner: PipelineRunner


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """Open the session of ``turnlane run`` on two cores; all measurements share it."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = start_session(SparkSettings(master=MASTER))
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def run_pipeline(
    spark: SparkSession,
    place: Path,
    make_sections: Mapping[str, Any],
    inputs: list[dict[str, Any]] | None = None,
) -> Iterator[RunningPipeline]:
    """Run a pipeline with these sections of a configuration."""
    with run_node(place, {}, inputs, make_sections) as node:
        config = load(place / CONFIG)
        settings = config.pipeline()
        assert settings is not None
        runner = PipelineRunner(spark)
        access = {"endpoint": node.flight}
        runner.start(PipelinePlan(settings, config.knobs(), access, place / "checkpoints"))
        try:
            yield RunningPipeline(node, runner)
        finally:
            runner.stop()


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Poll a condition at short intervals. Raises ``TimeoutError`` after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {patience:.0f} s")
        time.sleep(LOOK_SECONDS)


def get_size(path: Path) -> int:
    """Return the bytes of a file; 0 if it does not exist yet."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
