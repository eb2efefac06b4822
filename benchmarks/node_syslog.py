"""Syslog over TCP into a disk queue, compared with rsyslogd: the same sender and messages.

The time starts with the first byte sent and ends when the receiver has all messages in its queue;
turnlane has also synced them to disk. At the same time a consumer empties each queue and drops the
messages. rsyslogd closes a connection after it has put all messages of it into its queue.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import rsyslog
from benchmarks.command import main
from benchmarks.effort import Effort
from benchmarks.lines import make_syslog_messages
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.rsyslog import ASSISTED, DISK
from benchmarks.sender import CONNECTIONS, Sender
from turnlane.errors import QueueClosed
from turnlane.inputs.syslog import SyslogInput, SyslogSettings
from turnlane.node.node import Node
from turnlane.queues.buffered import BufferedQueue

SIZE = 100
OURS = "turnlane disk, always"


def measure_rate(place: Path, port: int, events: int, secure: Callable[[], object]) -> float:
    """Return events per second until all are sent and received, and ``secure`` has returned."""
    messages = make_syslog_messages(20_000, SIZE - 1)
    with contextlib.closing(Sender(place, port, messages, events)) as sender:
        started = time.perf_counter()
        sender.send()
        secure()
        return sender.events / (time.perf_counter() - started)


def measure_turnlane(effort: Effort, events: int) -> float:
    """Send into a node's disk queue; every message is synced (group commit) within the time."""
    knobs = {"durability": "always", "dequeue_batch_size": 50_000}
    settings = SyslogSettings.model_validate({"queue": "main", "tcp": "127.0.0.1:0"})
    with effort.place() as place, Node(place / "data", {"main": knobs}) as node:
        consumer = threading.Thread(target=_drop_all, args=(node.queue("main"),))
        consumer.start()
        with SyslogInput(settings, node) as source:
            source.start()
            found = measure_rate(
                place, source.addresses["tcp"].port, events, partial(source.stop, 600.0)
            )
        node.queue("main").finish()
        consumer.join()
    return found


def _drop_all(queue: BufferedQueue) -> None:
    with contextlib.suppress(QueueClosed):
        while True:
            queue.get().done()


def measure_rsyslog(effort: Effort, kind: str, events: int) -> float:
    """Into a ruleset's queue of rsyslogd, fed by imptcp."""
    away = 'action(type="omfile" file="/dev/null")'
    with effort.place() as place, rsyslog.run_rsyslogd(place, kind, away) as port:
        return measure_rate(place, port, events, lambda: None)


def run(effort: Effort) -> Outcome:
    """turnlane, and rsyslogd with both of its queues if it is installed."""
    events = effort.events(200_000, 1_000_000)
    contestants = {OURS: partial(measure_turnlane, effort, events)}
    if rsyslog.find_program() is not None:
        for kind in rsyslog.QUEUES:
            contestants[kind] = partial(measure_rsyslog, effort, kind, events)
    found = {name: Series(rates) for name, rates in alternate(contestants, effort.rounds).items()}
    own = found[OURS]
    how = f"{SIZE}-byte messages over TCP into the synced disk queue / rsyslogd, imptcp into its "
    bounds = {DISK: ("disk", "disk queue, not synced", 2), ASSISTED: ("da", "disk-assisted one", 1)}
    figures = [
        make_figure(
            f"syslog_vs_rsyslog_{name}", own.over(found[kind]), how + what, unit="×", at_least=n
        )
        for kind, (name, what, n) in bounds.items()
        if kind in found
    ]
    table = Table(
        "Syslog over TCP into a queue",
        "events/s",
        (f"{SIZE} B",),
        {name: [Cell.of(series)] for name, series in found.items()},
        f"{CONNECTIONS} connections, newlines. turnlane's time includes the sync of all events.",
    )
    remarks = (
        []
        if rsyslog.find_program()
        else ["There is no comparison with rsyslogd: it is not installed."]
    )
    return Outcome(figures, [table], remarks)


if __name__ == "__main__":
    main(run, "Measure syslog over TCP, compared with rsyslogd.")
