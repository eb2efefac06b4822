"""What listens where, and whether two things would listen in the same place.

Looked for in the plain values, as everything that is wrong only together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from turnlane.config.document import Path, dotted
from turnlane.config.settings import FLIGHT, HTTP
from turnlane.config.values import Values, Wrong
from turnlane.serving.address import LOOPBACK, Address

TCP: Final = "tcp"
UDP: Final = "udp"

_PLANES: Final = {"flight": FLIGHT, "http": HTTP}
_OF_INPUTS: Final = {("listen",): TCP, ("tcp",): TCP, ("udp",): UDP, ("tls", "listen"): TCP}
"""The settings of inputs that are addresses, and what is spoken there."""
_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


class Listener(NamedTuple):
    """One address that something will listen on."""

    path: Path
    protocol: str
    address: Address

    def meets(self, other: Listener) -> bool:
        """Whether only one of both can have its address. Port 0 is a free one every time."""
        here, there = self.address, other.address
        if self.protocol != other.protocol or here.port != there.port or not here.port:
            return False
        hosts = {_host(here), _host(there)}
        return len(hosts) == 1 or not hosts.isdisjoint(_EVERYWHERE)


def listeners_twice(data: Values) -> Iterator[Wrong]:
    """The listeners whose place another one has, and which."""
    taken: list[Listener] = []
    # Defaults first: what can be pointed at is what stands in the file.
    for each in sorted(_listeners(data), key=lambda listener: _is_written(listener.path, data)):
        other = next(filter(each.meets, taken), None)
        if other is not None:
            place = f"{dotted(other.path)} listens on {other.address}"
            yield each.path, f"{place} already; choose another port"
        taken.append(each)


def _listeners(data: Values) -> Iterator[Listener]:
    for plane, default in _PLANES.items():
        path: Path = ("node", plane, "listen")
        if _at(("node", plane, "enabled"), data) is not False:
            yield from _listener(path, TCP, _at(path, data) or default)
    inputs = data.get("inputs")
    for at, each in enumerate(inputs if isinstance(inputs, list) else ()):
        for setting, protocol in _OF_INPUTS.items():
            yield from _listener(("inputs", at, *setting), protocol, _at(setting, each))


def _listener(path: Path, protocol: str, value: object) -> Iterator[Listener]:
    try:
        yield Listener(path, protocol, Address.parse(value))
    except ValueError:
        return  # none, or what is wrong with it is said elsewhere


def _is_written(path: Path, data: object) -> bool:
    return _at(path, data) is not None


def _at(path: Path, data: Any) -> Any:  # noqa: ANN401 - whatever YAML has
    for part in path:
        if isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def _host(address: Address) -> str:
    host = address.host.lower()
    return LOOPBACK if host == "localhost" else host
