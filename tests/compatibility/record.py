"""Record a version, so that the tests beside this file can hold later versions to it.

Run it from the root of a checkout that has these tests, with the interpreter of an environment in
which the version to be recorded is installed::

    git worktree add ../before before-redesign
    (cd ../before && make .venv/.ready)
    ../before/.venv/bin/python -m tests.compatibility.record before-redesign

The first argument names the folder below ``stored``; further ones choose what to record, by
default everything. The configurations in the folder are not made here: write them by hand, or copy
those of an older version. ``--scratch`` is a directory for temporary files; its name appears in the
stored data. A recording needs some minutes, and Java for the pipeline.

Everything uses public means: the command line, HTTP, Arrow Flight, and the names that ``turnlane``
exports. Only the exchange over Flight calls the methods of a client's nodes, to record the messages
that they send; a later version may need other calls there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import turnlane
from tests.compatibility import configurations, exchanges, names
from tests.compatibility.node_directory import make_node, observe_node
from tests.compatibility.pipeline_directory import (
    make_pipeline,
    observe_dead_letters,
    observe_pipeline,
)
from tests.compatibility.queue_directories import OPENED_WITH, make_queues, observe_queue
from tests.compatibility.running import NodeProcess
from tests.compatibility.spark_source import read_source_names
from tests.compatibility.stored import StoredVersion
from tests.compatibility.table_database import make_tables, observe_tables

Record = Callable[[StoredVersion, Path], None]


def record_queues(version: StoredVersion, scratch: Path) -> None:
    """Record directories of queues."""
    make_queues(scratch)
    version.pack("queues", scratch)
    copy = _copy(scratch)
    version.write("queues", {name: observe_queue(copy / name, name) for name in OPENED_WITH})


def record_node(version: StoredVersion, scratch: Path) -> None:
    """Record the data directory of a node."""
    make_node(scratch)
    version.pack("node", scratch)
    version.write("node", observe_node(_copy(scratch)))


def record_tables(version: StoredVersion, scratch: Path) -> None:
    """Record databases with queue tables."""
    make_tables(scratch)
    version.pack("tables", scratch)
    version.write("tables", observe_tables(_copy(scratch)))


def record_exchange(version: StoredVersion, scratch: Path) -> None:
    """Record the answers of a node over Flight and HTTP, and the names of its metrics."""
    for name in ("flight", "http"):
        (scratch / name).mkdir()
        exchanges.prepare_node(scratch / name)
        exchanges.fill_table(scratch / name)
    with NodeProcess(scratch / "flight", "open.yaml") as node:
        exchanges.wait_for_leader(node)
        version.write("flight", exchanges.record_flight(node))
        version.write("metrics", names.read_metrics(node.http))
    with NodeProcess(scratch / "http", "open.yaml") as node:
        exchanges.wait_for_leader(node)
        version.write("http", exchanges.record_http(node))
        version.write("openapi", exchanges.read_interface(node))
    with NodeProcess(scratch / "http", "tokens.yaml") as node:
        version.write("flight-tokens", exchanges.record_flight_with_tokens(node))
        version.write("http-tokens", exchanges.record_http_with_tokens(node))


def record_configurations(version: StoredVersion, scratch: Path) -> None:
    """Record the settings that the stored configurations have."""
    unset = configurations.find_unset(version.configurations)
    assert not unset, f"no configuration sets {', '.join(unset)}"
    configurations.prepare_directory(scratch)
    said = {
        file.name: configurations.observe_configuration(file, scratch)
        for file in version.configurations
    }
    version.write("configurations", said)
    version.write("settings", configurations.read_settings())
    version.write("knobs", configurations.observe_knobs())


def record_names(version: StoredVersion, scratch: Path) -> None:
    """Record the names that users write."""
    checkout = Path(turnlane.__file__).parents[2]
    version.write("commands", names.read_commands())
    version.write("entry-points", names.read_entry_points(checkout))
    version.write("python", names.read_python_names())
    version.write("spark", read_source_names())


def record_pipeline(version: StoredVersion, scratch: Path) -> None:
    """Record the directory of a pipeline that has run on Spark."""
    make_pipeline(scratch)
    version.pack("pipeline", scratch)
    version.write("dead-letters", observe_dead_letters(_copy(scratch)))
    version.write("pipeline", observe_pipeline(_copy(scratch)))


RECORDS: Final[Mapping[str, Record]] = {
    "queues": record_queues,
    "node": record_node,
    "tables": record_tables,
    "exchange": record_exchange,
    "configurations": record_configurations,
    "names": record_names,
    "pipeline": record_pipeline,
}


def _copy(directory: Path) -> Path:
    """Copy a directory, since looking at it changes it."""
    copy = directory.with_name(f"{directory.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    return Path(shutil.copytree(directory, copy))


def main() -> None:
    """Record the parts that the command line names."""
    parser = argparse.ArgumentParser(description="Record a version of turnlane.")
    parser.add_argument("version", help="the folder below tests/compatibility/stored")
    parser.add_argument("parts", nargs="*", choices=[*RECORDS, []], help="what to record")
    parser.add_argument("--scratch", type=Path, default=Path("/var/lib/turnlane"))
    given = parser.parse_args()
    version = StoredVersion(given.version)
    version.path.mkdir(parents=True, exist_ok=True)
    for part in given.parts or RECORDS:
        directory = given.scratch / part
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        RECORDS[part](version, directory)
        sys.stdout.write(json.dumps({"recorded": part}) + "\n")
    shutil.rmtree(given.scratch)


if __name__ == "__main__":
    main()
