"""A standalone cluster whose executors are killed: each event arrives once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyspark
import pytest

from tests.conftest import QUICK_JAVA, skip_or_fail
from tests.contract.harness import wait_until
from tests.ports import free_port
from tests.spark.nodes import Served, numbers, serving
from tests.spark.program import PATIENCE, Program, list_descendants, read_command_line

pytestmark = pytest.mark.timeout(900)

EVENTS = 300
BATCH = 100
CONFIG = """\
node: {data: unused}
nodes: {token_env: TURNLANE_TEST_TOKEN}
transform: slow:slowly
lane: {max_events: 100, workers: 2, worker_minimum_events: 50}
actions:
  - name: held        # its lane waits for more events than arrive, so its queue keeps all
    filter: cast(cast(value as string) as int) % 2 = 0
    queue: disk
    lane: {min_events: 1000000000, max_age: 1d}
    output: {type: file, path: held.jsonl}
spark:
  conf:
    spark.authenticate.secret: cluster-s3cret
    spark.executor.memory: 512m
    spark.executor.extraJavaOptions: JAVA
    spark.driver.bindAddress: 127.0.0.1
    spark.driver.host: 127.0.0.1
"""
SLOW = """\
import os
import time
from pathlib import Path

from pyspark.sql.functions import lit, udf


def each(value, place):  # pickled by its name: executors have to find this module
    assert os.environ["TURNLANE_TEST_TOKEN"] == "s3cret"
    Path(place, "begun-" + value.decode()).touch()
    time.sleep(0.04)
    return True


def slowly(events):
    place = lit(str(Path(__file__).parent))
    return events.where(udf(each, "boolean", useArrow=False)("value", place))
"""
"""A transform that reports the start of a task and waits, so that the test can kill it."""


AUTHENTICATION = """\
spark.authenticate true
spark.authenticate.secret cluster-s3cret
spark.network.crypto.enabled true
"""


class Cluster:
    """A master and two workers on loopback. They talk only to who knows their secret."""

    def __init__(self, place: Path, running: ExitStack) -> None:
        self._place = place
        self._running = running
        (place / "spark-defaults.conf").write_text(AUTHENTICATION)
        port = free_port()
        self.master = f"spark://127.0.0.1:{port}"
        self._start("master.Master", "--port", str(port), "--webui-port", str(free_port()))
        self._workers = [
            self._start(
                *("worker.Worker", "--cores", "1", "--memory", "1g", self.master),
                *("--webui-port", str(free_port()), "--work-dir", str(place / f"work-{at}")),
            )
            for at in range(2)
        ]

    def _start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        home = Path(pyspark.__file__).parent
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{what}"]
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_CONF_DIR": str(self._place),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
        }
        log = self._running.enter_context((self._place / "cluster.log").open("ab"))
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *arguments],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        self._running.callback(_end, process)
        return process

    def executors(self) -> list[int]:
        """Return the running executors, oldest first: each is a child of a worker."""
        started = [pid for worker in self._workers for pid in list_descendants(worker.pid)]
        backend = "CoarseGrainedExecutorBackend"
        return sorted(pid for pid in started if backend in read_command_line(pid))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if not (shutil.which("java") or "JAVA_HOME" in os.environ):
        skip_or_fail("Spark needs Java 17 or later")
    with ExitStack() as running:
        yield Cluster(tmp_path, running)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", {"main": {}}) as served:
        yield served


@pytest.fixture
def pipeline(
    cluster: Cluster, node: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Program]:
    """The pipeline, started after the cluster: executors have neither its token nor its modules."""
    monkeypatch.setenv("TURNLANE_TEST_TOKEN", "s3cret")
    (tmp_path / "c.yaml").write_text(CONFIG.replace("JAVA", QUICK_JAVA))
    (tmp_path / "slow.py").write_text(SLOW)
    where = ("--endpoint", node.url, "--master", cluster.master)
    program = Program(tmp_path, "pipeline", "c.yaml", "--no-reload", *where)
    yield program
    program.close()


def test_executor_killed_during_a_batch_loses_and_duplicates_nothing(
    cluster: Cluster, node: Served, pipeline: Program, tmp_path: Path
) -> None:
    node.publish("main", numbers(0, EVENTS))
    wait_until(lambda: node.queue("main").low > 0, "the first batch", PATIENCE)
    late = [tmp_path / f"begun-{number}" for number in range(BATCH, EVENTS)]
    wait_until(lambda: any(each.exists() for each in late), "another one to begin", PATIENCE)
    first = cluster.executors()
    assert len(first) == 2
    everything = [*first, *list_descendants(pipeline.process.pid)]
    assert not [each for each in map(read_command_line, everything) if "s3cret" in each]
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: node.queue("main").low == EVENTS, "all of them", PATIENCE)
    wait_until(lambda: bool({*cluster.executors()} - {*first}), "another executor", PATIENCE)
    expected = [value for value in numbers(0, EVENTS) if int(value) % 2 == 0]
    assert sorted(node.values("held")) == sorted(expected)
    pipeline.process.send_signal(signal.SIGTERM)
    assert pipeline.ended() == 0, pipeline.errors
