"""URLs of databases: which dialect they select, and the options and passwords in them.

The modules of the dialects are imported here, when a URL needs them: psycopg and PyMySQL are
optional.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

from turnlane.databases.dialect import ConnectOptions, Dialect
from turnlane.errors import ConfigError, NotSupported

URL_EXAMPLES: Final = (
    "sqlite:///queue.db, postgresql://user@host/database or mysql://user@host/database"
)

MYSQL_FILES: Final = ("unix_socket", "ssl_ca")
MYSQL_TIMEOUTS: Final = {"connect_timeout": 10, "read_timeout": 60, "write_timeout": 60}
"""Seconds, unless the URL or the options say otherwise. They notice that a server is gone; a
statement may wait 50 seconds for a lock."""

_NAMES: Final = {
    "sqlite": "sqlite",
    "postgresql": "postgres",
    "postgres": "postgres",
    "mysql": "mysql",
    "mariadb": "mysql",
}


def get_dialect_name(url: str) -> str | None:
    """Return the name of the dialect that a URL selects; ``None`` if there is none."""
    return _NAMES.get(url.partition("://")[0])


def load_dialect(url: str, options: ConnectOptions | None = None) -> Dialect:
    """Import the driver that a URL selects. Opens no connection.

    ``sqlite:///queue.db`` is a file in the working directory, ``sqlite:////var/lib/queue.db`` an
    absolute path. Raises ``ConfigError``, and ``NotSupported`` if the driver is not installed.
    """
    options = options or ConnectOptions()
    name = get_dialect_name(url)
    try:
        match name:
            case "sqlite":
                from turnlane.databases.sqlite import Sqlite

                return Sqlite(url, options)
            case "postgres":
                from turnlane.databases.postgres import Postgres

                return Postgres(url, options)
            case "mysql":
                from turnlane.databases.mysql import Mysql

                return Mysql(url, options)
    except ImportError as error:
        raise NotSupported(f"{error}; install it: pip install 'turnlane[{name}]'") from error
    scheme, separator, _ = url.partition("://")
    what = f"{scheme!r} is not a database that turnlane supports" if separator else "is not a URL"
    raise ConfigError("url", f"{what}; write {URL_EXAMPLES}")


def check_url_setting(url: str) -> str:
    """Return the URL, as a setting. Needs no driver.

    Raises ``ValueError`` if it has a password, or an option that MySQL's dialect does not have.
    """
    if urlsplit(url).password:
        raise ValueError("holds a password; name it with password_env or password_file")
    if get_dialect_name(url) == "mysql":
        parse_mysql_options(url)
    return url


def parse_mysql_options(url: str) -> dict[str, int | str]:
    """Return the options in the query of a URL. Raises ``ValueError``."""
    options: dict[str, int | str] = {}
    for name, value in parse_qsl(urlsplit(url).query):
        if name in MYSQL_FILES:
            options[name] = value
        elif name not in MYSQL_TIMEOUTS:
            known = ", ".join((*MYSQL_FILES, *MYSQL_TIMEOUTS))
            raise ValueError(f"there is no option {name!r}; there are {known}")
        elif not value.isdecimal() or not int(value):
            raise ValueError(f"{name} is a number of seconds, not {value!r}")
        else:
            options[name] = int(value)
    return options


def add_password(url: str, password: str | None) -> str:
    """Return the URL with a password, if there is one and the database has users."""
    parts = urlsplit(url)
    if password is None or parts.scheme == "sqlite":
        return url
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        raise ConfigError("url", "names no user that the password is for: write user@host")
    name = user.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}:{quote(password, safe='')}@{host}"))


def remove_password(url: str) -> str:
    """Return the URL without its password, as others may see it."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}@{host}"))
