"""The SQL of a queue table, each statement by its name.

They are the same for all databases but for what :class:`Dialect` fills in: the clock, the locks,
the sign for a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Self

from turnlane.table.definition import Definition
from turnlane.table.event import EVENT_COLUMNS
from turnlane.table.sql.dialect import MOST_ATTEMPTS, Dialect

_FENCED: Final = "EXISTS (SELECT 1 FROM turnlane_lease WHERE queue = %s AND token = %s)"
_PENDING: Final = "state = 'to_be_fired' AND after_group IS NULL"
_STANDING: Final = "state IN ('to_be_fired', 'fired')"
_HOLDING: Final = (
    "WITH fence AS MATERIALIZED (SELECT token, set_config('lock_timeout', '200ms', true) "
    "FROM turnlane_lease WHERE queue = %s AND token = %s {share}), settled AS ("
)
_HELD: Final = "EXISTS (SELECT 1 FROM fence)) SELECT token FROM fence"
"""Around a statement: nothing happens, and nothing is returned, unless the lease row is held.

It waits for no row that somebody else holds, or not for long: PostgreSQL has no DELETE that skips
such rows, and to lock them first would cost as much as to delete them."""

_PLAIN: Final = {
    # the lease
    "lease": "SELECT owner, token, expires_at, {now} FROM turnlane_lease WHERE queue = %s {lock}",
    "take": "UPDATE turnlane_lease SET owner = %s, token = token + 1, expires_at = %s, "
    "listening = 0 WHERE queue = %s",
    "renew": "UPDATE turnlane_lease SET expires_at = {now} + %s WHERE queue = %s AND token = %s",
    "expiry": "SELECT expires_at FROM turnlane_lease WHERE queue = %s",
    "release": "UPDATE turnlane_lease SET owner = NULL, expires_at = 0, listening = 0 "
    "WHERE queue = %s AND token = %s",
    "listen": "UPDATE turnlane_lease SET listening = %s WHERE queue = %s AND token = %s",
    "fence": "SELECT token FROM turnlane_lease WHERE queue = %s AND token = %s {share}",
    # what the manager reads
    "definition": "SELECT definition FROM turnlane_queue WHERE name = %s",
    "last_id": "SELECT COALESCE(MAX(event_id), 0) FROM {table}",
    "read_new": "SELECT {columns} FROM {table} {by_id} "
    f"WHERE event_id > %s AND state = 'to_be_fired' AND {_FENCED} ORDER BY event_id LIMIT %s",
    "read_retried": "SELECT {columns} FROM {table} "
    f"WHERE {_STANDING} AND attempts > 0 AND {_FENCED}",
    "old_fired": "SELECT event_id, attempts FROM {table} {by_time} "
    "WHERE fire_at >= %s AND fire_at <= %s AND state = 'fired' "
    "ORDER BY fire_at, event_id LIMIT %s",
    "old_acked": "SELECT event_id FROM {table} {by_time} WHERE fire_at <= %s AND state = 'acked' "
    "ORDER BY fire_at, event_id LIMIT %s",
    # groups
    "done_groups": "SELECT DISTINCT w.after_group FROM {table} AS w "
    "WHERE w.after_group IS NOT NULL AND w.state IN ('to_be_fired', 'fired') AND NOT EXISTS ("
    "SELECT 1 FROM {table} AS m WHERE m.event_group = w.after_group AND m.state <> 'acked')",
    "unsettled_member": "SELECT event_id FROM {table} WHERE event_group = %s AND state <> 'acked' "
    "LIMIT 1",
    "lock_waiting": f"SELECT event_id FROM {{table}} WHERE after_group = %s AND {_STANDING} "
    "{lock_free}",
    # what people ask
    "counts": "SELECT state, COUNT(*) FROM {table} GROUP BY state",
    "retry_all": "UPDATE {table} SET state = 'to_be_fired', attempts = 0, fire_at = {now} "
    "WHERE state = 'dead'",
    "peek_known": "SELECT event_id, fire_at, priority, attempts, keyspace_id, NULL, NULL, "
    "last_error FROM {table} WHERE state = %s ORDER BY fire_at, event_id LIMIT %s",
    "peek": "SELECT {peeked} FROM {table} WHERE state = %s ORDER BY fire_at, event_id LIMIT %s",
}

_OF_SOME: Final = {
    # The first condition is for databases that find no range in the second. Bounds are parameters:
    # a clock that moves while a statement runs is no bound for an index.
    "read_due": "SELECT {columns} FROM {table} {by_time} "
    "WHERE fire_at >= %s AND (fire_at, event_id) > (%s, %s) AND fire_at <= %s AND {which} "
    f"AND {_PENDING} AND {_FENCED} ORDER BY fire_at, event_id LIMIT %s",
    "read_ids": "SELECT {columns} FROM {rows} "
    f"WHERE event_id {{which}} AND state = 'to_be_fired' AND {_FENCED}",
    "read_standing": f"SELECT {{columns}} FROM {{rows}} WHERE event_id {{which}} AND {_STANDING} "
    f"AND {_FENCED}",
    "unsettled": "SELECT event_id FROM {rows} WHERE event_id {which} AND state <> 'acked'",
    "standing": f"SELECT event_id FROM {{rows}} WHERE event_id {{which}} AND {_STANDING}",
    # These wait for nobody: a user's transaction may hold a row, to ack it, for minutes.
    "lock_standing": f"SELECT event_id FROM {{rows}} WHERE event_id {{which}} AND {_STANDING} "
    "{lock_free}",
    # A row that somebody moved into the future must not fire now.
    "lock_due": "SELECT event_id FROM {rows} WHERE event_id {which} AND fire_at <= {now} "
    f"AND {_PENDING} {{lock_free}}",
    "lock_fired": "SELECT event_id FROM {rows} WHERE event_id {which} AND state = 'fired' "
    "{lock_free}",
    "lock_unsettled": "SELECT event_id FROM {rows} WHERE event_id {which} AND state <> 'acked' "
    "{lock_free}",
    # Whatever somebody wrote there, the number of attempts stays one.
    "mark": "UPDATE {rows} SET state = 'fired', "
    f"attempts = attempts + CASE WHEN attempts < {MOST_ATTEMPTS} THEN 1 ELSE 0 END "
    "WHERE event_id {which}",
    "unmark": "UPDATE {rows} SET state = 'to_be_fired', "
    "attempts = attempts - CASE WHEN attempts > 0 THEN 1 ELSE 0 END WHERE event_id {which}",
    "ack_delete": "{delete} WHERE event_id {which}",
    "ack_keep": "UPDATE {rows} SET state = 'acked' WHERE event_id {which} AND state <> 'acked'",
    "fenced_ack_delete": f"{_HOLDING}{{delete}} WHERE event_id {{which}} AND {_HELD}",
    "fenced_ack_keep": f"{_HOLDING}UPDATE {{rows}} SET state = 'acked' "
    f"WHERE event_id {{which}} AND state <> 'acked' AND {_HELD}",
    "let_go": "UPDATE {rows} SET after_group = NULL, "
    "fire_at = CASE WHEN fire_at > {now} THEN fire_at ELSE {now} END WHERE event_id {which}",
    "fired_before": "SELECT event_id, event_group FROM {rows} "
    "WHERE event_id {which} AND (state IN ('fired', 'dead') OR attempts > 0) AND state <> 'acked'",
    "delete": "{delete} WHERE event_id {which} AND state = 'acked'",
    # What was only fired keeps its attempts: a late ack of it is still good. MySQL sets columns in
    # their order here.
    "retry": "UPDATE {rows} SET fire_at = {now}, "
    "attempts = CASE state WHEN 'dead' THEN 0 ELSE attempts END, state = 'to_be_fired' "
    "WHERE event_id {which} AND state IN ('dead', 'fired')",
    "cancel": "{delete} WHERE event_id {which} AND state = 'to_be_fired'",
}


@dataclass(frozen=True, slots=True)
class FilteredStatement:
    """A statement about some events; which, is a condition that stands between its halves."""

    before: str
    after: str

    def where(self, condition: str) -> str:
        """The whole statement."""
        return f"{self.before}{condition}{self.after}"


@dataclass(frozen=True, slots=True)
class Statements:
    """All statements about one queue, its names filled in."""

    table: str
    columns: str
    lease: str
    take: str
    renew: str
    expiry: str
    release: str
    listen: str
    fence: str
    definition: str
    last_id: str
    read_new: str
    read_retried: str
    old_fired: str
    old_acked: str
    done_groups: str
    unsettled_member: str
    lock_waiting: str
    counts: str
    retry_all: str
    peek: str
    peek_known: str
    read_due: FilteredStatement
    read_ids: FilteredStatement
    read_standing: FilteredStatement
    unsettled: FilteredStatement
    standing: FilteredStatement
    lock_standing: FilteredStatement
    lock_due: FilteredStatement
    lock_fired: FilteredStatement
    lock_unsettled: FilteredStatement
    mark: FilteredStatement
    unmark: FilteredStatement
    ack_delete: FilteredStatement
    ack_keep: FilteredStatement
    fenced_ack_delete: FilteredStatement
    fenced_ack_keep: FilteredStatement
    let_go: FilteredStatement
    fired_before: FilteredStatement
    delete: FilteredStatement
    retry: FilteredStatement
    cancel: FilteredStatement

    @classmethod
    def of(cls, dialect: Dialect, definition: Definition) -> Self:
        """The statements in the words of a database."""
        own = [dialect.identifier(name) for name in definition.names]
        by_time, by_id = dialect.hints(definition)
        table = dialect.identifier(definition.name)
        names = {
            "table": table,
            "by_time": by_time,
            "by_id": by_id,
            "rows": f"{table} {by_id}",
            "delete": begin_delete(table, by_id),
            "columns": ", ".join([*EVENT_COLUMNS, *own]),
            "peeked": ", ".join([*EVENT_COLUMNS, "last_error", *own]),
        }
        made: dict[str, Any] = {"table": table, "columns": names["columns"]}
        for name, template in _PLAIN.items():
            made[name] = dialect.sql(template, **names)
        for name, template in _OF_SOME.items():
            # Cut before the names are filled in: a queue may be called {which}.
            before, after = template.split("{which}")
            made[name] = FilteredStatement(
                dialect.sql(before, **names), dialect.sql(after, **names)
            )
        assert made.keys() == {field.name for field in fields(cls)}
        return cls(**made)


def begin_delete(table: str, hint: str) -> str:
    """The beginning of a DELETE; an index can be named only in the form for several tables."""
    return f"DELETE {table} FROM {table} {hint}" if hint else f"DELETE FROM {table}"
