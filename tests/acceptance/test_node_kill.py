"""kill -9 of a node under load from four kinds of client: is everything there that they were told?

Numbered Flight and HTTP producers, OTLP, and a file that is being written to. Afterwards the queue
holds every event that a client was told is persisted; the numbered ones, and the file's lines, it
holds exactly once and in order.
"""

from __future__ import annotations

import abc
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import turnlane
from tests.conftest import IN_CI
from tests.contract.harness import wait_until
from tests.ports import free_port
from turnlane.events import get_values

KILLS = 8 if IN_CI else 3
PATIENCE = 60.0
LONGEST_DELAY = 0.3
"""Seconds until a kill, once all have been told something: long enough for syncs, new chunks of
requests and saved positions to be under way."""


class Client(threading.Thread):
    """Sends numbered events until it is told to stop; ``told`` of them are persisted, it heard."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.told = 0
        self.sent = 0
        self.ending = threading.Event()
        self.failure: BaseException | None = None

    def value(self, number: int) -> str:
        return f"{self.name}:{number}"

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self.failure = error

    @abc.abstractmethod
    def work(self) -> None: ...


class FlightClient(Client):
    def __init__(self, url: str) -> None:
        super().__init__("flight")
        self.url = url

    def work(self) -> None:
        with turnlane.connect(self.url) as client:
            queue = client.queue("main", producer_id="flight", batch_size=50)
            producer = queue.producer(ack="persisted", on_ack=self.heard)
            while not self.ending.is_set():
                producer.publish(self.value(self.sent).encode())
                self.sent += 1
                if self.sent - self.told > 2000:
                    time.sleep(0.001)
            assert producer.flush(PATIENCE)

    def heard(self, ack: turnlane.Ack) -> None:
        self.told += ack.count


class HttpClient(Client):
    """Sends a request again until it is answered."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name)
        self.url = url

    def work(self) -> None:
        with httpx.Client(timeout=10.0, trust_env=False) as http:
            while not self.ending.is_set():
                self.send(http)

    def send(self, http: httpx.Client) -> None:
        last = self.told + 5
        self.sent = last
        deadline = time.monotonic() + PATIENCE
        while not self.succeeds(http, list(range(self.told, last))):
            assert time.monotonic() < deadline, "the node did not come back"
            time.sleep(0.05)
        self.told = last

    def succeeds(self, http: httpx.Client, numbers: list[int]) -> bool:
        try:
            answer = self.post(http, numbers)
        except httpx.TransportError:
            return False
        assert answer.status_code in {200, 429, 503}, answer.text
        return answer.status_code == 200

    def post(self, http: httpx.Client, numbers: list[int]) -> httpx.Response:
        lines = "".join(json.dumps({"value": self.value(n)}) + "\n" for n in numbers)
        return http.post(
            f"{self.url}/queues/main/events",
            content=lines,
            headers={
                "Content-Type": "application/x-ndjson",
                "Producer-Id": self.name,
                "Sequence": str(numbers[0]),
            },
        )


class OtlpClient(HttpClient):
    def post(self, http: httpx.Client, numbers: list[int]) -> httpx.Response:
        records = [{"body": {"stringValue": self.value(number)}} for number in numbers]
        body = {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}
        return http.post(f"{self.url}/v1/logs", json=body)


class FileClient(Client):
    def __init__(self, path: Path) -> None:
        super().__init__("file")
        self.path = path

    def work(self) -> None:
        with self.path.open("a") as file:
            while not self.ending.is_set():
                for _ in range(20):
                    file.write(self.value(self.sent) + "\n")
                    self.sent += 1
                file.flush()
                time.sleep(0.002)
        self.told = self.sent


class Nodes:
    """One life after the other, at the same addresses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "app.log"
        flight, http, otlp = (f"127.0.0.1:{free_port()}" for _ in range(3))
        self.flight, self.http, self.otlp = (
            f"turnlane://{flight}",
            f"http://{http}",
            f"http://{otlp}",
        )
        config = {
            "node": {
                "data": str(directory / "data"),
                "flight": {"listen": flight},
                "http": {"listen": http},
            },
            "queues": {"main": {"durability": "always"}},
            "inputs": [
                {"type": "otlp", "listen": otlp, "queue": "main"},
                {"type": "files", "paths": [str(self.log)], "queue": "main"},
            ],
        }
        self.config = directory / "node.yaml"
        self.config.write_text(json.dumps(config))

    @contextmanager
    def life(self) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "turnlane", "serve", str(self.config), "--json"]
        with (
            (self.directory / "node.log").open("a") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):
            try:
                assert process.stdout is not None
                assert process.stdout.readline(), (self.directory / "node.log").read_text()
                yield process
            finally:
                process.kill()


def test_killed_node_loses_no_acknowledged_event(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    flight = FlightClient(nodes.flight)
    http = HttpClient("http", nodes.http)
    otlp = OtlpClient("otlp", nodes.otlp)
    file = FileClient(nodes.log)
    clients: list[Client] = [flight, http, otlp, file]
    seed = random.randrange(2**32)
    print(f"seed of the delays: {seed}")  # noqa: T201 - to repeat a run that failed
    delays = random.Random(seed)
    for client in clients:
        client.start()
    try:
        for _ in range(KILLS):
            before = [(client, client.told) for client in (flight, http, otlp)]
            with nodes.life() as process:
                for client, told in before:
                    wait_until(
                        lambda c=client, t=told: c.told > t or c.failure is not None,  # type: ignore[misc]
                        f"{client.name} to be told something",
                    )
                time.sleep(
                    delays.uniform(0.0, LONGEST_DELAY)
                )  # any moment, not the moment of an answer
                process.send_signal(signal.SIGKILL)
                process.wait(PATIENCE)
        with nodes.life() as process:
            for client in clients:
                client.ending.set()
            for client in clients:
                client.join(PATIENCE)
                assert not client.is_alive(), f"{client.name} did not end"
                if client.failure is not None:
                    raise client.failure
            found = everything(nodes.flight, file)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
    finally:
        for client in clients:
            client.ending.set()
    for client in (flight, http, file):
        assert found[client.name] == list(range(len(found[client.name]))), "each once, in order"
        assert len(found[client.name]) >= client.told
    assert set(range(otlp.told)) <= set(found["otlp"])


def everything(url: str, file: FileClient) -> dict[str, list[int]]:
    """The numbers in the queue, by client, once the file has been read to its end."""
    found: dict[str, list[int]] = {name: [] for name in ("flight", "http", "otlp", "file")}
    with turnlane.connect(url) as client:
        at = 0
        deadline = time.monotonic() + PATIENCE
        while len(found["file"]) < file.sent:
            assert time.monotonic() < deadline, f"{len(found['file'])} of {file.sent} lines"
            client.wait("main", at, 0.2)
            for first, block in client.read("main", at):
                for value in get_values([block]):
                    name, number = parsed(value)
                    found[name].append(number)
                at = first + block.num_rows
    return found


def parsed(value: bytes) -> tuple[str, int]:
    if b"otlp:" in value:  # within a protobuf message, at its end or before another field
        digits = value.split(b"otlp:", 1)[1]
        count = next((at for at, byte in enumerate(digits) if not 48 <= byte <= 57), len(digits))
        return "otlp", int(digits[:count])
    name, number = value.decode().split(":")
    return name, int(number)


pytestmark = pytest.mark.timeout(240)
