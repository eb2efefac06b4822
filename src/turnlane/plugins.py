"""Finding inputs and outputs by type: turnlane's own, and those that other distributions bring.

A distribution adds one with an entry point whose group is ``turnlane.inputs`` or
``turnlane.outputs``, whose name is the type, and whose object is a subclass of the contract.
"""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from turnlane.errors import ConfigError
from turnlane.problems import did_you_mean

Plugin = TypeVar("Plugin")


class Plugins(Generic[Plugin]):
    """All plugins of one group."""

    def __init__(self, group: str, base: type[Plugin], noun: str) -> None:
        self._group = group
        self._base = base
        self._noun = noun

    @cached_property
    def _known(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}

    def types(self) -> list[str]:
        """The types that are installed."""
        return sorted(self._known)

    def load(self, kind: str) -> type[Plugin]:
        """The class of a type. Raises ``ConfigError``, also if what it needs is not installed."""
        point = self._known.get(kind)
        if point is None:
            hint = did_you_mean(kind, self._known) or f"; there are: {', '.join(self.types())}"
            raise ConfigError("type", f"there is no {self._noun} {kind!r}{hint}")
        try:
            found = point.load()
        except ImportError as error:
            raise ConfigError("type", f"{self._noun} {kind!r} cannot be used: {error}") from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigError("type", f"{point.value}, named as {self._noun} {kind!r}, is none")
        return found
