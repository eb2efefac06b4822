"""Every knob accepts its values, refuses others by name, and is checked with other knobs."""

from __future__ import annotations

from datetime import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from turnlane.errors import ConfigError
from turnlane.memory import memory_limit
from turnlane.queues.api import Durability, FullBehavior
from turnlane.queues.settings import ON_DISK, Compression, Kind, Marks, QueueSettings
from turnlane.units import Percentage, TimeWindow
from turnlane.validation import convert_validation_error

MEBI = 2**20

# Knob → values that are right, as (written, read), and values that are wrong.
KNOBS: dict[str, tuple[list[tuple[Any, Any]], list[Any]]] = {
    "kind": ([("disk_assisted", Kind.DISK_ASSISTED)], ["tape", "", 3, "Disk"]),
    "name": ([("orders", "orders"), ("a.b-c_9", "a.b-c_9")], ["", "a b", "a/b", "..", "x" * 129]),
    "path": ([("/x", Path("/x")), (Path("y"), Path("y"))], [3, ["/x"]]),
    "size": ([(1, 1), ("100_000", 100_000), (10.0, 10)], [0, -1, 1.5, "many", True]),
    "target_utilization": ([("60%", Percentage(60)), (60, Percentage(60))], ["0%", 0.6, "1", "x"]),
    "max_bytes": ([("1Gi", 2**30), (4096, 4096)], [0, "1parsec", -1, True]),
    "memory_percent": ([("5%", Percentage(5)), (5, Percentage(5))], ["0%", "101%", "some", 0.1]),
    "max_event_bytes": ([("1Mi", MEBI)], [0, "big", -1]),
    "full_behavior": ([("drop_oldest", FullBehavior.DROP_OLDEST)], ["explode", 1, True]),
    "full_timeout": ([("2s", 2.0), (0, 0.0)], ["soon", -1, True]),
    "discard_mark": ([("98%", Percentage(98)), (100, 100), ("100", 100)], [-1, 0, "x", 1.5, True]),
    "discard_severity": ([(0, 0), (7, 7), ("5", 5)], [-1, 8, "debug", True]),
    "full_delay_mark": ([("90%", Percentage(90)), (10, 10), (None, None)], [-1, 0, "full"]),
    "light_delay_mark": ([("60%", Percentage(60)), (10, 10), (None, None)], [-1, 0, "101%"]),
    "light_delay": ([("200ms", 0.2), (0, 0.0)], ["-1s", "a while"]),
    "high_watermark": ([("80%", Percentage(80)), (1000, 1000)], [0, -5, "high", False]),
    "low_watermark": ([("10%", Percentage(10)), (0, 0)], [-5, "low", "0%"]),
    "dequeue_batch_size": ([(5000, 5000)], [0, 1.5, "all", True]),
    "minimum_batch_size": ([(100, 100)], [0, -1, "few", 1025]),
    "minimum_batch_timeout": ([("250ms", 0.25)], ["-1s", []]),
    "dequeue_rate": ([(5000, 5000.0), (0.5, 0.5)], [0, -1, "fast", float("inf"), True]),
    "dequeue_window": ([("22:00-06:00", TimeWindow(time(22), time(6)))], ["night", "9-17", 22]),
    "sampling_interval": ([(10, 10)], [0, -1, 0.5]),
    "shutdown_timeout": ([("1m", 60.0), (0, 0.0)], ["never", -1]),
    "completion_timeout": ([("2m", 120.0)], [0, "0s", "x"]),
    "idle_timeout": ([("10s", 10.0), (0, 0.0)], ["x", -1]),
    "save_on_shutdown": ([(False, False), ("true", True)], ["perhaps", 2]),
    "workers": ([(8, 8), (0, 0)], [-1, "all", True]),
    "worker_minimum_events": ([(5000, 5000)], [0, "some", 50_001]),
    "durability": ([("always", Durability.ALWAYS), ("never", Durability.NEVER)], ["memory", 1]),
    "sync_interval": ([("200ms", 0.2)], [0, "0s", "x"]),
    "chunk_size": ([("256Mi", 256 * MEBI)], [0, "x"]),
    "memory_bytes": ([("16Mi", 16 * MEBI), (1, 1)], [0, "x"]),
    "failover_memory": ([("256Mi", 256 * MEBI), (1, 1)], [0, "x"]),
    "write_buffer": ([("256Ki", 262_144), (0, 0)], [-1, "x", "65Mi"]),
    "stale_flush": ([("5s", 5.0)], [0, "x"]),
    "compression": ([("none", Compression.NONE), ("snappy", Compression.SNAPPY)], ["zip", 3]),
    "batch_size": ([(4096, 4096)], [0, "x"]),
    "batches": ([(8, 8)], [0, -1, "x"]),
    "resend_bytes": ([("128Mi", 128 * MEBI)], [0, "x"]),
}  # fmt: skip


