"""A program that knows nothing of turnlane: ``foreign_writer.py FILE TABLE,TABLE COUNT SECONDS``.

It opens the SQLite file, commits one row to each table and closes the file, COUNT times, and
spreads this over about SECONDS.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import time


def main() -> None:
    path, tables, count, seconds = sys.argv[1:]
    for at in range(int(count)):
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection, connection:
            for table in tables.split(","):
                connection.execute(
                    f"INSERT INTO {table} (user_id, payload) VALUES (?, ?)", (at, f"p{at}")
                )
        time.sleep(float(seconds) / int(count))


if __name__ == "__main__":
    main()
