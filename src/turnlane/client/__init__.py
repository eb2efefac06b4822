"""The client: queues of nodes elsewhere, with the contract of local ones."""

from __future__ import annotations

from turnlane.client.client import Client, connect

__all__ = ["Client", "connect"]
