"""From errors to exit codes and one line on stderr: no tracebacks for what users can put right."""

from __future__ import annotations

import enum
import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from turnlane.errors import Bug, ConfigError, RetryLater, TurnlaneError

P = ParamSpec("P")


class ExitCode(enum.IntEnum):
    """What scripts can rely on; usage errors (2) are the parser's."""

    FAILED = 1
    TEMPORARY = 75
    CONFIG = 78
    BROKEN_PIPE = 141
    """As the shell reports a program that SIGPIPE has ended."""


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """The command, its errors told in a line; whoever closes the pipe early gets silence."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            _silence_stdout()
            raise typer.Exit(ExitCode.BROKEN_PIPE) from None
        except Bug:
            raise
        except (TurnlaneError, OSError) as error:
            typer.echo(f"turnlane: {_message(error)}", err=True)
            raise typer.Exit(_code(error)) from None

    return run


def _silence_stdout() -> None:
    """Let what is still buffered go nowhere, or Python would complain of it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: TurnlaneError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _code(error: TurnlaneError | OSError) -> ExitCode:
    if isinstance(error, RetryLater):
        return ExitCode.TEMPORARY
    return ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED
