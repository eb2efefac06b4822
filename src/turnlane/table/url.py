"""Addresses of databases: which driver, and what it is told."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from turnlane.errors import ConfigError, NotSupported
from turnlane.table.sql.dialect import Dialect

EXAMPLES = "sqlite:///queue.db, postgresql://user@host/database or mysql://user@host/database"

TIMEOUTS = ("connect_timeout", "read_timeout", "write_timeout")
"""Options of MySQL's driver, in seconds."""


def dialect_of(url: str) -> Dialect:
    """The database at an address. Connects to nothing yet.

    ``sqlite:///queue.db`` is a file in the working directory, ``sqlite:////var/lib/queue.db`` one
    by its whole path.
    """
    scheme, _, rest = url.partition("://")
    try:
        match scheme:
            case "sqlite":
                return _sqlite(rest)
            case "postgresql" | "postgres":
                from turnlane.table.sql.postgres import Postgres

                return Postgres(url)
            case "mysql" | "mariadb":
                return _mysql(url)
    except ModuleNotFoundError as error:
        extra = "mysql" if scheme in {"mysql", "mariadb"} else "postgres"
        raise NotSupported(f"{scheme} needs: pip install 'turnlane[{extra}]'") from error
    raise ConfigError("url", f"{scheme or url!r} is not a database that is known; write {EXAMPLES}")


def _sqlite(rest: str) -> Dialect:
    from turnlane.table.sql.sqlite import Sqlite

    path = unquote(rest.removeprefix("/"))
    if not path or path == ":memory:":
        raise ConfigError("url", "a queue needs a file that several connections can open")
    return Sqlite(path)


def _mysql(url: str) -> Dialect:
    from turnlane.table.sql.mysql import Mysql

    parts = urlsplit(url)
    options: dict[str, object] = {
        "host": parts.hostname or "localhost",
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path.removeprefix("/")),
    }
    for name, value in parse_qsl(parts.query):
        options[name] = _mysql_option(name, value)
    return Mysql(options)


def _mysql_option(name: str, value: str) -> object:
    if name in {"unix_socket", "ssl_ca"}:
        return value
    if name not in TIMEOUTS:
        there = ", ".join(("unix_socket", "ssl_ca", *TIMEOUTS))
        raise ConfigError("url", f"there is no option {name!r}; there are {there}")
    if not value.isdecimal() or not int(value):
        raise ConfigError("url", f"{name} is a number of seconds, not {value!r}")
    return int(value)
