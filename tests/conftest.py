"""What all tests share: Hypothesis profiles, and the rule "skip locally, fail in CI"."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

IN_CI = os.environ.get("CI") == "true"

# The machines are noisy, so how long an example takes says nothing about whether it is right.
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", max_examples=25, deadline=None)
settings.load_profile("ci" if IN_CI else "dev")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test whose surroundings are missing; in CI that is a failure."""
    if IN_CI:
        pytest.fail(f"must not be skipped in CI: {reason}", pytrace=False)
    pytest.skip(reason)
