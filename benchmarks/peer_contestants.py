"""Other queues for Python, each used as its manual says, and a bare file for comparison."""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import persistqueue

from benchmarks.contestant import Contestant

TRANSACTION = 1_000
"""The events of a transaction or a read if the user makes the batches."""


class BareFile(Contestant):
    """A file with one ``write`` for each call and one sync at the end."""

    label = "bare file"
    events = 50_000

    def __init__(self, directory: Path, expected: int) -> None:
        del expected
        self._fd = os.open(directory / "bare", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def put(self, value: bytes) -> None:
        os.write(self._fd, value)

    def put_block(self, values: Sequence[bytes]) -> None:
        os.write(self._fd, b"".join(values))

    def secure(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class SyncedFile(BareFile):
    """A file with one ``write`` and one ``fdatasync`` for each event."""

    label = "bare file, synced each time"

    def put(self, value: bytes) -> None:
        os.write(self._fd, value)
        os.fdatasync(self._fd)


class StandardQueue(Contestant):
    """``queue.Queue``, in memory."""

    label = "queue.Queue"
    events = 50_000

    def __init__(self, directory: Path, expected: int) -> None:
        del directory
        self._queue: queue.Queue[bytes] = queue.Queue(expected + 1)
        self.put = self._queue.put

    def drain(self, count: int) -> None:
        get, done = self._queue.get, self._queue.task_done
        for _ in range(count):
            get()
            done()

    def close(self) -> None:
        pass


class PersistFile(Contestant):
    """persist-queue's file queue. With ``autosave`` it saves every ``get``; it saves every put.

    It syncs a chunk when the chunk is full. It never syncs its position.
    """

    label = "persist-queue, file"
    events = 200
    autosave = False

    def __init__(self, directory: Path, expected: int) -> None:
        del expected
        path = str(directory / "persist")
        Path(path).mkdir()
        self._queue = persistqueue.Queue(path, tempdir=path, autosave=self.autosave)
        self.put = self._queue.put

    def secure(self) -> None:
        os.fdatasync(self._queue.headf.fileno())

    def drain(self, count: int) -> None:
        for _ in range(count):
            self._queue.get()
            self._queue.task_done()

    def close(self) -> None:
        self._queue.headf.close()
        self._queue.tailf.close()


class PersistFileAutosave(PersistFile):
    """persist-queue's file queue with ``autosave``, its safest setting."""

    label = "persist-queue, file, autosave"
    autosave = True


class PersistSqlite(Contestant):
    """persist-queue's SQLite queue: WAL, a transaction for each put."""

    label = "persist-queue, SQLite"
    events = 200

    def __init__(self, directory: Path, expected: int) -> None:
        del expected
        self._queue = persistqueue.SQLiteQueue(
            str(directory / "persist-sqlite"), multithreading=True, auto_commit=True
        )
        self.put = self._queue.put

    def drain(self, count: int) -> None:
        for _ in range(count):
            self._queue.get()
            self._queue.task_done()

    def close(self) -> None:
        self._queue.close()


class Sqlite(Contestant):
    """A hand-written table in WAL mode, ``synchronous=NORMAL``, 1,000 events in a transaction.

    A commit survives the end of the process. A power cut may undo the last commits, as with
    ``interval``.
    """

    label = "SQLite WAL by hand"
    events = 10_000

    def __init__(self, directory: Path, expected: int) -> None:
        del expected
        self._path = directory / "by-hand.db"
        self._lock = threading.Lock()
        self._open = 0
        self._database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, value BLOB)")

    def put(self, value: bytes) -> None:
        with self._lock:
            if not self._open:
                self._database.execute("BEGIN")
            self._database.execute("INSERT INTO events (value) VALUES (?)", (value,))
            self._open += 1
            if self._open == TRANSACTION:
                self._commit()

    def _commit(self) -> None:
        self._database.execute("COMMIT")
        self._open = 0

    def put_block(self, values: Sequence[bytes]) -> None:
        rows = [(value,) for value in values]
        self._database.execute("BEGIN")
        self._database.executemany("INSERT INTO events (value) VALUES (?)", rows)
        self._database.execute("COMMIT")

    def secure(self) -> None:
        if self._open:
            self._commit()
        fd = os.open(f"{self._path}-wal", os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)

    def drain(self, count: int) -> None:
        taken = 0
        while taken < count:
            self._database.execute("BEGIN IMMEDIATE")
            rows = self._database.execute(
                "SELECT id, value FROM events ORDER BY id LIMIT ?", (TRANSACTION,)
            ).fetchall()
            self._database.execute("DELETE FROM events WHERE id <= ?", (rows[-1][0],))
            self._database.execute("COMMIT")
            taken += len(rows)

    def close(self) -> None:
        self._database.close()
