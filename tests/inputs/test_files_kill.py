"""A reader that is killed at any moment repeats no line and skips none."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.conftest import IN_CI
from tests.contract.harness import wait_until
from tests.inputs.files_harness import open_test_queue, run_input
from tests.inputs.killed_files_process import live

KILLS = 25 if IN_CI else 15
SEED = 20_261_116


@dataclass
class Writer:
    """Writes numbered lines to three files, in random pieces, and rotates them."""

    directory: Path
    random: random.Random
    written: dict[str, int] = field(default_factory=lambda: dict.fromkeys("abc", 0))
    stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self.stopping.set()
            thread.join()

    def _run(self) -> None:
        while not self.stopping.wait(0.002):
            self.write(self.random.choice("abc"))

    def write(self, name: str) -> None:
        path = self.directory / f"{name}.log"
        first = self.written[name]
        end = self.written[name] = first + self.random.randrange(1, 60)
        lines = b"".join(b"%s %d\n" % (name.encode(), number) for number in range(first, end))
        cut = self.random.randrange(len(lines))
        with path.open("ab", buffering=0) as file:
            file.write(lines[:cut])
            file.write(lines[cut:])
        if self.random.random() < 0.03:
            path.rename(self.directory / f"{name}.log.{end}")

    def lines(self) -> list[bytes]:
        return [
            b"%s %d" % (name.encode(), number)
            for name, count in self.written.items()
            for number in range(count)
        ]


@dataclass
class Loop:
    """Starts and kills a reader again and again."""

    process_server: ForkServerContext
    data: Path
    pattern: str
    knobs: dict[str, Any]
    random: random.Random

    def life(self) -> None:
        mine, its = self.process_server.Pipe()
        at = self._moment()
        orders = (self.data, self.pattern, self.knobs, at, its)
        victim = self.process_server.Process(target=live, args=orders)
        victim.start()
        its.close()
        try:
            mine.poll(20)
            # Kill it from here if it does not reach the planned operation.
            victim.join(self.random.uniform(0.0, 0.15) + (0.3 if at[1] else 0.0))
        finally:
            victim.kill()
            victim.join()
            mine.close()
        assert victim.exitcode == -signal.SIGKILL, "it died of something else"

    def _moment(self) -> tuple[str, int, str]:
        """Choose the operation to be killed at: of the log, its journal, or the positions file."""
        operation = self.random.choice(["", "", "write", "sync", "rename", "truncate"])
        match = "files.json" if operation == "rename" else self.random.choice(["", "files.json"])
        return operation or "write", self.random.randrange(1, 12) if operation else 0, match


def run(loop: Loop, writer: Writer, kills: int) -> None:
    with writer.running():
        for _ in range(kills):
            loop.life()


def test_killed_reader_publishes_every_line_exactly_once_in_order(
    tmp_path: Path, process_server: ForkServerContext
) -> None:
    logs, data, chance = tmp_path / "logs", tmp_path / "data", random.Random(SEED)
    logs.mkdir()
    data.mkdir()
    knobs = {"kind": "disk", "sync_interval": 0.01, "chunk_size": "64Ki"}
    writer = Writer(logs, random.Random(SEED))
    run(Loop(process_server, data, f"{logs}/*", knobs, chance), writer, KILLS)
    with run_input(data, f"{logs}/*") as running:
        lines = running.await_lines(len(writer.lines()))
        running.await_rounds()
        assert running.queue.end == len(lines), "and no more come"
    # Order is kept within one generation of a file.
    assert sorted(lines, key=identity) == writer.lines()
    assert all(in_order(logs, lines))


def identity(line: bytes) -> tuple[bytes, int]:
    name, number = line.split()
    return name, int(number)


def in_order(logs: Path, lines: list[bytes]) -> Iterator[bool]:
    place = {line: at for at, line in enumerate(lines)}
    for log in logs.iterdir():
        places = [place[line] for line in log.read_bytes().splitlines()]
        yield places == sorted(places)


def test_disk_assisted_queue_gets_every_line_at_least_once(
    tmp_path: Path, process_server: ForkServerContext
) -> None:
    logs, data, chance = tmp_path / "logs", tmp_path / "data", random.Random(SEED)
    logs.mkdir()
    data.mkdir()
    knobs: dict[str, Any] = {"kind": "disk_assisted", "size": 500, "durability": "always"}
    writer = Writer(logs, random.Random(SEED))
    run(Loop(process_server, data, f"{logs}/*", knobs, chance), writer, KILLS // 2)
    expected = writer.lines()
    with (
        open_test_queue(data, **knobs) as queue,
        run_input(data, f"{logs}/*", queue=queue) as running,
    ):
        wait_until(lambda: set(running.lines()) >= set(expected))
