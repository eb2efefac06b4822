"""The harnesses as fixtures: ``any_kind`` runs a test over all kinds, ``buffered_kind`` over most.

There is one for each of the five kinds, and one for the client of a node: a proxy with a real
network.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.harness import (
    BUFFERING,
    EVERY,
    KEEPING,
    STORING,
    DirectHarness,
    DiskAssistedHarness,
    DiskHarness,
    Harness,
    MemoryHarness,
    ProxyHarness,
)


def _closed_after(harness: Harness) -> Iterator[Harness]:
    yield harness
    harness.close()


@pytest.fixture(params=EVERY, ids=lambda made: made.label or made.kind.value)
def any_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A harness for each kind; ledgers are checked at the end."""
    yield from _closed_after(request.param(tmp_path))


@pytest.fixture(params=BUFFERING, ids=lambda made: made.label or made.kind.value)
def buffered_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A harness for each kind in which events wait."""
    yield from _closed_after(request.param(tmp_path))


@pytest.fixture(params=KEEPING, ids=lambda made: made.label or made.kind.value)
def keeping(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A harness for each of the three kinds whose events wait in the queue itself."""
    yield from _closed_after(request.param(tmp_path))


@pytest.fixture(params=STORING, ids=lambda made: made.label or made.kind.value)
def disk_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A harness for each of the two kinds that keep a directory."""
    yield from _closed_after(request.param(tmp_path))


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[Harness]:
    """The harness of the direct kind."""
    yield from _closed_after(DirectHarness(tmp_path))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Harness]:
    """The harness of the memory kind, for behaviour that all buffered kinds share."""
    yield from _closed_after(MemoryHarness(tmp_path))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Harness]:
    """The harness of the disk kind."""
    yield from _closed_after(DiskHarness(tmp_path))


@pytest.fixture
def disk_assisted(tmp_path: Path) -> Iterator[Harness]:
    """The harness of the disk-assisted kind."""
    yield from _closed_after(DiskAssistedHarness(tmp_path))


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Harness]:
    """The harness of the proxy kind."""
    yield from _closed_after(ProxyHarness(tmp_path))
