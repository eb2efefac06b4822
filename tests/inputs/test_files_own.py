"""A files input never opens or closes files that its own process depends on."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.harness import wait_until
from tests.inputs.files_harness import append, make_lines, make_values, run_input
from turnlane.databases import load_dialect
from turnlane.databases.sqlite import find_database_inodes

WRITE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("INSERT INTO orders VALUES (?)", (int(sys.argv[2]),))
connection.commit()
connection.close()
"""


@contextmanager
def open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database as a queue table does, with a write-ahead log that has content."""
    connection = load_dialect(f"sqlite:///{path}").connect()
    assert isinstance(connection, sqlite3.Connection)
    try:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (number)")
        yield connection
    finally:
        connection.close()


def write_in_another_process(path: Path, number: int) -> None:
    subprocess.run([sys.executable, "-c", WRITE, path, str(number)], check=True, timeout=60)


def assert_locked(database: sqlite3.Connection, path: Path, number: int) -> None:
    """Check that a foreign writer does not take itself for the last user of the database."""
    log = path.with_name(path.name + "-wal")
    before = log.stat().st_ino
    write_in_another_process(path, number)
    assert log.exists(), "the other process has deleted the write-ahead log"
    assert log.stat().st_ino == before
    found = database.execute("SELECT count(*) FROM orders WHERE number = ?", (number,)).fetchone()
    assert found == (1,)


@pytest.mark.parametrize("kind", ["database", "symbolic link", "hard link"])
def test_database_of_the_process_is_not_read_and_keeps_its_locks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    logs, path = tmp_path / "logs", tmp_path / "logs" / "shop.db"
    logs.mkdir()
    if kind != "database":
        path = tmp_path / "shop.db"
    with open_database(path) as database:
        database.execute("INSERT INTO orders VALUES (0)")
        if kind == "symbolic link":
            (logs / "link").symlink_to(path)
        elif kind == "hard link":
            os.link(path, logs / "link")
        append(logs / "app.log", make_lines(0, 3))
        with run_input(tmp_path / "data", logs / "*", close_inactive=0) as running:
            assert running.await_lines(3) == make_values(0, 3)
            running.await_rounds()
            assert_locked(database, path, 1)
            running.await_rounds()
            assert running.lines() == make_values(0, 3)
        assert_locked(database, path, 2)
    assert "files.own_file_ignored" in caplog.text
    assert "SQLite" in caplog.text


def test_file_that_becomes_a_database_of_the_process_is_given_up_without_a_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The input has opened the file before SQLite: then it must not close it either."""
    path = tmp_path / "logs" / "shop.db"
    path.parent.mkdir()
    with sqlite3.connect(path) as foreign:
        foreign.execute("PRAGMA journal_mode = WAL")
        foreign.execute("CREATE TABLE orders (number)")
    foreign.close()
    with run_input(tmp_path / "data", path.parent / "*.db", partial_timeout=0.01) as running:
        wait_until(lambda: any(each.fd is not None for each in running.input._open))
        (reader,) = running.input._open
        held = reader.fd
        assert held is not None
        with open_database(path) as database:
            database.execute("INSERT INTO orders VALUES (0)")
            wait_until(lambda: not running.input._tracker.readers, "the input gives the file up")
            assert reader.fd is None
            assert (os.fstat(held).st_dev, os.fstat(held).st_ino) in find_database_inodes()
            assert_locked(database, path, 1)
            running.input.stop(5.0)
            assert_locked(database, path, 2)
    os.close(held)
    assert "files.database_kept_open" in caplog.text


@pytest.mark.parametrize("way", ["direct", "symbolic link"])
def test_files_of_the_data_directory_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Otherwise each event would be read again as a part of the queue that it is in."""
    data, root = tmp_path / "data", tmp_path
    data.mkdir()
    if way == "symbolic link":
        root = tmp_path / "logs"
        root.mkdir()
        (root / "data").symlink_to(data)
    append(root / "app.log", make_lines(0, 3))
    with run_input(data, root / "**") as running:
        running.await_lines(3)
        running.await_rounds(5)
        assert running.lines() == make_values(0, 3)
    assert "the data directory of this node" in caplog.text
