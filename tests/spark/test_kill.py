"""Driver and node are killed again and again: each event arrives where it should, once.

``turnlane run`` is a process, Spark a second one, the node a third. A producer publishes numbered
events all the time and remembers how many were persisted. In the end, from queue to queue every
event has come exactly once; into a file at least once; into Parquet exactly once; and a query that
counts has counted each once. A server that has a request and has not answered it gets those events
again, and no others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import turnlane
from tests.conftest import skip_or_fail
from tests.contract.harness import wait_until
from tests.outputs.web_servers import run_server
from tests.ports import free_port
from tests.spark.destinations import Destination
from tests.spark.program import PATIENCE, Program
from turnlane.client import Client
from turnlane.errors import TransportDown
from turnlane.events import block_of, get_values

KILLS = ("node", "node", "node", "driver", "both")
"""The processes to kill, in a random order. A node restarts much faster than Spark."""
ROUNDS = int(os.environ.get("TURNLANE_KILL_ROUNDS", "1"))
"""How often all of them are killed; before a release, more than once."""
TOO_SOON = 0.2
"""The probability of a kill before the last killed process has recovered."""
MOST_EVENTS = 1500
"""The most events between recovery and the next kill."""
AHEAD = 500
"""The most events without an ack."""

pytestmark = pytest.mark.timeout(900 * ROUNDS)

CONFIG = """\
node:
  data: data
  flight: {listen: "127.0.0.1:PORT"}
  http: {enabled: false}
main: {durability: interval}
parse: {format: json, on_error: dead}
actions:
  - name: held        # its lane waits for more events than arrive, so its queue keeps all
    filter: data:n::int % 3 = 0
    queue: disk
    lane: {min_events: 1000000000, max_age: 1d}
    output: {type: file, path: held.jsonl}
  - name: files
    filter: data:n::int % 2 = 0
    queue: disk
    output: {type: file, path: files.jsonl}
  - name: archive
    queue: disk
    lane: {min_events: 1}
    output: {type: spark, format: parquet, path: archive, columns: [cast(data:n as int) as n]}
  - name: counts      # keeps state
    queue: disk
    sql: SELECT data:n::int % 3 AS rest, count(*) AS events FROM events GROUP BY 1
    output_mode: complete
    output: {type: file, path: counts.jsonl}
  - name: direct      # called by the main lane itself
    filter: data:n::int % 2 = 1
    output: {type: file, path: direct.jsonl}
spark: {master: "local[2]"}
"""

WEB = """\
node:
  data: data
  flight: {listen: "127.0.0.1:PORT"}
  http: {enabled: false}
parse: none
actions:
  - name: web
    queue: disk
    output: {type: http, url: "URL", format: raw, timeout: 4m}
spark: {master: "local[2]"}
"""


STRICT = """\
node:
  data: data
  flight: {listen: "127.0.0.1:PORT"}
  http: {enabled: false}
parse: none
actions:
  - name: web
    filter: if(CAST(CAST(value AS string) AS int) % 40 = 7, raise_error('no'), true)
    queue: disk
    lane: {min_events: 1000000000, max_age: 1d}
    output: {type: file, path: web.jsonl}
spark: {master: "local[2]"}
"""


def value(number: int) -> bytes:
    """Every tenth event is no JSON: it goes only to the dead letters."""
    return b"no json %d" % number if is_broken(number) else b'{"n": %d}' % number


def is_broken(number: int) -> bool:
    return number % 10 == 9


class Publisher(threading.Thread):
    """Publishes numbered events until it is stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(name="publisher")
        self.url = url
        self.sent = 0
        self.acked = 0
        self.heard = threading.Condition()
        self.ending = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._publish()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self.failure = error

    def _publish(self) -> None:
        with turnlane.connect(self.url) as client:
            queue = client.queue("main", producer_id="publisher", batch_size=50)
            producer = queue.producer(ack="persisted", on_ack=self._hear)
            while not self.ending.is_set():
                producer.publish(value(self.sent))
                self.sent += 1
                with self.heard:
                    self.heard.wait_for(self._may_go_on)
            assert producer.flush(PATIENCE)

    def _may_go_on(self) -> bool:
        return self.sent - self.acked < AHEAD or self.ending.is_set()

    def _hear(self, ack: turnlane.Ack) -> None:
        with self.heard:
            self.acked += ack.count
            self.heard.notify()

    def end(self) -> None:
        self.ending.set()
        with self.heard:
            self.heard.notify()
        self.join(PATIENCE)


