"""Outputs: the destinations that actions deliver to. ``api`` is the contract for new ones."""

from turnlane.outputs.api import Output, OutputSettings, registry

__all__ = ["Output", "OutputSettings", "registry"]
