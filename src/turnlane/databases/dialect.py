"""The interface of a database: how to connect, what its SQL looks like, what its errors mean.

A `Dialect` describes one database and holds no connection, so any thread may use it. Queue tables
and SQL outputs share it. Each reacts in its own way to the kinds of errors, but only the dialect
of a database looks at the error codes of its driver. Statements about the tables of a queue are in
`turnlane.table.queue_sql`; statements of the SQL output are in `turnlane.outputs.sql`.

A URL selects the dialect. `load_dialect` imports its module only then: psycopg and PyMySQL are
optional.
"""

from __future__ import annotations

import abc
import enum
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

from turnlane.errors import ConfigError, NotSupported
from turnlane.plugins import require_extra
from turnlane.runtime import Closeable

Connection = Any
"""A DB-API connection: the drivers share methods, not types."""

Row = tuple[Any, ...]


class ErrorKind(enum.Enum):
    """What an error of a driver means."""

    TRANSIENT = enum.auto()
    """A deadlock, a serialization failure, a busy file: the same transaction may succeed now."""
    LOCKED = enum.auto()
    """Another transaction holds a row: the same transaction may succeed soon."""
    CREATED_CONCURRENTLY = enum.auto()
    """The table or function exists. Perhaps another connection created it at the same time: then
    the same statement succeeds now."""
    UNAVAILABLE = enum.auto()
    """The connection is lost, or the server lacks connections, memory or disk space."""
    READ_ONLY = enum.auto()
    DUPLICATE_KEY = enum.auto()
    REFUSED_DATA = enum.auto()
    """A value does not fit its column, or violates a constraint."""
    TOO_LARGE = enum.auto()
    """The statement is larger than the server accepts."""
    NEEDS_OPERATOR = enum.auto()
    """A wrong password, a missing table or right: a person has to change something."""
    UNKNOWN = enum.auto()
    """For example an error that a trigger raised."""


