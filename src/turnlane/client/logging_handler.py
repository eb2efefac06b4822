"""A ``logging.Handler`` that publishes records as events.

It blocks the application no longer than it is told to, by default not at all, and when the program
ends normally it stays until what was logged is safe. Records are put into the queue by the thread
that logs them; with a node, the client's own threads bring them there.
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

from turnlane.client.fork_relay import Relay
from turnlane.errors import ConfigError, QueueClosed, QueueFull
from turnlane.queues.api import Ack, AckLevel, Producer, Queue, parse_choice
from turnlane.runtime import Closing

_OWN: Final = ("turnlane", "pyarrow")
"""Loggers whose records are not sent: sending them would make more of them."""

_SEVERITIES: Final = ((50, 2), (40, 3), (30, 4), (25, 5), (20, 6))
"""Level and above → severity as syslog counts them; below the last is debug, 7."""

Headers = Mapping[str, str] | Callable[[logging.LogRecord], Mapping[str, str] | None]


class OnFull(enum.StrEnum):
    """What becomes of a record that there is no room for."""

    DROP = "drop"
    """It is counted in ``dropped``."""
    STDERR = "stderr"
    """It is counted and written to stderr."""


class TurnlaneHandler(logging.Handler):
    """Publishes log records to a queue: one that is open here, or one of a node by its URL.

    ``block_for`` is the longest that logging a record may wait for room, in seconds; then
    ``on_full`` says what becomes of it. ``exit_timeout`` is how long a normal exit waits until
    everything is persisted. The event's key is the logger's name, its severity follows from the
    level, its value is what the formatter makes of the record. ``dropped`` counts what could not
    be published.

    A process that was forked cannot use what is open in its parent, nor gRPC. With a URL it sends
    through a small process of its own (``turnlane.client.fork_relay``), started with its first record;
    given a queue instead, its records are treated as ``on_full`` says.
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
        """Connect. ``queue`` may be a URL, then ``name`` is the node's queue.

        ``source`` is this host by default. ``connect`` goes to :func:`turnlane.connect`: a token,
        say.
        """
        super().__init__(level)
        if isinstance(queue, str) and name is None:
            raise ConfigError("name", f"which queue of {queue}? Give its name")
        if not isinstance(queue, str) and (name is not None or connect):
            raise ConfigError("name", "is for a URL; a queue that is open has its own")
        self.dropped = 0
        self._block_for = block_for
        self._on_full = parse_choice(OnFull, "on_full", on_full)
        self._exit_timeout = exit_timeout
        self._headers = headers
        self._source = socket.gethostname() if source is None else source
        self._url = (queue, str(name), connect) if isinstance(queue, str) else None
        self._counting = threading.Lock()
        self._opening = threading.Lock()
        self._sending = threading.local()
        self._client: Closing | None = None
        self._own: Queue | None = None
        self._producer: Producer | Relay | None = None
        self._gave_up = False
        """Whether the last flush ran out of time, and nothing came since."""
        self._closed = False
        opened = queue if isinstance(queue, Queue) else self._connected(queue, str(name), connect)
        # A callback, so that publishing waits for nothing; flush() then waits for all of it.
        self._producer = opened.producer(ack=AckLevel.PERSISTED, on_ack=_ignore)
        _OPEN.add(self)

    def _connected(self, url: str, name: str, options: dict[str, Any]) -> Queue:
        from turnlane.client.client import connect

        client = connect(url, **options)
        # It would close itself at exit before logging.shutdown() has flushed this handler.
        atexit.unregister(client.close)
        self._client = client
        self._own = client.queue(name)
        return self._own

    # ── records ─────────────────────────────────────────────────────────────────────────────────

    def handle(self, record: logging.LogRecord) -> bool | logging.LogRecord:  # type: ignore[override] # 3.12 allows filters to give another record
        """Filter and emit without the handler's lock: a thread that waits must hold up no other."""
        passed: Any = self.filter(record)
        if isinstance(passed, logging.LogRecord):
            record = passed
        if passed:
            self.emit(record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        """Publish the record. Never raises, as ``logging`` wants it: see ``handleError``."""
        if getattr(self._sending, "on", False) or _is_own(record.name):
            return
        self._sending.on = True
        try:
            self._publish(record)
        except Exception:  # noqa: BLE001 - logging's own rule; handleError shows it on stderr
            with self._counting:
                self.dropped += 1
            self.handleError(record)
        finally:
            self._sending.on = False

    def _publish(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        producer = self._ready()
        if producer is None:
            self._refuse(text)
            return
        event: dict[str, Any] = {
            "headers": self._headers_of(record),
            "timestamp": int(record.created * 1_000_000),
            "severity": severity_of(record.levelno),
            "source": self._source,
        }
        # A lone surrogate, from a file name say, must not make the record unsendable.
        value, key = text.encode("utf-8", "backslashreplace"), _sound(record.name)
        try:
            if self._block_for > 0:
                inside = producer.publish(value, key, timeout=self._block_for, **event)
            else:
                inside = producer.try_publish(value, key, **event)
        except (QueueFull, QueueClosed):
            inside = False
        self._gave_up = False
        if not inside:
            self._refuse(text)

    def _headers_of(self, record: logging.LogRecord) -> Mapping[str, str] | None:
        return self._headers(record) if callable(self._headers) else self._headers

    def _refuse(self, text: str) -> None:
        with self._counting:
            self.dropped += 1
        if self._on_full is OnFull.STDERR and sys.stderr is not None:
            sys.stderr.write(text + "\n")

    def _ready(self) -> Producer | Relay | None:
        """The producer; in a process that was forked, something like it."""
        if self._producer is not None or self._closed or self._url is None:
            return self._producer
        with self._opening:
            if self._producer is None:
                self._producer = Relay(*self._url, self._exit_timeout)
                _close_when_child_ends(self)
        return self._producer

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        """Wait until what was logged is persisted, for ``exit_timeout`` seconds at most."""
        producer = self._producer
        if producer is None:
            return
        try:
            self._gave_up = not producer.flush(self._exit_timeout)
            if self._gave_up:
                _say(f"records may be lost: not persisted within {self._exit_timeout:g} s")
        except QueueClosed:
            return  # whoever closed it has decided what becomes of its events

    def close(self) -> None:
        """Flush, and close what was opened here; a queue that was given stays open."""
        if not self._closed:
            self._closed = True
            try:
                if not self._gave_up:  # logging.shutdown() has flushed before
                    self.flush()
                self._let_go()
            finally:
                self._producer = None
                _OPEN.discard(self)
        super().close()

    def _let_go(self) -> None:
        if self._producer is not None:
            self._producer.close()
        if self._own is not None and self._client is not None:
            self._own.close()  # it was flushed; the client would wait for it once more
            self._client.close()
            self._own = self._client = None

    def forked(self) -> None:
        """Forget, in a child, what belongs to its parent: its threads and locks are not here."""
        for each in (self._producer, self._own, self._client):
            _never_destroy(each)
        self._counting, self._opening = threading.Lock(), threading.Lock()
        self._sending = threading.local()
        self._producer = self._own = self._client = None


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, exception, and its extras."""

    def format(self, record: logging.LogRecord) -> str:
        """The record in JSON."""
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
        entry |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        return json.dumps(entry, default=str, ensure_ascii=False)


_USUAL: Final = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"])


def severity_of(level: int) -> int:
    """The severity, as syslog numbers it, of a level of ``logging``."""
    return next((severity for least, severity in _SEVERITIES if level >= least), 7)


def _is_own(logger: object) -> bool:
    return str(logger).partition(".")[0] in _OWN


def _sound(text: object) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode()


def _ignore(_ack: Ack) -> None:
    """Nothing is to be done for a single ack."""


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"turnlane: {text}\n")


# ── forks ────────────────────────────────────────────────────────────────────────────────────────

_OPEN: Final[set[TurnlaneHandler]] = set()
"""Those not closed yet. ``logging`` itself forgets a handler that no logger has any more, and with
it what it has not sent."""


def _never_destroy(thing: object) -> None:
    """Keep a child from tearing down what is its parent's: gRPC would wait for its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _after_fork() -> None:
    for handler in list(_OPEN):
        handler.forked()


def _close_when_child_ends(handler: TurnlaneHandler) -> None:
    """Children of ``multiprocessing`` end without ``atexit``; they have finalizers instead."""
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util.Finalize(handler, handler.close, exitpriority=100)


os.register_at_fork(after_in_child=_after_fork)
