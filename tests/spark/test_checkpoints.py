"""Checkpoints of an action's queries: is the one in use never touched, and no stale one used?"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnlane.spark.checkpoints import CheckpointCleaner, Checkpoints

A, B, C = ("a" * 12, "b" * 12, "c" * 12)


@pytest.fixture
def kept(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", "sums")


def committed(checkpoint: Path, batch: int = 0) -> Path:
    """A batch is done with it."""
    (checkpoint / "commits").mkdir(exist_ok=True)
    (checkpoint / "commits" / str(batch)).touch()
    return checkpoint


def did(rows: int) -> Any:
    return SimpleNamespace(numInputRows=rows)


def names(checkpoint: Path) -> list[str]:
    return sorted(each.name for each in checkpoint.parent.iterdir())


def test_same_query_continues_with_its_checkpoint(kept: Checkpoints) -> None:
    first = committed(kept.prepare(A, stays=False))
    assert kept.prepare(A, stays=False) == first
    assert (first / "commits" / "0").exists()


def test_query_without_a_batch_leaves_the_earlier_checkpoint(kept: Checkpoints) -> None:
    """It may fail for ever, and whoever brings the one before back loses nothing."""
    first = committed(kept.prepare(A, stays=False))
    cleaner = CheckpointCleaner(kept)
    cleaner.prepare(B, stays=False)
    cleaner.on_progress(did(0))
    cleaner.on_progress(did(5))  # told, but not noted by Spark
    kept.prepare(A, stays=False)
    assert (first / "commits" / "0").exists()


def test_checkpoints_of_other_queries_are_removed_after_a_batch(kept: Checkpoints) -> None:
    first = committed(kept.prepare(A, stays=False))
    cleaner = CheckpointCleaner(kept)
    second = committed(cleaner.prepare(B, stays=False))
    assert first.exists()
    cleaner.on_progress(did(0))
    assert first.exists()
    cleaner.on_progress(did(5))
    assert names(second) == [second.name]


def test_lane_without_a_checkpoint_removes_earlier_checkpoints(kept: Checkpoints) -> None:
    first = committed(kept.prepare(A, stays=False))
    CheckpointCleaner(kept).on_progress(did(5))
    assert not first.exists()


def test_outdated_checkpoint_is_emptied_after_a_kill(kept: Checkpoints) -> None:
    first = committed(kept.prepare(A, stays=False))
    second = committed(kept.prepare(B, stays=False))
    assert kept.prepare(A, stays=False) == first
    assert not (first / "commits").exists(), "it begins anew"
    assert (second / "commits").exists(), "until that has done a batch"
    committed(first)
    kept.prepare(B, stays=False)
    assert not (second / "commits").exists()


def test_kill_during_removal_leaves_no_partial_checkpoint(
    kept: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(kept.prepare(A, stays=False))
    second = committed(kept.prepare(B, stays=False))
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        kept.remove_unused(second)
    assert not (second.parent / f"sums-{A}").exists()
    kept.remove_unused(second)
    assert names(second) == [second.name], "what was left is swept up"


def test_failed_removal_does_not_stop_the_lane(
    kept: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError("not yours")

    committed(kept.prepare(A, stays=False))
    cleaner = CheckpointCleaner(kept)
    committed(cleaner.prepare(B, stays=False))
    monkeypatch.setattr(Path, "rename", refused)
    cleaner.on_progress(did(5))
    cleaner.on_progress(did(5))
    warned = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert warned == ['checkpoint.remove_failed error="PermissionError: not yours"']
    with pytest.raises(PermissionError):  # but a stale one is not used
        kept.prepare(A, stays=False)


def test_checkpoints_of_files_stay_and_are_used_again(kept: Checkpoints) -> None:
    """Without it, Spark would pass over what comes to the same path."""
    files = committed(kept.prepare(A, stays=True))
    kept.remove_unused(committed(kept.prepare(B, stays=False)))
    assert kept.prepare(A, stays=True) == files
    assert (files / "commits" / "0").exists()


def test_checkpoints_of_other_actions_and_unknown_ones_stay(kept: Checkpoints) -> None:
    used = committed(kept.prepare(A, stays=False))
    directory = used.parent
    other = committed(Checkpoints(directory, "sums-more").prepare(A, stays=False))
    unknown = directory / f"sums-{C}"
    others = [other, unknown, directory / "runs"]
    unknown.mkdir()
    (directory / "runs").mkdir()
    kept.remove_unused(used)
    assert all(each.exists() for each in [used, *others])
