"""The events of all benchmarks: log lines of services, the same in every run."""

from __future__ import annotations

import random
from functools import cache
from itertools import cycle, islice

POOL_BYTES = 2_000_000
"""The bytes of different lines; then they repeat. No compressor looks back as far as this."""

_WORDS = (  # noqa: SIM905 - as a list it would fill a page
    "accepted account after batch before cache checkout client closed commit connection customer "
    "deadline delivered disk dropped expired failed fetched handler header idle index inventory "
    "invoice job key latency lookup message missing node order page payment pending queue reached "
    "refused replica request restarted retry rotated route scheduled session shard shipped slow "
    "snapshot socket started stream stopped synced table timeout token upstream user waiting worker"
).split()
_SERVICES = ("checkout", "gateway", "inventory", "mailer", "search", "sessions")
_LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "WARN", "ERROR")
_HEADER = b"<%d>1 2026-08-14T09:00:00Z host app - - - "
_PRIORITIES = {b"DEBUG": 135, b"INFO": 134, b"WARN": 132, b"ERROR": 131}
"""Facility local0 with the severity of each level."""


@cache
def _make_pool(size: int) -> list[bytes]:
    chance = random.Random(size)
    return [_make_line(chance, number, size) for number in range(POOL_BYTES // size)]


def _make_line(chance: random.Random, number: int, size: int) -> bytes:
    seconds, micros = divmod(number * 1_237, 1_000_000)
    line = (
        f"2026-08-14T09:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}Z "
        f"{chance.choice(_LEVELS)} {chance.choice(_SERVICES)}-{chance.randrange(40)} "
        f"id={chance.getrandbits(48):012x} status={chance.randrange(200, 504)} "
        f"ms={chance.random() * 900:.2f}"
    )
    while len(line) < size:
        line += f" {chance.choice(_WORDS)}"
        if chance.random() < 0.2:
            line += f"={chance.randrange(100_000)}"
    return line[:size].encode()


def make_log_lines(count: int, size: int) -> list[bytes]:
    """Return ``count`` lines of exactly ``size`` bytes."""
    return list(islice(cycle(_make_pool(size)), count))


def make_syslog_messages(count: int, size: int) -> list[bytes]:
    """Return ``count`` messages of RFC 5424 of exactly ``size`` bytes, with fitting severities."""
    lines = make_log_lines(count, size - len(_HEADER % 134))
    return [_HEADER % _PRIORITIES[line.split(b" ", 2)[1]] + line for line in lines]


def split_into_blocks(lines: list[bytes], events: int) -> list[list[bytes]]:
    """Split lines into groups of ``events``; the last group may be smaller."""
    return [lines[at : at + events] for at in range(0, len(lines), events)]
