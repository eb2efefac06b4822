"""The arguments and options that several commands have, each with the same words everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnlane.cli.logs import LogFormat, LogLevel

# ── the configuration, and the nodes ─────────────────────────────────────────────────────────────

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")
]
OptionalConfig = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")
]
Endpoint = Annotated[
    str | None, typer.Option(help="The nodes, turnlane://host:port,…; default: what CONFIG says.")
]
TokenEnv = Annotated[
    str | None, typer.Option(help="Without a CONFIG: the environment variable with the token.")
]
TlsCa = Annotated[
    Path | None, typer.Option(help="Without a CONFIG: the certificates to trust, for TLS.")
]

# ── what is printed and logged ───────────────────────────────────────────────────────────────────

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Count = Annotated[int, typer.Option("--count", "-n", min=1, help="How many events.")]
Level = Annotated[LogLevel, typer.Option(help="What is logged.")]
Form = Annotated[LogFormat, typer.Option(help="How it is logged.")]

# ── what is asked ────────────────────────────────────────────────────────────────────────────────

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
