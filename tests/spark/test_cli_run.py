"""``turnlane run`` and ``turnlane pipeline`` as processes, on real Spark."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Certificates
from tests.conftest import skip_or_fail
from tests.ports import free_port
from tests.spark.nodes import serving
from tests.spark.program import (
    PATIENCE,
    Program,
    children_of,
    list_descendants,
    read_command_line,
)

pytestmark = pytest.mark.timeout(900)  # A dozen processes start on a machine that may be busy.

CONFIG = """\
node:
  data: data
  flight: {listen: "127.0.0.1:0"}
  http: {listen: "127.0.0.1:0"}
inputs: [{type: syslog, tcp: "127.0.0.1:0", queue: main}]
parse: syslog
actions:
  - {name: noise, filter: severity = 7, output: {type: discard}}
  - {name: alerts, filter: severity <= 3, queue: disk, output: {type: file, path: alerts.jsonl}}
  - {name: all, output: {type: file, path: all.jsonl}}
spark: {master: "local[2]"}
"""


INVALID = (
    (CONFIG + "- [", "c.yaml:12:1: ", "not YAML"),
    (CONFIG.replace("queue: disk", "queue: dsk"), "c.yaml:9:50: actions[1].queue: ", "'dsk'"),
    (
        CONFIG.replace("severity <= 3", "severty <= 3"),
        "c.yaml:9:28: actions[1].filter: ",
        "`severty` cannot be resolved",
    ),
    (f"{CONFIG}transform: absent:f", "c.yaml:12:12: transform: ", "No module named 'absent'"),
    (
        f"{CONFIG}transform: failing:fail",
        "c.yaml:12:12: transform: ",
        "ValueError: no rules (failing.py:2)",
    ),
)
"""Configurations that a reload refuses, with the start and a part of the only error."""
Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    if not (shutil.which("java") or "JAVA_HOME" in os.environ):
        skip_or_fail("Spark needs Java 17 or later")
    programs: list[Program] = []

    def make(*arguments: str) -> Program:
        programs.append(Program(tmp_path, *arguments))
        return programs[-1]

    yield make
    for program in programs:
        program.close()


def send(address: str, *severities: int, text: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as sender:
        for severity in severities:
            line = f"<{8 + severity}>1 2026-01-01T12:00:00Z web shop 1 - - {text} {severity}\n"
            sender.sendall(line.encode())


def messages(file: Path) -> list[str]:
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted(json.loads(line)["message"] for line in lines)


def wait_until_file_has(file: Path, expected: list[str], program: Program) -> None:
    deadline = time.monotonic() + PATIENCE
    while messages(file) != expected:
        if time.monotonic() > deadline or program.process.poll() is not None:
            pytest.fail(f"{file.name} has {messages(file)}, not {expected}\n{program.errors}")
        time.sleep(0.05)


def test_run_delivers_syslog_reloads_the_file_and_ends_on_a_signal(
    start: Start, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    (tmp_path / "failing.py").write_text("def fail(events):\n    raise ValueError('no rules')\n")
    program = start("run", "c.yaml", "--log-format=json")
    node = program.wait_for("node", state="ready")
    address = node["inputs"]["syslog"]
    assert program.wait_for("lanes")["names"] == ["main", "alerts"]
    send(address, 3, 6, 7, text="first")
    wait_until_file_has(tmp_path / "all.jsonl", ["first 3", "first 6"], program)
    wait_until_file_has(tmp_path / "alerts.jsonl", ["first 3"], program)

    # An invalid configuration changes nothing.
    for invalid, start_of_fault, part in INVALID:
        config.write_text(invalid)
        (fault,) = program.wait_for("reload", accepted=False)["faults"]
        assert fault.startswith(start_of_fault)
        assert part in fault
    send(address, 2, text="second")
    wait_until_file_has(tmp_path / "alerts.jsonl", ["first 3", "second 2"], program)

    # A valid configuration is used; a new action gets its queue.
    renamed = CONFIG.replace("name: alerts", "name: urgent").replace("<= 3", "<= 2")
    config.write_text(renamed.replace("alerts.jsonl", "urgent.jsonl"))
    assert program.wait_for("reload", accepted=True)["names"] == ["main", "urgent"]
    send(address, 0, 3, text="third")
    wait_until_file_has(tmp_path / "urgent.jsonl", ["third 0"], program)
    everything = ["first 3", "first 6", "second 2", "third 0", "third 3"]
    wait_until_file_has(tmp_path / "all.jsonl", everything, program)
    assert messages(tmp_path / "alerts.jsonl") == ["first 3", "second 2"]

    program.process.send_signal(signal.SIGTERM)
    program.wait_for("stopped")
    assert program.ended() == 0, program.errors
    assert not Path(f"/proc/{node['pid']}").exists()

    # stderr has only JSON, without Java's warning and without the tracebacks of ended processes,
    # and only this process reports the signal.
    assert [json.loads(line) for line in program.errors.splitlines()]
    for unwanted in ("incubator", "Traceback", "stopping"):
        assert unwanted not in program.errors
    assert [each["event"] for each in program.hear()].count("stopping") == 1


def test_killed_node_restarts_with_the_accepted_configuration(start: Start, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    running = CONFIG.replace('tcp: "127.0.0.1:0"', f'tcp: "127.0.0.1:{free_port()}"')
    config.write_text(running)
    program = start("run", "c.yaml")
    ready = program.wait_for("node", state="ready")
    program.wait_for("lanes")

    def kill_node(pid: int) -> dict[str, Any]:
        os.kill(pid, signal.SIGKILL)
        program.wait_for("node", state="died")
        return program.wait_for("node", state="ready")

    config.write_text(running.replace("parse: syslog", "parse: syslgo"))
    program.wait_for("reload", accepted=False)
    again = kill_node(ready["pid"])
    assert again["inputs"] == ready["inputs"]

    # Settings that need a restart of the command are not taken by a restart of its node.
    config.write_text(running.replace("data: data", "data: elsewhere"))
    assert program.wait_for("reload", accepted=True)["needs_restart"] == ["node"]
    assert kill_node(again["pid"])["inputs"] == ready["inputs"]
    send(ready["inputs"]["syslog"], 6, text="still")
    wait_until_file_has(tmp_path / "all.jsonl", ["still 6"], program)
    assert not (tmp_path / "elsewhere").exists()
    program.process.send_signal(signal.SIGTERM)
    assert program.ended() == 0, program.errors


def test_pipeline_command_creates_queues_on_another_node(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    with serving(tmp_path / "elsewhere", {"main": {}}) as served:
        message = b"<11>1 2026-01-01T12:00:00Z web shop 1 - - far away"
        served.publish("main", [message])
        where = ("--endpoint", served.url, "--master", "local[2]")
        program = start("pipeline", "c.yaml", *where, "--no-reload")  # Only SIGHUP reloads it.
        program.wait_for("lanes")
        queues = {"main", "main.dead", "alerts", "alerts.dead", "all.dead"}
        assert set(served.node.queues()) == queues
        wait_until_file_has(tmp_path / "alerts.jsonl", ["far away"], program)
        program.wait_for("lane", name="alerts", state="running")
        (tmp_path / "c.yaml").write_text(CONFIG.replace("name: all,", "name: everything,"))
        program.process.send_signal(signal.SIGHUP)
        program.wait_for("reload", accepted=True)
        program.process.send_signal(signal.SIGINT)
        assert program.ended() == 0, program.errors


def test_reload_with_other_nodes_reads_from_them(start: Start, tmp_path: Path) -> None:
    config, out = tmp_path / "c.yaml", tmp_path / "all.jsonl"
    message = "<14>1 2026-01-01T12:00:00Z web shop 1 - - {}"
    with (
        serving(tmp_path / "one", {"main": {}}) as one,
        serving(tmp_path / "two", {"main": {}}) as two,
    ):
        for served, text in ((one, "of one"), (two, "of two")):
            served.publish("main", [message.format(text).encode()])
        config.write_text(f"{CONFIG}nodes: {{endpoint: '{one.url}'}}\n")
        program = start("pipeline", "c.yaml")
        wait_until_file_has(out, ["of one"], program)
        config.write_text(f"{CONFIG}nodes: {{endpoint: '{two.url}'}}\n")
        assert program.wait_for("reload", accepted=True)["needs_restart"] == []
        wait_until_file_has(out, ["of one", "of two"], program)
        program.process.send_signal(signal.SIGTERM)
        assert program.ended() == 0, program.errors


def test_killed_spark_is_started_again_and_the_node_stays(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    program = start("run", "c.yaml")
    ready = program.wait_for("node", state="ready")
    program.wait_for("lanes")
    for child in children_of(program.process.pid):
        if child != ready["pid"]:
            os.kill(child, signal.SIGKILL)
    program.wait_for("spark", state="died")
    send(ready["inputs"]["syslog"], 3, text="after the kill")
    program.wait_for("spark", state="starting")
    program.wait_for("lanes")
    wait_until_file_has(tmp_path / "alerts.jsonl", ["after the kill 3"], program)
    assert Path(f"/proc/{ready['pid']}").exists()
    program.process.send_signal(signal.SIGTERM)
    assert program.ended() == 0, program.errors
    assert not Path(f"/proc/{ready['pid']}").exists()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    return place


def test_signal_while_spark_starts_ends_the_command(
    start: Start, tmp_path: Path, temporary: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    program = start("run", "c.yaml")
    node = program.wait_for("node", state="ready")["pid"]
    program.process.send_signal(signal.SIGTERM)
    program.wait_for("stopped")
    assert program.ended() == 0, program.errors
    assert not Path(f"/proc/{node}").exists()
    assert not list(temporary.iterdir())


def test_node_that_cannot_start_ends_the_command_with_its_exit_code(
    start: Start, tmp_path: Path, temporary: Path
) -> None:
    elsewhere = 'insecure: true, tcp: "203.0.113.7:5514"'  # This address belongs to no machine.
    (tmp_path / "c.yaml").write_text(CONFIG.replace('tcp: "127.0.0.1:0"', elsewhere))
    program = start("run", "c.yaml")
    assert program.ended() == 78
    assert "turnlane: input syslog" in program.errors
    assert not list(temporary.iterdir())


def test_node_whose_address_is_taken_is_started_again(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f'tcp: "127.0.0.1:{taken.getsockname()[1]}"'
        (tmp_path / "c.yaml").write_text(CONFIG.replace('tcp: "127.0.0.1:0"', address))
        program = start("run", "c.yaml")
        program.wait_for("node", state="died", code=75)
    program.wait_for("node", state="ready")
    program.process.send_signal(signal.SIGTERM)
    assert program.ended() == 0, program.errors


def test_node_that_lacks_a_certificate_is_started_again_once_it_has_run(
    start: Start, tmp_path: Path, certificates: Certificates
) -> None:
    """The configuration is the one that worked before, so the certificate may come back."""
    cert, key = (shutil.copy(each, tmp_path) for each in certificates.server)
    tls = f'tls: {{listen: "127.0.0.1:0", cert: "{cert}", key: "{key}"}}'
    (tmp_path / "c.yaml").write_text(CONFIG.replace('tcp: "127.0.0.1:0"', tls))
    program = start("run", "c.yaml")
    node = program.wait_for("node", state="ready")
    Path(cert).rename(tmp_path / "away")
    os.kill(node["pid"], signal.SIGKILL)
    for _ in range(2):
        program.wait_for("node", state="died", code=78)
    (tmp_path / "away").rename(cert)
    program.wait_for("node", state="ready")
    program.process.send_signal(signal.SIGTERM)
    assert program.ended() == 0, program.errors


RULES = """\
from pyspark.sql import functions as F

