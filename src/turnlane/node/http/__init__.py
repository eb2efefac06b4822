"""The HTTP plane of a node."""

from turnlane.node.http.app import HttpPlane, describe_plane

__all__ = ["HttpPlane", "describe_plane"]
