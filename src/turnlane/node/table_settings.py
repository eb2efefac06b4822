"""Which queue tables a node serves, as its configuration says."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from turnlane.errors import ConfigError
from turnlane.problems import Contradiction, Problem, message_of
from turnlane.table.shards import ShardMap
from turnlane.table.url import EXAMPLES


def _text(value: object) -> object:
    """YAML takes -80 for a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class ShardSettings(BaseModel):
    """A database that has a part of the keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr = Field(description=f"The database: {EXAMPLES}.")
    range: Annotated[str, BeforeValidator(_text)] = Field(
        "-", description="The key range that it has.", examples=["-80", "80-"]
    )


class ServedTableSettings(BaseModel):
    """A queue table that the node runs managers for, and gives to receivers elsewhere."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr | None = Field(
        default=None, description=f"Its database, if it is only one: {EXAMPLES}."
    )
    shards: tuple[ShardSettings, ...] = Field(
        (), description="Its databases, if there are several; together they have every key once."
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if (self.url is None) == (not self.shards):
            raise Contradiction([Problem("url", "give either url or shards")])
        try:
            self.map()
        except ConfigError as error:
            raise Contradiction([Problem("shards", message_of(error))]) from None
        return self

    def map(self) -> ShardMap:
        """The shards. Raises ``ConfigError``."""
        if self.url is not None:
            return ShardMap.of([(self.url.get_secret_value(), "-")])
        return ShardMap.of([(each.url.get_secret_value(), each.range) for each in self.shards])
