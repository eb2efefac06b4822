"""The nodes that a command is about: those of a configuration, or those at an address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from turnlane.cli.serve import faults_printed, loaded

if TYPE_CHECKING:
    from turnlane.client.remote import Credentials, RemoteNode
    from turnlane.config import Config


@contextmanager
def reached(
    config: Path | None, endpoint: str | None, token_env: str | None, tls_ca: Path | None
) -> Iterator[list[RemoteNode]]:
    """The nodes, by number. Raises ``ConfigError``; calls raise ``TransportDown``."""
    from turnlane.client.remote import RemoteNode
    from turnlane.client.url import Url

    where, credentials = _given(config, endpoint, token_env, tls_ca)
    url = Url.parse(where)
    with ExitStack() as opened:
        yield [
            opened.enter_context(RemoteNode(place, location, credentials))
            for place, location in zip(url.places, url.locations(), strict=True)
        ]


def _given(
    config: Path | None, endpoint: str | None, token_env: str | None, tls_ca: Path | None
) -> tuple[str, Credentials]:
    from turnlane.client.remote import Credentials

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
