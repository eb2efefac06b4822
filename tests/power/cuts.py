"""Real power cuts: a node in a guest loses its power at random moments; the oracle is outside.

``make test-power`` runs this; it is no part of ``make test``. A life of the guest begins with files
as the last cut left them. Over the network, the oracle first compares each queue with all that its
clients were told in all lives. Then they publish, take and settle events until the cut. A cut comes
at a random time, or at a random write or flush of the disk, also while the node starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from scripts.reliability import record_run
from tests.ports import free_port
from tests.power.disk import Losses, VolatileDisk
from tests.power.guest import FLIGHT, HTTP, PATIENCE, Guest, Machine, make_file_system
from turnlane.runtime import start_thread

SMALL = {"chunk_size": "16Ki", "memory_bytes": "64Ki"}
QUEUES: dict[str, dict[str, Any]] = {
    "always": {"durability": "always", **SMALL},
    "interval": {"durability": "interval", "sync_interval": "100ms", **SMALL},
    "assisted": {
        "kind": "disk_assisted",
        "durability": "always",
        "chunk_size": "16Ki",
        "size": 60,
        "high_watermark": 20,
        "low_watermark": 5,
    },
}
DISK_SIZE = {"ext4": 128 << 20, "xfs": 320 << 20}
PRODUCERS = {"single": 1, "few": 5, "many": 30}
"""The producers of each queue, and how many events each request has at most."""
LONG = 400
"""The pending events from which on a queue has no producers: to read all of it takes time."""
BROKEN = re.compile(r"EXT4-fs error|XFS.*[Cc]orrupt|I/O error|Traceback")
"""Lines on the guest's console that no power cut explains."""


class Identity(NamedTuple):
    """The identity of an event: the number among all events of its producer."""

    producer: str
    number: int

    def value(self) -> str:
        """The event's value: its identity, and some characters to fill chunks."""
        text = f"{self.producer}:{self.number}:"
        return text + text * (self.number * 37 % 20)

    @classmethod
    def of(cls, value: str) -> Self:
        """Return the identity in a value, and check that the value is complete."""
        producer, number, _ = value.split(":", 2)
        found = cls(producer, int(number))
        assert value == found.value(), f"{found} came back as {value!r}"
        return found


