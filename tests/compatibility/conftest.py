"""What tests of compatibility share: the stored versions, each in turn."""

from __future__ import annotations

import pytest

from tests.compatibility.stored import StoredVersion, list_versions


@pytest.fixture(params=list_versions())
def version(request: pytest.FixtureRequest) -> StoredVersion:
    """A version that this one has to be compatible with."""
    return StoredVersion(request.param)
