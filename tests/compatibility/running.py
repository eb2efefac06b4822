"""Run turnlane as its users do: commands, and nodes in processes of their own.

Everything here uses public entry points only, so that it works with any version that is installed.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

TIMEOUT = 60.0
"""Seconds that a test waits before it fails; a busy machine needs some."""


class Finished(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str


def run_turnlane(*arguments: object, cwd: Path | None = None) -> Finished:
    """Run a command of ``python -m turnlane`` inside this process, which takes milliseconds."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    before = sys.argv, list(sys.path), sys.stdin
    try:
        sys.argv = ["turnlane", *map(str, arguments)]
        sys.stdin = io.StringIO()
        with (
            contextlib.chdir(cwd or Path.cwd()),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            runpy.run_module("turnlane", run_name="__main__")
    except SystemExit as ended:
        code = int(ended.code) if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv, sys.path[:], sys.stdin = before
    return Finished(code, out.getvalue(), err.getvalue())


def read_json(*arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """Run a command that prints one JSON object; ``exit_code`` is added to the object."""
    finished = run_turnlane(*arguments, cwd=cwd)
    assert finished.out, finished.err
    found: dict[str, Any] = json.loads(finished.out)
    return {**found, "exit_code": finished.code}


def read_json_lines(*arguments: object, cwd: Path | None = None) -> list[Any]:
    """Run a command that prints one JSON object a line."""
    finished = run_turnlane(*arguments, cwd=cwd)
    assert finished.code == 0, finished.err
    return [json.loads(line) for line in finished.out.splitlines()]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; fail after ``TIMEOUT``."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT:g} s: {what}"
        time.sleep(0.02)


class NodeProcess:
    """``turnlane serve CONFIG`` in a directory, ready to be used."""

    def __init__(self, directory: Path, config: str) -> None:
        self._log = directory / "node.log"
        ready = directory / "ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "turnlane", "serve", config, "--ready-file", ready.name]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=directory, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait_until(lambda: ready.exists() or self.process.poll() is not None, "a node is ready")
        assert ready.exists(), self.log
        about = json.loads(ready.read_text())
        self.http: str = about["http"]
        self.url: str = about["flight"]
        self.inputs: dict[str, str] = about["inputs"]
        self.ready = about

    @property
    def location(self) -> str:
        """The address as Arrow Flight writes it."""
        return self.url.replace("turnlane://", "grpc://")

    @property
    def log(self) -> str:
        """Everything that the node has printed."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Stop in order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(TIMEOUT) == 0, self.log

    def kill(self) -> None:
        """End the process without notice."""
        self.process.kill()
        self.process.wait(TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()


@contextlib.contextmanager
def set_variables(**variables: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def encode_bytes(value: bytes | None) -> str | None:
    """Write bytes as JSON can keep them: as text where possible."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(value).decode()


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people, too: what fits into a line is in one line."""
    path.write_text(_format(value, "") + "\n", encoding="utf-8")


def _format(value: Any, indent: str) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(line) + len(indent) <= 150:
        return line
    inner = indent + " "
    if isinstance(value, list):
        items = [_format(each, inner) for each in value]
    else:
        items = [f"{json.dumps(key)}: {_format(each, inner)}" for key, each in value.items()]
    opened, closed = "[]" if isinstance(value, list) else "{}"
    listed = ",".join(f"\n{inner}{item}" for item in items)
    return f"{opened}{listed}\n{indent}{closed}"
