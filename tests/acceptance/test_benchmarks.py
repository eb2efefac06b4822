"""The benchmarks run and name their figures. How fast they are is for ``make bench`` to say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

pytest.importorskip("persistqueue", reason="needs the bench extra")

ROOT = Path(__file__).parents[2]
QUEUES = {
    "publish_one_us",
    "publish_block_us",
    "disk_write_ratio",
    "disk_read_ratio",
    "group_commit_ratio",
    "synced_write_ratio",
    "recovery_ratio",
    "proxy_memory_ratio",
    "proxy_memory_ratio_memory",
    "proxy_memory_ratio_disk_assisted",
    "vs_persist_queue",
    "vs_sqlite",
}
NODE = {
    "syslog_vs_rsyslog_disk",
    "syslog_vs_rsyslog_da",
    "flight_events_per_s",
    "persisted_p99_ms",
    "backlog_memory_ratio",
}
SPARK = {
    "source_vs_parquet",
    "source_vs_json",
    "pipeline_vs_rsyslog_da",
    "pipeline_vs_rsyslog_disk",
    "trickle_p50_ms",
    "trickle_p99_ms",
    "idle_cpu_percent",
    "dead_lane_loss_percent",
}
REALISTIC = {"plan_cost_16_filters_s", "plan_cost_growth", "plan_cost_transform_s"}
TABLE = {
    "vs_pgqueuer",
    "vs_procrastinate",
    "vs_skip_locked",
    "lag_p99_ms",
    "idle_statements_per_s",
    "statements_per_event",
    "churn_ratio",
}
DELIVERY = {
    "drain_vs_bare",
    "drain_vs_rsyslog",
    "adaptive_vs_best",
    "adaptive_vs_worst",
    "recovery_to_full_s",
    "engine_vs_bare",
    "pipelined_vs_not",
    "engine_overhead_us",
}
PROGRAMS = {
    "node": ("rsyslogd", "wrk"),
    "spark": ("java", "rsyslogd"),
    "realistic": ("java",),
    "delivery": ("java", "rsyslogd"),
    "table": ("mariadbd",),
}


@pytest.mark.timeout(900)  # with Spark it takes a minute, many if the machine has much to do
@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("queues", QUEUES),
        ("node", NODE),
        ("spark", SPARK),
        ("realistic", REALISTIC),
        ("delivery", DELIVERY),
        ("table", TABLE),
    ],
)
def test_benchmark_module_names_its_figures(module: str, names: set[str], tmp_path: Path) -> None:
    for program in PROGRAMS.get(module, ()):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            skip_or_fail(f"there is no {program}")
    saved = tmp_path / "outcome.json"
    run = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                f"benchmarks.{module}",
                "--quick",
                "--json",
                "--scale",
                "0.005",
            ),
            *("--directory", str(tmp_path), "--save", str(saved)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures.keys() >= names
    # In so short a run a loss may as well be a gain, and CPU time less than the kernel counts.
    any_number = {"dead_lane_loss_percent", "idle_cpu_percent"}
    assert all(figures[name] > 0 for name in figures.keys() - any_number), figures


def test_report_shows_every_figure_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    from benchmarks import report
    from benchmarks.outcome import Cell, Figure, Outcome, Table

    monkeypatch.setattr(report, "IMAGES", tmp_path)
    missed = Figure("some_ratio", 0.5, 0.4, 0.6, "one / the other", at_least=0.7)
    table = Table("A race", "events/s", ["100 B"], {"tortoise": [Cell(2, 1, 3)], "hare": [None]})

    text = report.build_page({"queues": Outcome([missed], [table])}, quick=True)

    assert "| `some_ratio` | 0.5 | 0.4–0.6 | ≥ 0.7 ✗ | one / the other |" in text
    assert "| tortoise | 2 (1–3) |" in text
    assert "| hare | – |" in text
    assert (tmp_path / "queues-a-race.svg").exists()
