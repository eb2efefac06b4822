"""The processes of a pipeline are killed again and again: each event arrives where it should, once.

``turnlane run`` is a process, Spark's Java a second one, the node a third, and Java starts Python
processes for tasks and sources. A producer publishes numbered events all the time and remembers how
many were persisted. In the end, from queue to queue every event has come exactly once; into a file
and to a web server at least once; into Parquet exactly once; and queries that count, count in
windows and join have had each once. A server that has a request and has not answered it gets those
events again, and no others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

import turnlane
from tests.conftest import skip_or_fail
from tests.contract.harness import wait_until
from tests.outputs.web_servers import run_server
from tests.ports import free_port
from tests.spark.destinations import Destination
from tests.spark.program import PATIENCE, Program, list_descendants, read_command_line
from turnlane.client import Client
from turnlane.errors import TransportDown
from turnlane.events import block_of, get_values

ROUNDS = int(os.environ.get("TURNLANE_KILL_ROUNDS", "1"))
"""How often all of them are killed; ``make test-chaos`` does it more than once."""
REPORT = os.environ.get("TURNLANE_KILL_REPORT")
"""A file to which each test appends what it has done, as a line of JSON."""
TOO_SOON = 0.2
"""The probability of a kill before the last killed process has recovered."""
MOST_EVENTS = 1500
"""The most events between recovery and the next kill."""
AHEAD = 500
"""The most events without an ack."""
MARKERS = 2
"""Events without a number, which end the windows."""
DEFAULT_CHANCE = random.Random(0)

pytestmark = pytest.mark.timeout(900 * ROUNDS)

HEAD = """\
node:
  data: data
  flight: {listen: "127.0.0.1:PORT"}
  http: {enabled: false}
main: {durability: interval}
parse: {format: json, on_error: dead}
spark: {master: "local[2]"}
actions:
  - name: direct      # called by the main lane itself
    filter: data:n::int % 2 = 1
    output: {type: file, path: direct.jsonl}
"""

ROUTES = f"""\
{HEAD}
  - name: held        # its lane waits for more events than arrive, so its queue keeps all
    filter: data:n::int % 3 = 0
    queue: disk
    lane: {{min_events: 1000000000, max_age: 1d}}
    output: {{type: file, path: held.jsonl}}
  - name: files
    filter: data:n::int % 2 = 0
    queue: disk
    output: {{type: file, path: files.jsonl}}
  - name: web
    filter: data:n::int % 4 = 0
    queue: disk
    output: {{type: http, url: "URL", format: raw}}
  - name: archive
    filter: data:n::int >= 0
    queue: disk
    lane: {{min_events: 1}}
    output: {{type: spark, format: parquet, path: archive, columns: [cast(data:n as int) as n]}}
"""
"""Outputs of every kind, without state."""

QUERIES = f"""\
{HEAD}
  - name: counts
    filter: data:n::int >= 0
    queue: disk
    sql: SELECT data:n::int % 3 AS rest, count(*) AS events FROM events GROUP BY 1
    output_mode: complete
    output: {{type: file, path: counts.jsonl}}
  - {{name: orders, filter: data:n::int % 5 = 0, queue: disk, output: {{type: discard}}}}
  - name: pairs
    filter: data:n::int % 5 = 1
    queue: disk
    sql: |
      SELECT e.data:n::int AS n, o.data:n::int AS partner
      FROM events e JOIN orders o ON e.data:n::int = o.data:n::int + 1
    with_queues: [orders]
    output: {{type: http, url: "URL", format: jsonl}}
  - name: windows     # a count is final when the watermark has passed its window
    queue: disk
    sql: |
      SELECT unix_seconds(window.start) AS second, count(data:n) AS events
      FROM events GROUP BY window(timestamp, '1 second')
    watermark: 10s
    output: {{type: spark, format: parquet, path: windows}}
