"""Does the README's node work as it stands there? Only the ports are changed for free ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import skip_or_fail
from tests.ports import free_port

README = Path(__file__).parents[2] / "README.md"
PATIENCE = 30.0
PORTS = ("5514", "8088", "8815")


def section() -> str:
    text = README.read_text()
    return text[text.index("## A node") : text.index("## Guarantees")]


def block(language: str) -> str:
    found = re.search(rf"```{language}.*\n((?:.*\n)*?)```", section())
    assert found is not None, f"the README has no {language} block about the node"
    return found[1]


def free_ports() -> dict[str, str]:
    return {old: str(free_port()) for old in PORTS}


def test_readme_node_accepts_and_returns_events(tmp_path: Path) -> None:
    for program in ("logger", "curl"):
        if shutil.which(program) is None:
            skip_or_fail(f"there is no {program}")
    ports = free_ports()
    config = block("yaml").replace("5514", ports["5514"])
    assert "flight" not in config, "the example has grown: give its planes free ports here"
    planes = {"flight": {"listen": f"127.0.0.1:{ports['8815']}"}}
    planes["http"] = {"listen": f"127.0.0.1:{ports['8088']}"}
    inner = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in planes.items())
    (tmp_path / "node.yaml").write_text(config.replace("node:\n", f"node:\n{inner}"))
    serve, *commands = [line[2:] for line in block("console").splitlines()]
    for old, new in ports.items():
        commands = [command.replace(old, new) for command in commands]
    arguments = serve.removesuffix(" &").split()
    assert arguments[0] == "turnlane"
    node = subprocess.Popen(
        [sys.executable, "-m", *arguments, "--ready-file", "ready"], cwd=tmp_path
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / "ready").exists():
            assert node.poll() is None, "it did not start"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        answers = [run(command, tmp_path) for command in commands]
        found = json.loads(answers[-1])["events"]
        while len(found) < 2:  # what came by TCP has no answer to wait for
            assert time.monotonic() < deadline
            more = run(commands[-1], tmp_path)
            found += json.loads(more)["events"] if more else []
        assert any("hello too" in event["value"] for event in found)
        assert any(event["value"].endswith("hello") for event in found)
    finally:
        node.send_signal(signal.SIGTERM)
        assert node.wait(PATIENCE) == 0


def run(command: str, directory: Path) -> str:
    environment = {**os.environ, "no_proxy": "*"}
    done = subprocess.run(
        command, shell=True, cwd=directory, env=environment, check=True,
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    return done.stdout
