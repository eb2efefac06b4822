"""Settings whose model is that of a plugin, chosen by their ``type``."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from pydantic import BaseModel
from pydantic_core import PydanticKnownError

from turnlane.errors import ConfigError
from turnlane.problems import Contradiction, Problem, message_of


@dataclass(frozen=True, slots=True)
class Plugged:
    """Stands in an annotation: it validates, and it tells hints and schema which models there are.

    ``Annotated[InputSettings, PlainValidator(INPUTS.validated), INPUTS]``
    """

    registry: ModuleType
    """Has ``types()``, and ``load(type)``, whose ``settings_type`` is the model."""

    def types(self) -> list[str]:
        """The types that are installed."""
        found: list[str] = self.registry.types()
        return found

    def model(self, kind: str) -> type[BaseModel]:
        """The settings' model of a type. Raises ``ConfigError``."""
        found: type[BaseModel] = self.registry.load(kind).settings_type
        return found

    def validated(self, value: object) -> BaseModel:
        """The settings, checked by the model of their type."""
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("dict_type")
        kind = value.get("type")
        if kind is None:
            there = ", ".join(self.types())
            raise Contradiction([Problem("type", f"is required; there are: {there}")])
        try:
            model = self.model(str(kind))
        except ConfigError as error:
            raise Contradiction([Problem("type", message_of(error))]) from None
        return model.model_validate(value)

    def model_of(self, value: object) -> type[BaseModel] | None:
        """The model for these plain values; ``None`` if they do not say which."""
        try:
            return self.model(str(value.get("type"))) if isinstance(value, dict) else None
        except ConfigError:
            return None