"""
"""Queries that keep state: a count, a join and windows."""

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


def get_time(number: int) -> int:
    """Return the timestamp of an event: a hundred events have the same second."""
    return number * 10_000


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
                producer.publish(value(self.sent), timestamp=get_time(self.sent))
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


def is_java(pid: int) -> bool:
    return "org.apache.spark.deploy.SparkSubmit" in read_command_line(pid)


def is_worker(pid: int) -> bool:
    command = read_command_line(pid)
    is_python = "pyspark." in command or "turnlane.spark.daemon" in command
    return is_python and not is_java(pid)


def is_search(pid: int) -> bool:
    return "pyspark.sql.worker.lookup_data_sources" in read_command_line(pid)


class KilledProcess:
    """``turnlane run``, started again after each kill at the same address."""

    def __init__(self, place: Path, config: str) -> None:
        port = free_port()
        self.place = place
        self.url = f"turnlane://127.0.0.1:{port}"
        (place / "c.yaml").write_text(config.replace("PORT", str(port)))
        self.client = turnlane.connect(self.url)
        self.lives: list[Program] = []
        self.live()

    def live(self) -> None:
        self.lives.append(Program(self.place, "run", "c.yaml", "--no-reload"))

    def kill(self, what: str, chance: random.Random = DEFAULT_CHANCE) -> None:
        """Kill a process; ``worker`` is any of Java's Python processes, of tasks or of sources."""
        program = self.lives[-1]
        if what in {"node", "both"}:
            os.kill(self.node(), signal.SIGKILL)
        if what in {"driver", "both"}:
            program.kill()
            self.live()
        if what == "java":  # One that does not start the first time ends the program.
            wait_until(self._has_lanes, "lanes", PATIENCE)
            self._kill_any(is_java, chance)
        if what == "worker":
            self._kill_any(is_worker, chance)

    def _kill_any(self, is_wanted: Callable[[int], bool], chance: random.Random) -> None:
        while True:
            pid = chance.choice(self.wait_for_processes(is_wanted))
            command = read_command_line(pid)[-100:]
            with suppress(ProcessLookupError):  # It may have ended by itself.
                os.kill(pid, signal.SIGKILL)
                print(f"killed {command}")  # noqa: T201 - to find the reason of a failure
                return

    def _has_lanes(self) -> bool:
        return any(each["event"] == "lanes" for each in self.lives[-1].hear())

    def wait_for_processes(self, is_wanted: Callable[[int], bool]) -> list[int]:
        """Return the processes below the driver that are wanted, at least one."""

        def list_wanted() -> list[int]:
            return [*filter(is_wanted, list_descendants(self.lives[-1].process.pid))]

        wait_until(list_wanted, is_wanted.__name__, PATIENCE)
        return list_wanted() or self.wait_for_processes(is_wanted)

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
def web() -> Iterator[Destination]:
    with run_server() as server:
        yield Destination(server)


@contextmanager
def has_process(place: Path, config: str) -> Iterator[KilledProcess]:
    if not (shutil.which("java") or "JAVA_HOME" in os.environ):
        skip_or_fail("Spark needs Java 17 or later")
    with closing(KilledProcess(place, config)) as victim:
        try:
            yield victim
        except BaseException:
            print(victim.lives[-1].errors[-10_000:])  # noqa: T201 - to find the reason
            raise


class Scenario(NamedTuple):
    """A pipeline, and the processes that are killed, in a random order.

    A node and a Python process restart much faster than Spark.
    """

    config: str
    kills: Sequence[str]
    queues: Sequence[str]
    """The queues that are empty in the end. The main lane fills the first one all the time."""
    check: Callable[[Results], dict[str, int]]
    """Checks the results; returns how many events came more than once, and where."""


