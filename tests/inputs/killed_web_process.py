"""A node with three inputs in a process that a test kills while it accepts events."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from tests.inputs.web_inputs import make_input, open_node


def main() -> None:
    """Serve a directory, print the addresses, and run until killed."""
    with open_node(Path(sys.argv[1])) as node:
        inputs = {kind: make_input(kind, node) for kind in ("http", "otlp", "elasticsearch")}
        for each in inputs.values():
            each.start()
        print(json.dumps({kind: each.address for kind, each in inputs.items()}), flush=True)  # noqa: T201
        threading.Event().wait()


if __name__ == "__main__":
    main()
