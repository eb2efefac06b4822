"""A process that receives and acks until it is killed: ``acking_process.py URL QUEUE``."""

from __future__ import annotations

import os
import sys

from turnlane import table


def main() -> None:
    url, name = sys.argv[1:]
    with table.connect(url) as database, database.queue(name).receive(prefetch=50) as receiver:
        while True:
            events = receiver.take(10)
            write_line("got", [event["payload"] for event in events])
            receiver.ack(events)
            receiver.flush()
            write_line("acked", [str(event.id) for event in events])


def write_line(verb: str, words: list[str]) -> None:
    """Write a whole line at once: a killed process leaves no half line."""
    os.write(1, f"{verb} {' '.join(words)}\n".encode())


if __name__ == "__main__":
    main()
