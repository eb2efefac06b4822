"""A virtual disk whose write cache does not survive a power cut, served to QEMU over NBD.

A real disk answers a write when the data is in its cache. Only a flush, or a write with FUA, makes
data durable. At a power cut, each sector that was written since the last flush has its durable
content or that of any of these writes: the disk saves them in any order. :class:`VolatileDisk`
keeps unflushed writes in memory by sector, and :meth:`VolatileDisk.cut_power` draws what is left.

NBD is the protocol of network block devices; here are the parts of it that QEMU needs: the fixed
newstyle handshake, and simple replies to reads, writes, flushes, trims and zeroes.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnlane.runtime import Closeable, start_thread

SECTOR = 4096
"""The bytes that a disk writes completely or not at all. File systems rely on it for their blocks:
with a smaller sector, a cut can tear the superblock of ext4, which cannot be mounted then."""

# The handshake
_OPTION = struct.Struct(">8sII")
_OPTION_REPLY = struct.Struct(">QIII")
_OPTION_REPLY_MAGIC = 0x3E889045565A9
_OPT_ABORT, _OPT_INFO, _OPT_GO = 2, 6, 7
_REP_ACK, _REP_INFO, _REP_UNSUPPORTED = 1, 3, 2**31 + 1
_FIXED_NEWSTYLE_NO_ZEROES = 3

# The transmission
_REQUEST = struct.Struct(">IHHQQI")
_REPLY = struct.Struct(">IIQ")
_REQUEST_MAGIC, _REPLY_MAGIC = 0x25609513, 0x67446698
_READ, _WRITE, _DISCONNECT, _FLUSH, _TRIM, _WRITE_ZEROES = 0, 1, 2, 3, 4, 6
_FUA = 1
_EXPORT_FLAGS = 0b0110_1101
"""There are flags; flush, FUA, trim and write zeroes are supported."""
_EINVAL = 22


@dataclass(frozen=True, slots=True)
class Losses:
    """The result of a power cut, in sectors that were written and not flushed."""

    unflushed: int
    lost: int
    """Sectors with their durable content: all writes since the last flush are lost."""
    outdated: int
    """Sectors with the content of a write that is not the last one."""


class VolatileDisk(Closeable):
    """The disk. One thread serves one connection after the other at a Unix socket.

    The thread owns the content while a client is connected. :meth:`cut_power` may be called when
    the client is dead: it waits until the thread has read everything that the client sent.
    """

    def __init__(self, path: Path, content: bytearray) -> None:
        self.path = path
        self.writes = 0
        self.is_silent = threading.Event()
        """Set when the disk has stopped answering: see :meth:`go_silent`."""
        self._durable = content
        self._cache: dict[int, list[tuple[int, bytes]]] = {}
        """By sector: the number and the content of each write since the last flush."""
        self._answers_left: int | None = None
        self._waits_for_flush = False
        self._idle = threading.Condition()
        self._is_connected = False
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(1)
        self._thread = start_thread("disk", self._serve)

    def go_silent(self, after: int, *, at_flush: bool) -> None:
        """Answer ``after`` more writes and flushes, and then nothing: the power is off.

        With ``at_flush``, answer also the writes after that until a flush comes.
        """
        self._waits_for_flush = at_flush
        self._answers_left = after

    def cut_power(self, rng: random.Random) -> Losses:
        """Draw what the writes since the last flush have left behind. Blocks; see the class."""
        with self._idle:
            assert self._idle.wait_for(lambda: not self._is_connected, 60), "a client is connected"
        self._answers_left = None
        self.is_silent.clear()
        keeps = self._draw_survival(rng)
        lost = outdated = 0
        for sector, versions in self._cache.items():
            kept = [content for number, content in versions if keeps(number)]
            if kept:
                self._durable[sector * SECTOR : (sector + 1) * SECTOR] = kept[-1]
            lost += not kept
            outdated += bool(kept) and kept[-1] is not versions[-1][1]
        losses = Losses(len(self._cache), lost, outdated)
        self._cache.clear()
        return losses

    def _draw_survival(self, rng: random.Random) -> Callable[[int], bool]:
        """Return a function that tells for each sector of a write whether the disk saved it."""
        numbers = sorted({number for all_ in self._cache.values() for number, _ in all_})
        share = rng.random()
        kept = {number for number in numbers if rng.random() < share}
        last = rng.choice(numbers) if numbers else 0
        return rng.choice(
            [
                lambda number: False,
                lambda number: number <= last,  # in order
                lambda number: number in kept,  # reordered
                lambda number: rng.random() < share,  # reordered and torn
            ]
        )

    # ── the protocol ────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the server is closed
            while True:
                connection = self._server.accept()[0]
                with self._idle:
                    self._is_connected = True
                with connection, contextlib.suppress(EOFError, ConnectionError):
                    if self._agree(connection):
                        self._answer_requests(connection)
                with self._idle:
                    self._is_connected = False
                    self._idle.notify_all()

    def _agree(self, client: socket.socket) -> bool:
        """Shake hands; return whether the client wants to go on."""
        client.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", _FIXED_NEWSTYLE_NO_ZEROES))
        _receive(client, 4)
        while True:
            _, option, length = _OPTION.unpack(_receive(client, _OPTION.size))
            _receive(client, length)
            if option in (_OPT_GO, _OPT_INFO):
                export = struct.pack(">HQH", 0, len(self._durable), _EXPORT_FLAGS)
                _reply_to_option(client, option, _REP_INFO, export)
                _reply_to_option(client, option, _REP_ACK)
            elif option == _OPT_ABORT:
                _reply_to_option(client, option, _REP_ACK)
            else:
                _reply_to_option(client, option, _REP_UNSUPPORTED)
            if option in (_OPT_GO, _OPT_ABORT):
                return bool(option == _OPT_GO)

    def _answer_requests(self, client: socket.socket) -> None:
        while True:
            header = _REQUEST.unpack(_receive(client, _REQUEST.size))
            magic, flags, kind, handle, offset, length = header
            assert magic == _REQUEST_MAGIC, header
            if kind == _DISCONNECT:
                return
            data = _receive(client, length) if kind == _WRITE else b""
            if kind != _READ and self._is_power_off(is_flush=kind == _FLUSH):
                continue
            answer, error = b"", 0
            match kind:
                case _ if offset + length > len(self._durable) or (offset | length) % SECTOR:
                    error = _EINVAL
                case 0:
                    answer = self._read(offset, length)
                case 1:
                    self._write(offset, data)
                case 3:
                    self._flush()
                case 4 | 6:
                    self._write(offset, bytes(length))
                case _:
                    error = _EINVAL
            if flags & _FUA and not error:
                self._flush()  # of more than this write, which a disk may do
            client.sendall(_REPLY.pack(_REPLY_MAGIC, error, handle) + answer)

    def _is_power_off(self, *, is_flush: bool) -> bool:
        """Count a change; return whether it comes too late."""
        if self.is_silent.is_set():
            return True
        if self._answers_left is None:
            return False
        if self._answers_left == 0 and (is_flush or not self._waits_for_flush):
            self.is_silent.set()
            return True
        self._answers_left = max(0, self._answers_left - 1)
        return False

    def _read(self, offset: int, length: int) -> bytes:
        found = bytearray(self._durable[offset : offset + length])
        for at in range(0, length, SECTOR):
            if versions := self._cache.get((offset + at) // SECTOR):
                found[at : at + SECTOR] = versions[-1][1]
        return bytes(found)

    def _write(self, offset: int, data: bytes) -> None:
        self.writes += 1
        for at in range(0, len(data), SECTOR):
            versions = self._cache.setdefault((offset + at) // SECTOR, [])
            versions.append((self.writes, data[at : at + SECTOR]))

    def _flush(self) -> None:
        for sector, versions in self._cache.items():
            self._durable[sector * SECTOR : (sector + 1) * SECTOR] = versions[-1][1]
        self._cache.clear()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


def _receive(client: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = client.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _reply_to_option(client: socket.socket, option: int, kind: int, data: bytes = b"") -> None:
    client.sendall(_OPTION_REPLY.pack(_OPTION_REPLY_MAGIC, option, kind, len(data)) + data)
