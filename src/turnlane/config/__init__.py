"""Configuration: one YAML file → settings. ``docs/configuration.md`` is the guide to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from turnlane.config.cross_checks import cautions
from turnlane.config.document import ConfigFaults, Fault, Place, parse
from turnlane.config.schema import json_schema
from turnlane.config.settings import Config
from turnlane.config.validation import shown, validated, validated_cases
from turnlane.errors import ConfigError
from turnlane.pipeline.cases import Case

__all__ = [
    "Config",
    "ConfigFaults",
    "Fault",
    "Place",
    "cautions",
    "json_schema",
    "load",
    "load_cases",
    "loads",
    "shown",
    "text_of",
]


def load(path: Path, environment: Mapping[str, str] | None = None) -> Config:
    """The settings in a file. Raises ``ConfigError``; ``ConfigFaults`` if it can be read at all."""
    return loads(text_of(path), str(path), environment)


def loads(text: str, file: str = "<text>", environment: Mapping[str, str] | None = None) -> Config:
    """The settings in a text; ``file`` is what faults call it. Raises ``ConfigFaults``."""
    return validated(parse(text, file, os.environ if environment is None else environment))


def load_cases(path: Path, config: Config) -> tuple[Case, ...]:
    """The cases in a file of their own, for a configuration. Raises as :func:`load` does."""
    return validated_cases(parse(text_of(path), str(path), os.environ), config)


def text_of(path: Path) -> str:
    """What a file says, for :func:`loads`. Raises as :func:`load` does."""
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error)) from None
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = contents[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        message = "this is not UTF-8; save the file as that"
        raise ConfigFaults(str(path), [Fault(Place(line, column), "", message)]) from None
