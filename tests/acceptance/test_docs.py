"""Every program in the documentation is run, and prints what the documentation says it prints.

A ```python block runs in one session with the other blocks of its file, in order, in an empty
directory; a ```console block runs what stands after ``$ ``. What must be printed follows: in a
```text or ```output block after the program, or within the console block. ``…`` stands for
anything. A ```yaml block whose title is the name of a file is written to that file. A block that
cannot run says why: ```python title="no-run: needs a node", which the
built pages show as its title. A page that names ``$NODE`` has a node with a disk queue
``orders`` there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

import turnlane
from scripts import reliability
from tests.conftest import skip_or_fail
from turnlane import errors
from turnlane.node.http import HttpPlane
from turnlane.node.node import Node
from turnlane.serving.address import Address
from turnlane.serving.auth import Authority
from turnlane.serving.http_server import WebSettings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

LANGUAGES = {"", "console", "json", "output", "python", "sh", "sql", "text", "toml", "yaml"}
SETUP_COMMANDS = ("git clone ", "cd ", "make ", "pip install ", "python3 -m venv ", ". ")
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)")
TITLED = re.compile(r'yaml title="([\w.-]+\.yaml)"')
ON_SPARK = re.compile(r"\bSparkSession\b|\bturnlane test ")
NO_RUN = re.compile(r'(python|console) title="no-run: [^"]{8,}"')

SESSION = """
import contextlib, io, json, subprocess, sys

names = {"__name__": "__main__"}
for step in json.load(sys.stdin):
    if step["language"] == "python":
        printed = io.StringIO()
        code = compile("\\n" * step["line"] + step["code"], step["page"], "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        output = printed.getvalue()
    elif step["language"] == "yaml":
        with open(step["file"], "w") as file:
            file.write(step["code"])
        output = ""
    else:
        run = subprocess.run(
            step["code"], shell=True, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        if run.returncode:
            sys.exit(f"{step['page']}:{step['line']}: exit {run.returncode}\\n{run.stdout}")
        output = run.stdout
    sys.__stdout__.write(json.dumps(output) + "\\n")
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, text, and the line of its opening fence."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def runs(self) -> bool:
        return self.language in {"python", "console"} and "no-run" not in self.info


@dataclass(frozen=True)
class Step:
    """One thing to run, and what it has to print, if the page says so."""

    page: str
    language: str
    code: str
    line: int
    expected: str | None
    file: str | None = None


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    blocks = []
    opened: re.Match[str] | None = None
    start, body = 0, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = FENCE.fullmatch(line.rstrip())
        if opened is None:
            if fence:
                opened, start, body = fence, number, []
        elif fence and fence["ticks"] >= opened["ticks"] and not fence["info"]:
            blocks.append(Block(opened["info"].strip(), "\n".join(body), start))
            opened = None
        else:
            body.append(line.removeprefix(opened["indent"]))
    assert opened is None, f"{page}:{start}: the block is never closed"
    return blocks


def steps_of(page: Path) -> Iterator[Step]:
    """Return the programs and commands of a page."""
    blocks = blocks_of(page)
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        if file := TITLED.fullmatch(block.info):
            yield Step(page.name, "yaml", block.text, block.line, None, file[1])
        if not block.runs:
            continue
        printed = after.text if after and after.language in {"text", "output"} else None
        if block.language == "python":
            yield Step(page.name, "python", block.text, block.line, printed)
        else:
            yield from commands_of(page, block)


def commands_of(page: Path, block: Block) -> Iterator[Step]:
    """The commands of a console block, each with the output shown under it."""
    lines = block.text.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    assert starts[:1] == [0], f"{page}:{block.line}: a console block starts with '$ '"
    for start, end in pairwise([*starts, len(lines)]):
        shown = "\n".join(lines[start + 1 : end]) or None
        yield Step(page.name, "console", lines[start][2:], block.line + start + 1, shown)


def matches(expected: str, printed: str) -> bool:
    """Whether the text printed is the one shown, ``…`` being a stand-in for anything."""
    return (
        re.fullmatch(".*".join(map(re.escape, tidy(expected).split("…"))), tidy(printed), re.DOTALL)
        is not None
    )


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@contextlib.contextmanager
def node_for(page: Path, data: Path) -> Iterator[dict[str, str]]:
    """The environment of the page's programs; with the address of a node, if they ask for it."""
    if "$NODE" not in page.read_text():
        yield {}
        return
    settings = WebSettings(listen=Address.parse(":0"))
    with (
        Node(data, {"orders": {"durability": "always"}}) as node,
        HttpPlane(node, Authority(), settings).start() as plane,
    ):
        yield {"NODE": plane.url}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_print_the_output_of_the_page(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if any(ON_SPARK.search(step.code) for step in steps_of(page)):
        pytest.importorskip("pyspark.sql")
        if not (shutil.which("java") or "JAVA_HOME" in os.environ):
            skip_or_fail("Spark needs Java 17 or later")
    with node_for(page, tmp_path_factory.mktemp("node")) as environment:
        check_programs(page, tmp_path, environment)


def check_programs(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    steps = list(steps_of(page))
    scripts = str(Path(sys.executable).parent)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", SESSION],
        input=json.dumps([vars(step) for step in steps]),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            **environment,
        },
    )
    assert run.returncode == 0, run.stderr
    outputs = [json.loads(line) for line in run.stdout.splitlines()]
    for step, printed in zip(steps, outputs, strict=True):
        if step.expected is not None and not matches(step.expected, printed):
            pytest.fail(
                f"{step.page}:{step.line} printed\n{printed}\nbut the page shows\n{step.expected}",
                pytrace=False,
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_only_programs_that_cannot_run_are_skipped(page: Path) -> None:
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: no such kind of block: {block.language}"
        if "no-run" in block.info:
            assert NO_RUN.fullmatch(block.info), f'{where}: say why: title="no-run: …"'
        if block.language == "sh":
            for line in filter(None, block.text.splitlines()):
                assert line.startswith(SETUP_COMMANDS), f"{where}: use a console block: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_a_target(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_in_the_api_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    assert set(turnlane.__all__) <= named


def test_api_reference_has_every_error() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type))
    tree = {kind.__name__ for kind in kinds if issubclass(kind, errors.TurnlaneError)}
    rows = set(re.findall(r"^\| (?:– )?`(\w+)`", page, re.MULTILINE))
    assert tree <= rows


def test_reliability_page_has_the_counts_of_the_last_runs() -> None:
    page = reliability.PAGE.read_text()
    assert page == reliability.with_table(page), "run: python -m scripts.reliability"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "zensical.toml").read_text()
    for page in PAGES[1:]:
        assert f'"{page.name}"' in navigation, page.name


def test_make_targets_named_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, page.name


def test_wildcard_matches_any_text() -> None:
    assert matches("a … c", "a b\nb c\n")
    assert matches("a\nb", "a  \nb\n\n")
    assert not matches("a.c", "abc")
    assert not matches("a", "a b")
