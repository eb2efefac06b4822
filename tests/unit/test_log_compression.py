"""A frame is compressed only if that saves time."""

from __future__ import annotations

import os

import pytest

from turnlane.errors import ConfigError
from turnlane.storage.encoder import (
    MIN_COMPRESSED_BYTES,
    TRIAL_INTERVAL,
    CompressionMode,
    CompressionPolicy,
    is_compression_faster,
)
from turnlane.storage.frames import decompress

TEXT = b"GET /orders/1 200 OK " * 100
NOISE = os.urandom(2000)


class Ticks:
    """A timer that advances by a fixed step at every call."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(
    ("ratio", "compress_speed", "write_speed", "expected"),
    [
        (0.2, 3e9, 1e8, True),  # a slow disk and text
        (0.2, 3e9, 5e9, False),  # the page cache is faster than snappy
        (1.0, 3e9, 1e8, False),  # nothing to gain
        (1.1, 3e9, 1e8, False),
        (0.5, 1e9, 5e8, False),  # exactly even
    ],
)
def test_compression_is_faster_if_it_costs_less_than_it_saves(
    ratio: float, compress_speed: float, write_speed: float, expected: bool
) -> None:
    assert is_compression_faster(ratio, compress_speed, write_speed) is expected


def test_mode_none_never_compresses() -> None:
    assert CompressionPolicy("none").compress([TEXT]) is None


def test_mode_snappy_compresses_data_that_shrinks() -> None:
    packed = CompressionPolicy("snappy").compress([TEXT[:100], TEXT[100:]])
    assert packed is not None
    assert decompress(packed, len(TEXT)).to_pybytes() == TEXT


@pytest.mark.parametrize("mode", ["auto", "snappy"])
def test_small_or_incompressible_data_is_not_compressed(mode: CompressionMode) -> None:
    compression = CompressionPolicy(mode)
    compression.record_write(1, 1.0)
    assert compression.compress([NOISE]) is None
    assert compression.compress([TEXT[: MIN_COMPRESSED_BYTES - 1]]) is None


def test_mode_auto_waits_for_a_measurement_of_the_disk() -> None:
    compression = CompressionPolicy("auto", timer=Ticks(1e-6))
    assert compression.compress([TEXT]) is None
    compression.record_write(1_000_000, 1.0)
    assert compression.compress([TEXT]) is not None


def test_mode_auto_does_not_compress_on_a_fast_disk() -> None:
    compression = CompressionPolicy("auto", timer=Ticks(1.0))
    compression.record_write(1 << 30, 0.1)
    assert compression.compress([TEXT]) is None


@pytest.mark.parametrize(("pause", "packs"), [(0.001, True), (0.1, False)])
def test_mode_auto_does_not_compress_while_the_disk_is_idle(pause: float, packs: bool) -> None:
    timer = Ticks(1e-6)
    compression = CompressionPolicy("auto", timer=timer)
    for _ in range(TRIAL_INTERVAL):
        timer.now += pause
        compression.record_write(10_000, 0.01)
        packed = compression.compress([TEXT])
    assert (packed is not None) is packs


def test_long_pause_does_not_count_as_an_idle_disk() -> None:
    timer = Ticks(1e-6)
    compression = CompressionPolicy("auto", timer=timer)
    timer.now += 3600
    for _ in range(2):
        timer.now += 0.01
        compression.record_write(10_000, 0.01)
    assert compression.compress([TEXT]) is not None


def test_time_of_a_sync_counts_without_new_bytes() -> None:
    """The sync takes most of the time, although most measurements are of fast writes."""
    timer = Ticks(1e-6)
    compression = CompressionPolicy("auto", timer=timer)
    for size, seconds, pause in [(16 << 20, 0.01, 0.03)] * 4 + [(0, 0.9, 0.9)]:
        timer.now += pause
        compression.record_write(size, seconds)
    assert compression.compress([TEXT]) is not None


def test_write_of_several_seconds_counts_as_busy() -> None:
    timer = Ticks(1e-6)
    compression = CompressionPolicy("auto", timer=timer)
    timer.now += 5
    compression.record_write(1 << 20, 5.0)
    assert compression.compress([TEXT]) is not None


def test_mode_auto_adapts_to_changed_data() -> None:
    compression = CompressionPolicy("auto", timer=Ticks(1e-6))
    compression.record_write(1_000_000, 1.0)
    for _ in range(20 * TRIAL_INTERVAL):
        assert compression.compress([NOISE]) is None
    packed = [compression.compress([TEXT]) for _ in range(20 * TRIAL_INTERVAL)]
    assert packed[-1] is not None


def test_unknown_mode_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="compression"):
        CompressionPolicy("zip")  # type: ignore[arg-type]
