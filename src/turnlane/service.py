"""A node with everything around it, as a configuration asks for it: started, and stopped in order.

No command line here: ``turnlane serve`` is a thin shell around :class:`Service`, and whoever wants
a node inside a program of their own can use it the same way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

from turnlane.config import Config
from turnlane.errors import AddressTaken, ConfigError, NoSuchQueue
from turnlane.inputs import api
from turnlane.inputs.api import Input, InputSettings
from turnlane.node.flight.server import FlightPlane
from turnlane.node.http import HttpPlane
from turnlane.node.node import Node
from turnlane.node.tables import Tables
from turnlane.runtime import Closeable
from turnlane.serving.auth import Authority, TlsSettings

log = logging.getLogger(__name__)

_SHARE_OF_INPUTS: Final = 0.6
"""Of the time for a stop; the planes have the rest, so one stuck sender does not use it all up."""
_LAST_MOMENTS: Final = 1.0
"""What a part may take beyond the time it was given before it is left to itself."""


class Listening(NamedTuple):
    """One thing that can be reached."""

    what: str
    """``flight``, ``http`` or ``input`` with its name."""
    where: str | None
    """Its address; ``None`` if it does not listen (files, stdin)."""
    queue: str | None = None
    """The queue that an input fills."""


class Service(Closeable):
    """The node, its planes and its inputs. Start and stop it once; safe to stop from any thread."""

    node: Node

    def __init__(self, config: Config) -> None:
        self.config = config
        self.planes: dict[str, FlightPlane | HttpPlane] = {}
        self.tables = Tables()
        self.inputs: dict[str, Input] = {}
        self._counted: list[Input] = []
        """The same inputs, as the metrics look at them; grows while they are started."""
        self._starting: str | None = "inputs"
        """What readiness waits for."""
        self._stopping = threading.Lock()
        self._hurry = threading.Event()
        self._running = False

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    def start(self) -> Self:
        """Open the node, then let clients in. If that fails, everything is closed again.

        Raises ``ConfigError`` (an address, a certificate, a secret, a queue that is not there),
        ``AddressTaken``, ``DirectoryLocked``, ``DirectoryUnusable``, and whatever keeps a queue
        from being opened.
        """
        with contextlib.ExitStack() as started:
            authority = check(self.config)
            self.node = started.enter_context(Node(self.config.node.data, self.config.knobs()))
            self.tables = started.enter_context(Tables(self.config.tables))
            started.callback(self._stop_parts, 0.0)
            self._start_planes(authority)
            for settings in self.config.inputs:
                with _named(f"input {settings.label}"):
                    self._start_input(settings)
            self._starting = None
            self._running = True
            started.pop_all()
        return self

    def tell_without_action(self) -> None:
        """Warn of events that wait for an action which is no longer in the configuration.

        Only where there are actions: the pipeline of a node without them has another file.
        """
        for name, pending in self.node.list_queues_without_action() if self.config.actions else ():
            log.warning(
                "queue %s holds %d events and belongs to no action of the configuration any more; "
                "add the action again to have them delivered, or drop the queue",
                name,
                pending,
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
                waiting_for=lambda: self._starting,
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
        with _named(f"node.{name}"):
            plane.start()
        self.planes[name] = plane

    # ── what there is ───────────────────────────────────────────────────────────────────────────

    def url(self, plane: str) -> str:
        """Where a plane is reached, the port as it really is: ``turnlane://…`` or ``http://…``."""
        settings = getattr(self.config.node, plane)
        secure = "" if settings.tls is None else "s"
        scheme = {"flight": "turnlane", "http": "http"}[plane]
        return f"{scheme}{secure}://{self.planes[plane].address}"

    def listening(self) -> Iterator[Listening]:
        """What can be reached, and where: ports as they really are."""
        for name in sorted(self.planes):
            yield Listening(name, self.url(name))
        for label, each in self.inputs.items():
            yield Listening(f"input {label}", each.address, each.settings.queue)

    def as_dict(self) -> dict[str, Any]:
        """The same for scripts, as JSON has it."""
        return {
            "instance": self.node.instance,
            "data": str(self.node.data),
            **{name: self.url(name) for name in sorted(self.planes)},
            "inputs": {label: each.address for label, each in self.inputs.items()},
        }

    @property
    def finishes(self) -> bool:
        """Whether its inputs all come to an end, and no pipeline has to read what they brought."""
        ends = [each.finished for each in self.inputs.values()]
        return bool(ends) and None not in ends and not self.config.actions

    @property
    def finished(self) -> bool:
        """Whether all its inputs have come to their end."""
        return all(each.finished and each.finished.is_set() for each in self.inputs.values())

    # ── stopping ────────────────────────────────────────────────────────────────────────────────

    def stop(self, timeout: float | None = None) -> bool:
        """Stop inputs, then planes, then close the queues. True if everything ended in time.

        What senders were told is safe stays safe; senders that were told nothing by the end of
        ``timeout`` (default: the node's ``shutdown_timeout``) send again. Twice is harmless.
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
        """Wait for nobody any more; queues are closed as always. Returns once they are."""
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
        """Call all at the same time; whoever takes too long is left to itself, and named."""
        running = {name: _Stopping(name, stop, timeout) for name, stop in stops.items()}
        deadline = time.monotonic() + timeout + _LAST_MOMENTS
        for stopping in running.values():
            stopping.start()
        for stopping in running.values():
            while stopping.is_alive() and time.monotonic() < deadline:
                stopping.join(0.05)
                if self._hurry.is_set():
                    deadline = min(deadline, time.monotonic() + _LAST_MOMENTS)
        late = [name for name, stopping in running.items() if stopping.is_alive()]
        if late:
            log.warning("did not stop in time and is cut off: %s", ", ".join(late))
        return not late


class _Stopping(threading.Thread):
    """One part's stop, whose failure keeps no other part from being stopped."""

    def __init__(self, name: str, stop: Callable[[float], None], timeout: float) -> None:
        super().__init__(name=f"turnlane-stop-{name}", daemon=True)
        self._stop_part = stop
        self._allowed = timeout

    def run(self) -> None:
        try:
            self._stop_part(self._allowed)
        except Exception:
            log.exception("%s failed", self.name.removeprefix("turnlane-"))


def check(config: Config) -> Authority:
    """Everything that can be found wrong without opening the node: secrets and certificates.

    Raises ``ConfigError``.
    """
    settings = config.node
    for name, plane in (("flight", settings.flight), ("http", settings.http)):
        if plane.enabled and plane.tls is not None:
            with _named(f"node.{name}"):
                plane.tls.context()
    for each in config.inputs:
        with _named(f"input {each.label}"):
            tls = getattr(each, "tls", None)
            if isinstance(tls, TlsSettings):
                tls.context()
            exposed = getattr(each, "check_exposed", None)
            if exposed is not None:
                exposed()
            Authority(getattr(each, "tokens", ()))
    with _named("node"):
        return Authority(settings.tokens)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Say whose setting it is that is wrong."""
    try:
        yield
    except (AddressTaken, ConfigError) as error:
        message = str(error).removeprefix(f"{error.knob}: ")
        section, _, plane = what.partition(".")
        knob = error.knob.removeprefix(f"{plane}.")
        separator = "." if section == "node" else ": "
        raise type(error)(f"{what}{separator}{knob}", message) from error
