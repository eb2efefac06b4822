"""A process that reshards until it is killed: ``resharder.py QUEUE SHARDS TARGETS``, in JSON."""

from __future__ import annotations

import json
import os
import sys

from turnlane import table


def main() -> None:
    name, shards, targets = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    with table.connect_shards([tuple(each) for each in shards]) as database:
        database.queue(name).reshard(
            [tuple(each) for each in targets],
            lambda progress: os.write(1, f"{progress.step} {progress.moved}\n".encode()) and None,
        )


if __name__ == "__main__":
    main()