@dataclass
class QueueOracle:
    """All that the clients of one queue were told. The lock guards it while clients run."""

    name: str
    persisted: Counter[str] = field(default_factory=Counter)
    """By producer: how many of its first events are persisted."""
    settling: set[Identity] = field(default_factory=set)
    """Events that a client has settled, even if it got no answer."""
    settled: set[Identity] = field(default_factory=set)
    came_again: set[Identity] = field(default_factory=set)
    pending: int = 0
    """How many events the queue had at the last check."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def keeps_settlements(self) -> bool:
        """Whether a settled event never comes again.

        Only ``always`` syncs each settlement. In a disk-assisted queue, an event may be settled
        before it ever reaches the disk.
        """
        return self.name == "always"

    def hand_out(self, events: list[Identity]) -> None:
        """Check events that a consumer got."""
        with self.lock:
            again = self.settled.intersection(events)
            assert not (again and self.keeps_settlements), f"settled, and came again: {again}"
            self.came_again |= again

    def check(self, found: list[Identity], ledger: Mapping[str, Any]) -> None:
        """Compare the pending events of a node that has just started with all that was told."""
        self.pending = len(found)
        there = set(found)
        assert len(there) == len(found), f"{self.name}: some events are there twice"
        for producer, total in self.persisted.items():
            told = {Identity(producer, number) for number in range(total)}
            lost = sorted(told - there - self.settling)
            assert not lost, f"{self.name}: {len(lost)} persisted events are lost: {lost[:9]}"
            numbers = [event.number for event in found if event.producer == producer]
            assert numbers == sorted(numbers), f"{self.name}: {producer} is not in order"
        self.hand_out(found)
        dropped = ledger["dropped"]
        ended = ledger["delivered"] + ledger["dead"]
        total = ended + sum(dropped.values()) + ledger["pending"]
        assert ledger["accepted"] == total, f"{self.name}: {ledger} does not add up"
        assert ledger["pending"] == len(found), f"{self.name}: {ledger}, {len(found)} are there"
        assert set(dropped) <= {"missing"}, f"{self.name}: {ledger}"  # they were never persisted
        if self.keeps_settlements:
            counts = (len(self.settled), ended, len(self.settling))
            assert counts == tuple(sorted(counts)), f"{self.name}: {ledger}, settled: {counts}"


class Client(threading.Thread):
    """A client of one queue for one life of the node. It ends when the node does not answer."""

    def __init__(self, url: str, oracle: QueueOracle, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.oracle = oracle
        self.rng = rng
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False) as http:
                while self.work(http):
                    pass
        except httpx.TransportError:
            pass  # the power is off
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.failure = error

    def work(self, http: httpx.Client) -> bool:
        """Send one request; return whether to go on."""
        raise NotImplementedError


class Publisher(Client):
    """Sends events of a numbered producer; after a cut, again from the first without an answer."""

    def __init__(
        self, url: str, oracle: QueueOracle, rng: random.Random, producer: str, most: int
    ) -> None:
        super().__init__(url, oracle, rng)
        self.producer = producer
        self.most = most

    def work(self, http: httpx.Client) -> bool:
        first = self.oracle.persisted[self.producer]
        numbers = range(first, first + self.rng.randint(1, self.most))
        events = [{"value": Identity(self.producer, number).value()} for number in numbers]
        answer = http.post(
            f"/queues/{self.oracle.name}/events",
            params={"ack": "persisted", "timeout": "5s"},
            json=events,
            headers={"Producer-Id": self.producer, "Sequence": str(first)},
        )
        if answer.status_code == 200:
            assert answer.json()["dropped"] == 0, answer.text
            with self.oracle.lock:
                self.oracle.persisted[self.producer] = numbers.stop
        else:  # no room, or no ack in time
            assert answer.status_code in {429, 503, 504}, answer.text
        return True


class Consumer(Client):
    """Takes events, and settles most of them."""

    def work(self, http: httpx.Client) -> bool:
        params: dict[str, str | int] = {"wait": "1s", "lease": "1h"}
        params["max_events"] = self.rng.randint(1, 100)
        answer = http.get(f"/queues/{self.oracle.name}/events", params=params)
        if answer.status_code == 204:
            return True
        assert answer.status_code == 200, answer.text
        taken = [Identity.of(event["value"]) for event in answer.json()["events"]]
        self.oracle.hand_out(taken)
        path = self.rng.choices(["done", "dead", "release"], [16, 2, 2])[0]
        if path != "release":
            with self.oracle.lock:
                self.oracle.settling.update(taken)
        settled = http.post(f"/leases/{answer.json()['lease']}/{path}")
        if settled.status_code == 204 and path != "release":
            with self.oracle.lock:
                self.oracle.settled.update(taken)
        assert settled.status_code in {204, 404, 503}, settled.text
        return True


@dataclass
class Run:
    """Power cuts of one machine, one after the other."""

    machine: Machine
    disk: VolatileDisk
    url: str
    rng: random.Random
    oracles: list[QueueOracle] = field(default_factory=lambda: [QueueOracle(q) for q in QUEUES])
    cuts: Counter[str] = field(default_factory=Counter)
    losses: list[Losses] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def live(self) -> None:
        """Start the node, check it, use it, and cut the power."""
        moment = self.rng.choices(["start", "write", "flush", "time"], [3, 5, 8, 4])[0]
        if moment == "start":
            self.disk.go_silent(self.rng.randint(0, 40), at_flush=self.rng.random() < 0.5)
        clients: list[Client] = []
        # Unsynced data is lost in the memory of the guest, or on the disk if it is written at once.
        with self.machine.start(self.rng.choice([1, 3000])) as guest:
            start_thread("cut", self.kill_when_silent, guest)
            if not (self.await_ready(guest) and self.check()):
                moment = "start"
            else:
                if moment != "time":
                    self.disk.go_silent(self.rng.randint(0, 300), at_flush=moment != "write")
                clients = self.make_clients()
                for client in clients:
                    client.start()
                if not self.disk.is_silent.wait(self.rng.uniform(0, 6 if moment == "time" else 60)):
                    moment = "time"
                elif moment == "start":  # the node started with fewer writes
                    moment = "flush"
        for client in clients:
            client.join(PATIENCE)
            assert not client.is_alive(), f"{client} waits for a node that is dead"
            if client.failure is not None:
                raise client.failure
        self.cuts[moment] += 1
        self.losses.append(self.disk.cut_power(self.rng))

    def kill_when_silent(self, guest: Guest) -> None:
        """Kill the guest as soon as its disk does not answer: nothing happens without power."""
        while guest.is_running:
            if self.disk.is_silent.wait(0.1):
                guest.kill()

    def await_ready(self, guest: Guest) -> bool:
        """Wait until the node answers; false if the power went off before."""
        started = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as http:
            while not self.disk.is_silent.is_set():
                console = self.machine.read_console()
                assert guest.is_running, f"the node did not start: {console[-2000:]}"
                assert not BROKEN.search(console), console[-3000:]
                assert time.monotonic() < started + PATIENCE, f"no answer: {console[-2000:]}"
                with contextlib.suppress(httpx.TransportError):
                    if http.get("/readyz").status_code == 200:
                        self.starts.append(time.monotonic() - started)
                        return True
                time.sleep(0.05)
        return False

    def check(self) -> bool:
        """Compare all queues with their oracles; false if the power goes off before the end."""
        try:
            with httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False) as http:
                for oracle in self.oracles:
                    found = list(self.peek(http, oracle.name))
                    stats = http.get(f"/queues/{oracle.name}").json()["stats"]
                    oracle.check(found, stats["ledger"])
        except httpx.TransportError:
            assert self.disk.is_silent.is_set(), "the node does not answer"
            return False
        return True

    def peek(self, http: httpx.Client, queue: str) -> Iterator[Identity]:
        """Return all pending events of a queue, without taking them."""
        first = 0
        while True:
            params = {"first": first, "max": 1000}
            events = http.get(f"/queues/{queue}/peek", params=params).json()["events"]
            if not events:
                return
            for event in events:
                yield Identity.of(event["value"])
            first = events[-1]["offset"] + 1

    def make_clients(self) -> list[Client]:
        """Return the clients of one life. A short queue sometimes grows without consumers."""
        clients: list[Client] = []
        for oracle in self.oracles:
            if oracle.pending < LONG:
                clients += [
                    Publisher(self.url, oracle, self.new_rng(), producer, most)
                    for producer, most in PRODUCERS.items()
                ]
            if oracle.pending >= LONG or self.rng.random() < 0.8:
                clients.append(Consumer(self.url, oracle, self.new_rng()))
        return clients

    def new_rng(self) -> random.Random:
        """Return randomness for one thread."""
        return random.Random(self.rng.random())

    def drain(self) -> None:
        """Start the node for the last time, and take all events out."""
        with self.machine.start() as guest:
            assert self.await_ready(guest)
            assert self.check()
            with httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False) as http:
                for oracle in self.oracles:
                    consumer = Consumer(self.url, oracle, self.new_rng())
                    url = f"/queues/{oracle.name}"
                    while http.get(url).json()["stats"]["ledger"]["pending"]:
                        consumer.work(http)
                    for producer, total in oracle.persisted.items():
                        told = {Identity(producer, number) for number in range(total)}
                        assert told <= oracle.settling, (
                            f"{oracle.name}: lost {told - oracle.settling}"
                        )
                    oracle.check([], http.get(url).json()["stats"]["ledger"])

    def summarize(self) -> dict[str, int | str]:
        """Return the counts of the run."""
        return {
            "power cuts": self.cuts.total(),
            "while the node started": self.cuts["start"],
            "at a random write": self.cuts["write"],
            "before a random flush": self.cuts["flush"],
            "at a random time": self.cuts["time"],
            "events persisted": sum(oracle.persisted.total() for oracle in self.oracles),
            "events settled": sum(len(oracle.settled) for oracle in self.oracles),
            "unflushed sectors": sum(loss.unflushed for loss in self.losses),
            "of them lost": sum(loss.lost for loss in self.losses),
            "of them outdated": sum(loss.outdated for loss in self.losses),
            "settled events that came again, as the durability allows": sum(
                len(oracle.came_again) for oracle in self.oracles
            ),
        }


def main() -> None:
    """Cut the power as often as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--file-system", choices=DISK_SIZE, default="ext4")
    parser.add_argument("--durability", help="of the queue 'always': 'never' shows a failure")
    parser.add_argument("--record", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    queues = {name: dict(knobs) for name, knobs in QUEUES.items()}
    if options.durability:
        queues["always"]["durability"] = options.durability
    kind = options.file_system
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())  # ends the run after this cut
    directory = Path(tempfile.mkdtemp(prefix="turnlane-power-"))
    print(f"seed {options.seed}; console and disk are in {directory}", flush=True)
    content = make_file_system(kind, directory / "image", DISK_SIZE[kind])
    started, (http, flight) = time.monotonic(), (free_port(), free_port())
    with VolatileDisk(directory / "disk", content) as disk:
        machine = Machine(directory, disk.path, kind, queues, {http: HTTP, flight: FLIGHT})
        print(f"guest on {kind} ({machine.accelerator}): {time.monotonic() - started:.0f} s")
        run = Run(machine, disk, f"http://127.0.0.1:{http}", random.Random(options.seed))
        try:
            for cut in range(1, options.cuts + 1):
                if interrupted.is_set():
                    break
                run.live()
                total = sum(oracle.persisted.total() for oracle in run.oracles)
                seconds = time.monotonic() - started
                print(f"{cut} cuts, {total} events persisted, {seconds:.0f} s", flush=True)
            run.drain()
        except BaseException:
            (directory / "image").write_bytes(content)
            raise
    counts = {"file system": kind, "accelerator": machine.accelerator, **run.summarize()}
    print(json.dumps(counts, indent=2))
    if options.record:
        record_run("make test-power", counts)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
