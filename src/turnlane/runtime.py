"""What every part of a process needs: closing, threads, scratch directories, secrets."""

from __future__ import annotations

import abc
import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, ParamSpec, Self, TypeVar

from turnlane.errors import RetryLater
from turnlane.logs import get_logger

log = get_logger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Closeable(abc.ABC):
    """An object with ``close()`` that can stand in a ``with`` statement."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything that the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


# ── threads ──
# All threads are daemons: a thread that hangs in a call must not keep the process from ending.
# Everything that has to be durable is synced before the call that stops the thread returns.


def create_thread(
    name: str,
    work: Callable[Arguments, object],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> threading.Thread:
    """Create a daemon thread that calls ``work(*args, **kwargs)`` when the caller starts it."""
    return threading.Thread(target=work, args=args, kwargs=kwargs, name=name, daemon=True)


def start_thread(
    name: str,
    work: Callable[Arguments, object],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> threading.Thread:
    """Start ``work(*args, **kwargs)`` on a daemon thread, and return the thread."""
    thread = create_thread(name, work, *args, **kwargs)
    thread.start()
    return thread


def call_in_thread(
    name: str,
    call: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Future[Result]:
    """Start a call on a daemon thread; the future gets its result or its exception."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = call(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    start_thread(name, run)
    return future


class PeriodicThread(Closeable):
    """Calls ``work`` again and again on a daemon thread, until it is closed.

    The first call comes after ``seconds``. ``work`` may return the number of seconds until the
    next call; the default is ``seconds``. An exception is logged, and the calls continue.
    """

    def __init__(self, name: str, work: Callable[[], float | None], seconds: float) -> None:
        self._name = name
        self._work = work
        self._seconds = seconds
        self._closed = threading.Event()
        self._thread = start_thread(name, self._run)

    def stop(self) -> None:
        """Make no further call. Does not wait for a running one."""
        self._closed.set()

    def close(self) -> None:
        """Make no further call, and wait for a running one."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        pause = self._seconds
        while not self._closed.wait(pause):
            pause = self._seconds
            try:
                asked = self._work()
            except Exception:  # an error of one round must not end the others
                log.exception("thread.round_failed", thread=self._name, retry_seconds=pause)
            else:
                pause = self._seconds if asked is None else asked


# ── scratch directories ──
# They exist as long as this process. ``atexit`` alone is not enough: a process that ends with
# ``os._exit`` runs no such functions, and has to call ``remove_scratch_directories`` itself.

_scratch_directories: Final[list[Path]] = []


def create_scratch_directory(prefix: str) -> Path:
    """Create a directory that is deleted when this process ends."""
    _scratch_directories.append(Path(tempfile.mkdtemp(prefix=prefix)))
    return _scratch_directories[-1]


@atexit.register
def remove_scratch_directories() -> None:
    """Delete all scratch directories."""
    while _scratch_directories:
        shutil.rmtree(_scratch_directories.pop(), ignore_errors=True)


# ── secrets ──


def read_secret(what: str, variable: str | None, file: Path | None) -> str | None:
    """Return a password or token from an environment variable or a file; ``None`` without both.

    It is read each time it is needed. Raises ``RetryLater`` if it is missing: events wait until
    a person has corrected this.
    """
    if variable is not None:
        found = os.environ.get(variable, "")
        where = f"the variable {variable}"
    elif file is not None:
        where = str(file)
        try:
            found = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RetryLater(f"the {what} cannot be read: {where}: {error}") from None
    else:
        return None
    if not found:
        raise RetryLater(f"there is no {what}: {where} is empty or not set")
    return found
