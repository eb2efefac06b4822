"""Judging: what an attempt means for the events that it was about, and what it tells."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from turnlane.delivery.batching import Piece
from turnlane.delivery.outcome import Fate
from turnlane.errors import Bug, Never, PartlyDelivered, PayloadTooLarge, RetryLater

# ── verdict ──
# What an output's error says about the events it was given. Pure.


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


_STRANGE: Final = frozenset({Verdict.UNKNOWN, Verdict.PARTLY})
"""What an event of a send must not say: nobody knows what is meant."""


class News(enum.Enum):
    """What an attempt tells about whether others are worth it."""

    ANSWERED = "answered"
    PARTLY = "partly"
    """The destination took some events, and would do no better with others now."""
    FAILED = "failed"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to be done, once what is settled has been settled."""

    news: News
    later: Piece | None = None
    """Tried again, but not at once."""
    onward: Piece | None = None
    """Goes on at once."""
    error: BaseException | None = None
    """Why it is to be tried again."""


def judge_prepare(piece: Piece, count: int, error: BaseException) -> Judgement:
    """The first ``count`` rows could not be prepared. The destination has not heard of them.

    What may be prepared later waits for somebody, as it does for a destination that is away.
    """
    if verdict_on_prepare(error) is Verdict.LATER:
        return Judgement(News.FAILED, later=piece, error=error)
    _refuse(piece, count, error, sure=False)
    return Judgement(News.NOTHING, onward=_rest(piece))


def judge_send(
    piece: Piece, count: int, error: BaseException | None, max_attempts: int
) -> Judgement:
    """The first ``count`` rows were sent."""
    piece.tries += 1
    if error is None:
        piece.deliver(count)
        _bury_if_known(piece)
        return Judgement(News.ANSWERED, onward=_rest(piece))
    match verdict_on_send(error):
        case Verdict.LATER:
            return Judgement(News.FAILED, later=piece, error=error)
        case Verdict.SMALLER:
            piece.search = piece.search.too_large(count)
            _bury_if_alone(piece, count, error)
        case Verdict.REFUSED:
            _refuse(piece, count, error, sure=True)
        case Verdict.PARTLY if isinstance(error, PartlyDelivered):
            return _judge_parts(piece, count, error, max_attempts)
        case _:
            return _judge_unknown(piece, count, error, max_attempts)
    return Judgement(News.ANSWERED, onward=_rest(piece))


def _judge_unknown(piece: Piece, count: int, error: BaseException, max_attempts: int) -> Judgement:
    """Tried again as often as allowed; after that there is something wrong with some of it.

    Halves that fail tell nothing new. One event that fails alone where no other has gone may be
    innocent: the destination may have gone away meanwhile. So it has as many attempts by itself.
    """
    search, alone = piece.search, count == 1
    if alone or not search.suspect:
        piece.unknown += 1
    doubtful = alone and search.is_fruitless
    if piece.unknown < (2 if doubtful and search.suspect else 1) * max_attempts:
        return Judgement(News.FAILED, later=piece, error=error)
    news = News.FAILED if doubtful else News.NOTHING
    _refuse(piece, count, error, sure=False)
    return Judgement(news, onward=_rest(piece), error=error)


def _judge_parts(piece: Piece, count: int, error: PartlyDelivered, max_attempts: int) -> Judgement:
    """Every row has its own fate; those to be tried again make a piece of their own."""
    failures = error.failures
    if not failures or not all(0 <= row < count for row in failures):
        wrong = Bug(f"the output speaks of rows that it was not given: {error}")
        return _judge_unknown(piece, count, wrong, max_attempts)
    again = _to_try_again(piece, failures, max_attempts)
    _settle_parts(piece, count, failures, again)
    later = piece.part(np.array(sorted(again), dtype=np.int64)) if again else None
    piece.search = piece.search.delivered(count)
    piece.cut(count)
    if later is not None:
        piece.places = set()
        if not any(verdict_on_send(each) in _STRANGE for each in again.values()):
            later.unknown = 0
    patient = _most_patient(again)
    # Whoever says when to come again is not to be asked sooner, for other events neither.
    pushed_back = patient is not None and bool(said_when(patient))
    if pushed_back or len(again) == count:
        news = News.FAILED
    elif all(getattr(each, "alone", False) for each in again.values()):
        news = News.ANSWERED
    else:
        news = News.PARTLY
    return Judgement(news, later, _rest(piece), patient)


def _to_try_again(
    piece: Piece, failures: Mapping[int, BaseException], max_attempts: int
) -> dict[int, BaseException]:
    verdicts = {row: verdict_on_send(error) for row, error in failures.items()}
    wanted = {Verdict.LATER}
    if not _STRANGE.isdisjoint(verdicts.values()):
        piece.unknown += 1
        if piece.unknown < max_attempts:
            wanted |= _STRANGE
    return {row: failures[row] for row, verdict in verdicts.items() if verdict in wanted}


def _settle_parts(
    piece: Piece,
    count: int,
    failures: Mapping[int, BaseException],
    again: Mapping[int, BaseException],
) -> None:
    numbers = np.asarray(piece.numbers[:count], dtype=np.int64)
    took = np.ones(count, dtype=bool)
    took[list(failures)] = False
    piece.tally.settle(numbers[took], Fate.DELIVERED)
    dead: dict[tuple[type[BaseException], str], list[int]] = {}
    for row in sorted(failures.keys() - again.keys()):
        dead.setdefault((type(failures[row]), str(failures[row])), []).append(row)
    attempts = max(piece.unknown, piece.tries + piece.retries)
    for rows in dead.values():
        piece.tally.bury(piece.block.take(rows), numbers[rows], failures[rows[0]], attempts)


def _most_patient(errors: Mapping[int, BaseException]) -> BaseException | None:
    """Of several errors the one that says to wait longest."""
    return max(errors.values(), key=lambda each: said_when(each) or 0.0, default=None)


def _refuse(piece: Piece, count: int, error: BaseException, *, sure: bool) -> None:
    piece.search = piece.search.refused(count, sure=sure)
    piece.refusal = error
    _bury_if_alone(piece, count, error)


def _bury_if_known(piece: Piece) -> None:
    """All that were refused with it have gone: it need not be refused again."""
    if piece.search.is_known and piece.refusal is not None:
        piece.search = piece.search.refused(1)
        piece.bury(piece.refusal)


def _bury_if_alone(piece: Piece, count: int, error: BaseException) -> None:
    if count == 1:
        piece.bury(error)
    else:
        piece.unprepare()


def _rest(piece: Piece) -> Piece | None:
    return piece if piece.left else None
