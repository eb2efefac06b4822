"""Starts the many processes that tests kill, or in which they run a command.

Each process is forked from a server that has imported turnlane and has opened nothing, so it starts
in some milliseconds. A test process has one such server. The server imports its modules when it is
first used, so all of them are listed here.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path

from turnlane.cli import main

PATIENCE = 60.0
NEEDED = (
    "tests.inputs.killed_files_process",
    "tests.node.lane",
    "tests.process_server",
    "tests.recovery.killed_publisher",
    "tests.recovery.killed_process",
    "turnlane.cli.app",
)


def process_server() -> ForkServerContext:
    """Return the context that starts such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(NEEDED))
    return context


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``turnlane`` with these arguments; return its output and its exit code."""
    with tempfile.TemporaryDirectory() as place:
        output_files = [Path(place, name) for name in ("stdout", "stderr")]
        process = process_server().Process(target=_command, args=(arguments, output_files))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode is not None, f"turnlane {arguments} does not end"
        texts = [path.read_text() for path in output_files]
        return subprocess.CompletedProcess(["turnlane", *arguments], process.exitcode, *texts)


def _command(arguments: tuple[str, ...], output_files: list[Path]) -> None:
    for number, path in enumerate(output_files, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["turnlane", *arguments]
    main()
