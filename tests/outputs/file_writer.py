"""Writes batches to a file output: a given number of them, or until it is killed."""

from __future__ import annotations

import json
import sys
from itertools import count

from tests.outputs.blocks import make_block
from turnlane.outputs.file import FileOutput, FileOutputSettings


def main() -> None:
    knobs = json.loads(sys.argv[1])
    name, batches, width = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with FileOutput(FileOutputSettings.model_validate(knobs)) as output:
        for number in count() if batches < 0 else range(batches):
            lines = [b"%s %d %d %s" % (name.encode(), number, at, b"x" * width) for at in range(10)]
            output.send(output.prepare(make_block(lines)))
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
