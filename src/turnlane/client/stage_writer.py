"""Staging on a node elsewhere: what a commit will publish, written to its disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from turnlane.client.failures import understood
from turnlane.client.pieces import pieces_of
from turnlane.client.progress import within
from turnlane.closing import Closing
from turnlane.errors import NoSuchStage
from turnlane.events import Block

if TYPE_CHECKING:
    from turnlane.client.remote import RemoteNode


class StageWriter(Closing):
    """Has blocks written to a node's disk, for a commit to publish."""

    def __init__(self, node: RemoteNode, command: Mapping[str, Any], schema: pa.Schema) -> None:
        self.ids: list[str] | None = None
        """Of the stages there are; set by :meth:`finish`."""
        self._failed = False
        self._node = node
        self._place = node.place
        with understood(self._place):
            self._writer, self._answers = node.put(command, schema)

    def write(self, block: Block) -> None:
        """Stage another block."""
        self._failed = True
        with understood(self._place):
            for piece in pieces_of(block):
                within(self._place, partial(self._writer.write_batch, piece))
        self._failed = False

    def finish(self) -> str:
        """Wait until it is on the node's disk; returns the id to commit it by."""
        (found,) = self.finish_all()
        return found

    def finish_all(self) -> list[str]:
        """The same of what has become several stages, or none."""
        self._failed = True
        with understood(self._place):
            answer = within(self._place, self._end)
        if answer is None:
            raise NoSuchStage(f"{self._place} has not finished the stage")
        self._failed = False
        said = json.loads(bytes(answer))
        self.ids = said["stages"] if "stages" in said else [said["stage"]]
        return self.ids

    def _end(self) -> pa.Buffer | None:
        self._writer.done_writing()
        answer = self._answers.read()
        self._writer.close()
        return answer

    def close(self) -> None:
        """Let go; what was not finished is given up."""
        if self.ids is None and not self._failed:
            self._node.abort(self.finish_all())
            self.ids = None
