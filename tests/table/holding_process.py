"""A process that takes events and acks them on a signal: ``holding_process.py URL QUEUE``."""

from __future__ import annotations

import os
import sys

from turnlane import table
from turnlane.errors import LeadLost


def main() -> None:
    url, name = sys.argv[1:]
    with table.connect(url) as database, database.queue(name).receive() as receiver:
        events = receiver.take(10)
        write_line(f"took {len(events)}")
        sys.stdin.readline()
        receiver.ack(events)
        try:
            write_line("acked" if receiver.flush(30) else "late")
        except LeadLost:
            write_line("refused")
        write_line(f"given {len(receiver.take(timeout=0))}")
        sys.stdin.readline()


def write_line(words: str) -> None:
    """Write a whole line at once."""
    os.write(1, f"{words}\n".encode())


if __name__ == "__main__":
    main()
