"""The error policy: what the result of an attempt means for the rows and for the destination.

Two questions are answered after every attempt to prepare or send the first rows of a batch. What
happens to the rows: delivered, dead, tried again later, or tried at once in smaller numbers? And
what does the attempt say about the destination (``AttemptSignal``), which decides whether other
sends go on? Final states are set on the batch right away; the rest is returned as a decision.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from turnlane.delivery.batching import SendBatch
from turnlane.delivery.results import RowState
from turnlane.errors import Bug, Never, PartlyDelivered, PayloadTooLarge, RetryLater


class ErrorClass(enum.Enum):
    """What an output's error says about the events of an attempt."""

    RETRY = "retry"
    """The same events may succeed later."""
    TOO_LARGE = "too_large"
    """Fewer events at a time may succeed."""
    REFUSED = "refused"
    """At least one of the events can never be delivered."""
    PARTIAL = "partial"
    """Each event has its own error, or was delivered."""
    UNKNOWN = "unknown"
    """Not an error of turnlane: the same events are tried again a limited number of times."""


def classify_send_error(error: BaseException) -> ErrorClass:
    """Return what an error of ``send`` means."""
    match error:
        case RetryLater():
            return ErrorClass.RETRY
        case PayloadTooLarge():
            return ErrorClass.TOO_LARGE
        case Never():
            return ErrorClass.REFUSED
        case PartlyDelivered():
            return ErrorClass.PARTIAL
        case _:
            return ErrorClass.UNKNOWN


def get_retry_after(error: BaseException) -> float | None:
    """Return the seconds after which the destination asked to be tried again, if it did."""
    return error.after if isinstance(error, RetryLater) else None


def get_error_type(error: BaseException) -> str:
    """Return one word for an error, for metrics: mostly the name of its class."""
    kind: str | None = getattr(error, "kind", None)
    if kind is not None:
        return kind
    for each in (error, error.__cause__):
        if isinstance(each, TimeoutError):
            return "timeout"
        if isinstance(each, OSError):
            return "network"
    return type(error).__name__


class AttemptSignal(enum.Enum):
    """What an attempt says about the destination."""

    ANSWERED = "answered"
    """It works, even if it refused these events."""
    PARTIAL = "partial"
    """It took some events, and would not take more now."""
    FAILED = "failed"
    NONE = "none"
    """Nothing."""


@dataclass(frozen=True, slots=True)
class AttemptDecision:
    """What to do with the rows that are still open."""

    signal: AttemptSignal
    later: SendBatch | None = None
    """Try this batch again after a wait."""
    now: SendBatch | None = None
    """Go on with this batch at once."""
    error: BaseException | None = None
    """Why ``later`` is tried again."""


def decide_after_failed_prepare(
    batch: SendBatch, count: int, error: BaseException
) -> AttemptDecision:
    """Decide after the first ``count`` rows of a batch could not be prepared.

    ``prepare`` does no I/O, so it would fail again, unless it says otherwise or memory was short. A
    retry counts as a failure of the destination: it also waits for a person.
    """
    if isinstance(error, RetryLater | MemoryError):
        return AttemptDecision(AttemptSignal.FAILED, later=batch, error=error)
    _record_refusal(batch, count, error, is_certain=False)
    return AttemptDecision(AttemptSignal.NONE, now=_get_open(batch))


def decide_after_send(
    batch: SendBatch, count: int, error: BaseException | None, max_attempts: int
) -> AttemptDecision:
    """Decide after the first ``count`` rows of a batch were sent; without an error they arrived."""
    batch.tries += 1
    if error is None:
        batch.settle_delivered(count)
        if batch.search.is_first_row_bad and batch.refusal is not None:
            batch.search = batch.search.after_refusal(1)
            batch.settle_dead(batch.refusal)
        return AttemptDecision(AttemptSignal.ANSWERED, now=_get_open(batch))
    match classify_send_error(error):
        case ErrorClass.RETRY:
            return AttemptDecision(AttemptSignal.FAILED, later=batch, error=error)
        case ErrorClass.TOO_LARGE:
            batch.search = batch.search.after_too_large(count)
            _settle_single(batch, count, error)
        case ErrorClass.REFUSED:
            _record_refusal(batch, count, error, is_certain=True)
        case ErrorClass.PARTIAL if isinstance(error, PartlyDelivered):
            return _decide_after_partial(batch, count, error, max_attempts)
        case _:
            return _decide_after_unknown(batch, count, error, max_attempts)
    return AttemptDecision(AttemptSignal.ANSWERED, now=_get_open(batch))


