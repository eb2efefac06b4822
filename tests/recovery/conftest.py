"""Queues that are closed after the test, and a disk to trouble them with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recovery.hooked_disk import HookedDisk, Opener


@pytest.fixture
def opener() -> Iterator[Opener]:
    """Opens queues for one test."""
    opened = Opener()
    with opened.closing:
        yield opened


@pytest.fixture
def disk() -> Iterator[HookedDisk]:
    """A disk without troubles, to begin with; it has none when the queues are closed."""
    hooked = HookedDisk()
    yield hooked
    hooked.clear()
    hooked.unfill()
