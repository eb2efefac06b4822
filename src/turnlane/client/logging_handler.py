"""A ``logging.Handler`` that publishes records as events.

It blocks the application at most for ``block_for`` seconds, by default not at all. When the program
ends normally, it waits until the records are persisted. The thread that logs a record puts it into
the queue; with a node, the threads of the client send it.
"""

from __future__ import annotations

import atexit
import ctypes
import enum
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from turnlane.client.fork_relay import ForkRelay
from turnlane.errors import ConfigError, QueueClosed, QueueFull
from turnlane.queues.api import Ack, AckLevel, Producer, Queue, parse_choice
from turnlane.runtime import Closeable

_EXCLUDED_LOGGERS: Final = ("turnlane", "pyarrow")
"""Loggers whose records are not sent: sending them would create more records."""

_SEVERITIES: Final = ((50, 2), (40, 3), (30, 4), (25, 5), (20, 6))
"""The lowest level of each syslog severity; below the last level the severity is 7, debug."""

Headers = Mapping[str, str] | Callable[[logging.LogRecord], Mapping[str, str] | None]


class OnFull(enum.StrEnum):
    """The handling of a record for which there is no room."""

    DROP = "drop"
    """Count it in ``dropped``."""
    STDERR = "stderr"
    """Count it and write it to stderr."""


