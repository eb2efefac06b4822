"""The executor with one thread, on which the log writes."""

from __future__ import annotations

import threading
import weakref

import pytest

from tests.contract.harness import PATIENCE
from turnlane.storage.log import SingleThreadExecutor


def test_call_runs_while_the_caller_continues() -> None:
    """Both run at the same time."""
    executor, met = SingleThreadExecutor("test"), threading.Barrier(2, timeout=PATIENCE)
    executor.submit(lambda: (met.wait(), None)[1])
    met.wait()
    executor.wait()
    executor.stop()


def test_finished_call_is_released_before_wait_returns() -> None:
    """A written group is large, and the next group reuses its memory."""

    class Large:
        def write(self) -> None:
            """Do nothing with it."""

    executor, large = SingleThreadExecutor("test"), Large()
    gone = weakref.ref(large)
    executor.submit(large.write)
    del large
    executor.wait()
    assert gone() is None
    executor.stop()


def test_error_of_a_call_is_raised_once_by_wait() -> None:
    """The next call does not raise it again."""

    def fail() -> None:
        raise OSError(5, "no")

    executor = SingleThreadExecutor("test")
    executor.submit(fail)
    with pytest.raises(OSError, match="no"):
        executor.wait()
    done: list[int] = []
    executor.submit(lambda: done.append(1))
    executor.wait()
    assert done == [1]
    executor.stop()


def test_stopped_executor_can_be_used_again() -> None:
    """A second stop is harmless, and no thread is left."""
    executor = SingleThreadExecutor("hand-under-test")
    executor.stop()
    for _ in range(2):
        executor.submit(lambda: None)
        executor.wait()
        executor.stop()
    assert "hand-under-test" not in [thread.name for thread in threading.enumerate()]


def test_call_runs_on_the_calling_thread_if_no_thread_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue that is closed while the interpreter ends needs this."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't start {thread}")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    executor, done = SingleThreadExecutor("test"), list[int]()
    for number in range(2):
        executor.submit(lambda: done.append(threading.get_ident()))
        executor.wait()
        assert done == [threading.get_ident()] * (number + 1)
    executor.stop()
