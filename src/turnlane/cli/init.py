"""``turnlane init``: a configuration to begin with."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from turnlane.cli import output
from turnlane.cli.failure import ExitCode, reported


@reported
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("turnlane.yaml"),
) -> None:
    """Write a commented example of a pipeline's configuration. An existing file is left alone."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(example())
    except FileExistsError:
        output.warn(f"{path} exists; choose another name, or remove it")
        raise typer.Exit(ExitCode.FAILED) from None
    output.say(f"{path} written; next: turnlane validate {path}, turnlane run {path}")


def example() -> str:
    """The example's text."""
    return resources.files("turnlane.config").joinpath("example.yaml").read_text(encoding="utf-8")
