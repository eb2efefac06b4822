"""Where processes come from that tests start by the dozen, to be killed or to run a command.

Each is a process of its own, forked from a server that has turnlane imported and nothing opened:
so a life costs some milliseconds. A test process has one such server, which imports what it is
told of when it is first used: therefore everything is named here.
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
    "tests.inputs.files_victim",
    "tests.node.lane",
    "tests.nursery",
    "tests.recovery.victim",
    "turnlane.cli.app",
)


def nursery() -> ForkServerContext:
    """What makes such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(NEEDED))
    return context


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What ``turnlane`` with these arguments says, and its exit code."""
    with tempfile.TemporaryDirectory() as place:
        said = [Path(place, name) for name in ("stdout", "stderr")]
        process = nursery().Process(target=_command, args=(arguments, said))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode is not None, f"turnlane {arguments} does not end"
        texts = [path.read_text() for path in said]
        return subprocess.CompletedProcess(["turnlane", *arguments], process.exitcode, *texts)


def _command(arguments: tuple[str, ...], said: list[Path]) -> None:
    for number, path in enumerate(said, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["turnlane", *arguments]
    main()
