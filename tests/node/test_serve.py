"""Tests of ``turnlane serve`` as a process: start, announced addresses, and end."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import turnlane
from turnlane.cli import process
from turnlane.cli import serve as command
from turnlane.cli.app import app
from turnlane.config import Config, loads
from turnlane.errors import ConfigError, DirectoryLocked
from turnlane.inputs import api
from turnlane.inputs.api import Input
from turnlane.node.node import Node
from turnlane.plugins import PluginRegistry
from turnlane.service import Service

PATIENCE = 60
LOCAL = "127.0.0.1:0"

PROBE_INPUT = """
import threading
from turnlane.inputs.api import Input

class ProbeInput(Input):
    def start(self):
        self.host.queue(self.settings.queue).producer().publish(b"from the input")
        if self.settings.name == "broken":
            raise RuntimeError("it does not start")

    def stop(self, timeout):
        if self.settings.name == "stuck":
            print("stuck", flush=True)
            threading.Event().wait()
        self.host.queue(self.settings.queue).producer().publish(b"the input's last")
"""


class NodeProcess:
    """A node in its own process."""

    def __init__(
        self,
        *arguments: str | Path,
        path: Path | None = None,
        before: Sequence[str] = (),
        **extra: str,
    ) -> None:
        environment = {**os.environ, **extra}
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        self.process = subprocess.Popen(
            [
                *before,
                sys.executable,
                "-W",
                "error",
                "-m",
                "turnlane",
                "serve",
                *map(str, arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ready(self) -> dict[str, Any]:
        """Return the announcement of the ready node; needs ``--json``."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"it did not start: {self.process.communicate()[1]}")
        about: dict[str, Any] = json.loads(line)
        return about

    def wait_for_line(self, words: str) -> None:
        """Wait for a line on stderr that contains a text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if words in line:
                return
        pytest.fail(f"it never said {words!r}")

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_for_end(self) -> tuple[int, str]:
        """Return the exit code and the rest of stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


Serve = Callable[..., NodeProcess]


@pytest.fixture
def serve() -> Iterator[Serve]:
    served: list[NodeProcess] = []

    def start(*arguments: str | Path, **extra: Any) -> NodeProcess:
        served.append(NodeProcess(*arguments, **extra))
        return served[-1]

    yield start
    for each in served:
        each.close()


def configure_loopback(data: Path) -> list[str]:
    return [f"--data={data}", f"--listen-flight={LOCAL}", f"--listen-http={LOCAL}", "--json"]


def config_file(directory: Path, text: str = "") -> Path:
    file = directory / "turnlane.yaml"
    file.write_text(
        f"node:\n  data: {directory / 'data'}\n"
        f"  flight: {{listen: '{LOCAL}'}}\n  http: {{listen: '{LOCAL}'}}\n{text}"
    )
    return file