def _decide_after_unknown(
    batch: SendBatch, count: int, error: BaseException, max_attempts: int
) -> AttemptDecision:
    """Decide after an error that is not turnlane's.

    The batch is tried again ``max_attempts`` times; after that one of its rows must be bad, and the
    search begins. Failures during the search are no news about the destination. A row that fails
    alone while no other was delivered may still be good, because the destination may have failed
    in between: it gets ``max_attempts`` attempts of its own.
    """
    search, is_single = batch.search, count == 1
    if is_single or not search.suspect:
        batch.unknown_errors += 1
    is_doubtful = is_single and search.has_no_delivery
    allowed = (2 if is_doubtful and search.suspect else 1) * max_attempts
    if batch.unknown_errors < allowed:
        return AttemptDecision(AttemptSignal.FAILED, later=batch, error=error)
    signal = AttemptSignal.FAILED if is_doubtful else AttemptSignal.NONE
    _record_refusal(batch, count, error, is_certain=False)
    return AttemptDecision(signal, now=_get_open(batch), error=error)


_UNCLEAR: Final = frozenset({ErrorClass.UNKNOWN, ErrorClass.PARTIAL})
"""Errors that make no sense for a single event of a send."""


def _decide_after_partial(
    batch: SendBatch, count: int, error: PartlyDelivered, max_attempts: int
) -> AttemptDecision:
    """Decide for each row by its own error; rows to be tried again become a batch of their own."""
    failures = error.failures
    if not failures or not all(0 <= row < count for row in failures):
        rows = sorted(failures)
        bug = Bug(f"the output reported rows {rows} as failed, but was given rows 0 to {count - 1}")
        return _decide_after_unknown(batch, count, bug, max_attempts)
    retried = _select_retries(batch, failures, max_attempts)
    _settle_rows(batch, count, failures, retried)
    later = batch.select(np.array(sorted(retried), dtype=np.int64)) if retried else None
    batch.search = batch.search.after_delivery(count)
    batch.drop_first(count)
    if later is not None:
        batch.event_refs = set()
        if not any(classify_send_error(each) in _UNCLEAR for each in retried.values()):
            later.unknown_errors = 0
    longest = max(retried.values(), key=lambda each: get_retry_after(each) or 0.0, default=None)
    # A destination that asks for a wait must not be tried sooner with other events either.
    has_requested_wait = longest is not None and bool(get_retry_after(longest))
    if has_requested_wait or len(retried) == count:
        signal = AttemptSignal.FAILED
    elif all(getattr(each, "alone", False) for each in retried.values()):
        signal = AttemptSignal.ANSWERED
    else:
        signal = AttemptSignal.PARTIAL
    return AttemptDecision(signal, later, _get_open(batch), longest)


def _select_retries(
    batch: SendBatch, failures: Mapping[int, BaseException], max_attempts: int
) -> dict[int, BaseException]:
    """Return the failures of the rows that are tried again."""
    classes = {row: classify_send_error(error) for row, error in failures.items()}
    retried = {ErrorClass.RETRY}
    if not _UNCLEAR.isdisjoint(classes.values()):
        batch.unknown_errors += 1
        if batch.unknown_errors < max_attempts:
            retried |= _UNCLEAR
    return {row: failures[row] for row, each in classes.items() if each in retried}


def _settle_rows(
    batch: SendBatch,
    count: int,
    failures: Mapping[int, BaseException],
    retried: Mapping[int, BaseException],
) -> None:
    """Settle the delivered rows, and as dead the failed rows that are not tried again."""
    numbers = np.asarray(batch.numbers[:count], dtype=np.int64)
    is_delivered = np.ones(count, dtype=bool)
    is_delivered[list(failures)] = False
    batch.progress.settle(numbers[is_delivered], RowState.DELIVERED)
    dead: dict[tuple[type[BaseException], str], list[int]] = {}
    for row in sorted(failures.keys() - retried.keys()):
        dead.setdefault((type(failures[row]), str(failures[row])), []).append(row)
    attempts = max(batch.unknown_errors, batch.tries + batch.retries)
    for rows in dead.values():
        batch.progress.settle_dead(
            batch.block.take(rows), numbers[rows], failures[rows[0]], attempts
        )


def _record_refusal(
    batch: SendBatch, count: int, error: BaseException, *, is_certain: bool
) -> None:
    batch.search = batch.search.after_refusal(count, is_certain=is_certain)
    batch.refusal = error
    _settle_single(batch, count, error)


def _settle_single(batch: SendBatch, count: int, error: BaseException) -> None:
    """Settle a row that failed alone as dead; of several rows, others are sent next."""
    if count == 1:
        batch.settle_dead(error)
    else:
        batch.discard_payload()


def _get_open(batch: SendBatch) -> SendBatch | None:
    return batch if batch.left else None
