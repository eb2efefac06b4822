"""What an output is, so that anyone can write one.

An output is passive: a lane hands it a block, prepared apart from the sending so that the two can
overlap, and it succeeds or raises. ``RetryLater`` (with ``after``, if the destination said when)
and any error that is not turnlane's own mean that the same events are to be sent again;
``PayloadTooLarge`` that fewer of them might do; any other ``Never`` that these events cannot be
delivered, now or later. Everything else, waiting, splitting, giving up, is the lane's.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from turnlane.closing import Closing
from turnlane.events import Block


class OutputSettings(BaseModel):
    """The settings that every output has; one of its own adds to them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    type: str = Field(description="Which output this is.")


class Output(Closing):
    """A destination. Made, used and closed by one task of a lane, from one thread at a time."""

    settings_type: ClassVar[type[OutputSettings]] = OutputSettings

    def __init__(self, settings: OutputSettings) -> None:
        self.settings = settings

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Make of a block what :meth:`send` takes: serialised, compressed. No I/O."""
        return block

    @abc.abstractmethod
    def send(self, prepared: Any) -> None:  # noqa: ANN401
        """Deliver; returning means that the destination has it."""

    def check(self) -> None:
        """Try the destination without delivering anything; raises what :meth:`send` would."""

    def close(self) -> None:
        """Let go of connections and files."""
