"""The queue tables that a command is about: in the databases that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import urlsplit

import typer

from turnlane.cli.serve import faults_printed, loaded
from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from turnlane.client.node_client import Credentials, RemoteNode
    from turnlane.config import Config
    from turnlane.table import Database, ShardedDatabase, TableQueue
    from turnlane.table.shards import ShardSpec

# ── nodes ──
# The nodes that a command is about: those of a configuration, or those at an address.


@contextmanager
def reached(
    config: Path | None, endpoint: str | None, token_env: str | None, tls_ca: Path | None
) -> Iterator[list[RemoteNode]]:
    """The nodes, by number. Raises ``ConfigError``; calls raise ``TransportDown``."""
    from turnlane.client.address import NodeUrl
    from turnlane.client.node_client import RemoteNode

    where, credentials = _given(config, endpoint, token_env, tls_ca)
    url = NodeUrl.parse(where)
    with ExitStack() as opened:
        yield [
            opened.enter_context(RemoteNode(place, location, credentials))
            for place, location in zip(url.places, url.locations(), strict=True)
        ]


def _given(
    config: Path | None, endpoint: str | None, token_env: str | None, tls_ca: Path | None
) -> tuple[str, Credentials]:
    from turnlane.client.node_client import Credentials

    if config is None:
        where = endpoint or os.environ.get("TURNLANE_URL")
        if where is None:
            raise typer.BadParameter("give a CONFIG, or --endpoint turnlane://host:port")
        return where, Credentials(_secret(token_env), tls_ca)
    if token_env is not None or tls_ca is not None:
        raise typer.BadParameter("--token-env and --tls-ca are for --endpoint without a CONFIG")
    settings = loaded(config)
    nodes = settings.nodes
    with faults_printed(settings):
        token = nodes.token()
    credentials = Credentials(token, nodes.tls_ca, nodes.tls_cert, nodes.tls_key)
    return endpoint or nodes.endpoint or listening(settings), credentials


def _secret(variable: str | None) -> str | None:
    if variable is None:
        return None
    found = os.environ.get(variable)
    if not found:
        raise typer.BadParameter(f"the environment variable {variable} is not set")
    return found


def default_endpoint(settings: Config) -> str:
    """Where a pipeline's nodes are if neither an option nor the configuration's `nodes` say so."""
    return os.environ.get("TURNLANE_URL") or listening(settings)


def listening(settings: Config) -> str:
    """Where a configuration's own node is reached."""
    flight = settings.node.flight
    return f"turnlane{'' if flight.tls is None else 's'}://{flight.listen}"


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


def given(urls: list[str] | None) -> list[ShardSpec]:
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

    shards = ShardMap.from_shards(given(urls)).shards
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
            for each in (database.catalog.list_names() if name is None else [name])
        ]
