"""Kill a publisher half way, reopen its queue, and account for every event.

A child process publishes events into a disk queue and tells this one, over a pipe, how many are
persisted. Half way it is killed with SIGKILL, in the middle of whatever it is doing. This process
then opens the same directory, publishes what is missing, reads everything back, and checks that
each event came exactly once, in order, and that nothing reported as persisted was lost.

    python examples/kill_and_recover.py [--events 1000000]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import turnlane
from turnlane.events import get_values

EVENT_BYTES = 100
BLOCK_EVENTS = 5_000
FILLER = b"." * EVENT_BYTES


def event(number: int) -> bytes:
    """An event of 100 bytes that says which one it is."""
    return (b"event %010d " % number + FILLER)[:EVENT_BYTES]


def number_of(value: bytes) -> int | None:
    """Which event it is; ``None`` if it is not as it was published."""
    digits = value[6:16]
    return int(digits) if digits.isdigit() and value == event(int(digits)) else None


def open_queue(path: Path) -> turnlane.Queue:
    """The queue both processes use; synced often, so that the kill comes between two syncs."""
    return turnlane.open_queue(
        kind="disk",
        path=path,
        durability="interval",
        sync_interval="20ms",
        dequeue_batch_size=BLOCK_EVENTS,
    )


def publish(producer: turnlane.Producer, first: int, end: int) -> None:
    """Publish events ``first`` to ``end - 1``, a block at a time."""
    for begin in range(first, end, BLOCK_EVENTS):
        numbers = range(begin, min(begin + BLOCK_EVENTS, end))
        producer.publish_block(turnlane.block_of([event(number) for number in numbers]))


# ── the process that gets killed ──────────────────────────────────────────────────────────────────


def publish_until_killed(path: Path, events: int) -> None:
    """Publish, and print how many events are persisted each time an ack says so."""
    persisted = 0

    def report(ack: turnlane.Ack) -> None:
        nonlocal persisted
        persisted += ack.count
        print(persisted, flush=True)

    with open_queue(path) as queue:
        producer = queue.producer(ack="persisted", on_ack=report)
        publish(producer, 0, events)
        signal.pause()


# ── the process that kills it and picks up the pieces ─────────────────────────────────────────────


class Account:
    """What became of the events."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.promised = 0  # reported as persisted by the process that was killed
        self.found = 0  # in the queue when it was opened again
        self.arrived = 0
        self.repeated = 0
        self.damaged = 0
        self.out_of_order = 0
        self._seen = bytearray(events)
        self._next = 0

    def arrive(self, values: list[bytes]) -> None:
        """Enter a batch that was read."""
        self.arrived += len(values)
        for value in values:
            number = number_of(value)
            if number is None or number >= self.events:
                self.damaged += 1
                continue
            self.repeated += self._seen[number]
            self._seen[number] = 1
            self.out_of_order += number != self._next
            self._next = number + 1

    @property
    def lost(self) -> int:
        """Events that never arrived."""
        return self._seen.count(0)

    @property
    def lost_persisted(self) -> int:
        """Events that were reported as persisted and were not there afterwards."""
        return max(0, self.promised - self.found)

    @property
    def adds_up(self) -> bool:
        """Whether each event came exactly once, whole and in order."""
        wrong = (self.lost, self.lost_persisted, self.repeated, self.damaged, self.out_of_order)
        return self.arrived == self.events and not any(wrong)


def kill_half_way(path: Path, account: Account, bar: Progress, task: TaskID) -> None:
    """Start the publisher, watch it, and kill it once half of the events are persisted."""
    command = [sys.executable, __file__, "--child", str(path), "--events", str(account.events)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:  # what it wrote before it died is still in the pipe
            account.promised = int(line)
            bar.update(task, completed=account.promised)
            if account.promised >= account.events // 2:
                child.send_signal(signal.SIGKILL)
    bar.stop_task(task)
    if child.returncode != -signal.SIGKILL:
        raise SystemExit(f"the publisher ended by itself, with status {child.returncode}")


def publish_rest(queue: turnlane.Queue, account: Account, bar: Progress, task: TaskID) -> None:
    """Publish from the first missing event on, and wait until all of it is persisted."""
    bar.update(task, total=account.events - account.found)

    def report(ack: turnlane.Ack) -> None:
        bar.advance(task, ack.count)

    with queue.producer(ack="persisted", on_ack=report) as producer:
        publish(producer, account.found, account.events)
        producer.flush()


def drain(queue: turnlane.Queue, account: Account, bar: Progress, task: TaskID) -> None:
    """Read the queue to its end."""
    queue.finish()
    while True:
        try:
            batch = queue.get()
        except turnlane.QueueClosed:
            return
        account.arrive(get_values([batch.block]))
        batch.done()
        bar.advance(task, len(batch))


def run(path: Path, account: Account, console: Console) -> turnlane.Ledger:
    """All of it; returns the queue's own ledger."""
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:

        def step(what: str) -> TaskID:
            return bar.add_task(what, total=account.events)

        kill_half_way(path, account, bar, step("publish, kill -9 half way"))
        started = time.perf_counter()
        with open_queue(path) as queue:
            opened = time.perf_counter() - started
            account.found = queue.stats().ledger.accepted
            bar.console.print(
                f"Killed at {account.promised:,} persisted; reopened in {opened * 1000:.0f} ms, "
                f"{account.found:,} there."
            )
            publish_rest(queue, account, bar, step("publish the rest"))
            drain(queue, account, bar, step("drain"))
            return queue.stats().ledger


def table_of(account: Account, *, adds_up: bool) -> Table:
    """The account as a table."""
    table = Table(title="Every event accounted for" if adds_up else "It does not add up")
    table.add_column("events")
    table.add_column("", justify="right")
    for what, count in (
        ("reported persisted before the kill", account.promised),
        ("found when the queue was reopened", account.found),
        ("published afterwards", account.events - account.found),
        ("arrived", account.arrived),
    ):
        table.add_row(what, f"{count:,}")
    table.add_section()
    for what, count in (
        ("persisted, then lost", account.lost_persisted),
        ("lost", account.lost),
        ("repeated", account.repeated),
        ("damaged", account.damaged),
        ("out of order", account.out_of_order),
    ):
        table.add_row(what, f"{count:,}", style="red" if count else "green")
    return table


def main() -> int:
    """Run the demonstration; 0 if everything adds up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        publish_until_killed(arguments.child, arguments.events)
        return 0
    console = Console()
    account = Account(arguments.events)
    with tempfile.TemporaryDirectory(prefix="turnlane-") as directory:
        ledger = run(Path(directory) / "queue", account, console)
    adds_up = account.adds_up and ledger.adds_up and ledger.delivered == account.events
    console.print(table_of(account, adds_up=adds_up))
    console.print(f"The queue's ledger: {ledger}", soft_wrap=True)
    return 0 if adds_up else 1


if __name__ == "__main__":
    sys.exit(main())