@pytest.mark.parametrize("name", ["routes", "queries"])
def test_each_event_arrives_once_after_any_kill(
    name: str, web: Destination, tmp_path: Path
) -> None:
    scenario = SCENARIOS[name]
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - to repeat a run that failed
    chance = random.Random(seed)
    kills = chance.sample([*scenario.kills] * ROUNDS, len(scenario.kills) * ROUNDS)
    started = time.monotonic()
    with has_process(tmp_path, scenario.config.replace("URL", web.url)) as victim:
        with publish_all_the_time(victim.url) as publisher:
            for what in kills:
                wait_for_events(publisher, 1)
                if chance.random() > TOO_SOON:
                    wait_for_progress(victim, scenario.queues[0])
                wait_for_events(publisher, chance.randrange(MOST_EVENTS))
                victim.kill(what, chance)
                seconds = time.monotonic() - started
                print(f"{seconds:.1f} s, {publisher.acked} events: killed {what}")  # noqa: T201
            wait_for_progress(victim, scenario.queues[0])
        assert publisher.failure is None
        assert publisher.acked == publisher.sent
        # The first marker moves the watermark beyond all windows, the second ends them.
        for days in range(1, MARKERS + 1):
            publish_marker(victim, days)
            for queue in ("main", *scenario.queues):
                wait_until(partial(is_empty, victim.client, queue), f"{queue} to drain", PATIENCE)
        results = Results(victim, publisher.sent, web.taken, len(kills))
        check_main_queue(results)
        repeated = scenario.check(results)
        assert victim.stop() == 0, victim.lives[-1].errors
    if REPORT:
        done = {"scenario": name, "seed": seed, "events": publisher.sent, "repeated": repeated}
        done |= {"kills": Counter(kills), "seconds": round(time.monotonic() - started)}
        with Path(REPORT).open("a") as report:
            report.write(f"{json.dumps(done)}\n")


@contextmanager
def publish_all_the_time(url: str) -> Iterator[Publisher]:
    publisher = Publisher(url)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.end()


def publish_marker(victim: KilledProcess, days: int) -> None:
    """Publish an event without a number, which is newer than all others."""
    moment = 86_400_000_000 * days + get_time(1 << 30)
    with victim.client.queue("main") as main:
        main.producer(ack="persisted").publish(b"{}", timestamp=moment)


def wait_for_progress(victim: KilledProcess, queue: str) -> None:
    """Wait until the main lane has committed a batch with events for a queue."""
    wait_until(lambda: get_end(victim, queue) is not None, "a node", PATIENCE)
    before = get_end(victim, queue) or 0
    wait_until(lambda: (get_end(victim, queue, before) or 0) > before, "the main lane", PATIENCE)


def get_end(victim: KilledProcess, queue: str, beyond: int = -1) -> int | None:
    """Ask the node for the end of a queue, with a pause before; ``None`` while there is no node."""
    program = victim.lives[-1]
    assert program.process.poll() is None, program.errors
    try:
        return victim.client.wait(queue, beyond, 1.0).end
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


class Results:
    """The state of all queues and destinations after the kills."""

    def __init__(self, victim: KilledProcess, sent: int, web: list[bytes], kills: int) -> None:
        self.place = victim.place
        self.client = victim.client
        self.web = [json.loads(line) for line in web]
        self.kills = kills
        self.sent = sent
        self.whole = [number for number in range(sent) if not is_broken(number)]
        self.ledgers = {name: each["ledger"] for name, each in victim.client.stats().items()}

    def count_accepted(self, queue: str) -> int:
        """Return how many events a queue has accepted, without those that a kill has lost."""
        ledger = self.ledgers[queue]
        total: int = ledger["delivered"] + ledger["dead"] + ledger["pending"]
        return total

    def read_numbers(self, name: str) -> list[int]:
        return [json.loads(json.loads(line)["value"])["n"] for line in self.read_lines(name)]

    def read_lines(self, name: str) -> list[str]:
        """Return complete lines: a kill may leave a partial line, whose event is repeated."""
        lines = (self.place / name).read_text().splitlines()
        whole = [line for line in lines if is_json(line)]
        assert len(lines) - len(whole) <= self.kills, "at most one for each kill"
        return whole


