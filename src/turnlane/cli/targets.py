"""What a command works on: a configuration, nodes, or queue tables in databases."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import urlsplit

import typer

from turnlane.cli.console import ExitCode, warn
from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from turnlane.client.node_client import Credentials, RemoteNode
    from turnlane.config import Config
    from turnlane.pipeline.settings import PipelineSettings
    from turnlane.table import Database, ShardedDatabase, TableQueue
    from turnlane.table.shards import ShardSpec

# ── the configuration ────────────────────────────────────────────────────────────────────────────


def load_config(path: Path, text: str | None = None) -> Config:
    """Load the settings; print one line for each issue, in the form that editors read, and exit.

    With ``text`` the file is not read: this is its text.
    """
    from turnlane.config import load, loads

    make_modules_importable(path)  # they may have inputs and outputs
    with print_config_errors():
        return load(path) if text is None else loads(text, str(path))


def read_config_text(path: Path) -> str:
    """Return the text of a configuration, for :func:`load_config`."""
    from turnlane.config import read_text

    with print_config_errors():
        return read_text(path)


def get_pipeline(config: Config) -> PipelineSettings:
    """Return the pipeline of a configuration; print an error and exit if it has none."""
    pipeline = config.pipeline()
    if pipeline is None:
        with print_config_errors(config):
            raise ConfigError("actions", "there are none; turnlane serve runs a node without them")
    return pipeline


@contextlib.contextmanager
def print_config_errors(config: Config | None = None) -> Iterator[None]:
    """Print the issues of a configuration with their positions, and exit."""
    from turnlane.config import ConfigFileError

    try:
        yield
    except ConfigError as error:
        located = error if config is None else config.locate(error)
        if not isinstance(located, ConfigFileError):
            raise
        warn(str(located), logging.ERROR, prefix="")
        raise typer.Exit(ExitCode.CONFIG) from None


def list_modules_next_to(config: Path) -> list[Path]:
    """Return the Python files next to a configuration. Packages have to be installed."""
    return sorted(config.resolve().parent.glob("*.py"))


def make_modules_importable(config: Path) -> None:
    """Make modules next to a configuration importable, for Spark's own processes too."""
    place = str(config.resolve().parent)
    if place not in sys.path:
        sys.path.insert(0, place)
    paths = [place, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def connect_nodes(
    config: Path | None, endpoint: str | None, token_env: str | None, tls_ca: Path | None
) -> Iterator[list[RemoteNode]]:
    """Connect to the nodes of a configuration, or at an address, in their order.

    Raises ``ConfigError``; calls of the nodes raise ``TransportDown``.
    """
    from turnlane.client.address import NodeUrl
    from turnlane.client.node_client import RemoteNode

    where, credentials = _find_nodes(config, endpoint, token_env, tls_ca)
    url = NodeUrl.parse(where)
    with ExitStack() as opened:
        yield [
            opened.enter_context(RemoteNode(place, location, credentials))
            for place, location in zip(url.places, url.locations(), strict=True)
        ]


def _find_nodes(
    config: Path | None, endpoint: str | None, token_env: str | None, tls_ca: Path | None
) -> tuple[str, Credentials]:
    from turnlane.client.node_client import Credentials

    if config is None:
        where = endpoint or os.environ.get("TURNLANE_URL")
        if where is None:
            raise typer.BadParameter("give a CONFIG, or --endpoint turnlane://host:port")
        token = None if token_env is None else os.environ.get(token_env)
        if token_env is not None and not token:
            raise typer.BadParameter(f"the environment variable {token_env} is not set")
        return where, Credentials(token, tls_ca)
    if token_env is not None or tls_ca is not None:
        raise typer.BadParameter("--token-env and --tls-ca are for --endpoint without a CONFIG")
    settings = load_config(config)
    nodes = settings.nodes
    with print_config_errors(settings):
        token = nodes.token()
    credentials = Credentials(token, nodes.tls_ca, nodes.tls_cert, nodes.tls_key)
    return endpoint or nodes.endpoint or get_own_endpoint(settings), credentials


def get_default_endpoint(settings: Config) -> str:
    """Return the nodes of a pipeline if neither an option nor the section `nodes` names them."""
    return os.environ.get("TURNLANE_URL") or get_own_endpoint(settings)


def get_own_endpoint(settings: Config) -> str:
    """Return the URL of the node that a configuration describes."""
    flight = settings.node.flight
    return f"turnlane{'' if flight.tls is None else 's'}://{flight.listen}"


# ── queue tables ─────────────────────────────────────────────────────────────────────────────────

VARIABLE: Final = "TURNLANE_TABLE_URL"

Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar=VARIABLE,
        help="The database, such as postgresql://user@host/db; for several shards, repeat "
        "the option as RANGE=URL, such as -80=sqlite:///a.db.",
    ),
]
_SHARD: Final = re.compile(r"(?P<range>[0-9a-fA-F]*-[0-9a-fA-F]*)=(?P<url>.+)", re.DOTALL)


class ShardTable(NamedTuple):
    """The table of a queue in one database."""

    shard: str
    """The key range of that database."""
    queue: TableQueue


def parse_urls(urls: list[str] | None) -> list[ShardSpec]:
    """Return addresses and key ranges. Raises ``ConfigError``."""
    if not urls:
        raise ConfigError("--url", f"name the database, here or in ${VARIABLE}")
    found = []
    for url in urls:
        match = _SHARD.fullmatch(url)
        address, key_range = (url, "-") if match is None else (match["url"], match["range"])
        try:
            _ = urlsplit(address).port
        except ValueError:  # its message may have a part of the password
            message = "is not an address: its host or its port cannot be read"
            raise ConfigError("--url", message) from None
        found.append((address, key_range))
    return found


@contextmanager
def open_databases(urls: list[str] | None) -> Iterator[list[tuple[str, Database]]]:
    """Open the databases, each with its key range. ``ConfigError`` for a gap or an overlap."""
    from turnlane.table import connect
    from turnlane.table.shards import ShardMap

    shards = ShardMap.from_shards(parse_urls(urls)).shards
    with ExitStack() as opened:
        yield [(str(shard.key_range), opened.enter_context(connect(shard.url))) for shard in shards]


def open_sharded_database(urls: list[str] | None) -> ShardedDatabase:
    """Open all databases as one. ``ConfigError`` if key ranges have a gap or overlap."""
    from turnlane.table import connect_shards

    return connect_shards(parse_urls(urls))


@contextmanager
def open_tables(urls: list[str] | None, name: str | None) -> Iterator[list[ShardTable]]:
    """Open the tables of a queue, or of all queues, in all databases. Raises ``NoSuchQueue``."""
    with open_databases(urls) as found:
        yield [
            ShardTable(shard, database.queue(each))
            for shard, database in found
            for each in (database.catalog.list_names() if name is None else [name])
        ]