class KilledProcess:
    """``turnlane run``, started again after each kill at the same address."""

    def __init__(self, place: Path, config: str = CONFIG) -> None:
        port = free_port()
        self.place = place
        self.url = f"turnlane://127.0.0.1:{port}"
        (place / "c.yaml").write_text(config.replace("PORT", str(port)))
        self.client = turnlane.connect(self.url)
        self.lives: list[Program] = []
        self.live()

    def live(self) -> None:
        self.lives.append(Program(self.place, "run", "c.yaml", "--no-reload"))

    def kill(self, what: str) -> None:
        program = self.lives[-1]
        node = self.node()
        if what in {"node", "both"}:
            os.kill(node, signal.SIGKILL)
        if what in {"driver", "both"}:
            program.kill()
            self.live()

    def node(self) -> int:
        """Return the process of the node; it may run before it is reported."""
        wait_until(lambda: Path(f"/proc/{self._told_of()}").exists(), "the node", PATIENCE)
        return self._told_of()

    def _told_of(self) -> int:
        ready = [each["pid"] for each in self.lives[-1].hear() if each.get("state") == "ready"]
        return int(ready[-1]) if ready else -1

    def stop(self) -> int:
        self.lives[-1].process.send_signal(signal.SIGTERM)
        return self.lives[-1].ended()

    def close(self) -> None:
        self.client.close()
        for program in self.lives:
            program.close()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[KilledProcess]:
    with has_process(tmp_path) as victim:
        yield victim


@contextmanager
def has_process(place: Path, config: str = CONFIG) -> Iterator[KilledProcess]:
    if not (shutil.which("java") or "JAVA_HOME" in os.environ):
        skip_or_fail("Spark needs Java 17 or later")
    with closing(KilledProcess(place, config)) as victim:
        yield victim


@pytest.fixture
def publisher(victim: KilledProcess) -> Iterator[Publisher]:
    publisher = Publisher(victim.url)
    publisher.start()
    yield publisher
    publisher.end()