class TlsFiles(Protocol):
    """The TLS settings of a client."""

    ca: Path | None
    """The authorities to trust; the system's if none is given."""
    cert: Path | None
    """The client's certificate."""
    key: Path | None
    """The private key of the certificate."""
    verify: bool
    """Whether to check the certificate and the name of the server."""

    def make_context(self) -> ssl.SSLContext:
        """Read the files. Raises ``RetryLater``."""


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """Settings of a connection that its URL does not have. They take precedence over the URL."""

    password: str | None = None
    tls: TlsFiles | None = None
    """Require TLS; without it, the URL and the driver decide."""
    connect_timeout: float | None = None
    timeout: float | None = None
    """Seconds that a statement, or its wait for a lock, may take."""
    mysql_user: str = ""
    """The user if the URL names none; if this is empty, too, the driver chooses."""
    sqlite_functions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Functions of one argument that statements may call."""
    sqlite_must_exist: bool = False
    """Whether the file belongs to another program: it has to exist, and keeps its journal mode."""


class Dialect(abc.ABC):
    """One database. Holds no connection."""

    name: ClassVar[str]
    """``sqlite``, ``postgres`` or ``mysql``."""
    title: ClassVar[str]
    """The name of the database in messages."""
    quote: ClassVar[str] = '"'
    placeholder: ClassVar[str] = "%s"
    """The driver's sign for a parameter."""
    percent: ClassVar[str] = "%%"
    """A percent sign in a statement that takes parameters."""
    now: ClassVar[str]
    """An expression: the database's clock in nanoseconds since the epoch."""
    share: ClassVar[str] = ""
    """Ends a SELECT whose rows no other transaction may change before this one ends."""
    lock: ClassVar[str] = ""
    """Ends a SELECT whose rows this transaction is about to change."""
    lock_free: ClassVar[str] = ""
    """The same, but skips rows that another transaction has locked."""
    has_returning: ClassVar[bool] = True
    """Whether INSERT and UPDATE can return the rows that they changed."""
    insert_or_ignore: ClassVar[tuple[str, str]] = ("INSERT INTO", "ON CONFLICT DO NOTHING")
    """Begin and end of an INSERT that skips rows whose unique keys exist."""
    snapshot_query: ClassVar[str | None] = None
    """Selects the number of the oldest transaction that still writes, and of the next one."""

    # ── connections ──────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def connect(self) -> Connection:
        """Open a connection that commits every statement by itself."""

    def connect_for_index_scans(self) -> Connection:
        """Open a connection whose planner prefers an index to a scan of the table."""
        return self.connect()

    @abc.abstractmethod
    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """Run a transaction that writes; an exception rolls it back."""

    def cancel(self, connection: Connection) -> None:  # noqa: B027 - not every driver can
        """Ask the database to end the statement that another thread runs on a connection."""

    def get_descriptor(self, connection: Connection) -> int | None:  # noqa: ARG002
        """Return the file descriptor of the connection's socket; ``None`` if it has none."""
        return None

    def is_alive(self, connection: Connection) -> bool:  # noqa: ARG002
        """Whether the server has not closed a connection that is idle."""
        return True

    def watch(
        self,
        channel: str,  # noqa: ARG002
        subject: str,  # noqa: ARG002
        on_change: Callable[[], None],  # noqa: ARG002
    ) -> Closeable | None:
        """Call ``on_change`` from a thread when the database may have changed, until closed.

        PostgreSQL calls it for notifications on ``channel`` with ``subject`` as their payload,
        SQLite for every commit. ``None`` means that this database cannot do it.
        """
        return None

    def is_pooled(self, connection: Connection) -> bool:  # noqa: ARG002
        """Whether every transaction may be on another connection to the server."""
        return False

    # ── errors ───────────────────────────────────────────────────────────────────────────────────

    @property
    @abc.abstractmethod
    def error(self) -> type[Exception]:
        """The base class of the driver's errors."""

    @abc.abstractmethod
    def classify_error(self, error: Exception) -> ErrorKind:
        """Return what an error means; ``UNKNOWN`` if the driver did not raise it."""

    def describe_error(self, error: Exception) -> str:
        """Return the driver's message in one line, after the name of the database."""
        message = str(error.args[-1] if error.args else error)
        return f"{self.title}: {' '.join(message.split())}"

    def is_unreadable(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether the driver could not decode a value of a row that the database returned."""
        return False

    def cast_to_raw(self, column: str) -> str:
        """Return an expression that can be read where the value of a column cannot."""
        return column

    # ── SQL ──────────────────────────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def match_ids(self, ids: Sequence[int]) -> tuple[str, Row]:
        """Return the condition after an integer column's name, and its parameters."""

    @abc.abstractmethod
    def insert_many(
        self, connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
    ) -> None:
        """Insert rows the fastest way that the caller's transaction allows."""

    def stream(
        self, connection: Connection, statement: str, parameters: Row, size: int
    ) -> Iterator[list[Row]]:
        """Yield the rows of one statement, as they were at its start, ``size`` at a time."""
        cursor = connection.cursor()
        cursor.execute(statement, parameters)
        while rows := cursor.fetchmany(size):
            yield list(rows)

    def render(self, template: str, **names: str) -> str:
        """Return a statement with its names filled in; templates use ``%s`` for parameters."""
        placed = template.replace("%s", self.placeholder)
        locks = {"share": self.share, "lock": self.lock, "lock_free": self.lock_free}
        return placed.format(now=self.now, **locks, **names)

    def quote_name(self, name: str) -> str:
        """Quote a name for a statement that takes parameters."""
        return self.quote_bare_name(name).replace("%", self.percent)

    def quote_bare_name(self, name: str) -> str:
        """Quote a name for a statement without parameters, as people read it."""
        return self.quote + name.replace(self.quote, 2 * self.quote) + self.quote


# ── URLs ─────────────────────────────────────────────────────────────────────────────────────────

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
                with require_extra(name, "the driver of PostgreSQL"):
                    from turnlane.databases.postgres import Postgres

                return Postgres(url, options)
            case "mysql":
                with require_extra(name, "the driver of MySQL and MariaDB"):
                    from turnlane.databases.mysql import Mysql

                return Mysql(url, options)
    except ImportError as error:
        raise NotSupported(str(error)) from error
    scheme, separator, _ = url.partition("://")
    what = f"{scheme!r} is not a database that turnlane supports" if separator else "is not a URL"
    raise ConfigError("url", f"{what}; write {URL_EXAMPLES}")


def check_url_setting(url: str) -> str:
    """Return the URL, as a setting. Needs no driver.

    Raises ``ValueError`` if it has a password, or an option that MySQL's dialect does not have.
    """
    if urlsplit(url).password:
        raise ValueError("contains a password; set password_env or password_file instead")
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
