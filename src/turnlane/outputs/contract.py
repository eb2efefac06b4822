"""What an output is, so that anyone can write one.

An output is passive: a lane hands it a block, prepared apart from the sending so that the two can
overlap, and it succeeds or raises:

- ``RetryLater``, with ``after`` if the destination said when: the same events may go later. Also
  for what a person has to put right, an unknown host or a refused password: events wait for that.
- ``PayloadTooLarge``: fewer events at a time might do.
- ``PartlyDelivered``: all but some, each of which has its own error of this list. If that may be
  ``RetryLater``, the output says so by ``takes_apart``.
- any other ``Never``: something in these events cannot be delivered, now or later. The lane finds
  out which by halving.
- any error that is not turnlane's own counts as ``RetryLater``, but only so many times.

Everything else, waiting, splitting, giving up, is the lane's.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from turnlane.closing import Closing
from turnlane.events import Block


class OutputSettings(BaseModel):
    """The settings that every output has; one of its own adds to them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    type: str = Field(description="Which output this is.")

    usual: ClassVar[Mapping[str, Any]] = {}
    """What of an action's ``delivery`` has another default for this output."""

    @property
    def wants(self) -> frozenset[str] | None:
        """The columns that :meth:`Output.prepare` reads beside ``payload``; ``None`` if any may be.

        Where an event comes from, ``queue``, ``partition`` and ``offset``, is there in any case.
        Columns that nobody wants need not come the long way to a task.
        """
        return None


class Output(Closing):
    """A destination. Made and closed by one task of a lane.

    ``prepare`` and ``send`` are called by several threads at a time.
    """

    settings_type: ClassVar[type[OutputSettings]] = OutputSettings

    def __init__(self, settings: OutputSettings) -> None:
        self.settings = settings

    @property
    def takes_apart(self) -> bool:
        """Whether it may take some events of a block, and want others later.

        Then events of which one must not pass the other are never in one block.
        """
        return False

    @property
    def rejected(self) -> int:
        """Records inside of delivered events that the destination has refused for good, so far.

        For those that take requests as a whole, and do not say which records they leave out.
        """
        return 0

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Make of a block what :meth:`send` takes: serialised, compressed. No I/O."""
        return block

    @abc.abstractmethod
    def send(self, prepared: Any) -> None:  # noqa: ANN401
        """Deliver; returning means that the destination has it."""

    def check(self) -> None:
        """Try the destination without delivering anything; raises what :meth:`send` would."""

    def cancel(self) -> None:
        """Have sends that are under way fail now, as far as possible: nobody waits for them.

        Called by another thread than theirs. Later sends are welcome.
        """

    def close(self) -> None:
        """Let go of connections and files."""
