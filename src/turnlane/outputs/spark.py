"""Output ``spark``: writes with any sink format of Spark, such as Parquet, CSV or JDBC."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from turnlane.errors import Bug
from turnlane.outputs.api import Output, OutputSettings


class SparkSinkSettings(OutputSettings):
    """The settings of the output ``spark``."""

    format: str = Field(description="The name of the format in Spark: parquet, csv, jdbc, delta …")
    path: str | None = Field(
        default=None, description="The directory of the files, for file formats."
    )
    options: dict[str, str] = Field(
        default={}, repr=False, description="The options of the format."
    )
    partition_by: tuple[str, ...] = Field(
        default=(), description="Columns whose values name the folders of the files."
    )
    columns: tuple[str, ...] = Field(
        default=(),
        description="The columns to write, as Spark SQL expressions. Default: all columns.",
    )
    files: int | None = Field(
        default=None,
        ge=1,
        description="The most files per batch; with `partition_by`, the number of tasks that write "
        "(each value is one file). Default: one per task that reads, 1 for `sql`.",
    )

    @property
    def place(self) -> str | None:
        """The directory of the files; ``None`` if the format writes no files."""
        return self.path or self.options.get("path")


class SparkOutput(Output):
    """Holds the settings only: Spark itself writes, and no task calls this output."""

    settings_type = SparkSinkSettings
    settings: SparkSinkSettings

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        del prepared
        raise Bug("a task called the output spark, which Spark itself must write")
