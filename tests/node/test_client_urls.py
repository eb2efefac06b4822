"""Tests of client URLs and credentials: wrong ones are refused with helpful errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.contract.harness import PATIENCE
from tests.node.conftest import ServedNode, values
from tests.recovery.proxy_harness import impatience
from turnlane.client import connect
from turnlane.client.address import NodeUrl
from turnlane.client.node_client import Credentials
from turnlane.errors import (
    ConfigError,
    LaneTaken,
)


@pytest.fixture(autouse=True, scope="module")
def _shorten_waits() -> Iterator[None]:
    with impatience():
        yield


@pytest.mark.parametrize(
    ("url", "locations"),
    [
        ("turnlane://localhost:8815", ["grpc+tcp://localhost:8815"]),
        ("turnlanes://a.example:1,[::1]:2/", ["grpc+tls://a.example:1", "grpc+tls://[::1]:2"]),
        ("turnlane://localhost", ["grpc+tcp://localhost:8815"]),
    ],
)
def test_valid_url_is_parsed(url: str, locations: list[str]) -> None:
    assert NodeUrl.parse(url).locations() == locations


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8815",
        "http://localhost:8815",
        "turnlane://",
        "turnlane://a:b",
        "turnlane://a:1,,b:2",
        "turnlane://a:1,a:1",
        "turnlane://a:70000",
        "turnlane://a:0",
        "turnlane://user@a:1",
    ],
)
def test_invalid_url_is_refused_with_the_valid_form(url: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        connect(url)
    assert wrong.value.knob == "url"


def test_invalid_credentials_are_refused_and_not_shown(tmp_path: Path) -> None:
    assert "hush" not in repr(Credentials("hush"))
    with pytest.raises(ConfigError, match="token"):
        Credentials("a\nb")
    with pytest.raises(ConfigError, match="tls_key"):
        Credentials(tls_cert=tmp_path)
    with pytest.raises(ConfigError, match="tls_ca"):
        connect("turnlanes://localhost:1", tls_ca=tmp_path / "missing.pem")


def test_lease_that_is_not_a_duration_is_refused() -> None:
    with pytest.raises(ConfigError, match="'soon' is not a duration") as wrong:
        connect("turnlane://localhost:1", lease="soon")
    assert wrong.value.knob == "lease"


def test_tls_files_without_tls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="turnlanes://") as wrong:
        connect("turnlane://localhost:1", tls_ca=tmp_path / "ca.pem")
    assert wrong.value.knob == "tls_ca"


def test_invalid_tls_file_is_named(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    ca, (cert, key), (_, wrong_key) = certificates.ca, certificates.client, certificates.stranger
    connect("turnlanes://localhost:1", tls_ca=ca, tls_cert=cert, tls_key=key).close()
    for knob, files in [
        ("tls_ca", {"tls_ca": key}),
        ("tls_cert", {"tls_cert": key, "tls_key": key}),
        ("tls_key", {"tls_cert": cert, "tls_key": wrong_key}),
        ("tls_key", {"tls_cert": cert, "tls_key": cert}),
    ]:
        with pytest.raises(ConfigError) as error:
            connect("turnlanes://localhost:1", **files)  # type: ignore[arg-type]
        assert error.value.knob == knob


ENDING = """
import sys, turnlane
producer = turnlane.connect(sys.argv[1]).queue("disk").producer()
for number in range(1000):
    producer.publish(b"%d" % number)
"""


def test_program_that_ends_without_close_sends_everything(served: ServedNode) -> None:
    subprocess.run([sys.executable, "-c", ENDING, served.url], check=True)
    assert values(served.node, "disk") == [b"%d" % number for number in range(1000)]


def test_closed_client_leaves_no_threads_or_connections(served: ServedNode) -> None:
    before = set(threading.enumerate())
    with connect(served.url) as client:
        queue = client.queue("disk")
        queue.producer(ack="persisted").publish(b"x")
        queue.get(timeout=PATIENCE).done()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert {
        name for name in names if "proxy" in name or "stream" in name or "leases" in name
    } == set()


def test_end_of_a_with_block_sends_the_remaining_events(served: ServedNode) -> None:
    """Without this, a program that forgets to flush would lose its last batches silently."""
    with served.client().queue("disk") as queue:
        producer = queue.producer()
        for number in range(5000):
            producer.publish(b"%d" % number)
    assert served.node.queue("disk").end == 5000
    assert queue.stats().ledger.adds_up


def test_with_block_that_raises_does_not_wait_for_the_node(served: ServedNode) -> None:
    served.plane.stop()
    queue = served.client().queue("disk", shutdown_timeout="1h")

    def fail() -> None:
        with queue:
            queue.producer().publish(b"never sent")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert queue.stats().ledger.dropped == {"closed": 1}


def test_commit_of_a_forgotten_lane_is_refused(served: ServedNode) -> None:
    """A restarted node must not accept a commit that would settle nothing."""
    client = served.client()
    with pytest.raises(LaneTaken, match="restart the lane"):
        client.nodes[0].commit(lane="main", run="before the restart")
