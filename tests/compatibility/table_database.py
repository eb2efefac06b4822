"""SQLite databases with queue tables: make them, and describe their contents.

``shop.db`` has rows in every state, left by a process that was killed. ``low.db`` and the others
are the shards of one queue, of which one was split.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.compatibility.comparison import hide, mask
from tests.compatibility.running import TIMEOUT, encode_bytes, read_json_lines
from turnlane import table

ROOT: Final = Path(__file__).parents[2]
SHOP: Final = "sqlite:///shop.db"
SHARDS: Final = [("sqlite:///low.db", "-80"), ("sqlite:///high.db", "80-")]
FAR: Final = 4_102_444_800_000_000_000
"""The year 2100, in nanoseconds."""

MAILS: Final = (
    "CREATE QUEUE mails (customer BIGINT, subject TEXT, body BLOB, price DECIMAL(10, 2), "
    "sent TIMESTAMP, details JSON) SHARD BY (customer) WITH (ack_timeout = 3s, backoff = 10ms, "
    "max_backoff = 1s, max_attempts = 2, retention = 30000d, lease = 2s)"
)
EVERY_OPTION: Final = (
    "CREATE QUEUE reports (team TEXT, number INT) SHARD BY (team) WITH (max_qps = 100, "
    "max_concurrency = 50, ack_timeout = 1m, backoff = 2s, max_backoff = 1h, max_attempts = 7, "
    "retention = 1d, window = 10s, window_events = 500, ordering = key, layout = keyspace, "
    "lease = 5s)"
)
VARYING: Final = {"lag", "lease", "leader", "term"}
DATABASES: Final[Mapping[str, str]] = {
    "sqlite": "sqlite:///unused.db",
    "postgresql": "postgresql://app@db.example/shop",
    "mysql": "mysql://app@db.example/shop",
}


# ── making ───────────────────────────────────────────────────────────────────────────────────────


def make_tables(directory: Path) -> None:
    """Make the databases. They name each other by relative paths, from this directory."""
    command = [sys.executable, "-m", "tests.compatibility.table_database", str(directory)]
    subprocess.run(command, cwd=ROOT, check=False)
    with contextlib.chdir(directory):
        _make_shards()
    for name in sorted(directory.glob("*.db")):
        with contextlib.closing(sqlite3.connect(name)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _make_shop_and_die() -> None:
    with table.connect(SHOP) as database:
        database.sql(MAILS)
        database.sql(EVERY_OPTION)
        database.queue("reports").schedule(
            "weekly report", "0 8 * * MON", "Europe/Berlin", team="sales", number=7
        )
        queue = database.queue("mails")
        queue.insert([{"customer": number, "subject": f"s{number}"} for number in range(4)])
        receiver = queue.receive()
        events = {event["subject"]: event for event in _take(receiver, 4)}
        receiver.ack([events["s0"]])
        events["s1"].nack(delay=0.0, error="the first time")
        (again,) = _take(receiver, 1)
        again.nack(error="the second time")
        assert receiver.flush(TIMEOUT)
        deadline = time.monotonic() + TIMEOUT
        while (counts := queue.counts())["dead"] != 1 or counts["fired"] != 2:
            assert time.monotonic() < deadline, counts
            time.sleep(0.05)
        with contextlib.closing(sqlite3.connect("shop.db")) as connection:
            connection.executemany(
                "INSERT INTO mails (customer, subject, body, fire_at, event_name, priority, "
                "event_group, after_group) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (10, "later", b"\xff\x00", FAR, "order 1", 5, None, None),
                    (11, "much later", None, FAR + 1, None, 0, None, None),
                    (12, "member", None, 1, None, 0, "import 1", None),
                    (13, "all done", None, 1, None, 0, None, "import 1"),
                ],
            )
            connection.commit()
            os.kill(os.getpid(), signal.SIGKILL)


def _make_shards() -> None:
    with table.connect_shards(SHARDS) as databases:
        databases.sql("CREATE QUEUE orders (customer BIGINT, item TEXT) SHARD BY (customer)")
        queue = databases.queue("orders")
        rows = [{"customer": at, "item": f"i{at}", "fire_at": FAR + at} for at in range(40)]
        queue.put(rows)
        queue.reshard([("sqlite:///third.db", "80-c0"), ("sqlite:///fourth.db", "c0-")])


def _take(receiver: table.Receiver, count: int) -> list[table.TableEvent]:
    events: list[table.TableEvent] = []
    while len(events) < count:
        taken = receiver.take(count - len(events), timeout=TIMEOUT)
        assert taken, f"{len(events)} of {count} events came"
        events += taken
    return events


# ── observing ────────────────────────────────────────────────────────────────────────────────────


def observe_tables(directory: Path) -> dict[str, Any]:
    """Describe the databases, receive all due events, and retry the dead ones."""
    with contextlib.chdir(directory):
        return {
            "commands": _observe_with_commands(),
            "received": _receive(),
            "after": hide(_run("status"), VARYING),
            "shards": _observe_shards(),
            "statements": {name: _print_statements(url) for name, url in DATABASES.items()},
        }


def _observe_with_commands() -> dict[str, Any]:
    states = ("to_be_fired", "fired", "acked", "dead")
    found: dict[str, Any] = {
        "queues": _run("sql", "SHOW QUEUES"),
        "schedules": _run("sql", "SHOW SCHEDULES"),
        "status": hide(_run("status"), VARYING),
        "ddl": [_join_lines(each) for name in ("mails", "reports") for each in _run("ddl", name)],
    }
    for state in states:
        rows = _run("peek", "mails", "--count", 50, "--state", state)
        found[state] = [_without_time(row) for row in rows]
    return found


def _run(command: str, *arguments: object) -> list[Any]:
    return read_json_lines("table", command, *arguments, "--url", SHOP, "--json")


def _without_time(row: dict[str, Any]) -> dict[str, Any]:
    """Mask the fire time of an event that was inserted without one."""
    return row if row["fire_at"] >= FAR or row["fire_at"] == 1 else mask(row, {"fire_at"})


def _receive() -> dict[str, Any]:
    with table.connect(SHOP) as database:
        queue = database.queue("mails")
        with queue.receive() as receiver:
            due = [event for _ in range(4) for event in _take_and_ack(receiver)]
            retried = queue.retry()
            dead = _take_and_ack(receiver)
            assert receiver.flush(TIMEOUT)
        order = [event["subject"] for event in due]
        return {
            "due": sorted((_describe(event) for event in due), key=lambda each: each["id"]),
            "is_group_in_order": order.index("member") < order.index("all done"),
            "retried": retried,
            "dead": [_describe(event) for event in dead],
            "counts": queue.counts(),
        }


def _take_and_ack(receiver: table.Receiver) -> list[table.TableEvent]:
    events = _take(receiver, 1)
    receiver.ack(events)
    return events


def _describe(event: table.TableEvent) -> dict[str, Any]:
    columns = {
        name: encode_bytes(value) if isinstance(value, bytes) else value
        for name, value in event.columns.items()
    }
    return {"id": event.id, "attempts": event.attempts, "columns": columns}


def _observe_shards() -> dict[str, Any]:
    """Open the queue with the shards that it had before the split."""
    with table.connect_shards(SHARDS) as databases:
        queue = databases.queue("orders")
        return {
            "map": [[str(shard.key_range), shard.url] for shard in queue.map.shards],
            "counts": queue.counts(),
        }


def _print_statements(url: str) -> list[str]:
    """Print the SQL of statements that make queues; that needs no database."""
    return [
        _join_lines(each)
        for queue in (MAILS, EVERY_OPTION)
        for each in read_json_lines("table", "sql", queue, "--print", "--url", url, "--json")
    ]


def _join_lines(about: dict[str, str]) -> str:
    return " ".join(about["statement"].split())


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    _make_shop_and_die()
