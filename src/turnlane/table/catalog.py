"""The catalog: which queues a database has."""

from __future__ import annotations

from turnlane.errors import NoSuchQueue, QueueExists
from turnlane.runtime import Closing
from turnlane.table.batch_commit import delete_staged_rows
from turnlane.table.definition import Definition
from turnlane.table.grammar import parse_definition
from turnlane.table.schedules import get_schedule_ddl
from turnlane.table.shard_store import delete_shard_data
from turnlane.table.sql.dialect import Dialect
from turnlane.table.sql.session import Execute, Session


class QueueCatalog(Closing):
    """The queues of one database. Safe to use from any thread; every call asks the database."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._session = Session(dialect)
        self._prepared = self._made = False

    def close(self) -> None:
        self._session.close()

    def ddl(self, definition: Definition) -> list[str]:
        """The statements that :meth:`create` runs, for a migration tool."""
        name = definition.name.replace("'", "''")
        text = str(definition).replace("'", "''")
        if self.dialect.name == "mysql":  # where a backslash in a text is an escape
            name, text = name.replace("\\", "\\\\"), text.replace("\\", "\\\\")
        return [
            *self._bookkeeping(),
            *self.dialect.table(definition),
            f"INSERT INTO turnlane_queue (name, definition) VALUES ('{name}', '{text}')",
            # A queue that is made anew has tokens above all that its managers had before.
            (
                "INSERT INTO turnlane_lease (queue, token) "
                f"VALUES ('{name}', {self.dialect.now} / 1000)"
            ),
        ]

    def create(
        self, definition: Definition, *, if_not_exists: bool = False, first_id: int = 1
    ) -> bool:
        """Make a queue; false if it was there. Raises ``QueueExists``.

        The ids of its events begin at ``first_id``: no two shards of a queue have the same. On
        MySQL, which commits every DDL statement by itself, a failure half-way leaves a table
        that no catalog knows; :meth:`drop` removes it.
        """
        self._make()
        if definition.name in self.names():
            if if_not_exists:
                return False
            raise QueueExists(f"there is a queue {definition.name!r} in this database")
        made = self.dialect.table(definition)
        listed = self.ddl(definition)[len(self._bookkeeping()) + len(made) :]

        def work(execute: Execute) -> None:
            for statement in (*made, *self.dialect.number_from(definition.name, first_id), *listed):
                execute(statement.replace("%", self.dialect.percent))

        self._session.transact(work)
        return True

    def number_from(self, name: str, first_id: int) -> None:
        """Have the ids of events to come begin at ``first_id``, unless they are beyond that."""

        def work(execute: Execute) -> None:
            for statement in self.dialect.number_from(name, first_id):
                execute(statement.replace("%", self.dialect.percent))

        self._session.transact(work)

    def drop(self, name: str, *, if_exists: bool = False) -> bool:
        """Delete a queue and everything in it; false if there was none. Raises ``NoSuchQueue``."""
        self._make()
        found = name in self.names()
        if not found and not if_exists:
            raise NoSuchQueue(f"there is no queue {name!r} in this database")

        def work(execute: Execute) -> None:
            mark = self.dialect.mark
            execute(f"DELETE FROM turnlane_queue WHERE name = {mark}", (name,))
            execute(f"DELETE FROM turnlane_lease WHERE queue = {mark}", (name,))
            execute(f"DELETE FROM turnlane_schedule WHERE queue = {mark}", (name,))
            if found:
                execute(f"DROP TABLE IF EXISTS {self.dialect.identifier(name)}")
                delete_staged_rows(self.dialect, name, execute)
                delete_shard_data(self.dialect, name, execute)

        self._session.transact(work)
        return found

    def names(self) -> list[str]:
        """The names of all queues."""
        return [definition.name for definition in self.definitions()]

    def definitions(self) -> list[Definition]:
        """All queues, by name."""
        self._prepare()
        rows = self._session.query("SELECT definition FROM turnlane_queue ORDER BY name")
        return [parse_definition(row[0]) for row in rows]

    def definition(self, name: str) -> Definition:
        """The queue of this name. Raises ``NoSuchQueue``."""
        for definition in self.definitions():
            if definition.name == name:
                return definition
        raise NoSuchQueue(f"there is no queue {name!r} in this database")

    def _bookkeeping(self) -> list[str]:
        return [*self.dialect.bookkeeping(), get_schedule_ddl(self.dialect)]

    def _prepare(self) -> None:
        """Have turnlane's own tables; who finds them there needs no right to make any."""
        if self._prepared:
            return
        try:
            self._session.query("SELECT 1 FROM turnlane_queue WHERE 1 = 0")
        except self.dialect.error:
            self._make()
        self._prepared = True

    def _make(self) -> None:
        """Make turnlane's own tables, where they are missing; once."""
        if self._made:
            return
        for statement in self._bookkeeping():
            self._session.change(statement.replace("%", self.dialect.percent))
        self._made = self._prepared = True
