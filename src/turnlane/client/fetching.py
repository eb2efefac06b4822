"""Taking batches from several nodes at a time: whichever has one first.

Each node has a thread that asks it for a batch while somebody wants one. A batch that comes when
nobody wants it any more is kept for the next who does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from turnlane.errors import QueueClosed, QueueEmpty, TransportDown, TurnlaneError
from turnlane.queues.contract import Batch, Queue

LOOK_SECONDS = 0.2
"""How long a node is asked to wait, and how long one that is away is left alone."""


class Fetching:
    """Batches from all of ``queues``. Safe to use from any thread."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._queues = queues
        self._changed = threading.Condition()
        self._ready: list[tuple[Queue, Batch]] = []
        self._error: TurnlaneError | None = None
        self._wanted = 0
        self._largest: int | None = None
        self._threads: list[threading.Thread] = []
        self._ended = 0
        self._closed = False

    def get(self, max_events: int | None, timeout: float | None) -> Batch:
        """The next batch of any node. Raises as :meth:`Queue.get` does."""
        if max_events is not None and max_events < 1:
            raise ValueError(f"max_events is {max_events}; a batch has at least one event")
        with self._changed:
            self._start()
            self._largest = max_events
            self._wanted += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._has_answer(max_events), timeout)
                return self._answer(max_events)
            finally:
                self._wanted -= 1

    def close(self) -> None:
        """Give back what nobody has taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for _, batch in self._ready:
            _give_back(batch)
        self._ready.clear()

    def _start(self) -> None:
        if not self._threads and not self._closed:
            self._threads = [
                threading.Thread(target=self._fetch, args=(queue,), daemon=True)
                for queue in self._queues
            ]
            for thread in self._threads:
                thread.start()

    def _has_answer(self, max_events: int | None) -> bool:
        over = self._closed or self._ended == len(self._queues)
        return over or self._error is not None or self._find(max_events) is not None

    def _find(self, max_events: int | None) -> int | None:
        """A batch that is ready and not too large. Under the lock."""
        for index, (_, batch) in enumerate(self._ready):
            if max_events is None or len(batch) <= max_events:
                return index
        return None

    def _answer(self, max_events: int | None) -> Batch:
        index = self._find(max_events)
        if index is not None and not self._closed:
            _, batch = self._ready.pop(index)
            self._changed.notify_all()
            return batch
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._closed or self._ended == len(self._queues):
            raise QueueClosed(f"queue {self._queues[0].name!r} is closed")
        raise QueueEmpty(f"queue {self._queues[0].name!r} had nothing to read in the time allowed")

    # ── the threads ──────────────────────────────────────────────────────────────────────────────

    def _fetch(self, queue: Queue) -> None:
        while self._await_want(queue):
            try:
                batch = queue.get(self._largest, timeout=LOOK_SECONDS)
            except QueueEmpty:
                continue
            except TransportDown:
                self._pause()
            except QueueClosed:
                break
            except TurnlaneError as error:
                self._fail(error)
            else:
                self._offer(queue, batch)
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def _await_want(self, queue: Queue) -> bool:
        """Wait until somebody wants a batch and this node has none ready; false when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_fetch(queue))
            self._return_unfit(queue)
            return not self._closed

    def _may_fetch(self, queue: Queue) -> bool:
        mine = [batch for of, batch in self._ready if of is queue]
        return self._wanted > 0 and all(self._is_unfit(batch) for batch in mine)

    def _is_unfit(self, batch: Batch) -> bool:
        return self._largest is not None and len(batch) > self._largest

    def _return_unfit(self, queue: Queue) -> None:
        """Whoever wants a batch now wants a smaller one: let the node cut it anew."""
        for entry in [each for each in self._ready if each[0] is queue]:
            if self._is_unfit(entry[1]) and not self._closed:
                self._ready.remove(entry)
                _give_back(entry[1])

    def _offer(self, queue: Queue, batch: Batch) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append((queue, batch))
                self._changed.notify_all()
                return
        _give_back(batch)

    def _fail(self, error: TurnlaneError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._pause()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, LOOK_SECONDS)


def _give_back(batch: Batch) -> None:
    try:
        batch.release()
    except TurnlaneError:
        return  # its lease runs out
