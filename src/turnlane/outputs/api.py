"""The contract of an output, so that anyone can write one; and the registry of outputs.

An output is passive. A lane calls ``prepare`` with a block, and ``send`` with the result; the two
run on different threads, so that they overlap. ``send`` succeeds or raises:

- ``RetryLater``, with ``after`` if the destination said when: the same events may be sent later.
  Also for mistakes that a person must correct, such as an unknown host or a wrong password: the
  events wait for that.
- ``PayloadTooLarge``: fewer events at a time may succeed.
- ``PartlyDelivered``: all events but some, each of which has its own error of this list. If an
  error may be ``RetryLater``, the output must say so by ``can_deliver_partly``.
- any other ``Never``: at least one of the events can never be delivered. The lane finds out which
  ones by sending halves.
- an error that is not turnlane's counts as ``RetryLater``, a limited number of times.

Everything else is the lane's task: waiting, splitting, giving up.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from turnlane.events import Block
from turnlane.plugins import PluginRegistry
from turnlane.runtime import Closeable
from turnlane.validation import ConfigIssue


class OutputSettings(BaseModel):
    """The settings that every output has. An output's own settings class adds to them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    type: str = Field(description="Which output this is.")

    delivery_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of an action's ``delivery`` that are different for this output."""

    @property
    def wanted_columns(self) -> frozenset[str] | None:
        """The columns that ``prepare`` reads in addition to ``payload``; ``None``: any column.

        ``queue``, ``partition`` and ``offset`` are always there. Columns that no output wants are
        not sent to the tasks.
        """
        return None


class Output(Closeable):
    """A destination. One task of a lane creates and closes it.

    Several threads call ``prepare`` and ``send`` at a time.
    """

    settings_type: ClassVar[type[OutputSettings]] = OutputSettings

    def __init__(self, settings: OutputSettings) -> None:
        self.settings = settings

    @property
    def takes_apart(self) -> bool:
        """The former name of :attr:`can_deliver_partly`, for outputs that override it."""
        return False

    @property
    def can_deliver_partly(self) -> bool:
        """Whether it may take some events of a block and want others later.

        Then a block never has two events of which one must follow the other.
        """
        return self.takes_apart

    @property
    def rejected(self) -> int:
        """The number of records inside delivered events that the destination refused for good.

        For destinations that take requests as a whole and do not say which records they leave out.
        """
        return 0

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Convert a block to the form that ``send`` takes: serialised, compressed. No I/O."""
        return block

    @abc.abstractmethod
    def send(self, prepared: Any) -> None:  # noqa: ANN401
        """Deliver. Returning means that the destination has the events."""

    def check(self) -> None:
        """Try the destination without delivering anything. Raises as :meth:`send` would."""

    def cancel(self) -> None:
        """Make sends in progress fail now, as far as possible: their results are not used.

        Another thread calls it. Later sends must still work.
        """

    def close(self) -> None:
        """Close connections and files."""


class DiscardOutput(Output):
    """The output ``discard``: takes all events and drops them."""

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        del prepared


class ExactlyOnceSettings(BaseModel):
    """Settings of outputs that can write each event exactly once, into a database."""

    exactly_once: bool = Field(
        default=False,
        description="Record in the table `turnlane_delivered`, in the same transaction, which "
        "events were delivered, and skip these when they come again, even if their rows were "
        "changed or deleted since.",
    )
    delivered_as: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="With `exactly_once`: the name under which deliveries are recorded. Use "
        "another name if another pipeline writes to the same table, or if the queue was created "
        "again. Default: the name of the table.",
    )

    def get_delivery_name(self, table: str) -> str | None:
        """Return the name under which deliveries are recorded; ``None``: they are not."""
        return (self.delivered_as or table) if self.exactly_once else None

    def find_exactly_once_issues(self) -> list[ConfigIssue]:
        """Return contradictions between the two settings."""
        if self.delivered_as is None or self.exactly_once:
            return []
        return [ConfigIssue("delivered_as", "needs exactly_once: true")]


registry: Final = PluginRegistry("turnlane.outputs", Output, "output")  # type: ignore[type-abstract]
"""The outputs that are installed, by type."""
types = registry.types
load = registry.load