def FUNCTION(events):
    return events.withColumn("message", F.concat("message", F.lit(" TAG")))
"""


def rules(function: str, tag: str) -> str:
    return RULES.replace("FUNCTION", function).replace("TAG", tag)


def test_reload_uses_changed_code_of_transforms(start: Start, tmp_path: Path) -> None:
    config, code, out = tmp_path / "c.yaml", tmp_path / "rules.py", tmp_path / "all.jsonl"
    code.write_text(rules("first", "a"))
    config.write_text(f"{CONFIG}transform: rules:first\n")
    program = start("run", "c.yaml")
    address = program.wait_for("node", state="ready")["inputs"]["syslog"]
    program.wait_for("lanes")
    send(address, 6, text="1")
    wait_until_file_has(out, ["1 6 a"], program)

    # The configuration changes, too: it names the new function.
    code.write_text(rules("first", "a") + rules("second", "new"))
    config.write_text(f"{CONFIG}transform: rules:second\n")
    program.wait_for("reload", accepted=True)
    send(address, 6, text="2")
    wait_until_file_has(out, ["1 6 a", "2 6 new"], program)

    # Broken code changes nothing.
    code.write_text("def second(events: return events\n")
    program.process.send_signal(signal.SIGHUP)
    (fault,) = program.wait_for("reload", accepted=False)["faults"]
    assert fault.startswith("c.yaml:"), fault
    send(address, 6, text="3")
    wait_until_file_has(out, ["1 6 a", "2 6 new", "3 6 new"], program)

    # Only the code changes, not the configuration.
    code.write_text(rules("second", "newer"))
    program.process.send_signal(signal.SIGHUP)
    program.wait_for("reload", accepted=True)
    send(address, 6, text="4")
    wait_until_file_has(out, ["1 6 a", "2 6 new", "3 6 new", "4 6 newer"], program)


# ── what others on the machine or the network see ──


def list_listening_addresses(pids: list[int]) -> set[str]:
    """Return the TCP addresses, in hexadecimal, on which processes listen."""
    sockets = set()
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                sockets.add(str(each.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                found.add(local.partition(":")[0])
    return found


def test_processes_of_a_local_run_listen_on_loopback_only(start: Start, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    program = start("run", "c.yaml")
    address = program.wait_for("node", state="ready")["inputs"]["syslog"]
    send(address, 3, text="first")
    wait_until_file_has(tmp_path / "all.jsonl", ["first 3"], program)
    processes = [program.process.pid, *list_descendants(program.process.pid)]
    assert any("java" in read_command_line(each) for each in processes)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}
    assert list_listening_addresses(processes) - loopback == set()


def test_token_and_secrets_of_a_cluster_are_on_no_command_line(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNLANE_TEST_TOKEN", "s3cret")
    conf = "{spark.driver.host: 127.0.0.1, spark.executorEnv.A: s3cret, spark.password: s3cret}"
    (tmp_path / "c.yaml").write_text(
        "node: {data: unused}\nnodes: {token_env: TURNLANE_TEST_TOKEN}\n"
        "actions: [{name: a, output: {type: discard}}]\n"
        f"spark: {{conf: {conf}}}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as master:
        master.settimeout(PATIENCE)
        where = f"spark://127.0.0.1:{master.getsockname()[1]}"
        program = start("pipeline", "c.yaml", "--endpoint", "turnlane://a:1", "--master", where)
        master.accept()[0].close()  # Spark is up, and has its settings.
        lines = [*map(read_command_line, list_descendants(program.process.pid))]
        assert any("java" in each and where in each for each in lines)
        assert not [each for each in lines if "s3cret" in each]
        assert "spark.unauthenticated" in program.errors
