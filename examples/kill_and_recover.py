"""Kill a publisher half way, reopen its queue, and account for every event.

A child process publishes events into a disk queue and reports, over a pipe, how many are persisted.
When half of them are persisted, it is killed with SIGKILL. This process then opens the same
directory, publishes the missing events, and reads all events back. It checks that each event
arrives exactly once and in order, and that no event was lost that was reported as persisted.

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


def make_event(number: int) -> bytes:
    """Return an event of 100 bytes that contains its number."""
    return (b"event %010d " % number + FILLER)[:EVENT_BYTES]


def read_number(value: bytes) -> int | None:
    """Return the number of an event; ``None`` if the event is damaged."""
    digits = value[6:16]
    return int(digits) if digits.isdigit() and value == make_event(int(digits)) else None


def open_queue(path: Path) -> turnlane.Queue:
    """Open the queue of both processes. It syncs often: the kill comes between two syncs."""
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
        producer.publish_block(turnlane.block_of([make_event(number) for number in numbers]))


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


# ── the process that kills it and recovers ────────────────────────────────────────────────────────


class Account:
    """Counts what happened to the events."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.promised = 0  # Reported as persisted by the killed process.
        self.found = 0  # In the queue when it was opened again.
        self.arrived = 0
        self.repeated = 0
        self.damaged = 0
        self.out_of_order = 0
        self._arrived_numbers = bytearray(events)
        self._next = 0

    def add_batch(self, values: list[bytes]) -> None:
        """Count the events of a batch that was read."""
        self.arrived += len(values)
        for value in values:
            number = read_number(value)
            if number is None or number >= self.events:
                self.damaged += 1
                continue
            self.repeated += self._arrived_numbers[number]
            self._arrived_numbers[number] = 1
            self.out_of_order += number != self._next
            self._next = number + 1

    @property
    def lost(self) -> int:
        """Events that never arrived."""
        return self._arrived_numbers.count(0)

    @property
    def lost_persisted(self) -> int:
        """Events that were reported as persisted and are missing."""
        return max(0, self.promised - self.found)

    @property
    def adds_up(self) -> bool:
        """Whether each event arrived exactly once, undamaged and in order."""
        wrong = (self.lost, self.lost_persisted, self.repeated, self.damaged, self.out_of_order)
        return self.arrived == self.events and not any(wrong)


def kill_half_way(path: Path, account: Account, bar: Progress, task: TaskID) -> None:
    """Start the publisher, watch it, and kill it once half of the events are persisted."""
    command = [sys.executable, __file__, "--child", str(path), "--events", str(account.events)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:  # Lines from before the kill are still in the pipe.
            account.promised = int(line)
            bar.update(task, completed=account.promised)
            if account.promised >= account.events // 2:
                child.send_signal(signal.SIGKILL)
    bar.stop_task(task)
    if child.returncode != -signal.SIGKILL:
        raise SystemExit(
            f"the publisher ended by itself with status {child.returncode}, before it was killed"
        )


def publish_rest(queue: turnlane.Queue, account: Account, bar: Progress, task: TaskID) -> None:
    """Publish the missing events, and wait until they are persisted."""
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
        account.add_batch(get_values([batch.block]))
        batch.done()
        bar.advance(task, len(batch))


def run(path: Path, account: Account, console: Console) -> turnlane.Ledger:
    """Run all steps; returns the queue's ledger."""
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


def make_table(account: Account, *, adds_up: bool) -> Table:
    """Make a table of the account."""
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
    """Run the demonstration; returns 0 if all events are accounted for."""
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
    console.print(make_table(account, adds_up=adds_up))
    console.print(f"The queue's ledger: {ledger}", soft_wrap=True)
    return 0 if adds_up else 1


if __name__ == "__main__":
    sys.exit(main())
