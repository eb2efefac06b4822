"""The outputs that are installed."""

from __future__ import annotations

from turnlane.outputs.contract import Output
from turnlane.plugins import Plugins

_PLUGINS = Plugins("turnlane.outputs", Output, "output")  # type: ignore[type-abstract]

types = _PLUGINS.types
load = _PLUGINS.load
