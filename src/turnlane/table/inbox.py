"""The inbox: what other threads want of a manager."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from turnlane.errors import RetryLater

Message = Callable[[], None]


class Inbox:
    """Messages in their order. Put from any thread, read by the manager's."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()

    def put(self, message: Message) -> None:
        """Have something done."""
        self._messages.append(message)

    def read(self) -> None:
        """Do all that is there now. What fails because of the database is done again."""
        for _ in range(len(self._messages)):
            message = self._messages.popleft()
            try:
                message()
            except RetryLater:
                self._messages.appendleft(message)
                raise

    def empty(self) -> None:
        """Do whatever is there, on any thread: the manager's is gone."""
        while self._messages:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._messages.popleft()()
