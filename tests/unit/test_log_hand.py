"""Does the second pair of hands do what it is told, and say how it went?"""

from __future__ import annotations

import threading
import weakref

import pytest

from tests.contract.harness import PATIENCE
from turnlane.storage.active_segment import Hand


def test_the_caller_goes_on_meanwhile() -> None:
    """Both are under way at once."""
    hand, met = Hand("test"), threading.Barrier(2, timeout=PATIENCE)
    hand.begin(lambda: (met.wait(), None)[1])
    met.wait()
    hand.finish()
    hand.stop()


def test_it_keeps_nothing_of_what_it_has_done() -> None:
    """What was written is large, and its memory is wanted for what is written next."""

    class Large:
        def write(self) -> None:
            """Do nothing with it."""

    hand, large = Hand("test"), Large()
    gone = weakref.ref(large)
    hand.begin(large.write)
    del large
    hand.finish()
    assert gone() is None
    hand.stop()


def test_the_caller_hears_what_went_wrong() -> None:
    """Once; the next call is another matter."""

    def fail() -> None:
        raise OSError(5, "no")

    hand = Hand("test")
    hand.begin(fail)
    with pytest.raises(OSError, match="no"):
        hand.finish()
    done: list[int] = []
    hand.begin(lambda: done.append(1))
    hand.finish()
    assert done == [1]
    hand.stop()


def test_it_can_be_stopped_and_used_again() -> None:
    """Twice is harmless, and no thread is left."""
    hand = Hand("hand-under-test")
    hand.stop()
    for _ in range(2):
        hand.begin(lambda: None)
        hand.finish()
        hand.stop()
    assert "hand-under-test" not in [thread.name for thread in threading.enumerate()]


def test_without_another_thread_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a queue that is closed at the very end of a program has to."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't start {thread}")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    hand, done = Hand("test"), list[int]()
    for number in range(2):
        hand.begin(lambda: done.append(threading.get_ident()))
        hand.finish()
        assert done == [threading.get_ident()] * (number + 1)
    hand.stop()
