"""The rights in the documentation are enough, on PostgreSQL."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from tests.outputs.blocks import make_block, make_values
from tests.table.database_fixture import DatabaseFixture, eventually, payloads, settle, take
from tests.table.servers import PostgresServer
from turnlane.errors import RetryLater
from turnlane.outputs.table import TableOutput, TableOutputSettings
from turnlane.table import Database, TableQueue, connect, connect_shards

DOCS = Path(__file__).parents[2] / "docs" / "table.md"
ROLES = ("producer", "manager", "server", "planner", "delivery")


@dataclass
class Shop:
    """A queue, and roles with the documented rights."""

    db: DatabaseFixture
    queue: TableQueue
    opened: contextlib.ExitStack

    def url(self, role: str) -> str:
        return f"{self.db.url}&options=-c%20role%3D{self.queue.name}_{role}"

    def as_role(self, role: str) -> Database:
        return self.opened.enter_context(connect(self.url(role)))

    def output(self, url: str) -> TableOutput:
        given = {
            "type": "table",
            "url": url,
            "table": self.queue.name,
            "columns": {"payload": "value"},
            "exactly_once": True,
            "delivered_as": self.queue.name,
        }
        return self.opened.enter_context(TableOutput(TableOutputSettings.model_validate(given)))


def read_documented_grants() -> str:
    """Return the statements of the documentation."""
    section = DOCS.read_text().partition("\n## Rights in the database\n")[2]
    found = re.search(r"```sql\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def shop(postgres: PostgresServer) -> Iterator[Shop]:
    with DatabaseFixture(postgres.url, postgres) as db, contextlib.ExitStack() as opened:
        queue = db.queue()
        made = Shop(db, queue, opened)
        output = made.output(db.url)  # once with the right to create tables
        output.send(output.prepare(make_block(make_values(0, 1))))
        with connect_shards([(db.url, "-")]) as shards:
            shards.queue(queue.name)
        db.execute(f"DELETE FROM {queue.name}")
        roles = [f"{queue.name}_{role}" for role in ROLES]
        for role in roles:
            db.execute(f"CREATE ROLE {role}")
        named = re.sub(r"(?<![a-z])mails\b", queue.name, read_documented_grants())
        for role in ROLES:
            named = re.sub(rf"\b(TO|GRANT) {role}\b", rf"\1 {queue.name}_{role}", named)
        db.execute(named)
        yield made
        opened.close()
        for role in roles:
            db.execute(f"DROP OWNED BY {role}")
            db.execute(f"DROP ROLE {role}")


def test_documented_grants_are_enough_to_insert_and_to_manage(shop: Shop) -> None:
    name = shop.queue.name
    producer = shop.as_role("producer")
    with contextlib.closing(producer.connect()) as connection:
        producer.queue(name).enqueue(connection, {"user_id": 1, "payload": "one"}, name="first")
        producer.queue(name).enqueue_many(connection, [{"user_id": 2, "payload": "two"}])
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(f"DELETE FROM {name}")
    shop.as_role("planner").queue(name).schedule("tick", "* * * * *", payload="tick")
    shop.db.execute(f"UPDATE turnlane_schedule SET next_at = 1 WHERE queue = '{name}'")
    managed = shop.as_role("manager").queue(name)
    with managed.receive() as receiver:
        events = take(receiver, 3)
        assert sorted(payloads(events)) == ["one", "tick", "two"]
        events[0].nack()
        settle(receiver, events[1:])
        settle(receiver, take(receiver, 1))
        eventually(lambda: sum(shop.queue.counts().values()) == 0)
        assert managed.manager().counts.lost_leads == 0
    assert shop.as_role("planner").queue(name).unschedule("tick")


def test_documented_grants_are_enough_for_shards(shop: Shop) -> None:
    shards = connect_shards([(shop.url("server"), "-")])
    queue = shop.opened.enter_context(shards).queue(shop.queue.name)
    queue.put([{"user_id": 1, "payload": "one"}])
    queue.schedule("tick", "* * * * *", payload="tick")
    with queue.receive() as receiver:
        settle(receiver, take(receiver, 1))


def test_documented_grants_are_enough_for_an_exactly_once_output(shop: Shop) -> None:
    output = shop.output(shop.url("delivery"))
    for _ in range(2):
        output.send(output.prepare(make_block(make_values(1, 6), 1)))
    assert shop.queue.counts()["to_be_fired"] == 5
    shop.db.execute(f"REVOKE UPDATE ON turnlane_writer FROM {shop.queue.name}_delivery")
    with pytest.raises(RetryLater, match="turnlane_writer"):
        output.send(output.prepare(make_block(make_values(6, 7), 6)))
