"""The inputs that are installed."""

from __future__ import annotations

from turnlane.inputs.contract import Input
from turnlane.plugins import Plugins

_PLUGINS = Plugins("turnlane.inputs", Input, "input")  # type: ignore[type-abstract]

types = _PLUGINS.types
load = _PLUGINS.load
