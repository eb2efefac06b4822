"""What an answer of a web server means for the events of its request. Decisions only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final

from turnlane.errors import Never, PayloadTooLarge, RetryLater, TurnlaneError

_LONGEST_QUOTE: Final = 300
"""Characters of an answer that are repeated to people."""
_TOO_LARGE: Final = frozenset({413, 414, 431})
"""The body, the address or the headers: those of fewer events may fit, and of one never will."""
_REFUSED: Final = frozenset({400, 422})
"""Statuses that are about the contents: the same request would fail again."""
_ELSEWHERE: Final = frozenset({401, 403, 404, 405, 407})
"""Statuses that are about the address or the rights: another address may do better."""
LONGEST_WAIT: Final = 86_400.0
"""Seconds: nobody who says more is believed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, read as far as it is of use."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = True
    """Whether all of the body was read."""

    @property
    def is_good(self) -> bool:
        """Whether the destination has what it was sent."""
        return 200 <= self.status < 300

    @property
    def blames_address(self) -> bool:
        """Whether requests to another address are worth a try."""
        return self.status in _ELSEWHERE


def error_of(answer: Answer, url: str, now: float) -> TurnlaneError | None:
    """The error that stands for an answer; ``None`` for a good one. ``now``: since the epoch.

    What a person can put right waits for that: a refused password and an unknown path are no
    reason to give up events. Only what is said of the contents is.
    """
    if answer.is_good:
        return None
    text = f"{shown(url)}: HTTP {answer.status}{quoted(answer.body)}"
    if answer.status in _TOO_LARGE:
        return PayloadTooLarge(text)
    if answer.status in _REFUSED:
        return Never(text)
    if 300 <= answer.status < 400:
        where = answer.headers.get("location", "elsewhere")
        return RetryLater(f"{text}; redirects are not followed, this one leads to {where}")
    after = retry_after(answer.headers.get("retry-after"), now)
    kind = _kind(answer.status)
    return RetryLater(text, after=after, alone=answer.blames_address, kind=kind)


def _kind(status: int) -> str:
    """What a status means, in a word."""
    match status:
        case 401 | 403 | 407:
            return "auth"
        case 408 | 504:
            return "timeout"
        case 429:
            return "rate_limit"
        case _:
            return "server_error" if status >= 500 else "client_error"


def retry_after(text: str | None, now: float) -> float | None:
    """The seconds that a header ``Retry-After`` asks for, as a number or as a date."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else None


def shown(url: str) -> str:
    """An address for people, without its query: that is where some have keys."""
    return url.partition("?")[0]


def quoted(body: bytes) -> str:
    """The beginning of an answer in one line, for a message."""
    text = " ".join(body[: 4 * _LONGEST_QUOTE].decode(errors="replace").split())
    text = "".join(sign for sign in text if sign.isprintable() and sign != "�").strip()
    if len(text) > _LONGEST_QUOTE:
        text = f"{text[: _LONGEST_QUOTE - 1]}…"
    return f": {text}" if text else ""
