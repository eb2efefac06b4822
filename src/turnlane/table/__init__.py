"""Queue tables: events that fire at a time, inserted in the transactions of your own database."""

from __future__ import annotations

from turnlane.table.definition import TableSettings
from turnlane.table.manager import Manager
from turnlane.table.queue import Database, TableQueue, connect
from turnlane.table.receiver import Receiver, TableEvent
from turnlane.table.schedules import Schedule
from turnlane.table.sharded import ShardedDatabase, ShardedQueue, connect_shards
from turnlane.table.shards import KeyRange, Shard, ShardMap, keyspace_id

__all__ = [
    "Database",
    "KeyRange",
    "Manager",
    "Receiver",
    "Schedule",
    "Shard",
    "ShardMap",
    "ShardedDatabase",
    "ShardedQueue",
    "TableEvent",
    "TableQueue",
    "TableSettings",
    "connect",
    "connect_shards",
    "keyspace_id",
]
