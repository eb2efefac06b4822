"""The error tree: the class of an error tells the caller what to do next.

TurnlaneError
├── RetryLater             nothing is lost; the same call may succeed later
│   ├── QueueFull          no room within the time allowed
│   ├── NumbersMissing     too many gaps in a producer's numbers; send the missing ones first
│   ├── QueueEmpty         nothing to read within the time allowed
│   ├── AckNotStored       done() could not be recorded; the batch is still yours
│   ├── AckPending         published, but its level was not reached in time; do not publish again
│   ├── StorageFailed      the disk did not read or write; its data is still there
│   ├── DirectoryLocked    another process holds the queue's directory
│   ├── AddressTaken       another process listens there; names the knob
│   ├── TransportDown      the node cannot be reached
│   ├── DatabaseDown       the database does not answer; committed data is still there
│   ├── DatabaseReadOnly   the database takes no writes now
│   ├── LeadLost           another manager leads; this one changed nothing
│   └── ReshardUnderWay    the queue table's shards are being changed in another way
├── Never                  the same call will fail again
│   ├── EventsLost         accepted events could not be written before the queue was closed
│   ├── QueueClosed        the queue takes or gives no more events
│   ├── EventTooLarge      the event can never fit
│   ├── PayloadTooLarge    the destination takes only smaller requests
│   ├── SchemaMismatch     a column has another type than the queue's
│   ├── NoSuchQueue        the node has no queue of this name
│   ├── QueueExists        the node has a queue of this name, with other settings
│   ├── NoSuchSchedule     the queue table has no schedule of this name
│   ├── NoSuchLease        the lease was settled before, or has run out
│   ├── NoSuchStream       the receiver's stream is over; its events fire elsewhere
│   ├── NoSuchStage        the staged blocks were committed, given up, or never finished
│   ├── NoSuchBreaker      no task has delivered for an action of this name
│   ├── LaneTaken          the lane was started again elsewhere: this run has to end
│   ├── WriterAhead        the writer has written later batches: this batch is not a repeat
│   ├── NotAllowed         the token, or the lack of one, does not give the right to do that
│   ├── NotSupported       this kind of queue does not do that
│   ├── ConfigError        a setting is wrong; names the knob
│   ├── SyntaxFault        a statement cannot be read; says where
│   ├── NameTaken          an event of this name is in the queue table
│   ├── NotAQueue          the directory holds no queue that can be read
│   └── DirectoryUnusable  the directory cannot be written
├── PartlyDelivered        the destination took some events of a block; says which it did not
└── Bug                    turnlane, or the code calling it, is wrong
    └── BatchFreed         the contents were released with free()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class TurnlaneError(Exception):
    """Root of every error that turnlane raises on purpose."""


class RetryLater(TurnlaneError):
    """Nothing is lost; the same call may succeed later. ``after`` is a hint when, in seconds.

    If the error concerns some events of a block, ``alone`` means that the others may succeed now.
    ``kind`` is the cause in one word, for metrics: ``timeout``, ``rate_limit``, ``network``,
    ``auth`` …
    """

    def __init__(
        self,
        message: str = "",
        *,
        after: float | None = None,
        alone: bool = False,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.after = after
        self.alone = alone
        self.kind = kind


class QueueFull(RetryLater):
    """The queue had no room within the time allowed.

    ``accepted`` is the number of events at the start of the block that the queue took, including
    those that its policy dropped: do not publish them again. If ``pending`` is true, some of them
    have not reached the producer's level yet; ``flush()`` waits for that.
    """

    accepted = 0
    pending = False


class NumbersMissing(RetryLater):
    """There are too many gaps in the numbers of a producer: send the missing numbers first.

    ``missing`` has the lowest gaps as ranges ``(first, end)``; ``end`` is not missing.
    """

    missing: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, queue: str, gaps: Sequence[tuple[int, int]]) -> NumbersMissing:
        """Return the error for a producer with these gaps in its numbers."""
        shown = gaps[:8]
        numbers = ", ".join(
            f"{first}" if end - first == 1 else f"{first} to {end - 1}" for first, end in shown
        )
        error = cls(
            f"queue {queue!r} has {len(gaps)} gaps in the numbers of this producer, and takes no "
            f"further gap; missing are {numbers}{' …' if len(gaps) > len(shown) else ''}"
        )
        error.missing = shown
        return error


class QueueEmpty(RetryLater):
    """The queue had nothing to read within the time allowed."""


class AckNotStored(RetryLater):
    """``done()`` could not be recorded. The batch still belongs to the caller: call it again."""


class AckPending(RetryLater):
    """The event is in the queue, but its level was not reached in time. Do not publish it again."""


class StorageFailed(RetryLater):
    """The disk did not let the queue read or write."""


class DirectoryLocked(RetryLater):
    """Another process holds the queue's directory."""


