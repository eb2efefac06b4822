"""Configuration: one YAML file → settings. ``docs/configuration.md`` is the guide to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from turnlane.config.cross_checks import find_missing_drivers, find_warnings
from turnlane.config.document import ConfigFileError, FilePosition, LocatedIssue, parse
from turnlane.config.schema import json_schema
from turnlane.config.settings import Config
from turnlane.config.validation import get_visible_settings, validate, validate_cases
from turnlane.errors import ConfigError
from turnlane.pipeline.cases import Case

__all__ = [
    "Config",
    "ConfigFileError",
    "find_missing_drivers",
    "find_warnings",
    "get_visible_settings",
    "json_schema",
    "load",
    "load_cases",
    "loads",
    "read_text",
]


def load(path: Path, environment: Mapping[str, str] | None = None) -> Config:
    """Return the settings in a file. Raises ``ConfigError``, mostly ``ConfigFileError``."""
    return loads(read_text(path), str(path), environment)


def loads(text: str, file: str = "<text>", environment: Mapping[str, str] | None = None) -> Config:
    """Return the settings in a text, called ``file`` in messages. Raises ``ConfigFileError``."""
    return validate(parse(text, file, os.environ if environment is None else environment))


def load_cases(path: Path, config: Config) -> tuple[Case, ...]:
    """Return the cases in a file, for a configuration. Raises like :func:`load`."""
    return validate_cases(parse(read_text(path), str(path), os.environ), config)


def read_text(path: Path) -> str:
    """Return the text of a file, for :func:`loads`. Raises like :func:`load`."""
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error)) from None
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = contents[: error.start]
        position = FilePosition(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        issue = LocatedIssue(position, "", "this is not UTF-8; save the file as that")
        raise ConfigFileError(str(path), [issue]) from None
