"""What an output's error says about the events it was given. Pure."""

from __future__ import annotations

import enum

from turnlane.errors import Never, PartlyDelivered, PayloadTooLarge, RetryLater


class Verdict(enum.Enum):
    """What to do with what was sent."""

    LATER = "later"
    """Send the same again, later."""
    SMALLER = "smaller"
    """Send less at a time."""
    REFUSED = "refused"
    """Something in it can never be delivered."""
    PARTLY = "partly"
    """Each event has its own verdict."""
    UNKNOWN = "unknown"
    """Send the same again, later, but only so many times."""


def verdict_on_send(error: BaseException) -> Verdict:
    """What an error of ``send`` means."""
    match error:
        case RetryLater():
            return Verdict.LATER
        case PayloadTooLarge():
            return Verdict.SMALLER
        case Never():
            return Verdict.REFUSED
        case PartlyDelivered():
            return Verdict.PARTLY
        case _:
            return Verdict.UNKNOWN


def verdict_on_prepare(error: BaseException) -> Verdict:
    """What an error of ``prepare`` means. It does no I/O: it would fail again."""
    return Verdict.LATER if isinstance(error, RetryLater | MemoryError) else Verdict.REFUSED


def said_when(error: BaseException) -> float | None:
    """When the destination wants to hear from us again, in seconds, if it said so."""
    return error.after if isinstance(error, RetryLater) else None


def error_type(error: BaseException) -> str:
    """What went wrong, in a word that metrics can count: mostly the error's class."""
    kind: str | None = getattr(error, "kind", None)
    if kind is not None:
        return kind
    for each in (error, error.__cause__):
        if isinstance(each, TimeoutError):
            return "timeout"
        if isinstance(each, OSError):
            return "network"
    return type(error).__name__
