"""Keeping web pages away from a node without tokens.

Whoever opens a page lets it send requests from their machine, to nodes that listen there only,
too. Browsers say on whose behalf they ask, which is all that tells such a request from curl's.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from turnlane.errors import NotAllowed
from turnlane.serving.address import Address
from turnlane.serving.auth import Authority

_FOREIGN: Final = frozenset({"cross-site", "same-site"})
"""What browsers say of requests of pages that are not the node's own."""


class Browsers:
    """Refuses what pages of others ask for, as long as no token stands in their way."""

    def __init__(self, authority: Authority, address: Address) -> None:
        self._is_open = not authority.has_tokens
        self._is_local = address.is_loopback

    def check(self, headers: Headers) -> None:
        """Raise ``NotAllowed`` for a request that a page of another site has sent."""
        if not self._is_open:
            return
        origin, host = headers.get("origin"), headers.get("host")
        foreign = origin is not None and urlsplit(origin).netloc != host
        if foreign or headers.get("sec-fetch-site") in _FOREIGN:
            raise _refusal("pages of other sites may not use a node without tokens")
        # The name of a page's own site may be made to lead here.
        if self._is_local and host is not None and not _is_loopback(host):
            raise _refusal(
                f"{host[:80]!r} is no name of this machine for itself; use localhost, or tokens"
            )


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return Address(name, 0).is_loopback


def _refusal(message: str) -> NotAllowed:
    error = NotAllowed(message)
    error.known = True  # it is no token that is missing
    return error
