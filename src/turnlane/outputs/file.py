"""Output ``file``: events appended to a file, a line each."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from turnlane.errors import StorageFailed
from turnlane.events import Block
from turnlane.outputs.contract import Output, OutputSettings


class FileSettings(OutputSettings):
    """The settings of a file output."""

    path: Path = Field(description="The file, made with its directories if it is not there.")
    format: Literal["json", "raw"] = Field(
        default="json", description="A line is the whole event as JSON, or its value as it is."
    )
    sync: bool = Field(
        default=False, description="Whether a batch is done only once it is on the device."
    )


class FileOutput(Output):
    """Appends whole lines, so that several tasks can write to one file."""

    settings_type = FileSettings
    settings: FileSettings

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """The block's payloads as lines, in one piece of memory."""
        return lines_of(block.column("payload"))

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        path = self.settings.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                self._append(fd, memoryview(prepared))
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageFailed(f"{path}: {error.strerror or error}") from error

    def _append(self, fd: int, data: memoryview) -> None:
        """Append all of it or nothing: half a batch would come again with the other half."""
        fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        try:
            while data:
                data = data[os.write(fd, data) :]
            if self.settings.sync:
                os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise


_NOTHING = pa.scalar(b"", pa.large_binary())
_NEWLINE = pa.scalar(b"\n", pa.large_binary())


def lines_of(payloads: pa.Array[Any]) -> pa.Buffer:
    """Texts, each with a newline after it, without a Python object for any of them."""
    texts = pc.fill_null(payloads.cast(pa.large_binary()), _NOTHING)
    ended: Any = pc.binary_join_element_wise(texts, _NOTHING, _NEWLINE)  # type: ignore[type-var]
    if not len(ended):
        return pa.py_buffer(b"")
    offsets, values = ended.buffers()[1:]
    ends = memoryview(offsets).cast("q")
    first, last = ends[ended.offset], ends[ended.offset + len(ended)]
    lines: pa.Buffer = values.slice(first, last - first)
    return lines
