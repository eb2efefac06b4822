"""Output ``spark``: any sink format that Spark has, Parquet, CSV, JDBC and others' among them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from turnlane.errors import Bug
from turnlane.outputs.api import Output, OutputSettings


class SparkSinkSettings(OutputSettings):
    """The settings of a Spark sink."""

    format: str = Field(description="Spark's name for it: parquet, csv, jdbc, delta …")
    path: str | None = Field(default=None, description="Where the files go, for file formats.")
    options: dict[str, str] = Field(default={}, repr=False, description="The format's own options.")
    partition_by: tuple[str, ...] = Field(
        default=(), description="Columns by whose values files are put into folders."
    )
    columns: tuple[str, ...] = Field(
        default=(), description="What is written: expressions in Spark SQL. Default: everything."
    )
    files: int | None = Field(
        default=None,
        ge=1,
        description="The most files of a batch; with `partition_by`, how many tasks write, each "
        "value being one file. Default: one for every task that reads, 1 for `sql`.",
    )

    @property
    def place(self) -> str | None:
        """Where files go; ``None`` if it is none that are written."""
        return self.path or self.options.get("path")


class SparkOutput(Output):
    """Only its settings count: the lane has Spark write, and no task calls it."""

    settings_type = SparkSinkSettings
    settings: SparkSinkSettings

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        del prepared
        raise Bug("a spark output is written by its lane, not called by tasks")
