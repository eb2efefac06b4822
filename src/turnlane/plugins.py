"""Finding inputs and outputs by type: turnlane's own, and those that other distributions bring.

A distribution adds one with an entry point whose group is ``turnlane.inputs`` or
``turnlane.outputs``, whose name is the type, and whose object is a subclass of the contract. One
that is in no distribution is named by module and class, ``type: mymodule:MyOutput``.
"""

from __future__ import annotations

import importlib
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from turnlane.errors import ConfigError
from turnlane.validation import suggest

Plugin = TypeVar("Plugin")


class PluginRegistry(Generic[Plugin]):
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
        try:
            found = _named(kind) if ":" in kind else self._point(kind).load()
        except (ImportError, AttributeError) as error:
            raise ConfigError("type", f"{self._noun} {kind!r} cannot be used: {error}") from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigError("type", f"{found!r}, named as {self._noun} {kind!r}, is none")
        return found

    def _point(self, kind: str) -> EntryPoint:
        point = self._known.get(kind)
        if point is None:
            hint = suggest(kind, self._known) or f"; there are: {', '.join(self.types())}"
            raise ConfigError("type", f"there is no {self._noun} {kind!r}{hint}")
        return point


def _named(kind: str) -> object:
    """What ``module:Class`` names; the module may be beside the configuration."""
    module, _, name = kind.partition(":")
    if not module or not name.isidentifier():
        raise ImportError("write module:Class")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise
    except Exception as error:  # whatever a module does when it is imported
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return found
