"""What the Flight plane puts up with."""

from __future__ import annotations

import sys

from pydantic import BaseModel, ConfigDict, Field

from turnlane.errors import ConfigError
from turnlane.node.flight_commands import MAX_WAIT
from turnlane.quantities import Duration, Size
from turnlane.queues.memory_limit import memory_limit

_SHARE_OF_MEMORY = 0.75


class FlightLimits(BaseModel):
    """Limits on calls, connections and blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    max_calls: int = Field(
        default=1000, ge=1, description="The most calls at a time; a consumer or publisher is one."
    )
    max_connections: int = Field(default=1000, ge=1, description="The most connections at a time.")
    idle_timeout: Duration = Field(
        default=600.0,
        gt=MAX_WAIT,
        description="How long a connection stays open on which nothing goes either way.",
    )
    max_block_bytes: Size = Field(
        default=512 * 2**20, ge=1, description="The largest block once it is unpacked."
    )
    max_memory: Size | None = Field(
        default=None,
        ge=1,
        description="No new stream may bring blocks while Arrow uses more memory than this; "
        "default: three quarters of what the process may use.",
    )

    def memory(self) -> int:
        """``max_memory`` in bytes."""
        if self.max_memory is not None:
            return self.max_memory
        try:
            return int(memory_limit() * _SHARE_OF_MEMORY)
        except ConfigError:
            return sys.maxsize  # the system does not say what there is