def knobs_for(knob: str) -> dict[str, Any]:
    """Return the smallest settings in which the knob is allowed."""
    kinds = QueueSettings.kinds_of(knob)
    kind = Kind.DISK_ASSISTED if Kind.DISK_ASSISTED in kinds else kinds[0]
    knobs: dict[str, Any] = {"kind": kind}
    if kind in ON_DISK:
        knobs["path"] = "/orders"
    if knob == "discard_mark":
        knobs["discard_severity"] = 5
    if knob == "discard_severity":
        knobs["discard_mark"] = 100
    return knobs


def refused(**knobs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        QueueSettings.of(**knobs)
    return caught.value


def test_every_knob_is_in_the_tests() -> None:
    assert list(KNOBS) == list(QueueSettings.model_fields)


@pytest.mark.parametrize(
    ("knob", "written", "read"),
    [(knob, *pair) for knob, (right, _) in KNOBS.items() for pair in right],
)
def test_valid_value_is_read(knob: str, written: Any, read: Any) -> None:
    settings = QueueSettings.of(**{**knobs_for(knob), knob: written})
    assert getattr(settings, knob) == read
    assert type(getattr(settings, knob)) is type(read)


@pytest.mark.parametrize(
    ("knob", "written"), [(knob, value) for knob, (_, wrong) in KNOBS.items() for value in wrong]
)
def test_invalid_value_is_refused_by_name(knob: str, written: Any) -> None:
    error = refused(**{**knobs_for(knob), knob: written})
    assert error.knob == knob
    assert str(error).startswith(f"{knob}: ")
    assert "pydantic" not in str(error)


@pytest.mark.parametrize(
    ("knob", "kind"),
    [
        (knob, kind)
        for knob in QueueSettings.model_fields
        for kind in Kind
        if kind not in QueueSettings.kinds_of(knob)
    ],
)
def test_knob_of_another_kind_is_refused_by_name(knob: str, kind: Kind) -> None:
    ((written, _), *_), _ = KNOBS[knob]
    path = {"path": "/orders"} if kind in ON_DISK else {}
    error = refused(**{**path, "kind": kind, knob: written})
    assert error.knob == knob
    assert kind in str(error)


# Defaults


@pytest.mark.parametrize(
    ("kind", "size", "max_bytes"),
    [
        (Kind.DIRECT, None, None),
        (Kind.MEMORY, 50_000, 256 * MEBI),
        (Kind.DISK, None, 10 * 2**30),
        (Kind.DISK_ASSISTED, 50_000, 256 * MEBI),
        (Kind.PROXY, 4096, 256 * MEBI),
    ],
)
def test_bounds_by_kind(kind: Kind, size: int | None, max_bytes: int | None) -> None:
    settings = QueueSettings.of(kind=kind, path="/orders" if kind in ON_DISK else None)
    assert (settings.size, settings.max_bytes) == (size, max_bytes)
    assert settings.max_event_bytes == 64 * MEBI


def test_queue_without_knobs_is_in_memory() -> None:
    assert QueueSettings.of().kind is Kind.MEMORY


def test_size_of_a_proxy_follows_from_its_batches() -> None:
    assert QueueSettings.of(kind="proxy", batches=3, batch_size=7).size == 21


def test_memory_percent_sets_max_bytes() -> None:
    assert QueueSettings.of(memory_percent="10%").max_bytes == memory_limit() // 10


def test_memory_percent_of_a_disk_queue_sets_the_part_in_memory() -> None:
    settings = QueueSettings.of(kind="disk", path="/orders", memory_percent="1%", max_bytes="1Gi")
    assert settings.memory_bytes == memory_limit() // 100
    assert settings.max_bytes == 2**30


@pytest.mark.parametrize("written", [0.10, "0.10", 1, "1"])
def test_memory_percent_that_may_be_a_ratio_is_refused_with_both_readings(written: Any) -> None:
    ratio, percentage = ("10%", "0.1%") if str(written).startswith("0") else ("100%", "1%")
    message = str(refused(memory_percent=written))
    assert f"may be a ratio or a percentage: write {ratio} or {percentage}" in message


def test_size_auto_has_a_target_and_no_other_limits_until_the_queue_is_opened() -> None:
    settings = QueueSettings.of(size="auto")
    assert settings.target_utilization == Percentage(85)
    assert (settings.size, settings.max_bytes) == (None, None)
    assert QueueSettings.of(size="auto", target_utilization="40%").target_utilization == (
        Percentage(40)
    )
    assert settings.replace(workers=2).target_utilization == Percentage(85)


@pytest.mark.parametrize("kind", [Kind.MEMORY, *ON_DISK])
def test_size_auto_takes_its_limits_from_the_available_bytes(kind: Kind) -> None:
    path = {"path": "/orders"} if kind in ON_DISK else {}
    declared = QueueSettings.of(kind=kind, size="auto", target_utilization="50%", **path)
    settings = declared.with_bounds(640 * MEBI)
    assert (settings.max_bytes, settings.size) == (320 * MEBI, 5 * MEBI)
    assert settings.marks.light_delay == 5 * MEBI * 7 // 10
    assert settings.worker_minimum_events == declared.worker_minimum_events == 1024
    assert declared.with_bounds(0).max_bytes == MEBI


def test_size_auto_leaves_room_for_the_largest_event() -> None:
    declared = QueueSettings.of(size="auto", max_event_bytes="8Mi")
    assert declared.with_bounds(MEBI).max_bytes == 8 * MEBI


def test_default_of_max_event_bytes_is_at_most_the_smaller_bounds() -> None:
    assert QueueSettings.of(max_bytes="1Mi").max_event_bytes == MEBI
    assert QueueSettings.of(kind="proxy", resend_bytes="2Mi").max_event_bytes == 2 * MEBI


def test_default_of_write_buffer_is_at_most_chunk_size() -> None:
    settings = QueueSettings.of(kind="disk", path="/orders", chunk_size="64Ki")
    assert settings.write_buffer == 65_536


def test_worker_minimum_is_a_workers_share_of_the_size() -> None:
    assert QueueSettings.of(size=100, workers=4).worker_minimum_events == 25
    assert QueueSettings.of(size=2, workers=4).worker_minimum_events == 1
    disk = QueueSettings.of(kind="disk", path="/orders", workers=4, dequeue_batch_size=500)
    assert disk.worker_minimum_events == 500


@pytest.mark.parametrize(
    "knob",
    sorted(QueueSettings.model_fields.keys() - {"path", "full_delay_mark", "light_delay_mark"}),
)
def test_null_has_the_default(knob: str) -> None:
    for kind in Kind:
        knobs = {"kind": kind, "path": "/orders" if kind in ON_DISK else None}
        if knob == "kind":
            knobs = {}
        assert QueueSettings.of(**{**knobs, knob: None}) == QueueSettings.of(**knobs)


# Marks


def test_marks_are_percentages_of_the_size() -> None:
    settings = QueueSettings.of(kind="disk_assisted", path="/orders", size=1000)
    assert settings.marks == Marks(None, full_delay=970, light_delay=700, high=900, low=630)


def test_marks_in_events_are_used_unchanged() -> None:
    settings = QueueSettings.of(
        kind="disk_assisted",
        path="/orders",
        size=1000,
        discard_mark=990,
        discard_severity=6,
        full_delay_mark=500,
        light_delay_mark=400,
        high_watermark=300,
        low_watermark=200,
    )
    assert settings.marks == Marks(990, 500, 400, 300, 200)


def test_low_watermark_follows_high_watermark_and_is_a_percentage_of_size() -> None:
    assistant = {"kind": "disk_assisted", "path": "/orders", "size": 1000}
    assert QueueSettings.of(**assistant, high_watermark=100).marks.low == 70
    assert QueueSettings.of(**assistant, low_watermark="50%").marks.low == 500


def test_only_a_disk_assisted_queue_has_watermarks() -> None:
    marks = QueueSettings.of(size=1000).marks
    assert (marks.high, marks.low) == (None, None)


def test_delay_marks_can_be_switched_off() -> None:
    marks = QueueSettings.of(full_delay_mark=None, light_delay_mark=None).marks
    assert (marks.full_delay, marks.light_delay) == (None, None)


def test_default_marks_of_a_queue_without_size_are_off() -> None:
    assert QueueSettings.of(kind="disk", path="/orders").marks == Marks(*[None] * 5)


@pytest.mark.parametrize("knob", ["discard_mark", "full_delay_mark", "light_delay_mark"])
def test_percentage_without_a_size_is_refused_by_name(knob: str) -> None:
    needed = {"discard_severity": 3} if knob == "discard_mark" else {}
    error = refused(kind="disk", path="/orders", **needed, **{knob: "80%"})
    assert error.knob == knob
    assert "size" in str(error)


@given(st.integers(min_value=1, max_value=10**9))
def test_default_marks_fit_into_any_size(size: int) -> None:
    marks = QueueSettings.of(kind="disk_assisted", path="/orders", size=size).marks
    assert marks.high is not None
    assert marks.low is not None
    assert 0 <= marks.low < marks.high <= size
    for mark in (marks.full_delay, marks.light_delay):
        assert mark is not None
        assert 1 <= mark <= size


# Contradictions


@pytest.mark.parametrize(
    ("knob", "knobs"),
    [
        ("path", {"kind": "disk"}),
        ("path", {"kind": "disk_assisted"}),
        ("path", {"kind": "memory", "path": "/orders"}),
        ("size", {"kind": "proxy", "size": 10}),
        ("memory_percent", {"memory_percent": "5%", "max_bytes": "1Gi"}),
        ("memory_percent", {"memory_percent": "5%", "size": "auto"}),
        (
            "memory_percent",
            {"kind": "disk", "path": "/x", "memory_percent": "5%", "memory_bytes": 1},
        ),
        ("target_utilization", {"target_utilization": "50%", "size": 10}),
        ("target_utilization", {"size": "auto", "max_bytes": "1Mi"}),
        ("target_utilization", {"kind": "proxy", "size": "auto"}),
        ("max_event_bytes", {"max_event_bytes": "2Mi", "max_bytes": "1Mi"}),
        ("max_event_bytes", {"kind": "proxy", "max_event_bytes": "2Mi", "resend_bytes": "1Mi"}),
        ("full_timeout", {"full_timeout": "1s", "full_behavior": "drop_newest"}),
        ("full_timeout", {"full_timeout": "1s", "full_behavior": "drop_oldest"}),
        ("discard_severity", {"discard_mark": "80%"}),
        ("discard_mark", {"discard_severity": 5}),
        ("discard_mark", {"discard_mark": 11, "discard_severity": 5, "size": 10}),
        ("full_delay_mark", {"full_delay_mark": 11, "size": 10}),
        ("light_delay_mark", {"light_delay_mark": 11, "size": 10}),
        ("minimum_batch_size", {"minimum_batch_size": 11, "dequeue_batch_size": 10}),
        ("minimum_batch_size", {"minimum_batch_size": 11, "size": 10}),
        ("minimum_batch_size", {"kind": "proxy", "minimum_batch_size": 11, "batch_size": 10}),
        ("worker_minimum_events", {"worker_minimum_events": 11, "size": 10}),
        (
            "sync_interval",
            {"kind": "disk", "path": "/x", "sync_interval": 1, "durability": "always"},
        ),
        (
            "sync_interval",
            {"kind": "disk", "path": "/x", "sync_interval": 1, "durability": "never"},
        ),
        (
            "write_buffer",
            {"kind": "disk", "path": "/x", "write_buffer": "2Mi", "chunk_size": "1Mi"},
        ),
    ],
)
def test_contradiction_is_refused_by_name(knob: str, knobs: dict[str, Any]) -> None:
    assert refused(**knobs).knob == knob


@pytest.mark.parametrize(
    ("knob", "knobs"),
    [
        ("low_watermark", {"low_watermark": 500, "high_watermark": 500}),
        ("low_watermark", {"low_watermark": "80%", "high_watermark": "70%"}),
        ("low_watermark", {"low_watermark": "95%"}),
        ("low_watermark", {"low_watermark": 1001}),
        ("low_watermark", {"size": "auto", "low_watermark": "80%", "high_watermark": "70%"}),
        ("high_watermark", {"high_watermark": 1001}),
    ],
)
def test_watermarks_out_of_order_are_refused_by_name(knob: str, knobs: dict[str, Any]) -> None:
    error = refused(**{"kind": "disk_assisted", "path": "/orders", "size": 1000, **knobs})
    assert error.knob == knob


# Errors


def test_unknown_knob_gets_a_suggestion() -> None:
    error = refused(dequeue_batchsize=10)
    assert str(error) == (
        "dequeue_batchsize: there is no such knob; did you mean dequeue_batch_size?"
    )


def test_unknown_knob_without_a_similar_name_gets_no_suggestion() -> None:
    assert str(refused(zzz=None)) == "zzz: there is no such knob"


def test_misspelt_choice_gets_the_choices_and_a_suggestion() -> None:
    assert str(refused(kind="memmory")) == (
        "kind: must be one of direct, memory, disk, disk_assisted, proxy, not 'memmory'; "
        "did you mean memory?"
    )
    assert str(refused(kind="disk", path="/orders", durability="memory")) == (
        "durability: must be one of always, interval, never, not 'memory'"
    )


def test_all_issues_are_listed_one_per_line() -> None:
    error = refused(size=0, workers="x", kin="disk")
    assert error.knob == "size"
    assert str(error).splitlines() == [
        "size: must be at least 1, not 0",
        "workers: must be a whole number, not 'x'",
        "kin: there is no such knob; did you mean kind?",
    ]


def test_all_contradictions_are_listed_one_per_line() -> None:
    error = refused(size=10, minimum_batch_size=11, discard_mark=12, discard_severity=1)
    assert [line.partition(":")[0] for line in str(error).splitlines()] == [
        "minimum_batch_size",
        "discard_mark",
    ]


def test_long_invalid_value_is_cut() -> None:
    assert len(str(refused(workers="x" * 10_000))) < 200


def test_constructor_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="size"):
        QueueSettings(size=0)


