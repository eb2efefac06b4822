"""Does the recovery figure measure the time to the full rate, not to the first send?"""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="the measurement runs on Spark")

from benchmarks.delivery_lane import find_seconds_to_full
from benchmarks.http_server import BUCKET


def make_counts(rates: list[int]) -> dict[str, object]:
    return {
        "first": 1000 * BUCKET + BUCKET / 2,
        "last": (1000 + len(rates) - 1) * BUCKET + BUCKET / 2,
        "timeline": [[1000 + at, each] for at, each in enumerate(rates) if each],
    }


def test_pause_after_the_probe_counts_as_recovery_time() -> None:
    found = find_seconds_to_full(make_counts([1000] + [0] * 99 + [5000] * 300))
    assert found == pytest.approx(100 * BUCKET, abs=0.1)


def test_full_rate_from_the_start_is_no_recovery_time() -> None:
    assert find_seconds_to_full(make_counts([5000] * 300)) == BUCKET


def test_long_silence_does_not_lower_the_usual_rate() -> None:
    found = find_seconds_to_full(make_counts([10] + [0] * 500 + [5000] * 100))
    assert found > 400 * BUCKET