def check_main_queue(results: Results) -> None:
    assert all(ledger["adds_up"] for ledger in results.ledgers.values()), results.ledgers
    assert results.count_accepted("main") == results.sent + MARKERS
    broken = contents(results.client, "main.dead")
    assert sorted(broken) == sorted(map(value, filter(is_broken, range(results.sent))))


def check_routes(results: Results) -> dict[str, int]:
    whole = results.whole
    held = [json.loads(each)["n"] for each in contents(results.client, "held")]
    assert sorted(held) == [number for number in whole if number % 3 == 0]

    even = [number for number in whole if number % 2 == 0]
    files, direct = (results.read_numbers(f"{name}.jsonl") for name in ("files", "direct"))
    web = [event["n"] for event in results.web]
    assert set(files) == set(even)
    assert set(direct) == set(whole) - set(even)
    assert set(web) == {number for number in whole if number % 4 == 0}
    assert results.count_accepted("files") == len(even), "each event is in its queue once"

    assert sorted(row["n"] for row in read_archive(results.place / "archive")) == whole
    assert results.count_accepted("archive") == len(whole)
    return {
        "files": count_repeated(files),
        "direct": count_repeated(direct),
        "web": count_repeated(web),
    }


def check_queries(results: Results) -> dict[str, int]:
    whole = results.whole
    direct = results.read_numbers("direct.jsonl")
    assert set(direct) == {number for number in whole if number % 2 == 1}

    counts = {
        row["rest"]: row["events"] for row in map(json.loads, results.read_lines("counts.jsonl"))
    }
    assert counts == Counter(number % 3 for number in whole), "the last counts include all events"
    assert results.count_accepted("counts") == len(whole)

    pairs = [(row["n"], row["partner"]) for row in results.web]
    assert set(pairs) == {(number, number - 1) for number in whole if number % 5 == 1}

    windows = [(row["second"], row["events"]) for row in read_archive(results.place / "windows")]
    seconds = Counter(get_time(number) // 1_000_000 for number in whole)
    assert sorted(each for each in windows if each[1]) == sorted(seconds.items()), "each once"
    assert results.count_accepted("windows") == len(whole) + MARKERS
    return {"direct": count_repeated(direct), "pairs": count_repeated(pairs)}


SCENARIOS = {
    "routes": Scenario(
        ROUTES,
        ("node", "worker", "java", "node", "driver"),
        ("archive", "files", "web"),
        check_routes,
    ),
    "queries": Scenario(
        QUERIES,
        ("worker", "node", "java", "worker", "both"),
        ("windows", "counts", "orders", "pairs"),
        check_queries,
    ),
}
"""Two tests that can run at the same time."""


def count_repeated(came: Sequence[object]) -> int:
    return len(came) - len(set(came))


def is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def contents(client: Client, queue: str) -> list[bytes]:
    return get_values([block for _, block in client.read(queue)])


def read_archive(place: Path) -> list[dict[str, Any]]:
    """Read the files in Spark's log of the sink; files of failed batches are not in it."""
    entries: dict[str, Path] = {}
    for batch in (place / "_spark_metadata").iterdir():
        if batch.name.startswith("."):
            continue
        for line in batch.read_text().splitlines()[1:]:
            path = Path(json.loads(line)["path"].removeprefix("file://"))
            entries[path.name] = path
    return [row for path in entries.values() for row in pq.read_table(path).to_pylist()]


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


def test_pipeline_runs_after_the_search_for_data_sources_was_killed(tmp_path: Path) -> None:
    """Spark searches only once, with a Python process of its own."""
    with run_server() as server, has_process(tmp_path, WEB.replace("URL", server.url)) as victim:
        for pid in victim.wait_for_processes(is_search):
            os.kill(pid, signal.SIGKILL)
        publish(victim, 0, 20)
        wait_for_ledger(victim, "web", delivered=20)
        assert "spark.source_registered" in victim.lives[-1].errors, "the search was killed"
        assert victim.stop() == 0, victim.lives[-1].errors


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
