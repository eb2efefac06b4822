"""Checkpoints of an action's queries: the one in use is kept, and no outdated one is used."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnlane.spark.checkpoints import Checkpoints

A, B, C = ("a" * 12, "b" * 12, "c" * 12)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", "sums")


def open_later(checkpoints: Checkpoints) -> Checkpoints:
    """Return the same checkpoints for another lane of the action."""
    return Checkpoints(checkpoints._directory, checkpoints._action)


def commit_batch(checkpoint: Path, batch: int = 0) -> Path:
    """Mark a batch as committed in the checkpoint."""
    (checkpoint / "commits").mkdir(exist_ok=True)
    (checkpoint / "commits" / str(batch)).touch()
    return checkpoint


def make_progress(rows: int) -> Any:
    return SimpleNamespace(numInputRows=rows)


def list_names(checkpoint: Path) -> list[str]:
    return sorted(each.name for each in checkpoint.parent.iterdir())


def test_same_query_continues_with_its_checkpoint(checkpoints: Checkpoints) -> None:
    first = commit_batch(checkpoints.prepare(A, stays=False))
    assert checkpoints.prepare(A, stays=False) == first
    assert (first / "commits" / "0").exists()


def test_query_without_a_batch_leaves_the_earlier_checkpoint(checkpoints: Checkpoints) -> None:
    """The new query may never succeed; then the old configuration can return without loss."""
    first = commit_batch(checkpoints.prepare(A, stays=False))
    later = open_later(checkpoints)
    later.prepare(B, stays=False)
    later.on_progress(make_progress(0))
    later.on_progress(make_progress(5))  # Reported, but not committed by Spark.
    checkpoints.prepare(A, stays=False)
    assert (first / "commits" / "0").exists()


def test_checkpoints_of_other_queries_are_removed_after_a_batch(checkpoints: Checkpoints) -> None:
    first = commit_batch(checkpoints.prepare(A, stays=False))
    later = open_later(checkpoints)
    second = commit_batch(later.prepare(B, stays=False))
    assert first.exists()
    later.on_progress(make_progress(0))
    assert first.exists()
    later.on_progress(make_progress(5))
    assert list_names(second) == [second.name]


def test_lane_without_a_checkpoint_removes_earlier_checkpoints(checkpoints: Checkpoints) -> None:
    first = commit_batch(checkpoints.prepare(A, stays=False))
    open_later(checkpoints).on_progress(make_progress(5))
    assert not first.exists()


def test_outdated_checkpoint_is_emptied_after_a_kill(checkpoints: Checkpoints) -> None:
    first = commit_batch(checkpoints.prepare(A, stays=False))
    second = commit_batch(checkpoints.prepare(B, stays=False))
    assert checkpoints.prepare(A, stays=False) == first
    assert not (first / "commits").exists(), "it starts empty"
    assert (second / "commits").exists(), "it stays until the other has committed a batch"
    commit_batch(first)
    checkpoints.prepare(B, stays=False)
    assert not (second / "commits").exists()


def test_kill_during_removal_leaves_no_partial_checkpoint(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_batch(checkpoints.prepare(A, stays=False))
    second = commit_batch(checkpoints.prepare(B, stays=False))
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        checkpoints.remove_unused()
    assert not (second.parent / f"sums-{A}").exists()
    checkpoints.remove_unused()
    assert list_names(second) == [second.name], "the rest is removed later"


def test_failed_removal_does_not_stop_the_lane(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError("not yours")

    commit_batch(checkpoints.prepare(A, stays=False))
    later = open_later(checkpoints)
    commit_batch(later.prepare(B, stays=False))
    monkeypatch.setattr(Path, "rename", refused)
    later.on_progress(make_progress(5))
    later.on_progress(make_progress(5))
    warned = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert warned == ['checkpoint.remove_failed error="PermissionError: not yours"']
    with pytest.raises(PermissionError):  # An outdated checkpoint is never used.
        checkpoints.prepare(A, stays=False)


def test_checkpoints_of_files_stay_and_are_used_again(checkpoints: Checkpoints) -> None:
    """Without it, Spark would skip new batches for the same path."""
    files = commit_batch(checkpoints.prepare(A, stays=True))
    commit_batch(checkpoints.prepare(B, stays=False))
    checkpoints.remove_unused()
    assert checkpoints.prepare(A, stays=True) == files
    assert (files / "commits" / "0").exists()


def test_checkpoints_of_other_actions_and_unknown_ones_stay(checkpoints: Checkpoints) -> None:
    used = commit_batch(checkpoints.prepare(A, stays=False))
    directory = used.parent
    other = commit_batch(Checkpoints(directory, "sums-more").prepare(A, stays=False))
    unknown = directory / f"sums-{C}"
    others = [other, unknown, directory / "runs"]
    unknown.mkdir()
    (directory / "runs").mkdir()
    checkpoints.remove_unused()
    assert all(each.exists() for each in [used, *others])
