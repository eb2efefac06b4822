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

import numpy as np

from turnlane.delivery.batching import SendBatch
from turnlane.delivery.results import RowState
from turnlane.errors import Bug, Never, PartlyDelivered, PayloadTooLarge, RetryLater


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
    retry counts as a failure of the destination: it, too, may need a person to correct something.
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
    match error:
        case None:
            batch.settle_delivered(count)
            if batch.search.is_first_row_bad and batch.refusal is not None:
                batch.search = batch.search.after_refusal(1)
                batch.settle_dead(batch.refusal)
        case RetryLater():
            return AttemptDecision(AttemptSignal.FAILED, later=batch, error=error)
        case PayloadTooLarge():  # fewer events at a time may succeed
            batch.search = batch.search.after_too_large(count)
            _settle_single(batch, count, error)
        case Never():  # at least one of the events can never be delivered
            _record_refusal(batch, count, error, is_certain=True)
        case PartlyDelivered():
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


def _decide_after_partial(
    batch: SendBatch, count: int, error: PartlyDelivered, max_attempts: int
) -> AttemptDecision:
    """Decide for each row by its own error; rows to be tried again become a batch of their own."""
    failures = error.failures
    if not failures or not all(0 <= row < count for row in failures):
        rows = sorted(failures)
        bug = Bug(f"the output reported rows {rows} as failed, but was given rows 0 to {count - 1}")
        return _decide_after_unknown(batch, count, bug, max_attempts)
    if any(map(_is_unclear, failures.values())):
        batch.unknown_errors += 1
    can_retry_unclear = batch.unknown_errors < max_attempts
    retried = {
        row: each
        for row, each in failures.items()
        if isinstance(each, RetryLater) or (can_retry_unclear and _is_unclear(each))
    }
    _settle_rows(batch, count, failures, retried)
    later = batch.select(np.array(sorted(retried), dtype=np.int64)) if retried else None
    batch.search = batch.search.after_delivery(count)
    batch.drop_first(count)
    if later is not None:
        batch.event_refs = set()
        if not any(map(_is_unclear, retried.values())):
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


def _is_unclear(error: BaseException) -> bool:
    """Whether it is neither ``RetryLater`` nor ``Never``: retried up to ``max_attempts`` times."""
    return not isinstance(error, RetryLater | Never)


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
