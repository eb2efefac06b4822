"""The client: queues of remote nodes, with the contract of local queues."""

from __future__ import annotations

from turnlane.client.client import Client, connect

__all__ = ["Client", "connect"]
