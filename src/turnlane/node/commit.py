"""A commit as it is asked for, and the plan of it that its file has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from turnlane.queues.contract import Outcome


class Range(NamedTuple):
    """Offsets ``first`` to ``end - 1`` of a queue, to be settled."""

    queue: str
    first: int
    end: int
    outcome: Outcome = Outcome.DELIVERED


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish ``stages``, each to the queue it was staged for, and settle ``ranges``.

    It is a repeat, and nothing happens, if all its ranges are settled, or if ``writer`` has
    committed this ``epoch`` or a later one. If only some are settled it goes on, unless it is to be
    ``exact``: then it is refused, for what is staged was made of all of them.
    """

    stages: Sequence[str] = ()
    ranges: Sequence[Range] = ()
    writer: str | None = None
    epoch: int = 0
    exact: bool = False


class Part(NamedTuple):
    """A stage as the file has it: into which queue, and under which numbers."""

    stage: str
    queue: str
    sequence: int
    there: int | None = None
    """How many of its events the queue has, if others may have used its numbers since."""
    source: str | None = None
    """The queue that has its events, if the stage has only their places."""
    source_end: int = 0
    """Places from here on are those of other events."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A commit as its file has it: all that carrying it out needs."""

    parts: Sequence[Part]
    ranges: Sequence[Range]
    writer: str | None = None
    epoch: int = 0
    ids: Mapping[str, str] = field(default_factory=dict)
    """By name, which queues are meant: one that was dropped and made anew is another one."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to carry out."""
        return not self.parts and not self.ranges and self.writer is None

    def to_json(self) -> bytes:
        """The file's contents."""
        values = {
            "parts": self.parts,
            "ranges": self.ranges,
            "writer": self.writer,
            "epoch": self.epoch,
            "ids": self.ids,
        }
        return json.dumps(values).encode()

    @property
    def stages(self) -> list[str]:
        """The stages of its parts."""
        return [part.stage for part in self.parts]

    @property
    def queues(self) -> set[str]:
        """All queues that it has to do with."""
        sources = {part.source for part in self.parts if part.source is not None}
        return sources | {part.queue for part in self.parts} | {each.queue for each in self.ranges}

    @property
    def keys(self) -> set[str]:
        """What it must have for itself."""
        return keys_of(self.parts, self.ranges, self.writer)

    @classmethod
    def of_json(cls, data: bytes) -> Plan:
        """The plan of a file. ``ValueError``, ``KeyError`` or ``TypeError`` if it has none."""
        values = json.loads(data)
        return cls(
            [Part(*part) for part in values["parts"]],
            [Range(*each[:3], *map(Outcome, each[3:])) for each in values["ranges"]],
            values["writer"],
            values["epoch"],
            values["ids"],
        )


class Staged(Protocol):
    """What is to be published into a queue, perhaps from another one."""

    @property
    def queue(self) -> str: ...
    @property
    def source(self) -> str | None: ...


def keys_of(stages: Iterable[Staged], ranges: Sequence[Range], writer: str | None) -> set[str]:
    """What a commit must have for itself; emptying a queue and filling it are apart."""
    keys = {out_of(each.queue) for each in ranges}
    for stage in stages:
        keys.add(into(stage.queue))
        if stage.source is not None:
            keys.add(out_of(stage.source))
    return keys | ({f"writer {writer}"} if writer is not None else set())


def into(queue: str) -> str:
    """The key of whoever fills a queue."""
    return f"into {queue}"


def out_of(queue: str) -> str:
    """The key of whoever empties a queue."""
    return f"from {queue}"
