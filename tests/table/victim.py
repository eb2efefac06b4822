"""A process that receives and acks until it is killed: ``victim.py URL QUEUE``."""

from __future__ import annotations

import os
import sys

from turnlane import table


def main() -> None:
    url, name = sys.argv[1:]
    with table.connect(url) as database, database.queue(name).receive(prefetch=50) as receiver:
        while True:
            events = receiver.take(10)
            say("got", [event["payload"] for event in events])
            receiver.ack(events)
            receiver.flush()
            say("acked", [str(event.id) for event in events])


def say(verb: str, words: list[str]) -> None:
    """A whole line at once: who is killed leaves no half of one."""
    os.write(1, f"{verb} {' '.join(words)}\n".encode())


if __name__ == "__main__":
    main()
