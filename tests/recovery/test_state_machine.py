"""Each kind of queue behaves like a plain list, under any operations in any order.

The model is a list of values and their outcomes; the offset of a value is its index. Kinds with a
disk are also closed, opened again and crashed: a copy of the directory, made at any moment while
the queue is open, replaces the queue. ``test_proxy_machine.py`` has the machine of the proxy.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.conftest import IN_CI
from tests.contract.harness import PATIENCE, Acks, wait_until
from tests.queue_internals import state_of
from tests.recovery.copyable_disk import CopyableDisk
from tests.recovery.hooked_disk import get_block_values
from turnlane.errors import BatchFreed, QueueClosed, QueueEmpty, RetryLater
from turnlane.events import block_of
from turnlane.ledger import Outcome
from turnlane.queues import open_queue
from turnlane.queues.api import Batch, Producer
from turnlane.queues.buffered import BufferedQueue

SIZE = 60
PERSISTED, DELIVERED = "persisted", "delivered"

Values = list[bytes]
T = TypeVar("T")
picks = st.integers(0, 9)


class QueueMachine(RuleBasedStateMachine):
    """Compares a queue with a list. No rule does anything that could block without end."""

    knobs: ClassVar[dict[str, Any]]
    bounded = True
    """Whether every pending event counts against the bound."""
    durable = False
    persists = False
    """Whether everything published is persisted in the end, without a consumer."""
    keeps_offsets = False
    """Whether a settled offset is never given to another event, even after a crash."""
    cancels_all: ClassVar[bool | None] = False
    """Whether a cancel takes all unread events, or none; ``None``: those that are in memory."""

    @initialize(lazy=st.booleans())
    def start(self, lazy: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.disk = CopyableDisk()
        self.lazy = lazy and self.durable
        """Whether the queue writes only when it has to."""
        self.lives = 0
        self.path = self.folder / "0"
        self.next_value = 0
        self.forget_everything()
        self.open()

    def forget_everything(self) -> None:
        """Reset the model to a new queue."""
        self.events: Values = []
        self.outcomes: dict[int, Outcome] = {}
        self.attempts: dict[int, int] = {}
        self.returned: set[int] = set()

    def open(self) -> None:
        self.queue = self.opened()
        self.begin()

    def begin(self) -> None:
        """A queue was opened: all events that were in flight come again."""
        self.kept = self.unsettled(range(len(self.events)))
        self.returned = {at for at in self.attempts if at not in self.outcomes}
        self.out: list[Batch] = []
        self.freed: set[int] = set()
        self.handed_out: set[int] = set()
        self.acks = {PERSISTED: Acks(), DELIVERED: Acks()}
        self.producers: dict[str, Producer] = {
            level: self.queue.producer(ack=level, on_ack=acks) for level, acks in self.acks.items()
        }
        self.published: dict[str, list[int]] = {PERSISTED: [], DELIVERED: []}
        self.cancelled = {PERSISTED: 0, DELIVERED: 0}

    def opened(self) -> BufferedQueue:
        more: dict[str, Any] = {"path": self.path, "disk": self.disk} if self.durable else {}
        if self.lazy:
            more |= {"sync_interval": "1h", "stale_flush": "1h"}
        queue = open_queue(**self.knobs | more, size=SIZE)
        assert isinstance(queue, BufferedQueue)
        return queue

    # The model

    @property
    def pending(self) -> int:
        return len(self.events) - len(self.outcomes)

    @property
    def low(self) -> int:
        return next(
            (at for at in range(len(self.events)) if at not in self.outcomes), len(self.events)
        )

    @property
    def held(self) -> set[int]:
        """Offsets in flight that were not settled by offset."""
        out = {at for batch in self.out for at in range(batch.place.first, batch.place.end)}
        return out - self.outcomes.keys()

    def unsettled(self, offsets: range) -> set[int]:
        return {at for at in offsets if at not in self.outcomes}

    def fresh(self) -> list[int]:
        """Return the offsets that were not handed out since the queue was opened."""
        return [
            at
            for at in range(self.low, len(self.events))
            if at not in self.outcomes and at not in self.returned and at not in self.handed_out
        ]

    def new_values(self, count: int) -> Values:
        first = self.next_value
        self.next_value += count
        return [b"%05d" % number + bytes(number * 7 % 50) for number in range(first, first + count)]

    def tried(self, call: Callable[[], T], *, fits: bool) -> T:
        """Call until only the bound can refuse, not a writer that is behind; return the result."""
        found = call()
        for _ in range(100):
            if found or not fits or not self.bounded:
                break
            wait_until(
                lambda: not state_of(self.queue).admission.is_held, "a writer that has caught up"
            )
            found = call()
        return found

    def accept(self, level: str, new: Values) -> None:
        self.published[level] += range(len(self.events), len(self.events) + len(new))
        self.events += new

    # Publishing

    levels = st.sampled_from([PERSISTED, DELIVERED])

    @rule(level=levels, count=st.integers(1, 10))
    def publish(self, level: str, count: int) -> None:
        for value in self.new_values(count):
            if self.bounded and self.pending >= SIZE:
                break
            assert self.producers[level].publish(value, timeout=PATIENCE)
            self.accept(level, [value])

    @rule(level=levels, count=st.integers(1, 30))
    def publish_block(self, level: str, count: int) -> None:
        if self.bounded:
            count = min(count, SIZE - self.pending)
        if count:
            new = self.new_values(count)
            done = self.producers[level].publish_block(block_of(new), timeout=PATIENCE)
            assert done == (len(self.events), count, 0, 0)
            self.accept(level, new)

    @rule(level=levels)
    def try_publish(self, level: str) -> None:
        new = self.new_values(1)
        fits = self.pending < SIZE
        entered = self.tried(lambda: self.producers[level].try_publish(new[0]), fits=fits)
        if self.bounded:
            assert entered is fits
        if entered:
            self.accept(level, new)

    @rule(level=levels, count=st.integers(1, SIZE))
    def try_publish_block(self, level: str, count: int) -> None:
        new = self.new_values(count)
        fits = self.pending + count <= SIZE
        block = block_of(new)
        done = self.tried(lambda: self.producers[level].try_publish_block(block), fits=fits)
        if self.bounded:
            assert (done is not None) is fits
        if done is not None:
            self.accept(level, new)

    @precondition(lambda self: self.cancels_all is not False)
    @rule(level=levels)
    def cancel(self, level: str) -> None:
        """Take back the unread events of a producer, and make another one."""
        mine = set(self.published[level]) & set(self.fresh())
        self.producers[level].close(cancel=True)
        taken = {at for at in mine if self.queue.is_settled(at, at + 1)}
        if self.cancels_all is not None:
            assert taken == (mine if self.cancels_all else set())
        self.outcomes |= dict.fromkeys(taken, Outcome.CANCELLED)
        self.cancelled[level] += len(taken)
        self.published[level] = [at for at in self.published[level] if at not in taken]
        on_ack = self.acks[level]
        self.producers[level] = self.queue.producer(ack=level, on_ack=on_ack)

    # Consuming

    @rule(limit=st.integers(1, 40))
    def get(self, limit: int) -> None:
        expected = sorted(self.returned) or self.fresh()
        if not expected:
            with pytest.raises(QueueEmpty):
                self.queue.get(limit, timeout=0)
            return
        batch = self.queue.get(limit, timeout=PATIENCE)
        offsets = list(range(batch.place.first, batch.place.end))
        assert len(offsets) <= limit
        assert offsets == expected[: len(offsets)]
        assert get_block_values(batch.block) == [self.events[at] for at in offsets]
        assert {self.attempts.get(at, 1) for at in offsets} == {batch.attempt}
        self.returned.difference_update(offsets)
        self.handed_out.update(offsets)
        self.out.append(batch)

    def pick(self, which: int) -> tuple[Batch, set[int]]:
        """Return one of the batches in flight. Not drawn: their number depends on timing."""
        batch = self.out[which % len(self.out)]
        return batch, self.unsettled(range(batch.place.first, batch.place.end))

    @rule(which=picks, dead=st.booleans(), twice=st.booleans())
    def settle(self, which: int, dead: bool, twice: bool) -> None:
        if not self.out:
            return
        batch, offsets = self.pick(which)
        verb = batch.dead if dead else batch.done
        verb()
        if twice:
            batch.done()
        self.out.remove(batch)
        self.outcomes.update(dict.fromkeys(offsets, Outcome.DEAD if dead else Outcome.DELIVERED))

    @rule(which=picks)
    def release(self, which: int) -> None:
        if not self.out:
            return
        batch, offsets = self.pick(which)
        if batch.place.first in self.freed and offsets:
            with pytest.raises(BatchFreed):
                batch.release()
            return
        batch.release()
        self.out.remove(batch)
        self.returned.update(offsets)
        self.attempts.update(dict.fromkeys(offsets, batch.attempt + 1))

    @rule(which=picks)
    def free(self, which: int) -> None:
        if not self.out:
            return
        batch, offsets = self.pick(which)
        batch.free()
        if offsets:
            self.freed.add(batch.place.first)
            with pytest.raises(BatchFreed):
                _ = batch.block

    # By offset

    @rule(back=st.integers(0, 80), count=st.integers(1, 40))
    def read(self, back: int, count: int) -> None:
        first = max(0, len(self.events) - back)
        found = self.queue.read(first, count)
        readable = [at for at in self.fresh() if first <= at < first + count]
        if found is None:
            # Events in flight have another copy only on a disk.
            assert not readable or readable[0] != max(first, self.low)
            return
        start, block = found
        assert start >= first
        assert get_block_values(block) == self.events[start : start + block.num_rows]

    @rule(count=st.integers(1, 20))
    def settle_by_offset(self, count: int) -> None:
        """Settle like a reader that keeps its own position: the events read, oldest first."""
        fresh = self.fresh()[:count]
        if fresh and fresh[-1] - fresh[0] == len(fresh) - 1:
            self.queue.settle(fresh[0], fresh[-1] + 1)
            self.outcomes.update(dict.fromkeys(fresh, Outcome.DELIVERED))

    @rule(back=st.integers(0, 80), count=st.integers(1, 40))
    def settle_anything_by_offset(self, back: int, count: int) -> None:
        """Settle events in any state: in flight, given back, or settled before."""
        first = max(0, len(self.events) - back)
        self.queue.settle(first, first + count)
        for at in range(first, min(first + count, len(self.events))):
            self.outcomes.setdefault(at, Outcome.DELIVERED)
            self.returned.discard(at)

    # Waiting

    @rule()
    def acks_come(self) -> None:
        """Every producer gets exact acks for its events below the first unsettled one."""
        low = self.low
        settled = sum(at < low for at in self.published[DELIVERED])
        self.acks[DELIVERED].wait_for(settled)
        if low == len(self.events):
            dropped = self.cancelled[DELIVERED]
            wait_until(lambda: self.acks[DELIVERED].dropped == dropped, "acks of cancelled events")
        settled = sum(at < low for at in self.published[PERSISTED])
        wait_until(lambda: self.acks[PERSISTED].count >= settled, f"{settled} acks")

    @rule()
    def flush(self) -> None:
        """If a disk keeps everything, everything published is persisted in the end."""
        if self.persists:
            assert self.producers[PERSISTED].flush(PATIENCE)
            self.acks[PERSISTED].wait_for(len(self.published[PERSISTED]))

    # Ending, and beginning again

    def expected_lost(self) -> Counter[str]:
        """Return how many events a close drops, by outcome."""
        return Counter() if self.durable else Counter(closed=self.pending)

    def close(self) -> None:
        pending, expected = self.pending, self.expected_lost()
        self.queue.close()
        ledger = self.queue.stats().ledger
        assert ledger.adds_up
        assert ledger.pending == pending - expected.total()
        with pytest.raises(QueueClosed):
            self.queue.get(timeout=0)

    def after_close(self) -> None:
        """Apply the close to the model."""
        if not self.durable:
            self.forget_everything()

    @rule(finish=st.booleans())
    def restart(self, finish: bool) -> None:
        if finish:
            self.queue.finish()
            with pytest.raises(QueueClosed):
                self.producers[DELIVERED].publish(b"too late")
        self.close()
        self.after_close()
        self.open()

    @precondition(lambda self: self.durable)
    @rule(cut=st.integers(0, 40), persisted=st.booleans())
    def crash(self, cut: int, persisted: bool) -> None:
        """The process dies: its files stay as they are, with a torn frame at the end."""
        if persisted and self.persists:
            self.publish(PERSISTED, 1)  # and everything before it
            self.flush()
        promised = self.promised()
        self.lives += 1
        copy = self.disk.copy(self.path, self.folder / str(self.lives))
        self.close()
        self.path = copy
        chunks = sorted(copy.glob("*.chunk"))
        if chunks:
            data = chunks[-1].read_bytes()
            chunks[-1].write_bytes(data + data[:cut])
        self.queue = self.opened()
        self.lose(promised)
        self.begin()

    def promised(self) -> set[int]:
        """Return the offsets that survive a crash: on disk, or up to the last persisted one."""
        acked = self.published[PERSISTED][: self.acks[PERSISTED].count]
        safe = range(acked[-1] + 1) if acked else ()
        return self.kept.union(safe) - self.outcomes.keys()

    def lose(self, promised: set[int]) -> None:
        """Events only in memory are missing; beyond the end of the queue they never existed.

        Settled events stay settled: the model has none that comes back.
        """
        end = self.queue.end
        assert end <= len(self.events)
        if self.keeps_offsets:
            assert end > max(self.outcomes, default=-1)
        del self.events[end:]
        self.outcomes = {at: outcome for at, outcome in self.outcomes.items() if at < end}
        self.attempts = {at: attempt for at, attempt in self.attempts.items() if at < end}
        here = self.found()
        assert promised <= here
        missing = self.unsettled(range(end)) - here
        self.outcomes |= dict.fromkeys(missing, Outcome.MISSING)

    def found(self) -> set[int]:
        """Return the readable events of a queue that was just opened; settle others as missing."""
        found: set[int] = set()
        at = self.queue.low
        while (read := self.queue.read(at, SIZE)) is not None:
            first, block = read
            at = first + block.num_rows
            assert get_block_values(block) == self.events[first:at]
            found.update(range(first, at))
        return found

    @rule()
    def drain(self) -> None:
        """Take out all remaining events, in order."""
        if self.out:
            return
        while self.returned or self.fresh():
            self.get(40)
            self.settle(0, dead=False, twice=False)
        assert self.pending == 0
        self.acks_come()

    # Invariants

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        stats = self.queue.stats()
        tally = Counter(self.outcomes.values())
        assert stats.ledger.adds_up
        assert stats.ledger.accepted == len(self.events)
        assert stats.ledger.delivered == tally[Outcome.DELIVERED]
        assert stats.ledger.dead == tally[Outcome.DEAD]
        assert stats.ledger.dropped.get("missing", 0) == tally[Outcome.MISSING]
        assert stats.ledger.dropped.get("cancelled", 0) == tally[Outcome.CANCELLED]
        assert stats.ledger.pending == self.pending
        assert stats.in_flight == len(self.held)
        assert self.queue.low == self.low
        if self.bounded:
            assert stats.size == self.pending
        else:
            assert 0 <= stats.size <= self.pending
        assert stats.bytes >= 0
        assert stats.size > 0 or stats.bytes == 0

    @invariant()
    def acks_are_never_early(self) -> None:
        if hasattr(self, "queue"):
            low = self.low
            assert self.acks[DELIVERED].count <= sum(at < low for at in self.published[DELIVERED])
            assert self.acks[PERSISTED].count <= len(self.published[PERSISTED])
            for level in (PERSISTED, DELIVERED):
                assert self.acks[level].dropped <= self.cancelled[level]

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.queue.close()
            shutil.rmtree(self.folder)


class MemoryMachine(QueueMachine):
    knobs: ClassVar[dict[str, Any]] = {"kind": "memory"}
    cancels_all = True


class DiskMachine(QueueMachine):
    knobs: ClassVar[dict[str, Any]] = {
        "kind": "disk",
        "durability": "interval",
        "sync_interval": "5ms",
        "chunk_size": "1Ki",
        "memory_bytes": "1Ki",
        "write_buffer": "512",
    }
    durable = True
    persists = True
    keeps_offsets = True


class DiskAssistedMachine(QueueMachine):
    knobs: ClassVar[dict[str, Any]] = {
        "kind": "disk_assisted",
        "sync_interval": "5ms",
        "chunk_size": "1Ki",
        "high_watermark": 30,
        "low_watermark": 10,
    }
    bounded = False
    durable = True
    cancels_all = None

    def expected_lost(self) -> Counter[str]:
        # A consumer has the freed events; a close drops them unless they were on disk already.
        return Counter()

    @rule(which=picks)
    def free(self, which: int) -> None:
        """Do nothing: a close drops freed events or not, depending on whether they were spilled."""


class DirectMachine(RuleBasedStateMachine):
    """Compares a direct queue with two lists: the delivered and the dead events."""

    fates = st.sampled_from(["done", "dead", "release", "raise"])

    @initialize()
    def start(self) -> None:
        self.fate = "done"
        self.taken: Values = []
        self.expected: Values = []
        self.tally: Counter[str] = Counter()
        self.end = 0
        self.acks = Acks()
        self.queue = open_queue(kind="direct", consumer=self.consume)
        self.producer = self.queue.producer(ack=DELIVERED, on_ack=self.acks)

    def consume(self, batch: Batch) -> None:
        values = get_block_values(batch.block)
        if self.fate == "raise":
            raise RetryLater("not now")
        getattr(batch, self.fate)()
        if self.fate != "release":
            self.taken += values

    @rule(fate=fates, count=st.integers(1, 5), single=st.booleans())
    def publish(self, fate: str, count: int, single: bool) -> None:
        """The publisher learns the result in any case."""
        self.fate = fate
        new = [b"%05d" % number for number in range(self.end, self.end + (1 if single else count))]
        self.end += len(new)  # refused events use up offsets
        kept = fate in ("done", "dead")
        with contextlib.nullcontext() if kept else pytest.raises(RetryLater):
            if single:
                self.producer.publish(new[0])
            else:
                self.producer.publish_block(block_of(new))
        self.tally["pushes" if kept else "releases"] += 1
        if kept:
            self.expected += new
            self.tally[fate] += len(new)

    @rule()
    def acks_come(self) -> None:
        self.acks.wait_for(len(self.expected))
        ends = [ack.end for ack in self.acks.received]
        assert ends == sorted(set(ends))

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        stats = self.queue.stats()
        assert stats.ledger.adds_up
        assert (stats.ledger.delivered, stats.ledger.dead) == (
            self.tally["done"],
            self.tally["dead"],
        )
        assert (stats.pushes, stats.releases) == (self.tally["pushes"], self.tally["releases"])
        assert (stats.ledger.pending, stats.in_flight) == (0, 0)
        assert self.taken == self.expected
        assert self.acks.count <= len(self.expected)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.queue.close(drain=True)
            self.acks.wait_for(len(self.expected))


FEW = settings(max_examples=60 if IN_CI else 10, stateful_step_count=40, deadline=None)

TestMemory = MemoryMachine.TestCase
TestDisk = DiskMachine.TestCase
TestDiskAssisted = DiskAssistedMachine.TestCase
TestDirect = DirectMachine.TestCase
TestDirect.settings = FEW
TestMemory.settings = TestDisk.settings = TestDiskAssisted.settings = FEW
