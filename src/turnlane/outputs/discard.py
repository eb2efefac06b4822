"""Output ``discard``: nowhere. In a direct action it ends the event's way."""

from __future__ import annotations

from typing import Any

from turnlane.outputs.contract import Output


class DiscardOutput(Output):
    """Takes everything and keeps nothing."""

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        del prepared
