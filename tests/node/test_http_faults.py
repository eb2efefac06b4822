"""Tests of HTTP under failing disks, hanging clients and killed processes."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.contract.harness import wait_until
from tests.node.http_harness import HttpNode, serve_http
from turnlane.events import get_values
from turnlane.node.node import Node
from turnlane.queues.buffered import BufferedQueue

DURABLE = {"orders": {"durability": "always"}, "other": {"kind": "memory"}}


def read_orders(at: HttpNode) -> list[bytes]:
    return read_values(at.orders)


def read_values(queue: BufferedQueue) -> list[bytes]:
    """Return all values: one read returns one stored block, which may not be all."""
    found: list[bytes] = []
    while (read := queue.read(queue.low + len(found), 100_000)) is not None:
        assert read[0] == queue.low + len(found)
        found += get_values([read[1]])
    return found


def test_full_disk_is_503_for_its_queue_until_it_recovers(tmp_path: Path) -> None:
    with serve_http(tmp_path, DURABLE) as at:
        assert at.post(b"before").status_code == 200
        at.disk.fill()
        pending = at.post(b"during", params={"timeout": "200ms"})
        assert (pending.status_code, pending.json()["error"]) == (503, "AckPending")
        wait_until(lambda: at.http.get("/readyz").status_code == 503)
        refused = at.post(b"refused", params={"timeout": "0"})
        assert (refused.status_code, refused.json()["error"]) == (503, "StorageFailed")
        assert refused.headers["retry-after"] == "1"
        assert at.post(b"x", "other").status_code == 200
        assert at.http.get("/healthz").status_code == 200
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(at.post, b"after", params={"timeout": "20s"})
            wait_until(lambda: at.orders.stats().blocked_publishers == 1)
            at.disk.unfill()
            assert waiting.result().status_code == 200
        assert read_orders(at) == [b"before", b"during", b"after"]
        wait_until(lambda: at.http.get("/readyz").status_code == 200)


def test_numbered_request_refused_on_a_full_disk_is_accepted_once(
    tmp_path: Path,
) -> None:
    headers = {"producer-id": "p", "sequence": "0"}
    with serve_http(tmp_path, DURABLE) as at:
        at.disk.fill()
        first = at.post([{"value": "a"}, {"value": "b"}], headers=headers, params={"timeout": "0"})
        assert first.status_code == 503
        at.disk.unfill()
        wait_until(lambda: at.http.get("/readyz").status_code == 200)
        again = at.post([{"value": "a"}, {"value": "b"}], headers=headers)
        assert again.status_code == 200
        assert again.json()["accepted"] + again.json()["repeated"] == 2
        assert read_orders(at) == [b"a", b"b"]


def test_events_of_a_failed_sync_are_not_answered_with_200(tmp_path: Path) -> None:
    """After a failed sync the disk is in doubt: the events are given up and reported."""
    with serve_http(tmp_path, DURABLE) as at:
        at.disk.fail("sync", times=3, match="chunk")
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: at.post(b"%d" % number), range(24)))
        told = {number for number, answer in enumerate(answers) if answer.status_code == 200}
        assert {answer.status_code for answer in answers} <= {200, 503}
    with serve_http(tmp_path, DURABLE) as at:
        there = {int(value) for value in read_orders(at)}
    assert told <= there


def test_ack_that_cannot_be_stored_is_503_and_the_lease_stays(tmp_path: Path) -> None:
    with serve_http(tmp_path, DURABLE) as at:
        at.post(b"x")
        lease = at.take().json()["lease"]
        at.disk.fail("write", times=None, match="journal", error=errno.EIO)
        at.disk.fail("sync", times=None, match="journal", error=errno.EIO)
        failed = at.http.post(f"/leases/{lease}/done")
        assert (failed.status_code, failed.json()["error"]) == (503, "AckNotStored")
        at.disk.clear()
        assert at.http.post(f"/leases/{lease}/done").status_code == 204
        assert at.orders.low == 1


def test_unreadable_disk_is_503(tmp_path: Path) -> None:
    with serve_http(tmp_path, DURABLE) as at:
        at.post(b"x")
    with serve_http(tmp_path, DURABLE) as at:
        at.disk.fail("read", times=None, match="chunk")
        failed = at.http.get("/queues/orders/peek")
        assert failed.status_code == 503
        at.disk.clear()
        assert at.http.get("/queues/orders/peek").json()["events"][0]["value"] == "x"


def test_stuck_and_slow_clients_do_not_affect_others(tmp_path: Path) -> None:
    with serve_http(tmp_path, DURABLE, idle_timeout="500ms") as at, contextlib.ExitStack() as stack:
        place = (at.plane.address.host, at.plane.address.port)
        head = b"POST /queues/orders/events HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        for begun in (b"", b"POST /que", head, head + b"half"):
            for _ in range(10):
                sock = stack.enter_context(socket.create_connection(place))
                sock.sendall(begun)
        for _ in range(20):
            assert at.post(b"x").status_code == 200
        # All forty are disconnected; the remaining connection is the client of this test.
        wait_until(lambda: at.plane._server.connections <= 1)
        assert len(read_orders(at)) == 20


def test_client_that_leaves_during_a_request_leaves_nothing_behind(tmp_path: Path) -> None:
    with serve_http(tmp_path, DURABLE) as at:
        place = (at.plane.address.host, at.plane.address.port)
        with socket.create_connection(place) as sock:
            sock.sendall(b"POST /queues/orders/events HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf")
        wait_until(lambda: at.plane._server.connections == 0)
        assert at.post(b"whole").json()["first"] == 0


def test_stop_answers_the_running_requests(tmp_path: Path) -> None:
    with serve_http(tmp_path, DURABLE) as at, ThreadPoolExecutor(1) as pool:
        at.disk.delay("sync", seconds=0.5, match="chunk")
        answer = pool.submit(at.post, b"x")
        wait_until(lambda: at.orders.end == 1)
        at.plane.stop(20)
        assert answer.result().status_code == 200


# ── kill -9 ─────────────────────────────────────────────────────────────────────────────────────

VICTIM = """
import sys, time
from pathlib import Path
from turnlane.node.http import HttpPlane
from turnlane.node.node import Node
from turnlane.serving.auth import Authority
from turnlane.serving.http_server import WebSettings

