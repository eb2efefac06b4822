"""Tests of a node: its queues, its data directory and its housekeeping."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest

from tests.contract.harness import wait_until
from turnlane.errors import (
    ConfigError,
    DirectoryLocked,
    DirectoryUnusable,
    EventTooLarge,
    NoSuchQueue,
    NotAQueue,
    QueueExists,
    SchemaMismatch,
    StorageFailed,
)
from turnlane.events import BASE_SCHEMA, block_of
from turnlane.node import node as node_module
from turnlane.node.node import Node, load_registry
from turnlane.node.staging import Staging
from turnlane.queues.api import Durability
from turnlane.testing import FaultyDisk


def test_configured_queues_are_created_on_disk(tmp_path: Path) -> None:
    with Node(tmp_path, {"orders": {}, "quick": {"kind": "memory", "size": 10}}) as node:
        assert node.queue("orders").settings.kind == "disk"
        assert node.queue("orders").settings.path == tmp_path / "queues" / "orders"
        assert node.queue("quick").settings.size == 10


def test_events_survive_a_restart(tmp_path: Path) -> None:
    with Node(tmp_path, {"orders": {}}) as node:
        node.queue("orders").producer(ack="persisted").publish(b"one")
    with Node(tmp_path, {"orders": {}}) as node:
        assert [event.value for event in node.queue("orders").get(timeout=5)] == [b"one"]


def test_queue_created_at_run_time_survives_a_restart(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.create("later", durability="always", max_bytes="1Gi")
    with Node(tmp_path) as node:
        settings = node.queue("later").settings
        assert (settings.durability, settings.max_bytes) == (Durability.ALWAYS, 1 << 30)


def test_configuration_overrides_a_queue_created_at_run_time(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.create("orders", durability="always")
    with Node(tmp_path, {"orders": {"durability": "never"}}) as node:
        assert node.queue("orders").settings.durability is Durability.NEVER


def test_existing_queue_with_the_same_settings_is_returned(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        first = node.create("orders", size=10)
        assert node.create("orders", size=10) is first
        with pytest.raises(QueueExists, match="'orders'"):
            node.create("orders", size=11)


def test_dropped_queue_stays_away_after_a_restart(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.create("orders").producer(ack="persisted").publish(b"one")
        node.drop("orders")
        with pytest.raises(NoSuchQueue, match="there are: none"):
            node.queue("orders")
        assert not (tmp_path / "queues" / "orders").exists()
    with Node(tmp_path) as node:
        assert not node.queues()
        assert node.create("orders").end == 0


def test_configured_queue_cannot_be_dropped(tmp_path: Path) -> None:
    with Node(tmp_path, {"orders": {}}) as node, pytest.raises(ConfigError, match="remove it"):
        node.drop("orders")


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        (
            "a",
            {"path": "/elsewhere"},
            "path: remove it: a node keeps its queues in its data directory",
        ),
        ("a", {"kind": "direct"}, "kind: a node cannot have direct queues"),
        ("a", {"kind": "dsk"}, "kind: must be one of .*did you mean disk"),
        ("a", {"sise": 3}, "sise: there is no such knob; did you mean size"),
        ("../up", {}, "name"),
        ("", {}, "name"),
    ],
)
def test_wrong_setting_is_named(
    name: str, knobs: dict[str, object], message: str, tmp_path: Path
) -> None:
    with Node(tmp_path) as node:
        with pytest.raises(ConfigError, match=message):
            node.create(name, **knobs)
        assert not node.queues()


def test_failed_start_closes_everything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Node(tmp_path, {"good": {}, "bad": {"kind": "direct"}})
    Node(tmp_path, {"good": {}}).close()


def test_second_node_in_a_directory_is_refused(tmp_path: Path) -> None:
    with Node(tmp_path), pytest.raises(DirectoryLocked, match="held by this process"):
        Node(tmp_path)
    Node(tmp_path).close()


def test_data_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(DirectoryUnusable, match="data"):
        Node(tmp_path / "data")


def make_queues_at_run_time(data: Path) -> None:
    """Make a node's directory with a queue of three events, and an empty one."""
    with Node(data, {"configured": {}}) as node:
        node.create("orders", size=500).producer(ack="persisted").publish_block(
            block_of([b"1", b"2", b"3"])
        )
        node.create("small", size=7, kind="disk_assisted")


