"""Syslog over TCP into a disk queue, beside rsyslogd: the same sender, the same messages.

What is timed is getting in: from the first byte sent until the receiver has everything in its queue
and, with turnlane, everything is synced to disk. A consumer empties each queue meanwhile and throws
the messages away. rsyslogd closes a connection once it has queued what came over it; it is left at
its default of never syncing its queue files and of writing their index only at the end, which is
faster than what turnlane does and loses messages in a crash.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.lines import log_lines
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, figure
from turnlane.errors import QueueClosed
from turnlane.inputs.syslog import SyslogInput, SyslogSettings
from turnlane.node.node import Node
from turnlane.queues.holding import HoldingQueue

HEADER = b"<134>1 2026-08-14T09:00:00Z host app - - - "
SIZE = 100
CONNECTIONS = 2
START_SECONDS = 20.0

OURS, DISK, ASSISTED = "turnlane disk, always", "rsyslogd disk", "rsyslogd disk-assisted"

SENDER = """
import socket, sys, threading
port, repeats, count = (int(each) for each in sys.argv[2:])
content = open(sys.argv[1], "rb").read()
clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
def send(client):
    for _ in range(repeats):
        client.sendall(content)
    client.shutdown(socket.SHUT_WR)
    client.recv(1)
threads = [threading.Thread(target=send, args=(each,)) for each in clients]
print("ready", flush=True)
sys.stdin.readline()
for each in threads: each.start()
for each in threads: each.join()
print("done", flush=True)
"""
"""Sends a file so many times over each of its connections, until the receiver closes them."""

RSYSLOG = """
global(workDirectory="{place}")
module(load="imptcp")
input(type="imptcp" address="127.0.0.1" port="{port}" ruleset="in")
ruleset(name="in" queue.filename="queue" queue.timeoutEnqueue="600000" {queue}) {{
    action(type="omfile" file="/dev/null")
}}
"""
QUEUES = {
    DISK: 'queue.type="Disk" queue.size="100000000"',
    ASSISTED: 'queue.type="LinkedList" queue.size="50000" queue.lightDelayMark="0"',
}
"""A pure disk queue is bounded in messages too; imptcp is not slowed down by a delay mark."""


class Sender:
    """A process that is ready to send ``events`` messages, and is then timed."""

    def __init__(self, place: Path, port: int, events: int) -> None:
        lines = log_lines(events // CONNECTIONS, SIZE - len(HEADER) - 1)
        repeats = max(1, len(lines) // 20_000)
        lines = lines[: len(lines) // repeats]
        self.events = len(lines) * repeats * CONNECTIONS
        content = place / "content"
        content.write_bytes(b"".join(b"%s%s\n" % (HEADER, line) for line in lines))
        self._process = subprocess.Popen(
            [sys.executable, "-c", SENDER, *map(str, (content, port, repeats, CONNECTIONS))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._await("ready")

    def _await(self, word: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != word:
            raise RuntimeError("the sender failed")

    def send(self) -> None:
        """Send everything; returns when the receiver has closed the connections."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._await("done")

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate(timeout=START_SECONDS)


def rate(place: Path, port: int, events: int, secure: Callable[[], object]) -> float:
    """Events a second until all are sent, taken in, and as ``secure`` as they get."""
    with contextlib.closing(Sender(place, port, events)) as sender:
        started = time.perf_counter()
        sender.send()
        secure()
        return sender.events / (time.perf_counter() - started)


def turnlane_events(effort: Effort, events: int) -> float:
    """Into a node's disk queue, every message synced (group commit) before the clock stops."""
    knobs = {"durability": "always", "dequeue_batch_size": 50_000}
    settings = SyslogSettings.model_validate({"queue": "main", "tcp": "127.0.0.1:0"})
    with effort.place() as place, Node(place / "data", {"main": knobs}) as node:
        consumer = threading.Thread(target=_throw_away, args=(node.queue("main"),))
        consumer.start()
        with SyslogInput(settings, node) as source:
            source.start()
            found = rate(place, source.addresses["tcp"].port, events, partial(source.stop, 600.0))
        node.queue("main").finish()
        consumer.join()
    return found


def _throw_away(queue: HoldingQueue) -> None:
    with contextlib.suppress(QueueClosed):
        while True:
            queue.get().done()


def rsyslog_events(effort: Effort, kind: str, events: int) -> float:
    """Into a ruleset's queue of rsyslogd, fed by imptcp."""
    with effort.place() as place, _rsyslogd(place, QUEUES[kind]) as port:
        return rate(place, port, events, lambda: None)


@contextlib.contextmanager
def _rsyslogd(place: Path, queue: str) -> Iterator[int]:
    port = _free_port()
    config = place / "rsyslog.conf"
    config.write_text(RSYSLOG.format(place=place, port=port, queue=queue))
    program = rsyslogd()
    assert program is not None, "asked for before"
    daemon = subprocess.Popen([program, "-n", "-f", str(config), "-i", str(place / "pid")])
    try:
        _await_listener(port)
        yield port
    finally:
        daemon.kill()  # what is left in its queue nobody wants
        daemon.wait()


def rsyslogd() -> str | None:
    """Where rsyslogd is, if it is installed."""
    return shutil.which("rsyslogd", path="/usr/sbin:/usr/bin:/sbin:/bin")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _await_listener(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def run(effort: Effort) -> Outcome:
    """turnlane, and rsyslogd with both of its queues if it is installed."""
    events = effort.events(200_000, 1_000_000)
    contestants = {OURS: partial(turnlane_events, effort, events)}
    if rsyslogd() is not None:
        for kind in QUEUES:
            contestants[kind] = partial(rsyslog_events, effort, kind, events)
    found = {name: Series(rates) for name, rates in alternate(contestants, effort.rounds).items()}
    own = found[OURS]
    how = f"{SIZE}-byte messages over TCP into the synced disk queue / rsyslogd, imptcp into its "
    bounds = {DISK: ("disk", "disk queue, not synced", 2), ASSISTED: ("da", "disk-assisted one", 1)}
    figures = [
        figure(f"syslog_vs_rsyslog_{name}", own.over(found[kind]), how + what, unit="×", at_least=n)
        for kind, (name, what, n) in bounds.items()
        if kind in found
    ]
    table = Table(
        "Syslog over TCP into a queue",
        "events/s",
        (f"{SIZE} B",),
        {name: [Cell.of(series)] for name, series in found.items()},
        f"{CONNECTIONS} connections, newlines. turnlane syncs everything before the clock stops.",
    )
    remarks = [] if rsyslogd() else ["rsyslogd is not installed: nothing to compare with."]
    return Outcome(figures, [table], remarks)


if __name__ == "__main__":
    main(run, "Measure syslog over TCP beside rsyslogd.")