def test_each_event_arrives_once_after_any_kill(
    victim: KilledProcess, publisher: Publisher, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - to repeat a run that failed
    chance = random.Random(seed)
    for what in chance.sample(KILLS * ROUNDS, len(KILLS) * ROUNDS):
        wait_for_events(publisher, 1)
        if chance.random() > TOO_SOON:
            wait_for_progress(victim)
        wait_for_events(publisher, chance.randrange(MOST_EVENTS))
        victim.kill(what)
    wait_for_progress(victim)
    publisher.end()
    assert publisher.failure is None
    assert publisher.acked == publisher.sent
    for queue in ("main", "files", "archive", "counts"):
        wait_until(lambda q=queue: is_empty(victim.client, q), f"{queue} to drain", PATIENCE)  # type: ignore[misc]
    check(victim, publisher.sent)
    assert victim.stop() == 0, victim.lives[-1].errors


def wait_for_progress(victim: KilledProcess) -> None:
    """Wait until the main lane has committed a batch to the current node."""
    wait_until(lambda: get_held_end(victim) is not None, "a node", PATIENCE)
    before = get_held_end(victim) or 0
    wait_until(lambda: (get_held_end(victim, before) or 0) > before, "the main lane", PATIENCE)


def get_held_end(victim: KilledProcess, beyond: int = -1) -> int | None:
    """Ask the node for its queues, with a pause before; ``None`` while there is no node."""
    program = victim.lives[-1]
    assert program.process.poll() is None, program.errors
    try:
        return victim.client.wait("held", beyond, 1.0).end
    except TransportDown:
        threading.Event().wait(0.2)
        return None


def wait_for_events(publisher: Publisher, count: int) -> None:
    wanted = publisher.acked + count

    def heard() -> bool:
        assert publisher.failure is None, publisher.failure
        return publisher.acked >= wanted

    wait_until(heard, "events to be persisted", PATIENCE)


def is_empty(client: Client, queue: str) -> bool:
    ends = client.wait(queue, client.wait(queue, -1, 0.0).end, 0.2)
    return ends.low == ends.end


def check(victim: KilledProcess, sent: int) -> None:
    """Check the results after all kills."""
    whole = [number for number in range(sent) if not is_broken(number)]
    ledgers = {name: each["ledger"] for name, each in victim.client.stats().items()}
    assert all(ledger["adds_up"] for ledger in ledgers.values()), ledgers

    held = [json.loads(each)["n"] for each in contents(victim.client, "held")]
    assert sorted(held) == [number for number in whole if number % 3 == 0]
    broken = contents(victim.client, "main.dead")
    assert sorted(broken) == sorted(value(number) for number in filter(is_broken, range(sent)))

    even = [number for number in whole if number % 2 == 0]
    assert numbers(victim.place / "files.jsonl") == set(even)
    assert numbers(victim.place / "direct.jsonl") == set(whole) - set(even)
    assert count_accepted(ledgers["files"]) == len(even), "each event is in its queue once"

    lines = read_complete_lines(victim.place / "counts.jsonl")
    counts = {row["rest"]: row["events"] for row in map(json.loads, lines)}
    assert counts == Counter(number % 3 for number in whole), "the last counts include all events"
    assert count_accepted(ledgers["counts"]) == len(whole)

    assert sorted(read_archive(victim.place / "archive")) == whole
    assert count_accepted(ledgers["archive"]) == len(whole)
    assert count_accepted(ledgers["main"]) == sent


def numbers(path: Path) -> set[int]:
    return {json.loads(json.loads(line)["value"])["n"] for line in read_complete_lines(path)}


def read_complete_lines(path: Path) -> list[str]:
    """Return complete lines: a kill may leave a partial line, whose event is repeated."""
    lines = path.read_text().splitlines()
    whole = [line for line in lines if is_json(line)]
    assert len(lines) - len(whole) <= len(KILLS) * ROUNDS, "at most one for each kill"
    return whole


def is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def count_accepted(ledger: dict[str, Any]) -> int:
    """Return how many events a queue has accepted, without unacknowledged ones lost in a kill."""
    total: int = ledger["delivered"] + ledger["dead"] + ledger["pending"]
    return total


def contents(client: Client, queue: str) -> list[bytes]:
    return get_values([block for _, block in client.read(queue)])


def read_archive(place: Path) -> list[int]:
    """Read the files in Spark's log of the sink; files of failed batches are not in it."""
    entries: dict[str, Path] = {}
    for batch in (place / "_spark_metadata").iterdir():
        if batch.name.startswith("."):
            continue
        for line in batch.read_text().splitlines()[1:]:
            path = Path(json.loads(line)["path"].removeprefix("file://"))
            entries[path.name] = path
    tables = [pq.read_table(path, columns=["n"]) for path in entries.values()]
    return [int(row["n"]) for table in tables for row in table.to_pylist()]


# ── kills during a request ──


class Held:
    """A server that answers its requests only when the test allows it."""

    def __init__(self, at: Destination) -> None:
        self.values: set[bytes] = set()
        self.came = threading.Event()
        self.let_go = threading.Event()
        at.refuse = self._hold

    def _hold(self, values: list[bytes]) -> None:
        if not self.let_go.is_set():
            self.values.update(values)
            self.came.set()
            self.let_go.wait(PATIENCE)


def test_only_events_in_flight_at_a_kill_are_sent_again(
    tmp_path: Path,
) -> None:
    """First the driver is killed, then the node, each while the server has an open request."""
    with run_server() as server, has_process(tmp_path, WEB.replace("URL", server.url)) as victim:
        at = Destination(server)
        published = publish(victim, 0, 20)
        wait_for_ledger(victim, "web", delivered=20)
        opened: set[bytes] = set()
        for what in ("driver", "node"):
            held, before = Held(at), len(published)
            published |= publish(victim, before, 20)
            assert held.came.wait(PATIENCE)
            published |= publish(victim, before + 20, 20)
            wait_for_ledger(
                victim, "web", pending=40
            )  # Some are in the open request, others are not.
            node = Path(f"/proc/{victim.node()}")
            victim.kill(what)
            wait_until(lambda node=node: not node.exists(), "the node's end", PATIENCE)  # type: ignore[misc]
            held.let_go.set()
            wait_for_ledger(victim, "web", delivered=before + 40)
            opened |= held.values
        arrived = Counter(at.taken)
        ledgers = [each["ledger"] for each in victim.client.stats().values()]
        assert victim.stop() == 0, victim.lives[-1].errors
    assert set(arrived) == published, "each at least once"
    assert opened < published
    assert {each for each, times in arrived.items() if times > 1} <= opened
    assert max(arrived.values()) <= 2
    assert all(ledger["adds_up"] and not ledger["pending"] for ledger in ledgers), ledgers


def test_events_that_a_filter_cannot_handle_are_dead_once_after_kills(tmp_path: Path) -> None:
    """The processes are killed while the main lane searches for the bad events."""
    with has_process(tmp_path, STRICT) as victim:
        wait_for_ledger(victim, "web", accepted=0)
        for first, what in enumerate(("node", "both")):
            before = count_failures(victim)
            publish(victim, first * 200, 200)
            wait_until(lambda n=before: count_failures(victim) > n, "a failure", PATIENCE)  # type: ignore[misc]
            victim.kill(what)
        wait_for_ledger(victim, "web", accepted=390)
        wait_for_ledger(victim, "main", pending=0)
        ledgers = {name: each["ledger"] for name, each in victim.client.stats().items()}
        passed, dead = (contents(victim.client, name) for name in ("web", "main.dead"))
        assert victim.stop() == 0, victim.lives[-1].errors
    assert sorted(map(int, dead)) == list(range(7, 400, 40))
    assert sorted(map(int, passed)) == [number for number in range(400) if number % 40 != 7]
    assert all(ledger["adds_up"] for ledger in ledgers.values()), ledgers
    assert (ledgers["main"]["dead"], ledgers["main"]["pending"]) == (10, 0)


def count_failures(victim: KilledProcess) -> int:
    return victim.lives[-1].errors.count("lane.failed lane=main reason=")


def publish(victim: KilledProcess, first: int, count: int) -> set[bytes]:
    """Publish numbered events, all at once, and wait until they are persisted."""
    values = [b"%d" % number for number in range(first, first + count)]
    with victim.client.queue("main") as main:
        main.producer(ack="persisted").publish_block(block_of(values))
    return set(values)


def wait_for_ledger(victim: KilledProcess, queue: str, **wanted: int) -> None:
    """Wait until the ledger of a queue shows it; the node may be away for a while."""

    def is_so() -> bool:
        try:
            ledger: dict[str, Any] = victim.client.stats()[queue]["ledger"]
        except (TransportDown, KeyError):
            return False
        return wanted.items() <= ledger.items()

    wait_until(is_so, f"{queue}: {wanted}", PATIENCE)
