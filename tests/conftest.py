"""What all tests share: Hypothesis profiles, Java's options, their order, where they may skip."""

from __future__ import annotations

import os
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NoReturn

import pytest
import trustme
from hypothesis import HealthCheck, settings

from tests import nursery as nurseries
from tests.certificates import Certificates

IN_CI = os.environ.get("CI") == "true"

# The machines are noisy, so how long an example takes says nothing about whether it is right.
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", max_examples=25, deadline=None)
settings.load_profile("ci" if IN_CI else "dev")

QUICK_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
"""For processes of Spark that live for seconds, or wait most of the time: half of what they
computed was code compiled a second time, better, and hardly run after that. A tenth of the rest was
to verify classes that come as their makers have released them."""
for variable in ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
    os.environ[variable] = QUICK_JAVA


def pytest_configure(config: pytest.Config) -> None:
    """Let tests trust no authority but those that they make.

    To read all that the machine knows of takes 30 ms, at each connection to MariaDB.
    """
    if "SSL_CERT_FILE" in os.environ:  # a worker has it from its parent
        return
    place = tempfile.TemporaryDirectory()
    config.add_cleanup(place.cleanup)
    os.environ["SSL_CERT_FILE"] = str(Path(place.name, "nobody.pem"))
    trustme.CA().cert_pem.write_to_path(os.environ["SSL_CERT_FILE"])


@pytest.fixture(scope="session")
def nursery() -> ForkServerContext:
    """What makes processes that have everything imported."""
    return nurseries.nursery()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of one authority, for all tests that need no other."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers begin at the first test and at the middle one, and then help each other.

    So one of them begins with all that share a session of Spark, of which there is only one then,
    and the other one with what takes longest, which else might be left for one alone at the end.
    """
    shared: list[pytest.Item] = []
    alone: list[pytest.Item] = []
    rest: list[pytest.Item] = []
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            shared.append(item)
        else:
            (rest if item.get_closest_marker("timeout") is None else alone).append(item)
    middle = max(0, len(items) // 2 - len(shared))
    items[:] = [*shared, *rest[:middle], *alone, *rest[middle:]]


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test whose surroundings are missing; in CI that is a failure."""
    if IN_CI:
        pytest.fail(f"must not be skipped in CI: {reason}", pytrace=False)
    pytest.skip(reason)
