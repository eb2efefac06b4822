"""A unix datagram socket, such as ``/dev/log``: what the C library's ``syslog()`` writes to.

Messages are stored as they come, in RFC 3164's form without a host. By default nobody is made to
wait: a program that logs must not hang because a queue is full.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from turnlane.errors import AddressTaken, ConfigError
from turnlane.inputs.contract import Host, Input, InputSettings
from turnlane.inputs.datagrams import Datagram, DatagramReader, Receive, widen
from turnlane.inputs.one_way import OneWayPublisher
from turnlane.quantities import Size
from turnlane.queues.contract import FlowControl

_CREDENTIALS: Final = struct.Struct("3i")
_ANCILLARY: Final = socket.CMSG_SPACE(_CREDENTIALS.size)


class UnixSettings(InputSettings):
    """The settings of a unix datagram socket."""

    type: Literal["unix"] = "unix"
    path: Path = Field(description="Where to make the socket. One that nobody reads is replaced.")
    mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = Field(
        "0666", description="Who may write to it, in octal."
    )
    credentials: bool = Field(
        default=False,
        description="Have the kernel say who sends: `source` is then `pid=… uid=… gid=…`.",
    )
    flow: FlowControl = Field(
        FlowControl.NONE,
        description="`none` drops and counts when the queue is full; the others make senders wait.",
    )
    max_message_bytes: Annotated[Size, Field(ge=480, le=1 << 18)] = Field(
        64 << 10,
        description="A longer message is cut into pieces of this length, and counted as invalid.",
    )
    receive_buffer: Size = Field(
        1 << 20, description="What the operating system is asked to hold of what is not yet read."
    )


class UnixInput(Input):
    """Reads a unix datagram socket that it makes itself."""

    settings_type: ClassVar[type[InputSettings]] = UnixSettings
    settings: UnixSettings

    def __init__(self, settings: UnixSettings, host: Host) -> None:
        super().__init__(settings, host)
        self._reader: DatagramReader | None = None
        self._publisher: OneWayPublisher | None = None

    @property
    def address(self) -> str | None:
        return f"unix://{self.settings.path}" if self._reader is not None else None

    def start(self) -> None:
        settings = self.settings
        publisher = OneWayPublisher(self)
        publisher.check_fits(settings.max_message_bytes, "max_message_bytes")
        bound = _bound(settings.path, int(settings.mode, 8))
        widen(bound, settings.receive_buffer)
        if settings.credentials:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        longest = settings.max_message_bytes
        receive = _receiver(bound, str(settings.path), credentials=settings.credentials)
        self._publisher = publisher
        self._reader = DatagramReader(self, publisher, bound, receive, longest)
        self._reader.start()

    def stop(self, timeout: float) -> None:
        if self._reader is None or self._publisher is None:
            return
        deadline = time.monotonic() + timeout
        reader, self._reader = self._reader, None
        # Removed first, so that senders get an error instead of writing what nobody will read.
        with contextlib.suppress(FileNotFoundError):
            self.settings.path.unlink()
        reader.stop(deadline)
        self._publisher.finish(deadline)


def _bound(path: Path, mode: int) -> socket.socket:
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
    """Remove what a process that is gone has left; never something that is in use."""
    try:
        kind = os.stat(path).st_mode  # noqa: PTH116 - follows links, as bind() would
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ConfigError("path", f"{path} is there and is no socket; remove it or name another")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise AddressTaken("path", f"{path} is in use by another process")


def _receiver(bound: socket.socket, path: str, *, credentials: bool) -> Receive:
    # No room for anything else: open files that somebody sends along would be ours to close.
    room = _ANCILLARY if credentials else 0

    def receive(space: memoryview) -> Datagram:
        size, ancillary, flags, _ = bound.recvmsg_into([space], room)
        source = path
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                source = "pid={} uid={} gid={}".format(*_CREDENTIALS.unpack(content))
        return Datagram(size, source, bool(flags & socket.MSG_TRUNC))

    return receive
