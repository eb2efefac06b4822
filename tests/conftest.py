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

from tests import process_server as process_servers
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
def process_server() -> ForkServerContext:
    """Starts processes that have everything imported."""
    return process_servers.process_server()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of one authority, for all tests that need no other."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers begin at the first test and at the middle one, and then help each other.

    So one of them begins with all that start Spark, which takes more than a core: those that share
    a session, of which there is only one then, and those that take long, the longest first. The
    other one begins with the rest, which waits half of the time; when it has nothing left it takes
    over from the end of what the first one has still to do.
    """
    items.sort(key=_turn)  # what is alike stays in its random order


def _turn(item: pytest.Item) -> tuple[int, float]:
    """Those with a session before those that may take long, and these before the rest."""
    if "spark" in getattr(item, "fixturenames", ()):
        return 0, 0.0
    longest = item.get_closest_marker("timeout")
    return (2, 0.0) if longest is None else (1, -longest.args[0])


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test whose surroundings are missing; in CI that is a failure."""
    if IN_CI:
        pytest.fail(f"must not be skipped in CI: {reason}", pytrace=False)
    pytest.skip(reason)
