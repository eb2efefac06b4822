"""Events that policies dropped: once a publisher was told, the ledger counts them for good."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, cast

import pytest

from tests.contract.harness import PATIENCE, Task, wait_until
from tests.node.http_harness import serve_http
from tests.queue_internals import store_of
from tests.recovery.hooked_disk import HookedDisk, Opener
from tests.recovery.killed_publisher import EVENTS, publish_over_http, publish_singles
from turnlane.events import block_of
from turnlane.ledger import Outcome

POLICIES: dict[str, dict[str, Any]] = {
    "newest": {"size": 4, "full_behavior": "drop_newest"},
    "severity": {"size": 100, "discard_mark": 2, "discard_severity": 6},
    "sampled": {"sampling_interval": 4},
}
NEVER_DUE = {"sync_interval": "1h", "stale_flush": "1h"}
"""The writer does nothing by itself."""

PROMISES: dict[str, dict[str, Any]] = {
    "always, accepted": {"kind": "disk", "durability": "always", "ack": "accepted"},
    "always, persisted": {"kind": "disk", "durability": "always", "ack": "persisted"},
    "interval, persisted": {"kind": "disk", **NEVER_DUE, "ack": "persisted"},
    "never, persisted": {"kind": "disk", "durability": "never", "ack": "persisted"},
    "disk-assisted": {"kind": "disk_assisted", "durability": "always", "ack": "accepted"},
}
CASES = [
    pytest.param(policy, promise, id=f"{policy}, {promise}")
    for policy in POLICIES
    for promise in PROMISES
    if (policy, promise) != ("newest", "disk-assisted")  # it spills instead
]


def kill_after(
    process_server: ForkServerContext,
    publish: Callable[..., None],
    path: Path,
    knobs: dict[str, Any],
) -> int:
    """Kill a publisher as soon as it was told of its drops; return how many they are."""
    ack = knobs.pop("ack")
    ours, theirs = process_server.Pipe()
    life = process_server.Process(target=publish, args=(path, knobs, ack, theirs), daemon=True)
    life.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE), "the publisher is stuck"
        return cast("int", ours.recv())
    finally:
        life.kill()
        life.join()


@pytest.mark.parametrize(("policy", "promise"), CASES)
def test_process_killed_after_a_publisher_was_told_of_drops_has_counted_them(
    policy: str, promise: str, path: Path, process_server: ForkServerContext, opener: Opener
) -> None:
    knobs = POLICIES[policy] | PROMISES[promise]
    told = kill_after(process_server, publish_singles, path, dict(knobs))
    ledger = opener.stored(knobs["kind"], path).stats().ledger
    assert ledger.dropped == {policy: told}
    assert ledger.accepted <= EVENTS


@pytest.mark.parametrize("policy", POLICIES)
def test_node_killed_after_http_told_of_drops_has_counted_them(
    policy: str, tmp_path: Path, process_server: ForkServerContext
) -> None:
    knobs = POLICIES[policy] | PROMISES["interval, persisted"]
    told = kill_after(process_server, publish_over_http, tmp_path, dict(knobs))
    with serve_http(tmp_path, {"orders": {}}) as served:
        ledger = served.orders.stats().ledger
    assert ledger.dropped == {policy: told}
    assert ledger.accepted == EVENTS


@pytest.mark.parametrize("kind", ["disk", "disk_assisted"])
def test_drops_of_a_publisher_that_waits_for_nothing_are_recorded_within_the_interval(
    kind: str, tmp_path: Path, opener: Opener
) -> None:
    queue = opener.stored(kind, tmp_path / "queue", sampling_interval=4, sync_interval="10ms")
    told = queue.producer().publish_block(block_of([b"x"] * EVENTS)).dropped
    before = queue.stats().meta_syncs
    wait_until(lambda: count_recorded(queue) == told, "the record")
    shutil.copytree(tmp_path / "queue", tmp_path / "killed")
    assert opener.stored(kind, tmp_path / "killed").stats().ledger.dropped == {"sampled": told}
    wait_until(lambda: queue.stats().meta_syncs > before, "the sync")


@pytest.mark.parametrize("durability", ["always", "interval"])
def test_publisher_hears_of_its_drop_after_the_journal_is_synced(
    durability: str, path: Path, disk: HookedDisk, opener: Opener
) -> None:
    knobs: dict[str, Any] = POLICIES["newest"] | {"size": 1, "durability": durability}
    if durability == "interval":
        knobs |= NEVER_DUE
    queue = opener.stored("disk", path, disk=disk, **knobs)
    assert queue.producer(ack="persisted").publish(b"kept")
    pause = disk.pause("sync", match="journal")
    told = Task(lambda: queue.producer(ack="persisted").publish(b"dropped"))
    pause.await_reached()
    assert Task(queue.stats).result().ledger.dropped == {"newest": 1}
    assert told.running
    pause.end()
    assert told.result() is False


def test_publishers_that_drop_at_the_same_time_count_every_drop_once(
    tmp_path: Path, opener: Opener
) -> None:
    knobs = {"size": 1, "full_behavior": "drop_newest", "durability": "always"}
    queue = opener.stored("disk", tmp_path / "queue", **knobs)
    assert queue.producer().publish(b"kept")

    def publish() -> int:
        return sum(not queue.producer().publish(b"dropped") for _ in range(50))

    told = sum(task.result() for task in [Task(publish) for _ in range(8)])
    shutil.copytree(tmp_path / "queue", tmp_path / "killed")
    assert opener.stored("disk", tmp_path / "killed").stats().ledger.dropped == {"newest": told}


def test_drop_on_a_journal_that_fails_is_recorded_later(
    path: Path, disk: HookedDisk, opener: Opener
) -> None:
    knobs = {"size": 1, "full_behavior": "drop_newest", "durability": "always"}
    queue = opener.stored("disk", path, disk=disk, **knobs)
    assert queue.producer(ack="persisted").publish(b"kept")
    disk.fail("write", match="journal")
    assert not queue.producer().publish(b"dropped")
    wait_until(lambda: count_recorded(queue) == 1, "the next attempt")


def count_recorded(queue: Any) -> int:
    """Return how many drops the journal counts."""
    totals = store_of(queue).journal.state().totals
    return sum(totals.get(each, 0) for each in Outcome if each.is_drop)