class Action(BaseModel):
    queue: QueueSettings


@pytest.mark.parametrize(
    ("queue", "knob"),
    [({"size": 0}, "queue.size"), ({"kind": "disk"}, "queue.path"), ({"sise": 1}, "queue.sise")],
)
def test_knob_inside_a_larger_model_is_named_by_its_path(queue: dict[str, Any], knob: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Action.model_validate({"queue": queue})
    assert convert_validation_error(caught.value).knob == knob


# Equality, copies, JSON


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        QueueSettings.of().size = 3


def test_equal_settings_are_equal() -> None:
    one, other = (QueueSettings.of(max_bytes=size) for size in ("1Ki", 1024))
    assert one == other
    assert hash(one) == hash(other)
    assert one.marks == other.marks


def test_replace_changes_some_knobs_and_computes_other_defaults_again() -> None:
    settings = QueueSettings.of(name="orders", size=100, full_delay_mark=None)
    larger = settings.replace(size=1000, workers=2)
    assert (larger.name, larger.size, larger.worker_minimum_events) == ("orders", 1000, 500)
    assert larger.full_delay_mark is None
    assert settings.replace() == settings


def test_replace_is_checked() -> None:
    with pytest.raises(ConfigError, match="discard_mark"):
        QueueSettings.of().replace(discard_severity=3)


def test_settings_survive_json() -> None:
    settings = QueueSettings.of(
        kind="disk", path="/orders", size=10, light_delay_mark="50%", dequeue_window="22:00-06:00"
    )
    text = settings.model_dump_json(exclude_unset=True)
    assert QueueSettings.model_validate_json(text) == settings


def test_json_schema_describes_every_knob() -> None:
    properties = QueueSettings.model_json_schema()["properties"]
    assert list(properties) == list(QueueSettings.model_fields)
    assert all(knob["description"] and knob["examples"] for knob in properties.values())