DAMAGES = [
    b"",
    b"{",
    b"[]",
    b"7",
    b"null",
    b"\xa5" * 50,
    b"[" * 100_000,
    b'{"orders": 7, "small": {}}',
    b'{"orders": {"size": "many"}, "small": {}}',
    b'{"orders": {"kind": "direct"}, "small": {}}',
    b'{"orders": {"path": "/"}, "small": {}}',
    b'{"../orders": {}, "small": {}}',
    None,
]
HIDDEN_DAMAGES = [
    b'{"ordess": {"size": 500}, "small": {}}',
    b'{"orders": {"dropped": ["x"]}, "small": {}}',
    b'{"orders": {"dropped": "00"}}',
    b"{}",
]
"""Only the checksum tells that something is wrong."""


@pytest.mark.parametrize(
    ("damage", "has_checksum"),
    [
        *itertools.product(DAMAGES, [True, False]),
        *itertools.product(HIDDEN_DAMAGES, [True]),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_node_with_a_damaged_registry_starts_with_the_queues_on_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes | None, has_checksum: bool
) -> None:
    """It says what it could not read, keeps the file, and writes a new one."""
    make_queues_at_run_time(tmp_path)
    registry = tmp_path / "queues.json"
    if not has_checksum:
        (tmp_path / "queues.json.crc").unlink()
    if damage is None:
        registry.unlink()
        registry.mkdir()
    else:
        registry.write_bytes(damage)
    with Node(tmp_path, {"configured": {}}) as node:
        assert set(node.queues()) == {"configured", "orders", "small"}
        assert node.queue("orders").stats().ledger.pending == 3
    (error,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert error.getMessage().startswith(f"node.registry_damaged file={registry}")
    assert (tmp_path / "quarantine" / "queues.json").exists()
    caplog.clear()
    with Node(tmp_path, {"configured": {}}) as node:
        assert set(node.queues()) == {"configured", "orders", "small"}
    assert "ERROR" not in {each.levelname for each in caplog.records}


def test_node_starts_without_a_run_time_queue_that_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_queues_at_run_time(tmp_path)
    orders, away = tmp_path / "queues" / "orders", tmp_path / "away"
    orders.rename(away)
    orders.mkdir()
    (orders / "queue.json").write_text('{"format": 99}')
    for _ in range(2):  # the registry keeps it, also if the node writes a new one
        caplog.clear()
        with Node(tmp_path, {"configured": {}}) as node:
            assert set(node.queues()) == {"configured", "small"}
            with pytest.raises(StorageFailed, match=r"'orders' could not be opened: .*queue\.json"):
                node.queue("orders")
            node.create("more")
            node.drop("more")
        (error,) = [each for each in caplog.records if each.levelname == "ERROR"]
        assert error.getMessage().startswith("queue.not_opened queue=orders path=")
    with pytest.raises(NotAQueue):
        Node(tmp_path, {"orders": {}})
    (orders / "queue.json").unlink()
    orders.rmdir()
    away.rename(orders)
    with Node(tmp_path, {"configured": {}}) as node:
        assert node.queue("orders").stats().ledger.pending == 3
        assert node.queue("orders").settings.size == 500


def test_any_flipped_bit_of_the_registry_loses_no_queue(tmp_path: Path) -> None:
    make_queues_at_run_time(tmp_path)
    registry = tmp_path / "queues.json"
    data = registry.read_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        registry.write_bytes(flipped)
        assert load_registry(tmp_path)[1]
    with Node(tmp_path) as node:
        assert set(node.queues()) == {"configured", "orders", "small"}
        assert node.queue("orders").stats().ledger.pending == 3


def test_lost_registry_is_noticed_and_written_again(tmp_path: Path) -> None:
    make_queues_at_run_time(tmp_path)
    (tmp_path / "queues.json").unlink()
    with Node(tmp_path, {"configured": {}}) as node:
        assert set(node.queues()) == {"configured", "orders", "small"}
    assert set(json.loads((tmp_path / "queues.json").read_bytes())) == {"orders", "small"}


def test_queue_removed_from_the_configuration_is_not_opened_by_an_intact_registry(
    tmp_path: Path,
) -> None:
    make_queues_at_run_time(tmp_path)
    with Node(tmp_path) as node:
        assert set(node.queues()) == {"orders", "small"}


def test_queue_is_not_created_if_the_registry_cannot_be_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path, disk=disk) as node:
        disk.fail("write", match="queues.json")
        with pytest.raises(StorageFailed):
            node.create("orders")
        assert not node.queues()
        node.create("orders").producer(ack="persisted").publish(b"x")
    with Node(tmp_path) as node:
        assert node.queue("orders").end == 1


def test_queue_is_not_dropped_if_the_registry_cannot_be_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path, disk=disk) as node:
        node.create("orders")
        disk.fail("write", match="queues.json")
        with pytest.raises(StorageFailed):
            node.drop("orders")
        node.queue("orders").producer(ack="persisted").publish(b"x")
        node.drop("orders")
        assert not node.queues()
    assert not list((tmp_path / "queues").iterdir())


