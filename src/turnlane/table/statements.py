"""The SQL of a queue table: every statement by its name.

The statements are the same for all databases, except for the parts that :class:`Dialect` fills in:
the clock, the locks, the placeholder of a parameter.

An event is *open* while its state is ``to_be_fired`` or ``fired``: it is neither acked nor dead.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Self

from turnlane.databases import Dialect
from turnlane.table.definition import Definition
from turnlane.table.event import EVENT_COLUMNS
from turnlane.table.queue_sql import IS_OPEN, MOST_ATTEMPTS, get_queue_sql

_FENCED: Final = "EXISTS (SELECT 1 FROM turnlane_lease WHERE queue = %s AND token = %s)"
_FIREABLE: Final = "state = 'to_be_fired' AND after_group IS NULL"
_FENCE_BEGIN: Final = (
    "WITH fence AS MATERIALIZED (SELECT token, set_config('lock_timeout', '200ms', true) "
    "FROM turnlane_lease WHERE queue = %s AND token = %s {share}), settled AS ("
)
_FENCE_END: Final = "EXISTS (SELECT 1 FROM fence)) SELECT token FROM fence"
"""Around a statement: it changes and returns nothing unless the lease row has the token.

It waits at most 200 ms for a locked row: PostgreSQL has no DELETE that skips locked rows, and to
lock the rows first would cost as much as to delete them."""

_PLAIN: Final = {
    # the lease
    "read_lease": "SELECT owner, token, expires_at, {now} FROM turnlane_lease "
    "WHERE queue = %s {lock}",
    "take_lease": "UPDATE turnlane_lease SET owner = %s, token = token + 1, expires_at = %s, "
    "listening = 0 WHERE queue = %s",
    "renew_lease": "UPDATE turnlane_lease SET expires_at = {now} + %s "
    "WHERE queue = %s AND token = %s",
    "read_expiry": "SELECT expires_at FROM turnlane_lease WHERE queue = %s",
    "release_lease": "UPDATE turnlane_lease SET owner = NULL, expires_at = 0, listening = 0 "
    "WHERE queue = %s AND token = %s",
    "set_listening": "UPDATE turnlane_lease SET listening = %s WHERE queue = %s AND token = %s",
    "fence": "SELECT token FROM turnlane_lease WHERE queue = %s AND token = %s {share}",
    # reads of the manager
    "read_definition": "SELECT definition FROM turnlane_queue WHERE name = %s",
    "read_last_id": "SELECT COALESCE(MAX(event_id), 0) FROM {table}",
    "read_new": "SELECT {columns} FROM {table} {by_id} "
    f"WHERE event_id > %s AND state = 'to_be_fired' AND {_FENCED} ORDER BY event_id LIMIT %s",
    "read_retried": "SELECT {columns} FROM {table} "
    f"WHERE {IS_OPEN} AND attempts > 0 AND {_FENCED}",
    "read_old_fired": "SELECT event_id, attempts FROM {table} {by_time} "
    "WHERE fire_at >= %s AND fire_at <= %s AND state = 'fired' "
    "ORDER BY fire_at, event_id LIMIT %s",
    "read_old_acked": "SELECT event_id FROM {table} {by_time} "
    "WHERE fire_at <= %s AND state = 'acked' ORDER BY fire_at, event_id LIMIT %s",
    # groups
    "find_done_groups": "SELECT DISTINCT w.after_group FROM {table} AS w "
    "WHERE w.after_group IS NOT NULL AND w.state IN ('to_be_fired', 'fired') AND NOT EXISTS ("
    "SELECT 1 FROM {table} AS m WHERE m.event_group = w.after_group AND m.state <> 'acked')",
    "find_unacked_member": "SELECT event_id FROM {table} "
    "WHERE event_group = %s AND state <> 'acked' LIMIT 1",
    "lock_waiting": f"SELECT event_id FROM {{table}} WHERE after_group = %s AND {IS_OPEN} "
    "{lock_free}",
    # requests of users
    "count_by_state": "SELECT state, COUNT(*) FROM {table} GROUP BY state",
    "retry_all": "UPDATE {table} SET state = 'to_be_fired', attempts = 0, fire_at = {now} "
    "WHERE state = 'dead'",
    "peek_readable": "SELECT event_id, fire_at, priority, attempts, keyspace_id, NULL, NULL, "
    "last_error FROM {table} WHERE state = %s ORDER BY fire_at, event_id LIMIT %s",
    "peek": "SELECT {peeked} FROM {table} WHERE state = %s ORDER BY fire_at, event_id LIMIT %s",
}

_FILTERED: Final = {
    # The first condition is for databases that find no index range in the second. Bounds are
    # parameters: an index cannot use a clock that moves while the statement runs.
    "read_due": "SELECT {columns} FROM {table} {by_time} "
    "WHERE fire_at >= %s AND (fire_at, event_id) > (%s, %s) AND fire_at <= %s AND {filter} "
    f"AND {_FIREABLE} AND {_FENCED} ORDER BY fire_at, event_id LIMIT %s",
    "read_ids": "SELECT {columns} FROM {rows} "
    f"WHERE event_id {{filter}} AND state = 'to_be_fired' AND {_FENCED}",
    "read_open": f"SELECT {{columns}} FROM {{rows}} WHERE event_id {{filter}} AND {IS_OPEN} "
    f"AND {_FENCED}",
    "find_unacked": "SELECT event_id FROM {rows} WHERE event_id {filter} AND state <> 'acked'",
    "find_open": f"SELECT event_id FROM {{rows}} WHERE event_id {{filter}} AND {IS_OPEN}",
    # These skip locked rows: a user's transaction may hold a row, to ack it, for minutes.
    "lock_open": f"SELECT event_id FROM {{rows}} WHERE event_id {{filter}} AND {IS_OPEN} "
    "{lock_free}",
    # A row whose fire time a user moved into the future must not fire now.
    "lock_due": "SELECT event_id FROM {rows} WHERE event_id {filter} AND fire_at <= {now} "
    f"AND {_FIREABLE} {{lock_free}}",
    "lock_fired": "SELECT event_id FROM {rows} WHERE event_id {filter} AND state = 'fired' "
    "{lock_free}",
    "lock_unacked": "SELECT event_id FROM {rows} WHERE event_id {filter} AND state <> 'acked' "
    "{lock_free}",
    # A user may write any number of attempts: the sum must fit into the column.
    "mark_fired": "UPDATE {rows} SET state = 'fired', "
    f"attempts = attempts + CASE WHEN attempts < {MOST_ATTEMPTS} THEN 1 ELSE 0 END "
    "WHERE event_id {filter}",
    "unmark_fired": "UPDATE {rows} SET state = 'to_be_fired', "
    "attempts = attempts - CASE WHEN attempts > 0 THEN 1 ELSE 0 END WHERE event_id {filter}",
    "ack_delete": "{delete} WHERE event_id {filter}",
    "ack_keep": "UPDATE {rows} SET state = 'acked' WHERE event_id {filter} AND state <> 'acked'",
    "fenced_ack_delete": f"{_FENCE_BEGIN}{{delete}} WHERE event_id {{filter}} AND {_FENCE_END}",
    "fenced_ack_keep": f"{_FENCE_BEGIN}UPDATE {{rows}} SET state = 'acked' "
    f"WHERE event_id {{filter}} AND state <> 'acked' AND {_FENCE_END}",
    "release_waiting": "UPDATE {rows} SET after_group = NULL, "
    "fire_at = CASE WHEN fire_at > {now} THEN fire_at ELSE {now} END WHERE event_id {filter}",
    "find_fired_before": "SELECT event_id, event_group FROM {rows} "
    "WHERE event_id {filter} AND (state IN ('fired', 'dead') OR attempts > 0) AND state <> 'acked'",
    "delete_acked": "{delete} WHERE event_id {filter} AND state = 'acked'",
    # A fired event keeps its attempts: a late ack of it still counts. MySQL sets the columns in
    # the order of the statement.
    "retry": "UPDATE {rows} SET fire_at = {now}, "
    "attempts = CASE state WHEN 'dead' THEN 0 ELSE attempts END, state = 'to_be_fired' "
    "WHERE event_id {filter} AND state IN ('dead', 'fired')",
    "cancel": "{delete} WHERE event_id {filter} AND state = 'to_be_fired'",
}


@dataclass(frozen=True, slots=True)
class FilteredStatement:
    """A statement about some events: a condition selects them, between its two halves."""

    before: str
    after: str

    def where(self, condition: str) -> str:
        """Return the whole statement."""
        return f"{self.before}{condition}{self.after}"


@dataclass(frozen=True, slots=True)
class Statements:
    """All statements about one queue, with its names."""

    table: str
    columns: str
    read_lease: str
    take_lease: str
    renew_lease: str
    read_expiry: str
    release_lease: str
    set_listening: str
    fence: str
    read_definition: str
    read_last_id: str
    read_new: str
    read_retried: str
    read_old_fired: str
    read_old_acked: str
    find_done_groups: str
    find_unacked_member: str
    lock_waiting: str
    count_by_state: str
    retry_all: str
    peek: str
    peek_readable: str
    read_due: FilteredStatement
    read_ids: FilteredStatement
    read_open: FilteredStatement
    find_unacked: FilteredStatement
    find_open: FilteredStatement
    lock_open: FilteredStatement
    lock_due: FilteredStatement
    lock_fired: FilteredStatement
    lock_unacked: FilteredStatement
    mark_fired: FilteredStatement
    unmark_fired: FilteredStatement
    ack_delete: FilteredStatement
    ack_keep: FilteredStatement
    fenced_ack_delete: FilteredStatement
    fenced_ack_keep: FilteredStatement
    release_waiting: FilteredStatement
    find_fired_before: FilteredStatement
    delete_acked: FilteredStatement
    retry: FilteredStatement
    cancel: FilteredStatement

    @classmethod
    def from_definition(cls, dialect: Dialect, definition: Definition) -> Self:
        """Fill in the names of a queue and the SQL of a database."""
        users = [dialect.quote_name(name) for name in definition.column_names]
        by_time, by_id = get_queue_sql(dialect).get_index_hints(definition)
        table = dialect.quote_name(definition.name)
        names = {
            "table": table,
            "by_time": by_time,
            "by_id": by_id,
            "rows": f"{table} {by_id}",
            "delete": begin_delete(table, by_id),
            "columns": ", ".join([*EVENT_COLUMNS, *users]),
            "peeked": ", ".join([*EVENT_COLUMNS, "last_error", *users]),
        }
        rendered: dict[str, Any] = {"table": table, "columns": names["columns"]}
        for name, template in _PLAIN.items():
            rendered[name] = dialect.render(template, **names)
        for name, template in _FILTERED.items():
            # Split before the names are filled in: a queue may be named {filter}.
            before, after = template.split("{filter}")
            rendered[name] = FilteredStatement(
                dialect.render(before, **names), dialect.render(after, **names)
            )
        assert rendered.keys() == {field.name for field in fields(cls)}
        return cls(**rendered)


def begin_delete(table: str, hint: str) -> str:
    """Return the first words of a DELETE; MySQL takes an index hint only with a table list."""
    return f"DELETE {table} FROM {table} {hint}" if hint else f"DELETE FROM {table}"
