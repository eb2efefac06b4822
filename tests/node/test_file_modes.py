"""Who may read the files of a node: only its user, or also a group that the user names."""

from __future__ import annotations

import grp
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import turnlane
from tests.contract.harness import PATIENCE, wait_until
from turnlane.client import connect
from turnlane.errors import ConfigError
from turnlane.events import block_of
from turnlane.node.node import Node

CONFIG = """\
node: {data: data, flight: {listen: "127.0.0.1:0"}, http: {listen: "127.0.0.1:0"}GROUP}
queues: {orders: {kind: disk, durability: always}}
inputs: [{type: files, queue: orders, paths: ["*.log"], scan_interval: 50ms}]
"""

Serve = Callable[[str], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start ``turnlane serve`` with a umask of 0; return the URL of its Flight plane."""
    started: list[subprocess.Popen[bytes]] = []

    def start(config: str) -> str:
        (tmp_path / "c.yaml").write_text(config)
        command = [sys.executable, "-m", "turnlane", "serve", "c.yaml", "--json"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, umask=0)
        started.append(process)
        assert process.stdout is not None
        return str(json.loads(process.stdout.readline())["flight"])

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)


def use_node(url: str, place: Path) -> None:
    """Do everything that makes files: a log, stages, commits, positions of an input, an audit."""
    (place / "a.log").write_text("from a file\n")
    with connect(url) as client:
        client.create("made", kind="disk")
        client.queue("orders").producer(ack="persisted").publish(b"x", timeout=PATIENCE)
        with client.stage("made", block_of([]).schema) as stage:
            stage.write(block_of([b"y"]))
            assert client.commit([stage.finish()], writer="w", epoch=1)
        client.nodes[0].purge("made", [(0, 1)], why="test")
    wait_until(lambda: any(place.joinpath("data").glob("inputs/*.json")), "the positions", PATIENCE)


def list_modes(directory: Path) -> tuple[set[str], set[str]]:
    """Return the modes of all directories, and of all files."""
    paths = [directory, *directory.rglob("*")]
    modes = {each: oct(stat.S_IMODE(each.stat().st_mode)) for each in paths if each.exists()}
    directories = {mode for each, mode in modes.items() if each.is_dir()}
    return directories, {mode for each, mode in modes.items() if not each.is_dir()}


def find_group() -> str:
    """Return a group of this user, another one than the primary group if there is one."""
    known = grp.getgrall() if os.geteuid() == 0 else map(grp.getgrgid, os.getgroups())
    return min(known, key=lambda each: each.gr_gid == os.getegid()).gr_name


def test_files_of_a_node_are_readable_only_by_its_user(serve: Serve, tmp_path: Path) -> None:
    use_node(serve(CONFIG.replace("GROUP", "")), tmp_path)
    assert list_modes(tmp_path / "data") == ({"0o700"}, {"0o600"})


def test_group_of_a_node_can_read_all_its_files(serve: Serve, tmp_path: Path) -> None:
    group = find_group()
    use_node(serve(CONFIG.replace("GROUP", f", group: {group}")), tmp_path)
    data = tmp_path / "data"
    assert list_modes(data) == ({"0o2750"}, {"0o640"})
    assert {each.group() for each in (data, *data.rglob("*"))} == {group}


def test_unknown_group_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.group: .* 'no-such'.*name a group of this"):
        Node(tmp_path / "data", group="no-such")


def test_directories_of_an_older_version_are_closed_to_others(tmp_path: Path) -> None:
    parts = [tmp_path / name for name in ("queues", "staging", "commits")]
    for each in parts:
        each.mkdir(mode=0o755)
    Node(tmp_path).close()
    assert {stat.S_IMODE(each.stat().st_mode) for each in parts} == {0o700}


@pytest.mark.parametrize(("given", "modes"), [(None, (0o700, 0o600)), (0o2770, (0o2750, 0o640))])
def test_queue_without_a_node_follows_the_directory_above(
    tmp_path: Path, given: int | None, modes: tuple[int, int]
) -> None:
    """A directory with the setgid bit shares what is in it with its group."""
    if given is not None:
        tmp_path.chmod(given)
    with turnlane.open_queue(kind="disk", path=tmp_path / "queue") as queue:
        queue.producer().publish(b"x")
    directories, files = list_modes(tmp_path / "queue")
    assert (directories, files) == ({oct(modes[0])}, {oct(modes[1])})
