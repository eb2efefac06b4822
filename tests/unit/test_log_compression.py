"""Compression: is a frame compressed exactly where that pays?"""

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
    """A timer that moves by a fixed step at every look."""

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
def test_compressing_pays_if_it_costs_less_than_it_saves(
    ratio: float, compress_speed: float, write_speed: float, expected: bool
) -> None:
    assert is_compression_faster(ratio, compress_speed, write_speed) is expected


def test_none_never_compresses() -> None:
    assert CompressionPolicy("none").compress([TEXT]) is None


def test_snappy_always_compresses_what_shrinks() -> None:
    packed = CompressionPolicy("snappy").compress([TEXT[:100], TEXT[100:]])
    assert packed is not None
    assert decompress(packed, len(TEXT)).to_pybytes() == TEXT


@pytest.mark.parametrize("mode", ["auto", "snappy"])
def test_what_does_not_shrink_or_is_small_stays_as_it_is(mode: CompressionMode) -> None:
    compression = CompressionPolicy(mode)
    compression.record_write(1, 1.0)
    assert compression.compress([NOISE]) is None
    assert compression.compress([TEXT[: MIN_COMPRESSED_BYTES - 1]]) is None


def test_auto_waits_until_it_knows_the_disk() -> None:
    compression = CompressionPolicy("auto", timer=Ticks(1e-6))
    assert compression.compress([TEXT]) is None
    compression.record_write(1_000_000, 1.0)
    assert compression.compress([TEXT]) is not None


def test_auto_leaves_off_on_a_fast_disk() -> None:
    compression = CompressionPolicy("auto", timer=Ticks(1.0))
    compression.record_write(1 << 30, 0.1)
    assert compression.compress([TEXT]) is None


@pytest.mark.parametrize(("pause", "packs"), [(0.001, True), (0.1, False)])
def test_auto_leaves_off_while_the_disk_has_time_to_spare(pause: float, packs: bool) -> None:
    timer = Ticks(1e-6)
    compression = CompressionPolicy("auto", timer=timer)
    for _ in range(TRIAL_INTERVAL):
        timer.now += pause
        compression.record_write(10_000, 0.01)
        packed = compression.compress([TEXT])
    assert (packed is not None) is packs


def test_a_writer_that_had_nothing_to_do_for_long_may_be_busy_now() -> None:
    timer = Ticks(1e-6)
    compression = CompressionPolicy("auto", timer=timer)
    timer.now += 3600
    for _ in range(2):
        timer.now += 0.01
        compression.record_write(10_000, 0.01)
    assert compression.compress([TEXT]) is not None


def test_a_sync_counts_as_what_it_takes_even_if_nothing_is_new() -> None:
    """Most of the time goes into it, though most measurements are of quick writes."""
    timer = Ticks(1e-6)
    compression = CompressionPolicy("auto", timer=timer)
    for size, seconds, pause in [(16 << 20, 0.01, 0.03)] * 4 + [(0, 0.9, 0.9)]:
        timer.now += pause
        compression.record_write(size, seconds)
    assert compression.compress([TEXT]) is not None


def test_a_disk_that_takes_seconds_is_busy() -> None:
    timer = Ticks(1e-6)
    compression = CompressionPolicy("auto", timer=timer)
    timer.now += 5
    compression.record_write(1 << 20, 5.0)
    assert compression.compress([TEXT]) is not None


def test_auto_notices_that_the_data_has_changed() -> None:
    compression = CompressionPolicy("auto", timer=Ticks(1e-6))
    compression.record_write(1_000_000, 1.0)
    for _ in range(20 * TRIAL_INTERVAL):
        assert compression.compress([NOISE]) is None
    packed = [compression.compress([TEXT]) for _ in range(20 * TRIAL_INTERVAL)]
    assert packed[-1] is not None


def test_an_unknown_mode_names_the_knob() -> None:
    with pytest.raises(ConfigError, match="compression"):
        CompressionPolicy("zip")  # type: ignore[arg-type]