def test_second_close_does_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, {"orders": {}})
    node.close()
    node.close()


def test_event_that_the_queue_can_never_take_is_not_staged(tmp_path: Path) -> None:
    with Node(tmp_path, {"orders": {"max_event_bytes": 40}}) as node:
        with pytest.raises(NoSuchQueue):
            node.stage("other", BASE_SCHEMA)
        with pytest.raises(SchemaMismatch, match="value"):
            node.stage("orders", pa.schema([("value", pa.int64())]))
        with node.stage("orders", BASE_SCHEMA) as stage:
            stage.add(block_of([b"short"]))
            with pytest.raises(EventTooLarge, match="'orders'"):
                stage.add(block_of([b"longer than forty, with what else there is"]))
        assert not list((tmp_path / "staging").iterdir())


def test_stages_of_dead_tasks_are_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "STAGE_SECONDS", 0.0)
    monkeypatch.setattr(node_module, "INTERVAL", 0.01)
    with Node(tmp_path, {"orders": {}}) as node:
        with node.stage("orders", BASE_SCHEMA) as stage:
            stage.add(block_of([b"never committed"]))
            stage.finish()
        wait_until(lambda: not list((tmp_path / "staging").iterdir()), "the stage to go")
        assert len(node.staging) == 0


def test_stage_is_kept_for_the_slowest_task_of_its_batch(tmp_path: Path) -> None:
    with Node(tmp_path, {"orders": {}}) as node:
        with node.stage("orders", BASE_SCHEMA) as stage:
            stage_id = stage.finish()
        contents, since = node.staging._finished[stage_id]
        node.staging._finished[stage_id] = contents, since - 12 * 3600.0
        node.staging.discard_older(node_module.STAGE_SECONDS)
        assert node.staging.get_contents(stage_id) == contents


def test_housekeeping_continues_after_disk_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "STAGE_SECONDS", 0.0)
    monkeypatch.setattr(node_module, "INTERVAL", 0.01)
    disk = FaultyDisk()
    disk.fail("unlink", match=".stage", times=1)
    with Node(tmp_path, {"orders": {}}, disk=disk) as node:
        for _ in range(2):
            with node.stage("orders", BASE_SCHEMA) as stage:
                stage.finish()
        wait_until(lambda: len(list((tmp_path / "staging").iterdir())) <= 1, "the others to go")


def test_housekeeping_continues_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the thread, memory and stages would grow without a limit."""
    monkeypatch.setattr(node_module, "INTERVAL", 0.01)
    tries: list[float] = []

    def discard_older(_: object, seconds: float) -> int:
        tries.append(seconds)
        raise RuntimeError("planned")

    monkeypatch.setattr(Staging, "discard_older", discard_older)
    with Node(tmp_path, {"orders": {}}):
        wait_until(lambda: len(tries) > 1, "another try")
    assert "housekeeping.failed" in caplog.text