def publish(about: dict[str, Any], value: bytes, ack: str = "persisted") -> None:
    url = f"{about['http']}/queues/main/events?ack={ack}"
    request = urllib.request.Request(url, data=value, headers={"content-type": "text/x-raw"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert answer.status == 200


def read_values(data: Path, queue: str = "main") -> list[bytes | None]:
    """Return the values of a queue of a node that has ended."""
    with Node(data, {queue: {}}) as node:
        values: list[bytes | None] = []
        while node.queue(queue).stats().ledger.pending > len(values):
            values += [event.value for event in node.queue(queue).get(timeout=PATIENCE)]
        return values


@pytest.fixture
def probe_plugin(tmp_path: Path) -> Path:
    """A directory with a distribution that has an input plug-in."""
    folder = tmp_path / "site"
    about = folder / "probe-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "probe_input.py").write_text(PROBE_INPUT)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[turnlane.inputs]\nprobe = probe_input:ProbeInput\n")
    return folder


# ── starting ─────────────────────────────────────────────────────────────────────────────────────


def test_serve_needs_only_a_data_directory(serve: Serve, tmp_path: Path) -> None:
    served = serve(*configure_loopback(tmp_path / "new"))
    about = served.ready()
    assert about["pid"] == served.process.pid
    publish(about, b"hello")
    served.send_signal(signal.SIGTERM)
    code, errors = served.wait_for_end()
    assert code == 0, errors
    assert f"turnlane: flight on {about['flight']}\n" in errors
    assert f"turnlane: http on {about['http']}\n" in errors
    assert "Traceback" not in errors
    assert read_values(tmp_path / "new") == [b"hello"]


def test_starter_can_wait_until_the_node_is_ready(serve: Serve, tmp_path: Path) -> None:
    """By a line of JSON, by a file, or like a service manager; logs can also be JSON."""
    ready = tmp_path / "ready.json"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        flags = [
            *configure_loopback(tmp_path / "data"),
            f"--ready-file={ready}",
            "--log-format=json",
        ]
        served = serve(*flags, NOTIFY_SOCKET=str(tmp_path / "notify"))
        about = served.ready()
        assert json.loads(ready.read_text()) == about
        assert manager.recv(100) == b"READY=1"
        served.send_signal(signal.SIGINT)
        assert manager.recv(100) == b"STOPPING=1"
    code, errors = served.wait_for_end()
    assert code == 0
    assert not ready.exists()
    records = [json.loads(line) for line in errors.splitlines()]
    assert any(record["logger"] == "turnlane.node.node" for record in records)


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_event_of_a_command_is_written_in_the_chosen_form(
    form: str, serve: Serve, tmp_path: Path
) -> None:
    flags = [*configure_loopback(tmp_path / "data"), f"--log-format={form}"]
    served = serve(*flags, NOTIFY_SOCKET=str(tmp_path / "missing"))
    served.ready()
    served.send_signal(signal.SIGTERM)
    code, errors = served.wait_for_end()
    assert code == 0, errors
    lines = [line for line in errors.splitlines() if "systemd.notify_failed" in line]
    assert len(lines) == 2, errors
    if form == "json":
        fields = [json.loads(line)["fields"] for line in lines]
        assert [each["state"] for each in fields] == ["READY=1", "STOPPING=1"]
        assert all(each["error"].startswith("FileNotFoundError: ") for each in fields)
    else:
        start = ' WARNING systemd.notify_failed state="READY=1" error="FileNotFoundError: '
        assert start in lines[0]


# ── ending ───────────────────────────────────────────────────────────────────────────────────────


def test_signal_stops_inputs_first_and_loses_nothing(
    serve: Serve, tmp_path: Path, probe_plugin: Path
) -> None:
    text = "queues: {main: }\ninputs: [{type: probe, queue: main}]\n"
    served = serve(config_file(tmp_path, text), "--json", path=probe_plugin)
    about = served.ready()
    assert about["inputs"] == {"probe": None}
    for number in range(50):
        publish(about, b"%d" % number, "accepted")
    served.send_signal(signal.SIGTERM)
    code, errors = served.wait_for_end()
    assert code == 0, errors
    assert "turnlane: input probe into queue main\n" in errors
    expected = [b"from the input", *(b"%d" % number for number in range(50)), b"the input's last"]
    assert read_values(tmp_path / "data") == expected


def test_events_acked_under_load_are_stored_after_a_stop(serve: Serve, tmp_path: Path) -> None:
    served = serve(*configure_loopback(tmp_path / "data"))
    about = served.ready()
    told: list[bytes] = []
    enough = threading.Event()

    def keep_publishing(who: int) -> None:
        for number in itertools.count():
            value = b"http %d %d" % (who, number)
            try:
                publish(about, value)
            except (OSError, HTTPException):  # refused or disconnected: not acked
                return
            told.append(value)
            if number == 5:
                enough.set()

    clients = [threading.Thread(target=keep_publishing, args=(who,)) for who in range(3)]
    for client in clients:
        client.start()
    assert enough.wait(PATIENCE)
    served.send_signal(signal.SIGTERM)
    code, errors = served.wait_for_end()
    for client in clients:
        client.join(PATIENCE)
    assert code == 0, errors
    assert set(told) <= set(read_values(tmp_path / "data"))


def test_client_continues_with_the_next_node(serve: Serve, tmp_path: Path) -> None:
    """The node stops during a stream: the client waits and sends the unacked events again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        flight = f"--listen-flight=127.0.0.1:{free.getsockname()[1]}"
    flags = [f"--data={tmp_path / 'data'}", flight, f"--listen-http={LOCAL}", "--json"]
    served = serve(*flags)
    with turnlane.connect(served.ready()["flight"]) as client:
        producer = client.queue("main").producer(ack="persisted", on_ack=lambda _ack: None)
        for number in range(200):
            producer.publish(b"%d" % number)
            if number == 100:
                served.send_signal(signal.SIGTERM)
                assert served.wait_for_end()[0] == 0
                served = serve(*flags)
                served.ready()
        assert producer.flush(PATIENCE)
    served.send_signal(signal.SIGTERM)
    assert served.wait_for_end()[0] == 0
    assert read_values(tmp_path / "data") == [b"%d" % number for number in range(200)]


def test_part_that_does_not_stop_delays_the_end_by_its_timeout(
    serve: Serve, tmp_path: Path, probe_plugin: Path
) -> None:
    text = "  shutdown_timeout: 100ms\nqueues: {main: }\n"
    text += "inputs: [{type: probe, queue: main, name: stuck}]\n"
    served = serve(config_file(tmp_path, text), "--json", path=probe_plugin)
    publish(served.ready(), b"kept", "accepted")
    served.send_signal(signal.SIGTERM)
    code, errors = served.wait_for_end()
    assert code == 0, errors
    assert 'service.stop_timeout parts="input stuck"' in errors
    assert read_values(tmp_path / "data") == [b"from the input", b"kept"]


def test_signal_just_before_the_main_thread_sleeps_wakes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late:
        """Like ``os``, but a signal arrives after the last check for signals."""

        def read(self, file: int, size: int) -> bytes:
            signal.raise_signal(signal.SIGTERM)
            return os.read(file, size)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    monkeypatch.setattr(process, "os", Late())
    before = signal.getsignal(signal.SIGTERM)
    with process.Signals() as caught:
        assert caught.wait() is signal.SIGTERM
        assert not caught.wait_or(threading.Event().wait)
    assert signal.getsignal(signal.SIGTERM) is before


def test_error_during_the_stop_is_raised() -> None:
    with process.Signals() as caught:
        assert caught.wait_or(lambda: None)
        with pytest.raises(ZeroDivisionError):
            caught.wait_or(lambda: 1 / 0)


def stuck_node(serve: Serve, tmp_path: Path, probe_plugin: Path) -> NodeProcess:
    """A node that would wait ten minutes for its input to stop."""
    text = "  shutdown_timeout: 10m\nqueues: {main: }\n"
    text += "inputs: [{type: probe, queue: main, name: stuck}]\n"
    served = serve(config_file(tmp_path, text), "--json", path=probe_plugin)
    publish(served.ready(), b"kept", "accepted")
    served.send_signal(signal.SIGTERM)
    assert served.process.stdout is not None
    assert served.process.stdout.readline() == "stuck\n"
    return served


def test_second_signal_stops_at_once_and_closes_the_queues(
    serve: Serve, tmp_path: Path, probe_plugin: Path
) -> None:
    served = stuck_node(serve, tmp_path, probe_plugin)
    served.send_signal(signal.SIGTERM)
    code, errors = served.wait_for_end()
    assert code == 1, errors
    assert "stopping without waiting" in errors
    assert read_values(tmp_path / "data") == [b"from the input", b"kept"]


def test_third_signal_ends_the_process_at_once(
    serve: Serve, tmp_path: Path, probe_plugin: Path
) -> None:
    served = stuck_node(serve, tmp_path, probe_plugin)
    served.send_signal(signal.SIGINT)
    served.wait_for_line("stopping without waiting")
    served.send_signal(signal.SIGINT)
    assert served.wait_for_end()[0] == 128 + signal.SIGINT


def test_killed_node_has_every_persisted_event(serve: Serve, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for start in (0, 10):
        served = serve(*configure_loopback(data))
        about = served.ready()
        for number in range(start, start + 10):
            publish(about, b"%d" % number)
        served.send_signal(signal.SIGKILL)
        assert served.wait_for_end()[0] == -signal.SIGKILL
    assert read_values(data) == [b"%d" % number for number in range(20)]


# ── not starting ─────────────────────────────────────────────────────────────────────────────────


def run_turnlane(*arguments: str | Path) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command that ends before a node is opened."""
    run = CliRunner().invoke(app, [*map(str, arguments)])
    return run.exit_code, run.stdout, run.stderr


def get_only_line(errors: str) -> str:
    """Return the only error line; log records begin with a time."""
    (line,) = [line for line in errors.splitlines() if not line.startswith("20")]
    return line


def test_wrong_configuration_is_refused_with_its_places(tmp_path: Path) -> None:
    file = config_file(tmp_path, "queues:\n  main: {siez: 5}\ninputs:\n  - {type: nothing}\n")
    code, _, errors = run_turnlane("serve", file)
    assert code == 78
    assert errors.splitlines() == [
        f"{file}:6:10: queues.main.siez: there is no such setting; did you mean size?",
        errors.splitlines()[1],
    ]
    assert errors.splitlines()[1].startswith(f"{file}:8:12: inputs[0].type: there is no input")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("plane", ["flight", "http"])
def test_taken_port_is_named(serve: Serve, tmp_path: Path, plane: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        loopback = configure_loopback(tmp_path / "data")
        flags = [flag for flag in loopback if not flag.startswith(f"--listen-{plane}")]
        code, errors = serve(*flags, f"--listen-{plane}={address}").wait_for_end()
    assert code == 75
    wanted = f"turnlane: node.{plane}.listen: cannot listen on {address}: Address already in use"
    assert get_only_line(errors) == wanted
    with Node(tmp_path / "data"):
        """The directory is not locked."""


def test_taken_port_of_an_input_is_named(serve: Serve, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        text = f"queues: {{main: }}\ninputs: [{{type: syslog, udp: '{address}', queue: main}}]\n"
        code, errors = serve(config_file(tmp_path, text)).wait_for_end()
    assert code == 75
    wanted = f"turnlane: input syslog: udp: cannot listen on {address}: Address already in use"
    assert get_only_line(errors) == wanted


def test_limit_of_open_files_is_raised_to_the_maximum(serve: Serve, tmp_path: Path) -> None:
    limits = ["prlimit", "--nofile=256:2000"]
    node = serve(*configure_loopback(tmp_path / "data"), before=limits)
    pid = node.ready()["pid"]
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (2000, 2000)


@pytest.mark.parametrize("others", ["", "  - {type: syslog, tcp: ':0', queue: main}\n"])
def test_node_that_only_reads_stdin_ends_with_it(serve: Serve, tmp_path: Path, others: str) -> None:
    text = f"queues: {{main: }}\ninputs:\n  - {{type: stdin, queue: main}}\n{others}"
    node = serve(config_file(tmp_path, text), "--json")
    node.ready()
    assert node.process.stdin is not None
    node.process.stdin.write("one\ntwo")
    node.process.stdin.close()
    node.process.stdin = None  # communicate() would close it again
    if others:
        with pytest.raises(subprocess.TimeoutExpired):
            node.process.wait(1.0)
        node.send_signal(signal.SIGTERM)
    code, errors = node.wait_for_end()
    assert code == 0
    assert ("end of input: stopping" in errors) is not bool(others)
    assert read_values(tmp_path / "data") == [b"one", b"two"]


def test_directory_of_another_node_is_named(serve: Serve, tmp_path: Path) -> None:
    with Node(tmp_path / "data"):
        code, errors = serve(*configure_loopback(tmp_path / "data")).wait_for_end()
    assert code == 75
    assert str(tmp_path / "data") in get_only_line(errors)


def test_directory_that_cannot_be_created_is_named(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, errors = serve(*configure_loopback(tmp_path / "file" / "data")).wait_for_end()
    assert code == 1
    assert str(tmp_path / "file") in get_only_line(errors)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--data=d", "c.yaml"], ["c.yaml", "--queue=a"], ["c.yaml", "--listen-http=:0"]],
)
def test_config_together_with_a_directory_is_refused(arguments: list[str]) -> None:
    code, _, errors = run_turnlane("serve", *arguments)
    assert code == 2
    assert "CONFIG" in errors


def test_wrong_address_on_the_command_line_is_refused(tmp_path: Path) -> None:
    code, _, errors = run_turnlane("serve", f"--data={tmp_path}", "--listen-http=0.0.0.0:0")
    assert code == 78
    assert get_only_line(errors).startswith("turnlane: node.http.listen: 0.0.0.0:0 can be reached")


def test_work_that_ends_after_the_signals_writes_to_no_pipe(tmp_path: Path) -> None:
    """The descriptor of the closed pipe may belong to another file by then."""
    go_on = threading.Event()
    before = set(threading.enumerate())
    with process.Signals() as caught:
        signal.raise_signal(signal.SIGTERM)
        assert not caught.wait_or(go_on.wait)
        (work,) = [each for each in threading.enumerate() if each not in before]
    with (tmp_path / "one").open("wb"), (tmp_path / "two").open("wb"):
        go_on.set()
        work.join()
    assert [(tmp_path / name).read_bytes() for name in ("one", "two")] == [b"", b""]


# ── the service without a process ────────────────────────────────────────────────────────────────


def settings(data: Path, text: str = "") -> Config:
    planes = f"flight: {{listen: '{LOCAL}'}}, http: {{listen: '{LOCAL}'}}"
    return loads(f"node: {{data: '{data}', {planes}}}\nqueues: {{main: }}\n{text}")


def test_failed_start_closes_all_opened_parts(
    tmp_path: Path, probe_plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(probe_plugin)
    fresh = PluginRegistry("turnlane.inputs", Input, "input")  # type: ignore[type-abstract]
    monkeypatch.setattr(api, "load", fresh.load)
    text = "inputs: [{type: probe, queue: main, name: broken}]"
    service = Service(settings(tmp_path / "data", text))
    with pytest.raises(RuntimeError, match="does not start"):
        service.start()
    addresses = [plane.address for plane in service.planes.values()]
    assert len(addresses) == 2
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.host, address.port))
    assert read_values(tmp_path / "data") == [b"from the input"]


def test_input_without_its_queue_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path / "data", "inputs: [{type: stdin, queue: main}]")
    with pytest.raises(ConfigError, match="input stdin: queue: there is no queue 'main'"):
        Service(config.model_copy(update={"queues": {}})).start()


def test_queues_can_be_named_on_the_command_line(tmp_path: Path) -> None:
    listen = {"flight": LOCAL, "http": LOCAL}
    config = command._make_settings(None, tmp_path / "data", ["a", "b"], listen)
    with Service(config).start() as service:
        assert sorted(service.node.queues()) == ["a", "b"]


def test_service_can_be_stopped_twice_and_frees_its_directory(tmp_path: Path) -> None:
    service = Service(settings(tmp_path / "data")).start()
    with pytest.raises(DirectoryLocked):
        Node(tmp_path / "data")
    assert service.stop(5.0)
    assert service.stop()
    service.hard_stop()
    assert read_values(tmp_path / "data") == []


def test_planes_can_be_switched_off(tmp_path: Path) -> None:
    off = "node: {data: %s, flight: {enabled: false}, http: {enabled: false}}\nqueues: {main: }"
    with Service(loads(off % (tmp_path / "data"))).start() as service:
        assert list(service.listening()) == []
        assert isinstance(service.node.queue("main"), turnlane.Queue)


# ── turnlane validate ────────────────────────────────────────────────────────────────────────────


def test_validate_accepts_a_valid_file(tmp_path: Path) -> None:
    file = config_file(tmp_path, "queues: {main: }\n")
    assert run_turnlane("validate", file) == (0, f"{file}: ok, 1 queue, 0 inputs\n", "")
    assert not (tmp_path / "data").exists()


WITHOUT_LIBRARIES = """
import sys
for name in {gone}:
    sys.modules[name] = None
from turnlane.cli import main
main()
"""


def validate_without(*gone: str, file: Path) -> tuple[int, str]:
    """Validate a file in a Python that does not have some libraries; return code and stderr."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES.format(gone=gone), "validate", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return run.returncode, run.stderr


def test_validate_names_the_extra_of_every_missing_library(tmp_path: Path) -> None:
    url, sql = "url: 'postgresql://u@db/x'", "table: t, columns: {a: value}"
    file = config_file(
        tmp_path,
        "queues: {main: }\ninputs:\n"
        f"  - {{type: table, {url}, table: t, queue: main}}\n"
        f"tables:\n  jobs: {{{url}}}\n"
        "actions:\n"
        f"  - {{name: a, output: {{type: sql, url: 'mysql://u@db/x', {sql}}}}}\n"
        f"  - {{name: b, output: {{type: table, {url}, {sql}}}}}\n",
    )
    code, errors = validate_without("psycopg", "pymysql", file=file)
    assert code == 78
    assert [line.split(" ")[1] for line in errors.splitlines()] == [
        "inputs[0].url:",
        "tables.jobs.url:",
        "actions[0].output.url:",
        "actions[1].output.url:",
    ]
    for line, extra in zip(
        errors.splitlines(), ("postgres",) * 2 + ("mysql", "postgres"), strict=True
    ):
        assert f"is not installed: pip install 'turnlane[{extra}]'" in line
    file = config_file(tmp_path, "actions:\n  - {name: a, output: {type: otlp, url: 'http://x'}}\n")
    code, errors = validate_without("google", file=file)
    assert code == 78
    assert "OTLP is not installed: pip install 'turnlane[otlp]'" in errors
    file = config_file(tmp_path, "actions:\n  - {name: a, output: {type: discard}}\n")
    code, errors = validate_without("pyspark", file=file)
    assert code == 0
    assert "warning: turnlane run cannot run the actions here: Spark is not installed: " in errors
    assert "pip install 'turnlane[spark]'" in errors


def test_validate_refuses_transforms_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text("def enrich(events): return events\n")
    (tmp_path / "broken_rules.py").write_text("1 / 0\n")
    tail = "queue: disk, output: {type: discard}"
    file = config_file(
        tmp_path,
        "transform: absent_rules:enrich\nactions:\n"
        f"  - {{name: a, transform: 'rules:enrich', {tail}}}\n"
        f"  - {{name: b, transform: 'rules:gone', {tail}}}\n"
        f"  - {{name: c, transform: 'broken_rules:x', {tail}}}\n",
    )
    code, errors = validate_without(file=file)
    assert code == 78
    first, second, third = errors.splitlines()
    assert "transform: absent_rules:enrich: No module named 'absent_rules'" in first
    assert "actions[1].transform: rules:gone: module 'rules' has no attribute 'gone'" in second
    assert "actions[2].transform: broken_rules:x: ZeroDivisionError" in third


@pytest.mark.parametrize(
    ("kind", "where"),
    [("memory", "are kept in memory"), ("disk_assisted", "are kept in memory until they spill")],
)
def test_validate_warns_of_commits_into_memory(tmp_path: Path, kind: str, where: str) -> None:
    actions = [
        f"- {{name: fast, queue: {kind}, output: {{type: discard}}}}",
        "- {name: safe, queue: disk, output: {type: discard}}",
        "- {name: now, output: {type: discard}}",
    ]
    file = config_file(tmp_path, "actions:\n" + "\n".join(actions) + "\n")
    code, said, warned = run_turnlane("validate", file)
    assert (code, said) == (0, f"{file}: ok, 3 queues, 0 inputs, 3 actions\n")
    (line,) = warned.splitlines()
    assert line.startswith(
        f"turnlane: warning: {file}:6:23: actions[0].queue: events that the main lane"
    )
    assert where in line


def test_validate_lists_every_issue(tmp_path: Path) -> None:
    file = config_file(tmp_path, "queue: {}\ninput: []\n")
    code, _, errors = run_turnlane("validate", file)
    assert code == 78
    assert errors.splitlines() == [
        f"{file}:5:1: queue: there is no such setting; did you mean queues?",
        f"{file}:6:1: input: there is no such setting; did you mean inputs?",
    ]


def test_validate_reads_secrets_and_shows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "very-secret")
    token = "  tokens: [{name: app, secret: '${TOKEN}', rights: {'*': [publish]}}]\n"
    code, shown, errors = run_turnlane("validate", config_file(tmp_path, token), "--show")
    assert code == 0, errors
    assert json.loads(shown)["node"]["tokens"][0]["secret"] == "${TOKEN}"
    assert "very-secret" not in shown + errors
    elsewhere = token.replace("secret: '${TOKEN}'", "secret_env: GONE")
    code, _, errors = run_turnlane("validate", config_file(tmp_path, elsewhere))
    assert code == 78
    assert get_only_line(errors) == (
        "turnlane: node.tokens.app: environment variable GONE is empty or not set"
    )


@pytest.mark.parametrize(
    ("listens", "found"),
    [
        ("tcp: '0.0.0.0:6514'", "input syslog: tcp: 0.0.0.0:6514 can be reached from outside"),
        ("udp: '*:514'", "input syslog: udp: 0.0.0.0:514 can be reached"),
        ("udp: '*:514', insecure: true", None),
    ],
)
def test_validate_refuses_public_syslog(tmp_path: Path, listens: str, found: str | None) -> None:
    text = f"queues: {{main: }}\ninputs: [{{type: syslog, {listens}, queue: main}}]\n"
    code, _, errors = run_turnlane("validate", config_file(tmp_path, text))
    assert code == (78 if found else 0)
    assert not found or get_only_line(errors).startswith(f"turnlane: {found}")
    assert ("which needs tls and tls.client_ca" in errors) is bool(found)


def test_validate_loads_certificates(tmp_path: Path) -> None:
    file = config_file(tmp_path, "  tls: {cert: none.pem, key: none.key}\n")
    code, _, errors = run_turnlane("validate", file)
    assert code == 78
    expected = "turnlane: node.flight.tls.cert: none.pem: No such file or directory"
    assert get_only_line(errors) == expected
