"""What outputs that write each event exactly once are told: the settings that they share."""

from __future__ import annotations

from pydantic import BaseModel, Field

from turnlane.problems import Problem


class OnceSettings(BaseModel):
    """Whether to note what was delivered, and under which name."""

    exactly_once: bool = Field(
        default=False,
        description="Note in the table `turnlane_delivered`, in the same transaction, what was "
        "delivered, and leave out what comes again, whatever has become of it since.",
    )
    delivered_as: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="With `exactly_once`: the name under which that is noted. Another one if "
        "another pipeline writes to the same table, or if the queue was made anew. Default: the "
        "table's.",
    )

    def noted_as(self, table: str) -> str | None:
        """The name under which deliveries to a table are noted; ``None`` if they are not."""
        return (self.delivered_as or table) if self.exactly_once else None

    def once_problems(self) -> list[Problem]:
        """What makes no sense."""
        if self.delivered_as is None or self.exactly_once:
            return []
        return [Problem("delivered_as", "means nothing without exactly_once")]
