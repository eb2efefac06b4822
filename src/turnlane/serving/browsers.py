"""Requests of web pages, which a listener without tokens refuses.

A page that a user opens can send requests from the user's machine, also to a server that listens
only there. Browsers say on behalf of which page they send a request, and this alone distinguishes
it from a request of curl. The owner of a page can also make the name of its site resolve to the
address of the server (DNS rebinding). Then page and server have the same name, so a name that
another site can have is refused.
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from turnlane.errors import NotAllowed
from turnlane.serving.address import Address
from turnlane.serving.auth import Authority

_FOREIGN: Final = frozenset({"cross-site", "same-site"})
"""Values of ``Sec-Fetch-Site`` in requests of pages that are not the server's own."""


class BrowserGuard:
    """Refuses requests of foreign web pages if the server has no tokens."""

    def __init__(self, authority: Authority, address: Address) -> None:
        self._has_no_tokens = not authority.has_tokens
        self._address = address

    def check(self, headers: Headers) -> None:
        """Raise ``NotAllowed`` for a request that a page of another site has sent."""
        if not self._has_no_tokens:
            return
        origin, host = headers.get("origin"), headers.get("host")
        is_foreign = origin is not None and urlsplit(origin).netloc != host
        if is_foreign or headers.get("sec-fetch-site") in _FOREIGN:
            raise _make_refusal("pages of other sites may not use a server without tokens")
        if host is None:
            return
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if self._address.is_loopback and not Address(name, 0).is_loopback:
            raise _make_refusal(
                f"{host[:80]!r} is not a loopback name; use localhost, or configure tokens"
            )
        if origin is not None and not self._is_own_name(name):
            raise _make_refusal(
                f"{host[:80]!r} may be the name of another site; pages have to use the address "
                "of the server as a number, or tokens"
            )

    def _is_own_name(self, name: str) -> bool:
        """Return whether no other site can have this name."""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in ("localhost", self._address.host.lower())
        return True


def _make_refusal(message: str) -> NotAllowed:
    error = NotAllowed(message)
    error.known = True  # answered with 403: a token would not help
    return error
