"""Where a queue table is, as a configuration says it: a database, or several with key ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from turnlane.errors import ConfigError
from turnlane.problems import Contradiction, Problem
from turnlane.secret import revealed
from turnlane.table.shards import Shard, ShardMap
from turnlane.table.spread import with_password
from turnlane.table.url import EXAMPLES

_SCHEMES = {"sqlite", "postgresql", "postgres", "mysql", "mariadb"}


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"is not an address such as {EXAMPLES}")
    if parts.password:
        raise ValueError("holds a password; name it with password_env or password_file")
    return url


DatabaseUrl = Annotated[str, AfterValidator(_checked)]


class ShardAddress(BaseModel):
    """A database with a part of the keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: DatabaseUrl = Field(description="The database, without a password.")
    range: str = Field(description="Its key range, such as `-80`, `40-80` or `80-`.")


class TableAddress(BaseModel):
    """The settings that say where a queue table is."""

    url: DatabaseUrl | None = Field(
        default=None,
        description="The database, without a password.",
        examples=["postgresql://user@host/db", "mysql://user@host/db", "sqlite:///file.db"],
    )
    shards: tuple[ShardAddress, ...] = Field(
        default=(), description="Instead of `url`: the databases of a queue that has several."
    )
    password_env: str | None = Field(
        default=None, description="The environment variable that has the password."
    )
    password_file: Path | None = Field(default=None, description="The file that has the password.")
    table: str = Field(min_length=1, description="The queue table, which has to be there.")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.url is None) == (not self.shards):
            raise Contradiction([Problem("url", "give either url or shards")])
        if self.shards:
            try:
                ShardMap.of((each.url, each.range) for each in self.shards)
            except ConfigError as error:
                raise Contradiction([Problem("shards", str(error))]) from None
        return self

    def databases(self) -> list[Shard]:
        """The databases with their passwords. Raises ``RetryLater`` while those are not there."""
        password = revealed("password", self.password_env, self.password_file)
        given = [(each.url, each.range) for each in self.shards] or [(self.url or "", "-")]
        return [Shard.of((with_password(url, password), range_)) for url, range_ in given]
