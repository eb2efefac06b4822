"""The url of a node, or of several: ``turnlane://host:port,host:port``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from turnlane.errors import ConfigError
from turnlane.problems import message_of

DEFAULT_PORT: Final = 8815
SCHEMES: Final = {"turnlane": False, "turnlanes": True}
_HELP: Final = "write turnlane://host:port, with TLS turnlanes://host:port; several after commas"
_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Url:
    """Where the nodes are, and whether to speak TLS with them."""

    places: tuple[str, ...]
    """``host:port`` each."""
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Self:
        """Take a url apart. Raises ``ConfigError``."""
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in SCHEMES:
            raise ConfigError("url", f"{url!r} is not a node's; {_HELP}")
        places = tuple(_place(each.strip(), url) for each in rest.rstrip("/").split(","))
        if len(set(places)) < len(places):
            raise ConfigError("url", f"{url!r} names a node twice")
        return cls(places, SCHEMES[scheme])

    @classmethod
    def of_setting(cls, url: str) -> Self:
        """The same for a setting. Raises ``ValueError``, of which pydantic says whose it is."""
        try:
            return cls.parse(url)
        except ConfigError as error:
            raise ValueError(message_of(error)) from None

    def locations(self) -> list[str]:
        """The places as Flight writes them."""
        scheme = "grpc+tls" if self.tls else "grpc+tcp"
        return [f"{scheme}://{place}" for place in self.places]


def _place(text: str, url: str) -> str:
    match = _PLACE.fullmatch(text)
    if match is None or int(match[2] or 1) > 65_535 or match[2] == "0":
        raise ConfigError("url", f"{text!r} in {url!r} is not host:port; {_HELP}")
    return f"{match[1]}:{match[2] or DEFAULT_PORT}"
