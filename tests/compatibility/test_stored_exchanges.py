"""What clients of an older version say: is it understood, and answered in the same way?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compatibility.comparison import check_none, check_same
from tests.compatibility.exchanges import (
    fill_table,
    find_secret,
    find_servers,
    prepare_node,
    read_interface,
    wait_for_leader,
)
from tests.compatibility.flight_exchange import replay
from tests.compatibility.flight_peer import connect_peer
from tests.compatibility.http_exchange import replay_requests
from tests.compatibility.names import read_metrics
from tests.compatibility.running import NodeProcess
from tests.compatibility.stored import StoredVersion


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a node with a table, in which three events are due."""
    prepare_node(tmp_path)
    fill_table(tmp_path)
    return tmp_path


def test_node_answers_flight_calls_of_older_client_and_keeps_its_metrics(
    version: StoredVersion, directory: Path
) -> None:
    with NodeProcess(directory, "open.yaml") as node, connect_peer(node.location) as peer:
        check_none(replay(version.read("flight"), peer))
        old = version.read("metrics")
        # Changed on purpose: the same series, but no longer called a counter, which never falls.
        workers = old.pop("turnlane_queue_workers")
        old["turnlane_queue_workers_total"] = {**workers, "type": "gauge"}
        check_same(old, read_metrics(node.http))


def test_node_answers_http_requests_of_older_client(
    version: StoredVersion, directory: Path
) -> None:
    with NodeProcess(directory, "open.yaml") as node:
        wait_for_leader(node)
        check_none(replay_requests(version.read("http"), find_servers(node)))
        check_same(version.read("openapi"), read_interface(node))
    with NodeProcess(directory, "tokens.yaml") as node:
        for name, calls in version.read("flight-tokens").items():
            with connect_peer(node.location, find_secret(name)) as peer:
                check_none(replay(calls, peer))
        for requests in version.read("http-tokens").values():
            check_none(replay_requests(requests, find_servers(node)))
