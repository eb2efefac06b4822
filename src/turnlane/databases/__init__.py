"""Databases: one layer for PostgreSQL, MySQL, MariaDB and SQLite under queue tables and outputs.

Importing the package imports no driver; `load_dialect` does.
"""

from __future__ import annotations

from turnlane.databases.connection import (
    Execute,
    RowsLocked,
    Session,
    StatementResult,
    execute_statement,
    get_delivery_error,
    translate_errors,
)
from turnlane.databases.dialect import (
    URL_EXAMPLES,
    Connection,
    ConnectOptions,
    Dialect,
    ErrorKind,
    Row,
    add_password,
    check_url_setting,
    get_dialect_name,
    load_dialect,
    remove_password,
)

__all__ = [
    "URL_EXAMPLES",
    "ConnectOptions",
    "Connection",
    "Dialect",
    "ErrorKind",
    "Execute",
    "Row",
    "RowsLocked",
    "Session",
    "StatementResult",
    "add_password",
    "check_url_setting",
    "execute_statement",
    "get_delivery_error",
    "get_dialect_name",
    "load_dialect",
    "remove_password",
    "translate_errors",
]
