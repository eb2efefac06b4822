"""A running node with its planes, queue tables and inputs, as a configuration describes it.

``turnlane serve`` is a thin command around :class:`Service`. A program that has a node inside can
use it in the same way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

from turnlane.config import Config
from turnlane.errors import AddressTaken, ConfigError, NoSuchQueue
from turnlane.inputs import api
from turnlane.inputs.api import Input, InputSettings
from turnlane.logs import get_logger
from turnlane.memory import set_process_limit
from turnlane.node.flight.server import FlightPlane
from turnlane.node.http import HttpPlane
from turnlane.node.node import Node
from turnlane.node.tables import Tables
from turnlane.runtime import Closeable, start_thread
from turnlane.serving.auth import Authority, TlsSettings
from turnlane.serving.body_budget import BodyBudget

log = get_logger(__name__)

_SHARE_OF_INPUTS: Final = 0.6
"""The share of the time for a stop. The planes have the rest, so one stuck sender cannot use it."""
_GRACE_SECONDS: Final = 1.0
"""How much longer than its timeout a part may take before it is abandoned."""


class Listening(NamedTuple):
    """A plane or an input, and its address."""

    what: str
    """``flight``, ``http`` or ``input`` with its name."""
    where: str | None
    """Its address; ``None`` if it does not listen (files, stdin)."""
    queue: str | None = None
    """The queue of an input."""


class Service(Closeable):
    """The node, its planes and its inputs. Start and stop it once; safe to stop from any thread."""

    node: Node

    def __init__(self, config: Config) -> None:
        self.config = config
        self.planes: dict[str, FlightPlane | HttpPlane] = {}
        self.tables = Tables()
        self.inputs: dict[str, Input] = {}
        self._counted: list[Input] = []
        """The inputs that the metrics count; grows while inputs start."""
        self._starting: str | None = "inputs"
        """The part that the node still waits for before it is ready."""
        self._stopping = threading.Lock()
        self._hurry = threading.Event()
        self._running = False

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    def start(self) -> Self:
        """Open the node, then let clients in. After an error everything is closed again.

        Raises ``ConfigError`` (an address, a certificate, a secret, a missing queue),
        ``AddressTaken``, ``DirectoryLocked``, ``DirectoryUnusable``, and errors of opening queues.
        """
        with contextlib.ExitStack() as started:
            authority = check(self.config)
            node = self.config.node
            set_process_limit(node.memory_limit)
            self.node = started.enter_context(
                Node(node.data, self.config.knobs(), group=node.group)
            )
            self.node.body_budget = BodyBudget(node.http.max_memory)
            self.tables = started.enter_context(Tables(self.config.tables))
            started.callback(self._stop_parts, 0.0)
            self._start_planes(authority)
            for settings in self.config.inputs:
                with _name_errors(f"input {settings.label}"):
                    self._start_input(settings)
            self._starting = None
            self._running = True
            started.pop_all()
        return self

    def warn_of_unread_queues(self) -> None:
        """Log a warning for events of actions that are no longer in the configuration.

        Does nothing without actions: then the pipeline has a configuration of its own.
        """
        for name, pending in self.node.list_queues_without_action() if self.config.actions else ():
            log.warning(
                "queue.without_action",
                queue=name,
                events=pending,
                hint="no action of the configuration delivers these events any more: "
                "add the action again, or drop the queue",
            )

    def _start_input(self, settings: InputSettings) -> None:
        try:
            self.node.queue(settings.queue)
        except NoSuchQueue as error:
            raise ConfigError("queue", str(error)) from None
        made = api.load(settings.type)(settings, self.node)
        made.start()
        self.inputs[settings.label] = made
        self._counted.append(made)

    def _start_planes(self, authority: Authority) -> None:
        settings = self.config.node
        if settings.http.enabled:
            http = HttpPlane(
                self.node,
                authority,
                settings.http,
                inputs=self._counted,
                get_startup_blocker=lambda: self._starting,
                tables=self.tables,
            )
            self._start_plane("http", http)
        if settings.flight.enabled:
            flight = settings.flight
            plane = FlightPlane(
                self.node,
                authority,
                flight.listen,
                flight.tls,
                limits=flight,
                tables=self.tables,
            )
            self._start_plane("flight", plane)

    def _start_plane(self, name: str, plane: FlightPlane | HttpPlane) -> None:
        with _name_errors(f"node.{name}"):
            plane.start()
        self.planes[name] = plane

    # ── addresses ───────────────────────────────────────────────────────────────────────────

    def url(self, plane: str) -> str:
        """Return the URL of a plane with its real port: ``turnlane://…`` or ``http://…``."""
        settings = getattr(self.config.node, plane)
        secure = "" if settings.tls is None else "s"
        scheme = {"flight": "turnlane", "http": "http"}[plane]
        return f"{scheme}{secure}://{self.planes[plane].address}"

    def listening(self) -> Iterator[Listening]:
        """Return the planes and inputs with their addresses and real ports."""
        for name in sorted(self.planes):
            yield Listening(name, self.url(name))
        for label, each in self.inputs.items():
            yield Listening(f"input {label}", each.address, each.settings.queue)

    def as_dict(self) -> dict[str, Any]:
        """Return the addresses for JSON."""
        return {
            "instance": self.node.instance,
            "data": str(self.node.data),
            **{name: self.url(name) for name in sorted(self.planes)},
            "inputs": {label: each.address for label, each in self.inputs.items()},
        }

    @property
    def finishes(self) -> bool:
        """Whether all its inputs are finite, and no pipeline has to read their events."""
        ends = [each.finished for each in self.inputs.values()]
        return bool(ends) and None not in ends and not self.config.actions

    @property
    def finished(self) -> bool:
        """Whether all its inputs have ended."""
        return all(each.finished and each.finished.is_set() for each in self.inputs.values())

    # ── stopping ────────────────────────────────────────────────────────────────────────────────

    def stop(self, timeout: float | None = None) -> bool:
        """Stop inputs, then planes, then close the queues. True if everything ended in time.

        Events that were acknowledged are safe. Senders without an answer by the end of ``timeout``
        (default: the node's ``shutdown_timeout``) send again. A second call does nothing.
        """
        with self._stopping:
            if not self._running:
                return True
            limit = self.config.node.shutdown_timeout if timeout is None else timeout
            orderly = self._stop_parts(limit)
            self.node.close()
            self._running = False
            return orderly

    def hard_stop(self) -> None:
        """Stop without waiting for clients. Returns once the queues are closed in order."""
        self._hurry.set()
        self.stop(0.0)

    def close(self) -> None:
        self.stop()

    def _stop_parts(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        inputs = {f"input {label}": each.stop for label, each in self.inputs.items()}
        planes = {name: plane.stop for name, plane in self.planes.items()}
        orderly = self._stop_together(inputs, timeout * _SHARE_OF_INPUTS)
        left = max(0.0, deadline - time.monotonic())
        orderly = self._stop_together(planes, left) and orderly
        left = max(0.0, deadline - time.monotonic())
        return self._stop_together({"tables": lambda _: self.tables.close()}, left) and orderly

    def _stop_together(self, stops: Mapping[str, Callable[[float], None]], timeout: float) -> bool:
        """Stop all parts at the same time; a part that takes too long is abandoned and logged."""
        deadline = time.monotonic() + timeout + _GRACE_SECONDS
        running = {
            name: start_thread(f"turnlane-stop-{name}", _stop_part, name, stop, timeout)
            for name, stop in stops.items()
        }
        for stopping in running.values():
            while stopping.is_alive() and time.monotonic() < deadline:
                stopping.join(0.05)
                if self._hurry.is_set():
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        late = [name for name, stopping in running.items() if stopping.is_alive()]
        if late:
            log.warning("service.stop_timeout", parts=late, seconds=timeout)
        return not late


def _stop_part(name: str, stop: Callable[[float], None], timeout: float) -> None:
    try:
        stop(timeout)
    except Exception:  # the other parts are stopped anyway
        log.exception("service.stop_failed", part=name)


def check(config: Config) -> Authority:
    """Check secrets and certificates without opening the node. Raises ``ConfigError``."""
    settings = config.node
    for name, plane in (("flight", settings.flight), ("http", settings.http)):
        if plane.enabled and plane.tls is not None:
            with _name_errors(f"node.{name}"):
                plane.tls.context()
    for each in config.inputs:
        with _name_errors(f"input {each.label}"):
            tls = getattr(each, "tls", None)
            if isinstance(tls, TlsSettings):
                tls.context()
            exposed = getattr(each, "check_exposed", None)
            if exposed is not None:
                exposed()
            Authority(getattr(each, "tokens", ()))
    with _name_errors("node"):
        return Authority(settings.tokens)


@contextlib.contextmanager
def _name_errors(what: str) -> Iterator[None]:
    """Add the name of a section to the errors in the block."""
    try:
        yield
    except (AddressTaken, ConfigError) as error:
        message = str(error).removeprefix(f"{error.knob}: ")
        section, _, plane = what.partition(".")
        knob = error.knob.removeprefix(f"{plane}.")
        separator = "." if section == "node" else ": "
        raise type(error)(f"{what}{separator}{knob}", message) from error
