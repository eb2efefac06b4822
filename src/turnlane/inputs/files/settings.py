"""What can be configured about the ``files`` input."""

from __future__ import annotations

import enum
import os

from pydantic import Field, field_validator

from turnlane.inputs.contract import InputSettings
from turnlane.quantities import Duration, Size
from turnlane.queues.contract import FlowControl


class StartAt(enum.StrEnum):
    """Where to begin with files that are there when the input starts for the first time."""

    BEGINNING = "beginning"
    END = "end"


class FilesSettings(InputSettings):
    """Settings of the ``files`` input."""

    type: str = "files"
    flow: FlowControl = Field(FlowControl.FULL, description="Files can wait as long as needed.")
    paths: tuple[str, ...] = Field(
        min_length=1, description="Globs of the files to follow; ** is any depth of folders."
    )
    exclude: tuple[str, ...] = Field(
        (), description="Globs of files to leave out: of the name, or with a / of the whole path."
    )
    start_at: StartAt = Field(
        StartAt.BEGINNING,
        description="Where to begin with files that are there at the very first start.",
    )
    max_line_bytes: Size = Field(
        1 << 20, ge=1, description="Longer lines are split into events of this size, and counted."
    )
    scan_interval: Duration = Field(
        1.0, gt=0, description="How often to look for new, rotated and changed files."
    )
    rotate_wait: Duration = Field(
        10.0, description="How long a renamed or deleted file is read on after its last line."
    )
    partial_timeout: Duration | None = Field(
        None, description="Take a last line without newline after so long; default: never."
    )
    ignore_older: Duration | None = Field(
        None, description="Leave out files that were last changed longer ago, until they change."
    )
    close_inactive: Duration = Field(
        300.0, description="Close files that had nothing new for so long; they are still watched."
    )
    forget_after: Duration = Field(
        2 * 86_400.0, description="Forget files that have been gone for so long."
    )
    read_buffer: Size = Field(
        1 << 20, ge=64, le=1 << 28, description="How much is read of a file at once."
    )
    offsets: bool = Field(
        default=False, description="Add a column file_offset: the byte at which a line begins."
    )

    @field_validator("paths", "exclude", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("paths")
    @classmethod
    def _absolute(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if not all(paths):
            raise ValueError("an empty path matches nothing; write a glob such as /var/log/*.log")
        return tuple(map(os.path.abspath, paths))
