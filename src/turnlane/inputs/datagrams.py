"""Reads datagrams, and the input ``unix``: each datagram is one message, without an answer.

A unix datagram socket, such as ``/dev/log``, is the one to which ``syslog()`` of the C library
writes. Messages are stored as they come, in the form of RFC 3164 without a host. By default no
sender waits: a program that logs must not hang because a queue is full.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from turnlane.errors import AddressTaken, ConfigError
from turnlane.formats.lines import trim_ends
from turnlane.formats.syslog import BINARY, FOREIGN_HEAD_BYTES, is_binary, parse_severities
from turnlane.inputs.api import Host, Input, InputSettings
from turnlane.inputs.publishers import WARN_SECONDS, FireAndForgetPublisher, ReceiveBuffer
from turnlane.logs import get_logger
from turnlane.queues.api import FlowControl
from turnlane.runtime import create_thread
from turnlane.units import Size

log = get_logger(__name__)

MAX_DATAGRAM_BYTES: Final = 1 << 18
"""Room for one datagram. A UDP datagram has less than a quarter of this."""
READ_BYTES: Final = 1 << 20
MAX_BLOCK_DATAGRAMS: Final = 4_096
"""The most datagrams and bytes of a block: so no message waits long for others."""
_LESS: Final = ord("<")
_SO_RCVBUFFORCE: Final = 33
_SO_MEMINFO: Final = 55
_MEMINFO: Final = struct.Struct("9I")


class Datagram(NamedTuple):
    """One datagram: its size, its sender, and whether it was cut off."""

    size: int
    source: str | None
    truncated: bool


Receive = Callable[[memoryview], Datagram]
"""Receives one datagram into memory; raises ``BlockingIOError`` if there is none."""


class DatagramReader:
    """Publishes the datagrams of one bound socket, from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        owner: Input,
        publisher: FireAndForgetPublisher,
        bound: socket.socket,
        receive: Receive,
        longest: int,
    ) -> None:
        self._owner = owner
        self.publisher = publisher
        self._socket = bound
        self._receive = receive
        self._longest = longest
        self._buffer = ReceiveBuffer(READ_BYTES + MAX_DATAGRAM_BYTES, parse_severities)
        self._system_drops = 0
        self._next_warning = float("-inf")
        self._waker, self._wake_end = os.pipe()
        self._stopping = threading.Event()
        self._deadline = float("inf")
        name = f"turnlane-{owner.settings.label}-datagrams"
        self._thread = create_thread(name, self._run)

    def start(self) -> None:
        """Start the thread."""
        self._socket.setblocking(False)  # noqa: FBT003 - the socket's own interface
        self._thread.start()

    def stop(self, deadline: float) -> None:
        """Publish the datagrams that have arrived, then close the socket. Until ``deadline``."""
        self._deadline = deadline
        self.publisher.set_deadline(deadline)
        self._stopping.set()
        if self._thread.ident is not None:
            os.write(self._wake_end, b".")
            self._thread.join()
        self._socket.close()
        os.close(self._waker)
        os.close(self._wake_end)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        try:
            while not self._stopping.is_set() and not self.publisher.has_failed:
                poll.poll()
                self._read_available()
            self._drain()
        except Exception:
            log.exception("input.reader_failed", input=self._owner.settings.label)

    def _drain(self) -> None:
        """Read the datagrams that have arrived, at most one more full buffer."""
        left = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        while not self.publisher.has_failed and left > 0 and (size := self._read_available()):
            left -= size
            if time.monotonic() >= self._deadline:
                return

    def _read_available(self) -> int:
        """Publish the datagrams that have arrived, as one block; return how many bytes."""
        space = self._buffer.get_space()
        ends, sources, cut, refused = [0], list[str | None](), 0, 0
        while len(ends) < MAX_BLOCK_DATAGRAMS and ends[-1] + refused < READ_BYTES:
            try:
                size, source, truncated = self._receive(space[ends[-1] :])
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # over UDP, an ICMP answer to a datagram from this port
                log.info("input.receive_failed", input=self._owner.settings.label, error=error)
                break
            start, end = ends[-1], ends[-1] + size
            if size and space[start] != _LESS and self._is_refused(space[start:end], source):
                refused += size  # the next datagram takes its place
                continue
            bounds = [*range(start + self._longest, end, self._longest), end]
            ends += bounds
            sources += [source] * len(bounds)
            cut += truncated or len(bounds) > 1
        self._publish(ends, sources, cut)
        self._owner.count(bytes=refused)
        return ends[-1] + refused

    def _is_refused(self, datagram: memoryview, source: str | None) -> bool:
        """Whether a datagram without ``<PRI>`` is binary data, which is counted and left out."""
        if not is_binary(bytes(datagram[:FOREIGN_HEAD_BYTES])):
            return False
        self._owner.count_invalid(BINARY.reason)
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + WARN_SECONDS
            label, hint = self._owner.settings.label, BINARY.hint
            log.warning("input.datagram_invalid", input=label, source=source, hint=hint)
        return True

    def _publish(self, ends: list[int], sources: list[str | None], cut: int) -> None:
        bounds = np.array(ends)
        used = int(bounds[-1])
        starts, final = bounds[:-1], bounds[1:]
        if used:
            final = trim_ends(
                np.frombuffer(self._buffer.get_space()[:used], np.uint8), starts, final
            )
        full = final > starts
        named = [source for source, kept in zip(sources, full, strict=True) if kept]
        self._buffer.add_from_sources(starts[full], final[full], used, named, [1] * len(named))
        self._owner.count_invalid("empty", len(sources) - len(named))
        self._owner.count_invalid("too_long", cut)
        self._owner.count(bytes=used, dropped=self._count_system_drops())
        block = self._buffer.take_block()
        if block is not None:
            self.publisher.publish(block)

    def _count_system_drops(self) -> int:
        """Return how many datagrams the operating system has dropped since the last call."""
        try:
            info = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        except OSError:
            return 0  # before Linux 4.12
        before, self._system_drops = self._system_drops, _MEMINFO.unpack(info)[-1]
        return (self._system_drops - before) % (1 << 32)


