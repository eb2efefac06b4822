"""Compare the input with a model that only counts lines.

Files are written, rotated, truncated and deleted, and the input is restarted and killed in between.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.conftest import IN_CI
from tests.inputs.files_harness import RunningInput, StubHost, open_test_queue, settings
from turnlane.inputs.files import FilesInput

NAMES = st.sampled_from(["a", "b"])


@dataclass
class Generation:
    """The content of a file since its creation or its last truncation."""

    lines: list[bytes] = field(default_factory=list)
    partial: bytes = b""


class Files(RuleBasedStateMachine):
    """The model: all complete lines of every generation are in the queue, in order and once."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.root = Path(tempfile.mkdtemp())
        self.stack.callback(shutil.rmtree, self.root)
        self.queue = self.stack.enter_context(
            open_test_queue(self.root / "data", durability="never")
        )
        self.logs = self.root / "logs"
        self.logs.mkdir()
        self.generations: list[Generation] = []
        self.current: dict[str, Generation] = {}
        self.count = 0
        self.begun: FilesInput | None = None

    @initialize()
    def begin(self) -> None:
        knobs = {"rotate_wait": 0, "read_buffer": 64, "close_inactive": 0, "scan_interval": 60}
        home = StubHost(self.root / "data", self.queue)
        self.begun = FilesInput(settings(self.logs / "*", **knobs), home)
        self.begun.prepare()

    @property
    def input(self) -> FilesInput:
        assert self.begun is not None
        return self.begun

    def path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    # ── changes of files ────────────────────────────────────────────────────────────────────

    @rule(name=NAMES, lines=st.integers(0, 30), partial=st.booleans())
    def append(self, name: str, lines: int, partial: bool) -> None:
        if name not in self.current:
            self.current[name] = Generation()
            self.generations.append(self.current[name])
        generation = self.current[name]
        data = b""
        for _ in range(lines):
            self.count += 1
            line = b"%s %d" % (name.encode(), self.count)
            generation.lines.append(generation.partial + line)
            generation.partial = b""
            data += line + b"\n"
        if partial:
            self.count += 1
            data += b"partial %d, " % self.count
            generation.partial += b"partial %d, " % self.count
        with self.path(name).open("ab") as file:
            file.write(data)

    @rule(name=NAMES)
    def rename(self, name: str) -> None:
        if name in self.current:
            self.count += 1
            self.path(name).rename(self.logs / f"{name}.{self.count}")
            del self.current[name]

    @rule(name=NAMES)
    def truncate(self, name: str) -> None:
        if name in self.current:
            self.look()
            self.path(name).write_bytes(b"")
            self.current[name] = Generation()
            self.generations.append(self.current[name])

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.current:
            self.look()
            generation = self.current.pop(name)
            inode = self.path(name).stat().st_ino
            held = any(reader.key.inode == inode for reader in self.input._open)
            self.path(name).unlink()
            if held and generation.partial:  # the partial line is complete now
                generation.lines.append(generation.partial)
            self.look()

    # ── changes of the input ────────────────────────────────────────────────────────────────

    @rule()
    def look(self) -> None:
        self.input._scan_at = 0.0
        while self.input.run_round():
            pass

    @rule(lose=st.booleans())
    def kill(self, lose: bool) -> None:
        """Kill the input: it saves nothing, and it may also lose the positions file."""
        for reader in list(self.input._open):
            reader.close()
        if lose:
            (self.root / "data" / "inputs" / "files.json").unlink(missing_ok=True)
        self.begin()

    @rule()
    def stop(self) -> None:
        self.input._finish()
        self.begin()

    # ── invariants ─────────────────────────────────────────────────────────────────────────

    @invariant()
    def nothing_is_twice_or_out_of_order(self) -> None:
        if self.begun is not None:
            self.compare(RunningInput(self.input, self.queue).lines(), whole=False)

    def compare(self, found: list[bytes], *, whole: bool) -> None:
        place = {line: at for at, line in enumerate(found)}
        left = dict.fromkeys(found)
        for generation in self.generations:
            own = [line for line in generation.lines if line in place]
            assert own == generation.lines[: len(own)]
            assert [place[line] for line in own] == sorted(place[line] for line in own)
            assert not whole or own == generation.lines
            for line in own:
                del left[line]
        assert len(place) == len(found), "a line came twice"
        assert not left, "lines came that nobody wrote"

    def teardown(self) -> None:
        try:
            if self.begun is not None:
                self.look()
                self.compare(RunningInput(self.input, self.queue).lines(), whole=True)
                self.input._finish()
        finally:
            self.stack.close()


TestFiles = Files.TestCase
TestFiles.settings = profile(max_examples=100 if IN_CI else 20, stateful_step_count=25)
