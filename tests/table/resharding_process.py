"""A process that reshards: ``resharding_process.py QUEUE SHARDS TARGETS``, in JSON."""

from __future__ import annotations

import json
import os
import sys

from turnlane import table
from turnlane.table.reshard import ReshardProgress


def main() -> None:
    name, shards, targets = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    with table.connect_shards([tuple(each) for each in shards]) as database:
        database.queue(name).reshard([tuple(each) for each in targets], write_line)


def write_line(progress: ReshardProgress) -> None:
    """Write a whole line at once."""
    os.write(1, f"{progress.step} {progress.moved}\n".encode())


if __name__ == "__main__":
    main()