class AddressTaken(RetryLater):
    """Another process listens on the address, which the setting ``knob`` has."""

    def __init__(self, knob: str, message: str) -> None:
        super().__init__(f"{knob}: {message}")
        self.knob = knob


class TransportDown(RetryLater):
    """The node at the far end cannot be reached."""


class DatabaseDown(RetryLater):
    """The database does not answer, or ended the connection. Committed data is still there."""


class DatabaseReadOnly(RetryLater):
    """The database takes no writes: it is a replica, or it is being moved."""


class LeadLost(RetryLater):
    """Another manager leads the shard; the write was refused and changed nothing."""


class ReshardUnderWay(RetryLater):
    """Another reshard of the queue is not finished: resume that one first."""


class Never(TurnlaneError):
    """The same call will fail again; do not retry it."""


class EventsLost(Never):
    """A close could not write accepted events; those acked ``persisted`` are not among them."""


class QueueClosed(Never):
    """The queue is closed: it takes no more events, or has none left to give."""


class EventTooLarge(Never):
    """The event, or block, is larger than the queue can ever hold."""


class PayloadTooLarge(Never):
    """The destination refused the size of the request; fewer events at a time may succeed."""


class SchemaMismatch(Never):
    """A column of the block has another type than the same column of the queue."""


class NoSuchQueue(Never):
    """The node has no queue of this name."""


class QueueExists(Never):
    """The node has a queue of this name already, with other settings."""


class NoSuchSchedule(Never):
    """The queue table has no schedule of this name."""


class NoSuchLease(Never):
    """The lease was settled before, or it ran out and its events went to another consumer."""


class NoSuchStream(Never):
    """The stream of a queue table's receiver is over: its unacked events fire elsewhere."""


class NoSuchStage(Never):
    """The staged blocks were committed or given up before, or were never finished."""


class NoSuchBreaker(Never):
    """No task has delivered for an action of this name since the node was started."""


class LaneTaken(Never):
    """The lane was started again, here or elsewhere; the run that gets this error has to end."""


class WriterAhead(Never):
    """The writer has written later batches than this one, and this one is not a repeat.

    Its checkpoint was replaced, and the batches of the new checkpoint start from 0 again.
    """

    @classmethod
    def of(cls, writer: str, last: int, batch: int) -> WriterAhead:
        """Return the error for a writer that has written batch ``last`` and now gets ``batch``."""
        return cls(
            f"the writer {writer!r} has written batch {last} before, and now has batch {batch}: "
            "restore its checkpoint, or give the query another writerId"
        )


class NotAllowed(Never):
    """The token, or the lack of one, does not give the right to do that."""

    known = False
    """Whether the token is valid and only lacks the right."""


class NotSupported(Never):
    """This kind of queue does not offer the operation."""


class ConfigError(Never):
    """A setting is wrong or contradicts another; ``knob`` names it."""

    def __init__(self, knob: str, message: str) -> None:
        super().__init__(f"{knob}: {message}")
        self.knob = knob


class SyntaxFault(Never):
    """A statement cannot be read; ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"{line}:{column}: {message}")
        self.line = line
        self.column = column


class NameTaken(Never):
    """An event of this name is in the queue table already: it is not enqueued again."""


class NotAQueue(Never):
    """The directory holds no queue that turnlane can read."""


class DirectoryUnusable(Never):
    """The queue's directory cannot be created or written."""


class PartlyDelivered(TurnlaneError):
    """The destination took a block except for ``failures``: row numbers and their errors."""

    def __init__(self, failures: Mapping[int, TurnlaneError]) -> None:
        super().__init__(f"{len(failures)} events were refused: {next(iter(failures.values()))}")
        self.failures = dict(failures)


class Bug(TurnlaneError):
    """turnlane, or the code that calls it, broke its own rules."""


class BatchFreed(Bug):
    """The batch's contents were released with ``free()``; they cannot be read or given back."""
