"""Fixtures: queues that are closed after the test, and a disk with faults on request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.fastqueue_writer import Writer
from tests.recovery.hooked_disk import HookedDisk, Opener, Stored
from tests.recovery.stored import KNOBS, close
from turnlane.queues import open_queue
from turnlane.queues.buffered import BufferedQueue


@pytest.fixture
def opener() -> Iterator[Opener]:
    """Opens queues for one test."""
    opened = Opener()
    with opened.closing:
        yield opened


@pytest.fixture
def disk() -> Iterator[HookedDisk]:
    """A disk that works at first; its faults are cleared before the queues are closed."""
    hooked = HookedDisk()
    yield hooked
    hooked.clear()
    hooked.unfill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of a queue, which does not exist yet."""
    return tmp_path / "queue"


@pytest.fixture
def queues() -> Iterator[Callable[..., Stored]]:
    """Opens queues, and closes them after the test."""
    with contextlib.ExitStack() as opened:

        def make(path: Path, kind: str = "disk", **knobs: Any) -> Stored:
            queue = open_queue(path=path, **KNOBS[kind] | knobs)
            assert isinstance(queue, BufferedQueue)
            opened.callback(close, queue)
            return queue

        yield make


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    """The writer of a directory with large chunks."""
    return Writer(tmp_path)


@pytest.fixture
def small_chunks(tmp_path: Path) -> Writer:
    """The writer of a directory with chunks of one kibibyte."""
    return Writer(tmp_path, chunk_size=1024)
