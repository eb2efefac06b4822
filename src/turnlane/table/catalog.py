"""The catalog: which queues a database has, and how they are created and dropped.

turnlane's own tables (``turnlane_queue``, ``turnlane_lease``, ``turnlane_schedule``) are created
when they are needed first. A process that finds them needs no right to create tables.
"""

from __future__ import annotations

from turnlane.databases import Dialect, Execute, Session
from turnlane.errors import NoSuchQueue, QueueExists
from turnlane.runtime import Closeable
from turnlane.table.batch_commit import delete_batch_data
from turnlane.table.definition import Definition
from turnlane.table.grammar import parse_definition
from turnlane.table.queue_sql import get_queue_sql
from turnlane.table.receiver import EVENT_COLUMNS
from turnlane.table.schedules import get_schedule_ddl
from turnlane.table.shard_store import delete_shard_data


class QueueCatalog(Closeable):
    """The queues of one database. Thread-safe; every call asks the database."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._queue_sql = get_queue_sql(dialect)
        self._session = Session(dialect)
        self._has_tables = self._has_created_tables = False

    def close(self) -> None:
        self._session.close()

    def build_ddl(self, definition: Definition) -> list[str]:
        """Return the statements that :meth:`create` runs, for a migration tool."""
        return [
            *self._get_own_ddl(),
            *self._queue_sql.create_table(definition),
            *self._build_inserts(definition),
        ]

    def create(
        self, definition: Definition, *, if_not_exists: bool = False, first_id: int = 1
    ) -> bool:
        """Create a queue; false if it exists. Raises ``QueueExists``.

        The ids of its events begin at ``first_id``: the shards of a queue have different ids. MySQL
        commits every DDL statement by itself, so a failure may leave a table that is not in the
        catalog; :meth:`drop` drops it.
        """
        self._create_tables()
        if definition.name in self.list_names():
            if if_not_exists:
                return False
            raise QueueExists(f"this database already has a queue {definition.name!r}")
        self._run_all(
            [
                *self._queue_sql.create_table(definition),
                *self._queue_sql.set_next_id(definition.name, first_id),
                *self._build_inserts(definition),
            ]
        )
        return True

    def set_first_id(self, name: str, first_id: int) -> None:
        """Let the ids of new events begin at ``first_id``, unless they are higher already."""
        self._run_all(self._queue_sql.set_next_id(name, first_id))

    def drop(self, name: str, *, if_exists: bool = False) -> bool:
        """Delete a queue and everything in it; false if there is none. Raises ``NoSuchQueue``."""
        self._create_tables()
        found = name in self.list_names() or self._is_unfinished(name)
        if not found and not if_exists:
            raise NoSuchQueue(f"there is no queue {name!r} in this database")

        def work(execute: Execute) -> None:
            mark = self.dialect.placeholder
            execute(f"DELETE FROM turnlane_queue WHERE name = {mark}", (name,))
            execute(f"DELETE FROM turnlane_lease WHERE queue = {mark}", (name,))
            execute(f"DELETE FROM turnlane_schedule WHERE queue = {mark}", (name,))
            if found:
                execute(f"DROP TABLE IF EXISTS {self.dialect.quote_name(name)}")
                delete_batch_data(self.dialect, name, execute)
                delete_shard_data(self.dialect, name, execute)

        self._session.transact(work)
        return found

    def _is_unfinished(self, name: str) -> bool:
        """Whether :meth:`create` failed and left a table: one of a queue, without a row."""
        if self.dialect.name != "mysql":
            return False
        columns = ", ".join((*EVENT_COLUMNS, "last_error", "keyspace_id"))
        try:
            return not self._session.query(
                f"SELECT {columns} FROM {self.dialect.quote_name(name)} LIMIT 1"
            )
        except self.dialect.error:
            return False  # there is no table, or it is not a queue's

    def list_names(self) -> list[str]:
        """Return the names of all queues."""
        return [definition.name for definition in self.list_definitions()]

    def list_definitions(self) -> list[Definition]:
        """Return the definitions of all queues, by name."""
        if not self._has_tables:
            try:
                self._session.query("SELECT 1 FROM turnlane_queue WHERE 1 = 0")
            except self.dialect.error:
                self._create_tables()
            self._has_tables = True
        rows = self._session.query("SELECT definition FROM turnlane_queue ORDER BY name")
        return [parse_definition(row[0]) for row in rows]

    def get_definition(self, name: str) -> Definition:
        """Return the definition of a queue. Raises ``NoSuchQueue``."""
        for definition in self.list_definitions():
            if definition.name == name:
                return definition
        raise NoSuchQueue(f"there is no queue {name!r} in this database")

    def _get_own_ddl(self) -> list[str]:
        return [*self._queue_sql.create_own_tables(), get_schedule_ddl(self.dialect)]

    def _create_tables(self) -> None:
        """Create turnlane's own tables where they are missing; once."""
        if not self._has_created_tables:
            for statement in self._get_own_ddl():
                self._session.change(statement.replace("%", self.dialect.percent))
            self._has_created_tables = self._has_tables = True

    def _build_inserts(self, definition: Definition) -> list[str]:
        """Return the statements that register a queue, without parameters."""
        name = definition.name.replace("'", "''")
        text = str(definition).replace("'", "''")
        if self.dialect.name == "mysql":  # a backslash in a text is an escape
            name, text = name.replace("\\", "\\\\"), text.replace("\\", "\\\\")
        return [
            f"INSERT INTO turnlane_queue (name, definition) VALUES ('{name}', '{text}')",
            # The first token comes from the clock: if the queue is created again, its tokens are
            # higher than all tokens of the old managers.
            (
                "INSERT INTO turnlane_lease (queue, token) "
                f"VALUES ('{name}', {self.dialect.now} / 1000)"
            ),
        ]

    def _run_all(self, statements: list[str]) -> None:
        def work(execute: Execute) -> None:
            for statement in statements:
                execute(statement.replace("%", self.dialect.percent))

        self._session.transact(work)