node = Node(Path(sys.argv[1]), {"orders": {"durability": "always"}})
plane = HttpPlane(node, Authority(), WebSettings(listen=":0")).start()
print(plane.url, flush=True)
time.sleep(600)
"""


class KilledProcess:
    """A node in its own process, which the test kills."""

    def __init__(self, data: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(data)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Sender(threading.Thread):
    """Publishes numbered values until it is stopped; repeats each until it is persisted."""

    def __init__(self, name: str, urls: list[str], *, numbered: bool) -> None:
        super().__init__(name=name)
        self.acked: list[str] = []
        self.stop = threading.Event()
        self._urls = urls
        self._numbered = numbered

    def run(self) -> None:
        number = 0
        with httpx.Client(timeout=10) as http:
            while not self.stop.is_set():
                values = [f"{self.name}-{number + each}" for each in range(3)]
                headers = {"producer-id": self.name, "sequence": str(number)}
                if self._send(http, values, headers if self._numbered else {}):
                    self.acked += values
                    number += 3

    def _send(self, http: httpx.Client, values: list[str], headers: dict[str, str]) -> bool:
        body = "\n".join(json.dumps({"value": value}) for value in values)
        kind = {"content-type": "application/x-ndjson"}
        try:
            url = f"{self._urls[-1]}/queues/orders/events"
            return http.post(url, content=body, headers=kind | headers).status_code == 200
        except httpx.TransportError:
            time.sleep(0.01)  # the node is down
            return False


@pytest.mark.timeout(120)
def test_killed_node_has_every_acked_event_and_numbered_ones_once(tmp_path: Path) -> None:
    urls: list[str] = []
    senders = [Sender(f"n{at}", urls, numbered=True) for at in range(2)]
    senders += [Sender(f"p{at}", urls, numbered=False) for at in range(2)]
    for life in range(2):
        victim = KilledProcess(tmp_path)
        try:
            urls.append(victim.url)
            if not life:
                for sender in senders:
                    sender.start()
            goals = [len(sender.acked) + 30 for sender in senders]
            pairs = list(zip(senders, goals, strict=True))
            wait_until(lambda: all(len(each.acked) >= goal for each, goal in pairs), patience=30)  # noqa: B023
        finally:
            if life == 1:
                for sender in senders:
                    sender.stop.set()
                    sender.join()
            victim.kill()
    with Node(tmp_path, {"orders": {"durability": "always"}}) as node:
        counts = Counter(value.decode() for value in read_values(node.queue("orders")))
    for sender in senders:
        assert all(counts[value] >= 1 for value in sender.acked)
    twice = [value for value, count in counts.items() if count > 1 and value.startswith("n")]
    assert twice == []
    for sender in senders[:2]:  # and in order
        order = [each for each in counts if each.startswith(f"{sender.name}-")]
        assert order == [f"{sender.name}-{number}" for number in range(len(order))]
