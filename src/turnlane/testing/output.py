"""An output that fails as it is told to, and remembers what it was given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from turnlane.events import Block
from turnlane.outputs.api import Output, OutputSettings

Fault = Callable[[Block], BaseException | None]
"""Returns the error for a block, or ``None``."""


class FaultyOutput(Output):
    """Takes blocks, or fails as told. Safe to use from several threads.

    ``prepare_fault`` and ``fault`` decide about every block, in ``prepare`` and in ``send``; a
    fault may also block for a while, as a slow destination does.
    """

    def __init__(self, fault: Fault | None = None, prepare_fault: Fault | None = None) -> None:
        super().__init__(OutputSettings(type="faulty"))
        self.fault = fault
        self.prepare_fault = prepare_fault
        self.taken: list[Block] = []
        """The delivered events, in order of delivery."""
        self.sends = 0
        self.failures = 0
        self.most_in_flight = 0
        self._in_flight = 0
        self._planned: list[BaseException] = []
        self._changed = threading.Condition()

    def fail(self, error: BaseException, times: int = 1) -> None:
        """Fail the next sends with this error, before anything else."""
        with self._changed:
            self._planned += [error] * times

    def await_sends(self, count: int, timeout: float = 20.0) -> bool:
        """Wait until this many sends have begun; false on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.sends >= count, timeout)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        error = self.prepare_fault(block) if self.prepare_fault is not None else None
        if error is not None:
            raise error
        return block

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        with self._changed:
            self.sends += 1
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            planned = self._planned.pop(0) if self._planned else None
            self._changed.notify_all()
        try:
            error = planned or (self.fault(prepared) if self.fault is not None else None)
            self._record(prepared, error)
        finally:
            with self._changed:
                self._in_flight -= 1
        if error is not None:
            raise error

    def close(self) -> None:
        """Nothing to let go of."""

    def _record(self, block: Block, error: BaseException | None) -> None:
        with self._changed:
            if error is None:
                self.taken.append(block)
                return
            self.failures += 1
            failed = getattr(error, "failures", None)
            if failed is not None:
                rows = [row for row in range(block.num_rows) if row not in failed]
                self.taken.append(block.take(rows))
