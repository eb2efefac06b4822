"""The queue tables that a command is about: in the databases that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import urlsplit

import typer

from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from turnlane.table import Database, ShardedDatabase, TableQueue
    from turnlane.table.shards import Given

VARIABLE: Final = "TURNLANE_TABLE_URL"

Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar=VARIABLE,
        help="The database, such as postgresql://user@host/db; of several shards, each as "
        "RANGE=URL, such as -80=sqlite:///a.db.",
    ),
]
_SHARD: Final = re.compile(r"(?P<range>[0-9a-fA-F]*-[0-9a-fA-F]*)=(?P<url>.+)", re.DOTALL)


class Place(NamedTuple):
    """A queue's table in one database."""

    shard: str
    """The key range of that database."""
    queue: TableQueue


def given(urls: list[str] | None) -> list[Given]:
    """Addresses and key ranges, as they were given. Raises ``ConfigError``."""
    if not urls:
        raise ConfigError("--url", f"name the database, here or in ${VARIABLE}")
    found = []
    for url in urls:
        match = _SHARD.fullmatch(url)
        found.append((url, "-") if match is None else (match["url"], match["range"]))
        _check_address(found[-1][0])
    return found


def _check_address(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:  # whose words might be a part of the password
        raise ConfigError("--url", "is no address: its host or its port cannot be read") from None


@contextmanager
def databases(urls: list[str] | None) -> Iterator[list[tuple[str, Database]]]:
    """The databases, each with its key range. Raises ``ConfigError`` if those do not fit."""
    from turnlane.table import connect
    from turnlane.table.shards import ShardMap

    shards = ShardMap.of(given(urls)).shards
    with ExitStack() as opened:
        yield [(str(shard.key_range), opened.enter_context(connect(shard.url))) for shard in shards]


def together(urls: list[str] | None) -> ShardedDatabase:
    """The databases as one. Raises ``ConfigError`` if their key ranges do not fit."""
    from turnlane.table import connect_shards

    return connect_shards(given(urls))


@contextmanager
def places(urls: list[str] | None, name: str | None) -> Iterator[list[Place]]:
    """A queue's tables in all databases, or those of all queues. Raises ``NoSuchQueue``."""
    with databases(urls) as found:
        yield [
            Place(shard, database.queue(each))
            for shard, database in found
            for each in (database.catalog.names() if name is None else [name])
        ]
