"""``turnlane migrate`` as a command, and its page in the documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from turnlane.migrate.metrics_governor import FLAGS, KEYS
from turnlane.migrate.rsyslog_queues import ACTION_RULES, QUEUE_RULES
from turnlane.node.metrics import NodeCollector
from turnlane.node.node import Node

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrate.md"

GOVERNOR = """\
exporter:
  endpoint: http://127.0.0.1:4318
  protocol: http
  queue: {type: disk, max_bytes: 1Gi, workers: 8}
"""
RSYSLOG = """\
module(load="imtcp")
input(type="imtcp" port="5514" address="127.0.0.1")
main_queue(queue.type="LinkedList" queue.size="100000" queue.filename="main")
*.err action(type="omfwd" target="127.0.0.1" port="6514" protocol="tcp" queue.type="Disk")
*.*   /var/log/all
"""


def turnlane(*arguments: str | Path, place: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turnlane", *map(str, arguments)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("program", "text"), [("metrics-governor", GOVERNOR), ("rsyslog", RSYSLOG)]
)
def test_converted_file_passes_validation(program: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "old").write_text(text)
    done = turnlane("migrate", program, "old", "--output", "new.yaml", place=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "new.yaml written; next: turnlane validate new.yaml" in done.stderr
    checked = turnlane("validate", "new.yaml", place=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("new.yaml: ok")


def test_missing_counterpart_is_on_stderr_and_the_exit_code_is_1(tmp_path: Path) -> None:
    (tmp_path / "old").write_text('\nmodule(load="imjournal")\n*.* /x\n')
    done = turnlane("migrate", "rsyslog", "old", place=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("old:2: module = imjournal: no counterpart; pipe the journal in")
    (tmp_path / "new.yaml").write_text(done.stdout)
    assert turnlane("validate", "new.yaml", place=tmp_path).returncode == 0


def test_flags_alone_are_enough(tmp_path: Path) -> None:
    flags = "-queue-type disk -queue-max-bytes 2Gi"
    done = turnlane("migrate", "metrics-governor", "--flags", flags, place=tmp_path)
    assert done.returncode == 0
    assert "max_bytes: 2Gi  # -queue-max-bytes = 2Gi" in done.stdout
    assert turnlane("migrate", "metrics-governor", place=tmp_path).returncode == 2


def test_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    (tmp_path / "old").write_text(RSYSLOG)
    (tmp_path / "new.yaml").write_text("mine")
    refused = turnlane("migrate", "rsyslog", "old", "-o", "new.yaml", place=tmp_path)
    assert refused.returncode == 2
    assert "new.yaml exists" in refused.stderr
    assert (tmp_path / "new.yaml").read_text() == "mine"
    done = turnlane("migrate", "rsyslog", "old", "-o", "new.yaml", "--force", place=tmp_path)
    assert done.returncode == 0
    assert "kind: disk_assisted" in (tmp_path / "new.yaml").read_text()


@pytest.mark.parametrize(
    ("program", "text"), [("metrics-governor", b"[1]"), ("rsyslog", b"\xff"), ("rsyslog", None)]
)
def test_unreadable_file_gives_exit_code_78(
    program: str, text: bytes | None, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "old").write_bytes(text)
    done = turnlane("migrate", program, "old", place=tmp_path)
    assert done.returncode == 78
    assert done.stdout == ""
    assert done.stderr.startswith(("old:1:1: ", "turnlane: old: ", "turnlane: old:1:1: "))


# ── the pages ────────────────────────────────────────────────────────────────────────────────────


def first_cells(title: str) -> set[str]:
    """Return the names in the first column of the table under a title."""
    _, _, rest = PAGE.read_text().partition(f"\n### {title}\n")
    assert rest, f"docs/migrate.md has no section {title}"
    section = re.split(r"\n##", rest)[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_page_has_every_key_of_metrics_governor_and_no_other() -> None:
    assert first_cells("Keys") == {key.removeprefix("exporter.queue.") for key in KEYS}


def test_page_has_every_flag_of_metrics_governor_and_no_other() -> None:
    assert first_cells("Flags") == {f"-{flag}" for flag in FLAGS}


def test_page_has_every_queue_parameter_of_rsyslog_and_no_other() -> None:
    assert {name.lower() for name in first_cells("Queue parameters")} == set(QUEUE_RULES)


def test_page_has_every_action_parameter_of_rsyslog_and_no_other() -> None:
    assert {name.lower() for name in first_cells("Action parameters")} == set(ACTION_RULES)


@pytest.mark.parametrize("name", ["migrate.md", "troubleshooting.md"])
def test_metrics_on_the_page_exist(name: str, tmp_path: Path) -> None:
    with Node(tmp_path / "data", {"main": {}}) as node:
        families = list(NodeCollector(node).collect())
    existing = {f"{each.name}{'_total' * (each.type == 'counter')}" for each in families}
    text = (ROOT / "docs" / name).read_text()
    named = set(re.findall(r"\bturnlane_(?:\w+)", text))
    assert len(named) > 10
    assert named <= existing, named - existing