class TurnlaneHandler(logging.Handler):
    """Publishes log records to an open queue, or to a queue of a node by its URL.

    ``block_for`` is how long a record may wait for room, in seconds; then ``on_full`` applies.
    ``exit_timeout`` is how long a normal exit waits until everything is persisted. The key of an
    event is the name of the logger, its severity follows from the level, its value is the formatted
    record. ``dropped`` counts the records that could not be published.

    A forked process cannot use the open queue of its parent, nor gRPC. With a URL it sends through
    a small process (``turnlane.client.fork_relay``), which starts with its first record.
    With an open queue, ``on_full`` applies to its records.
    """

    def __init__(
        self,
        queue: Queue | str,
        name: str | None = None,
        *,
        level: int | str = logging.NOTSET,
        block_for: float = 0.0,
        on_full: OnFull | str = OnFull.DROP,
        exit_timeout: float = 5.0,
        headers: Headers | None = None,
        source: str | None = None,
        **connect: Any,
    ) -> None:
        """Connect. If ``queue`` is a URL, ``name`` is the queue of the node.

        ``source`` is by default the name of this host. ``connect`` has the options of
        :func:`turnlane.connect`, such as a token.
        """
        super().__init__(level)
        if isinstance(queue, str) and name is None:
            raise ConfigError("name", f"the URL {queue} needs the name of a queue")
        if not isinstance(queue, str) and (name is not None or connect):
            raise ConfigError("name", "name and connection options are allowed only with a URL")
        self.dropped = 0
        self._block_for = block_for
        self._on_full = parse_choice(OnFull, "on_full", on_full)
        self._exit_timeout = exit_timeout
        self._headers = headers
        self._source = socket.gethostname() if source is None else source
        self._url = (queue, str(name), connect) if isinstance(queue, str) else None
        self._count_lock = threading.Lock()
        self._open_lock = threading.Lock()
        self._emit_guard = threading.local()
        self._client: Closeable | None = None
        self._opened_queue: Queue | None = None
        self._producer: Producer | ForkRelay | None = None
        self._has_flush_timed_out = False
        """Whether the last flush timed out and no record came since."""
        self._closed = False
        opened = queue if isinstance(queue, Queue) else self._connect(queue, str(name), connect)
        # With a callback publishing does not wait; flush() waits for all acks.
        self._producer = opened.producer(ack=AckLevel.PERSISTED, on_ack=_ignore)
        _OPEN.add(self)

    def _connect(self, url: str, name: str, options: dict[str, Any]) -> Queue:
        from turnlane.client.client import connect

        client = connect(url, **options)
        # The client would close itself at exit, before logging.shutdown() flushes this handler.
        atexit.unregister(client.close)
        self._client = client
        self._opened_queue = client.queue(name)
        return self._opened_queue

    # ── records ─────────────────────────────────────────────────────────────────────────────────

    def handle(self, record: logging.LogRecord) -> bool | logging.LogRecord:  # type: ignore[override] # 3.12 allows filters to give another record
        """Filter and emit without the handler's lock: a waiting thread must not block others."""
        passed: Any = self.filter(record)
        if isinstance(passed, logging.LogRecord):
            record = passed
        if passed:
            self.emit(record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        """Publish the record. Never raises, as ``logging`` requires; see ``handleError``."""
        if getattr(self._emit_guard, "is_active", False) or _is_excluded(record.name):
            return
        self._emit_guard.is_active = True
        try:
            self._publish(record)
        except Exception:  # noqa: BLE001 - a rule of logging; handleError shows it on stderr
            with self._count_lock:
                self.dropped += 1
            self.handleError(record)
        finally:
            self._emit_guard.is_active = False

    def _publish(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        producer = self._get_producer()
        if producer is None:
            self._refuse(text)
            return
        event: dict[str, Any] = {
            "headers": self._get_headers(record),
            "timestamp": int(record.created * 1_000_000),
            "severity": get_severity(record.levelno),
            "source": self._source,
        }
        # A lone surrogate, for example from a file name, must not stop the record from being
        # published.
        value, key = text.encode("utf-8", "backslashreplace"), _escape_surrogates(record.name)
        try:
            if self._block_for > 0:
                is_accepted = producer.publish(value, key, timeout=self._block_for, **event)
            else:
                is_accepted = producer.try_publish(value, key, **event)
        except (QueueFull, QueueClosed):
            is_accepted = False
        self._has_flush_timed_out = False
        if not is_accepted:
            self._refuse(text)

    def _get_headers(self, record: logging.LogRecord) -> Mapping[str, str] | None:
        return self._headers(record) if callable(self._headers) else self._headers

    def _refuse(self, text: str) -> None:
        with self._count_lock:
            self.dropped += 1
        if self._on_full is OnFull.STDERR and sys.stderr is not None:
            sys.stderr.write(text + "\n")

    def _get_producer(self) -> Producer | ForkRelay | None:
        """Return the producer; in a forked process a relay with the same methods."""
        if self._producer is not None or self._closed or self._url is None:
            return self._producer
        with self._open_lock:
            if self._producer is None:
                self._producer = ForkRelay(*self._url, self._exit_timeout)
                _close_when_child_ends(self)
        return self._producer

    # ── flush and close ─────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        """Wait until all records are persisted, at most ``exit_timeout`` seconds."""
        producer = self._producer
        if producer is None:
            return
        try:
            self._has_flush_timed_out = not producer.flush(self._exit_timeout)
            if self._has_flush_timed_out:
                _write_stderr(f"records may be lost: not persisted within {self._exit_timeout:g} s")
        except QueueClosed:
            return  # the owner of the queue has closed it

    def close(self) -> None:
        """Flush, and close the client if the handler opened one. A given queue stays open."""
        if not self._closed:
            self._closed = True
            try:
                if not self._has_flush_timed_out:  # logging.shutdown() has flushed before
                    self.flush()
                self._close_client()
            finally:
                self._producer = None
                _OPEN.discard(self)
        super().close()

    def _close_client(self) -> None:
        if self._producer is not None:
            self._producer.close()
        if self._opened_queue is not None and self._client is not None:
            self._opened_queue.close()  # after the flush, so that the client does not wait again
            self._client.close()
            self._opened_queue = self._client = None

    def reset_after_fork(self) -> None:
        """Forget the parent's queue, client and locks in a forked child, which lacks threads."""
        for inherited in (self._producer, self._opened_queue, self._client):
            _leak_reference(inherited)
        self._count_lock, self._open_lock = threading.Lock(), threading.Lock()
        self._emit_guard = threading.local()
        self._producer = self._opened_queue = self._client = None


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, exception, extras."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        import json

        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        entry |= {
            name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS
        }
        return json.dumps(entry, default=str, ensure_ascii=False)


_STANDARD_FIELDS: Final = frozenset(
    [*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"]
)


def get_severity(level: int) -> int:
    """Return the syslog severity of a level of ``logging``."""
    return next((severity for least, severity in _SEVERITIES if level >= least), 7)


def _is_excluded(logger: object) -> bool:
    return str(logger).partition(".")[0] in _EXCLUDED_LOGGERS


def _escape_surrogates(text: object) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode()


def _ignore(_ack: Ack) -> None:
    """Ignore an ack: ``flush`` waits for all of them."""


def _write_stderr(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"turnlane: {text}\n")


# ── forks ────────────────────────────────────────────────────────────────────────────────────────

_OPEN: Final[set[TurnlaneHandler]] = set()
"""The open handlers. ``logging`` forgets a handler that no logger has any more; this set keeps it
until its records are sent."""


def _leak_reference(thing: object) -> None:
    """Keep a parent's object in a child for good: its destructor in gRPC would wait for threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _after_fork() -> None:
    for handler in list(_OPEN):
        handler.reset_after_fork()


def _close_when_child_ends(handler: TurnlaneHandler) -> None:
    """Close the handler at the end of a child of ``multiprocessing``, which skips ``atexit``."""
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util.Finalize(handler, handler.close, exitpriority=100)


os.register_at_fork(after_in_child=_after_fork)
