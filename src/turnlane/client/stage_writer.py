"""Staging on a node elsewhere: what a commit will publish, written to its disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa

from turnlane.client.failures import understood
from turnlane.closing import Closing
from turnlane.errors import NoSuchStage
from turnlane.events import Block

if TYPE_CHECKING:
    from turnlane.client.remote import RemoteNode


class StageWriter(Closing):
    """Writes blocks to a node's disk, for a commit to publish."""

    def __init__(self, node: RemoteNode, queue: str, schema: pa.Schema, spare: int) -> None:
        self.id: str | None = None
        """Set by :meth:`finish`."""
        self._failed = False
        self._node = node
        self._place = node.place
        with understood(self._place):
            self._writer, self._answers = node.put({"stage": queue, "spare": spare}, schema)

    def write(self, block: Block) -> None:
        """Stage another block."""
        self._failed = True
        with understood(self._place):
            self._writer.write_batch(block)
        self._failed = False

    def finish(self) -> str:
        """Wait until it is on the node's disk; returns the id to commit it by."""
        self._failed = True
        with understood(self._place):
            self._writer.done_writing()
            answer = self._answers.read()
            self._writer.close()
        if answer is None:
            raise NoSuchStage(f"{self._place} has not finished the stage")
        self._failed = False
        self.id = str(json.loads(bytes(answer))["stage"])
        return self.id

    def close(self) -> None:
        """Let go; what was not finished is given up."""
        if self.id is None and not self._failed:
            self._node.abort([self.finish()])
            self.id = None
