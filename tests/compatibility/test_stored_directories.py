"""Directories that an older version has written: do they open, with everything in them?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compatibility.comparison import check_same
from tests.compatibility.node_directory import observe_node
from tests.compatibility.pipeline_directory import observe_dead_letters
from tests.compatibility.queue_directories import OPENED_WITH, observe_queue
from tests.compatibility.stored import StoredVersion
from tests.compatibility.table_database import observe_tables


@pytest.mark.parametrize("name", OPENED_WITH)
def test_queue_of_older_version_opens_with_the_same_contents(
    version: StoredVersion, name: str, tmp_path: Path
) -> None:
    """Ledger, events, attempts, sequences of producers, and what damage did."""
    directory = version.unpack("queues", tmp_path / "queues")
    check_same(version.read("queues")[name], observe_queue(directory / name, name))


def test_node_starts_on_data_of_older_version_and_finishes_its_commits(
    version: StoredVersion, tmp_path: Path
) -> None:
    """Queues, unfinished commits, writers, producers, positions of files, and a Spark offset."""
    directory = version.unpack("node", tmp_path / "node")
    check_same(version.read("node"), observe_node(directory))


def test_queue_tables_of_older_version_fire_their_events(
    version: StoredVersion, tmp_path: Path
) -> None:
    """Rows in every state, a schedule, shards, and the SQL that makes tables."""
    directory = version.unpack("tables", tmp_path / "tables")
    check_same(version.read("tables"), observe_tables(directory))


def test_dead_letters_of_older_version_are_listed_and_replayed(
    version: StoredVersion, tmp_path: Path
) -> None:
    directory = version.unpack("pipeline", tmp_path / "pipeline")
    check_same(version.read("dead-letters"), observe_dead_letters(directory))
