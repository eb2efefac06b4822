"""Plug-ins: inputs and outputs by their type, of turnlane and of other distributions.

A distribution adds one with an entry point whose group is ``turnlane.inputs`` or
``turnlane.outputs``, whose name is the type, and whose object is a subclass of the contract. A
class without a distribution is named by module and class, ``type: mymodule:MyOutput``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Generic, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticKnownError

from turnlane.errors import ConfigError
from turnlane.validation import ConfigIssue, ContradictorySettings, get_message, suggest

Plugin = TypeVar("Plugin")


@contextlib.contextmanager
def require_extra(extra: str, what: str) -> Iterator[None]:
    """Stand around imports of optional libraries: the error says which extra to install."""
    try:
        yield
    except ImportError as error:
        message = f"{what} is not installed: pip install 'turnlane[{extra}]' ({error})"
        raise ImportError(message, name=error.name) from error


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
        """Return the types that are installed."""
        return sorted(self._known)

    def load(self, kind: str) -> type[Plugin]:
        """Return the class of a type. Raises ``ConfigError``, also for missing libraries."""
        try:
            found = _import_class(kind) if ":" in kind else self._get_entry_point(kind).load()
        except (ImportError, AttributeError) as error:
            raise ConfigError("type", f"{self._noun} {kind!r} cannot be used: {error}") from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            base = self._base.__name__
            raise ConfigError("type", f"{kind!r} is {found!r}, not a subclass of {base}")
        return found

    def _get_entry_point(self, kind: str) -> EntryPoint:
        point = self._known.get(kind)
        if point is None:
            hint = suggest(kind, self._known) or f"; there are: {', '.join(self.types())}"
            raise ConfigError("type", f"there is no {self._noun} {kind!r}{hint}")
        return point


def _import_class(kind: str) -> object:
    """Import ``module:Class``; the module may be beside the configuration."""
    module, _, name = kind.partition(":")
    if not module or not name.isidentifier():
        raise ImportError("write module:Class")
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise
    except Exception as error:  # a module may raise anything when it is imported
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return found


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """Stands in an annotation of settings whose ``type`` selects the model of a plug-in.

    It validates the settings, and it tells suggestions and the schema which models exist:
    ``Annotated[InputSettings, PlainValidator(INPUTS.validate), INPUTS]``. A discriminated union of
    pydantic would need all models, and so import every plug-in with its libraries at each start.
    """

    registry: ModuleType
    """Has ``types()``, and ``load(type)``, whose ``settings_type`` is the model."""

    def types(self) -> list[str]:
        """Return the types that are installed."""
        found: list[str] = self.registry.types()
        return found

    def get_model(self, kind: str) -> type[BaseModel]:
        """Return the model of a type. Raises ``ConfigError``."""
        found: type[BaseModel] = self.registry.load(kind).settings_type
        return found

    def validate(self, value: object) -> BaseModel:
        """Return the settings, checked by the model of their type."""
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("dict_type")
        kind = value.get("type")
        if kind is None:
            there = ", ".join(self.types())
            raise ContradictorySettings([ConfigIssue("type", f"is required; there are: {there}")])
        try:
            model = self.get_model(str(kind))
        except ConfigError as error:
            raise ContradictorySettings([ConfigIssue("type", get_message(error))]) from None
        return model.model_validate(value)

    def find_model(self, value: object) -> type[BaseModel] | None:
        """Return the model for plain values; ``None`` if they have no known type."""
        try:
            return self.get_model(str(value.get("type"))) if isinstance(value, dict) else None
        except ConfigError:
            return None