def set_receive_buffer(bound: socket.socket, size: int) -> None:
    """Ask the operating system to hold up to ``size`` unread bytes; it may allow fewer."""
    try:
        bound.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
    except OSError:  # needs CAP_NET_ADMIN
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


# ── the input `unix` ─────────────────────────────────────────────────────────────────────────────

_CREDENTIALS: Final = struct.Struct("3i")
_ANCILLARY: Final = socket.CMSG_SPACE(_CREDENTIALS.size)


class UnixSettings(InputSettings):
    """The settings of a unix datagram socket."""

    type: Literal["unix"] = "unix"
    path: Path = Field(description="The path of the socket. A socket without a reader is replaced.")
    mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = Field(
        "0666", description="Who may write to it, in octal."
    )
    credentials: bool = Field(
        default=False,
        description="Ask the kernel for the sender: `source` is then `pid=… uid=… gid=…`.",
    )
    flow: FlowControl = Field(
        FlowControl.NONE,
        description="`none` drops and counts events of a full queue; the others let senders wait.",
    )
    max_message_bytes: Annotated[Size, Field(ge=480, le=1 << 18)] = Field(
        64 << 10,
        description="A longer message is cut into pieces of this length, and counted as invalid.",
    )
    receive_buffer: Size = Field(
        1 << 20, description="How many unread bytes the operating system should hold."
    )


class UnixInput(Input):
    """Creates a unix datagram socket and reads it."""

    settings_type: ClassVar[type[InputSettings]] = UnixSettings
    settings: UnixSettings

    def __init__(self, settings: UnixSettings, host: Host) -> None:
        super().__init__(settings, host)
        self._reader: DatagramReader | None = None

    @property
    def address(self) -> str | None:
        return f"unix://{self.settings.path}" if self._reader is not None else None

    def start(self) -> None:
        settings = self.settings
        publisher = FireAndForgetPublisher(self)
        publisher.check_fits(settings.max_message_bytes, "max_message_bytes")
        bound = _bind(settings.path, int(settings.mode, 8))
        set_receive_buffer(bound, settings.receive_buffer)
        if settings.credentials:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        receive = _make_receiver(bound, str(settings.path), credentials=settings.credentials)
        self._reader = DatagramReader(self, publisher, bound, receive, settings.max_message_bytes)
        self._reader.start()

    def stop(self, timeout: float) -> None:
        if self._reader is None:
            return
        deadline = time.monotonic() + timeout
        reader, self._reader = self._reader, None
        # First remove the path: then senders get an error and do not write without a reader.
        with contextlib.suppress(FileNotFoundError):
            self.settings.path.unlink()
        reader.stop(deadline)
        reader.publisher.finish(deadline)


def _bind(path: Path, mode: int) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        _remove_stale(path)
        bound.bind(str(path))
        path.chmod(mode)
    except OSError as error:
        bound.close()
        raise ConfigError("path", f"{path}: {error.strerror or error}") from None
    except (AddressTaken, ConfigError):
        bound.close()
        raise
    return bound


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that has ended; never a socket in use."""
    try:
        kind = os.stat(path).st_mode  # noqa: PTH116 - follows links, as bind() would
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ConfigError("path", f"{path} is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise AddressTaken("path", f"{path} is in use by another process")


def _make_receiver(bound: socket.socket, path: str, *, credentials: bool) -> Receive:
    # No room for ancillary data: we would have to close open files that a sender attaches.
    room = _ANCILLARY if credentials else 0

    def receive(space: memoryview) -> Datagram:
        size, ancillary, flags, _ = bound.recvmsg_into([space], room)
        source = path
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                source = "pid={} uid={} gid={}".format(*_CREDENTIALS.unpack(content))
        return Datagram(size, source, bool(flags & socket.MSG_TRUNC))

    return receive
