"""The virtual disk of ``make test-power`` loses unflushed writes, and nothing else."""

from __future__ import annotations

import random
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.power.disk import SECTOR, VolatileDisk
from turnlane.runtime import Closeable

SIZE = 64 * SECTOR
READ, WRITE, FLUSH = 0, 1, 3


class Client(Closeable):
    """A client of the disk that speaks NBD as QEMU does."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._answers = self._socket.makefile("rb")
        assert self._answers.read(18)[:16] == b"NBDMAGICIHAVEOPT"
        self._socket.sendall(struct.pack(">I", 3))
        self._socket.sendall(b"IHAVEOPT" + struct.pack(">IIIH", 7, 6, 0, 0))
        assert struct.unpack(">QH", self._answers.read(20 + 12 + 20)[22:32])[0] == SIZE

    def request(self, kind: int, sector: int = 0, data: bytes = b"", flags: int = 0) -> bytes:
        """Send a request and return the data of the answer."""
        self.send(kind, sector, data, flags)
        assert struct.unpack(">IIQ", self._answers.read(16)) == (0x67446698, 0, 7)
        return self._answers.read(SECTOR) if kind == READ else b""

    def send(self, kind: int, sector: int = 0, data: bytes = b"", flags: int = 0) -> None:
        length = SECTOR if kind == READ else len(data)
        header = struct.pack(">IHHQQI", 0x25609513, flags, kind, 7, sector * SECTOR, length)
        self._socket.sendall(header + data)

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


@pytest.fixture
def content() -> bytearray:
    return bytearray(SIZE)


@pytest.fixture
def disk(content: bytearray) -> Iterator[VolatileDisk]:
    with (
        tempfile.TemporaryDirectory() as folder,  # short: the path of a socket has 107 bytes
        VolatileDisk(Path(folder, "disk"), content) as disk,
    ):
        yield disk


def fill(letter: bytes) -> bytes:
    return letter * SECTOR


def test_written_sector_reads_back_before_it_is_flushed(
    disk: VolatileDisk, content: bytearray
) -> None:
    with Client(disk.path) as client:
        client.request(WRITE, 3, fill(b"a"))
        assert client.request(READ, 3) == fill(b"a")
        assert content == bytes(SIZE)


@pytest.mark.parametrize("flags", [0, 1], ids=["flush", "fua"])
def test_flushed_write_survives_every_power_cut(
    disk: VolatileDisk, content: bytearray, flags: int
) -> None:
    for seed in range(20):
        letter = bytes([65 + seed])
        with Client(disk.path) as client:
            client.request(WRITE, 3, fill(letter), flags)
            if not flags:
                client.request(FLUSH)
        assert disk.cut_power(random.Random(seed)).unflushed == 0
        assert content[3 * SECTOR : 4 * SECTOR] == fill(letter)


def test_unflushed_writes_are_lost_and_reordered(disk: VolatileDisk, content: bytearray) -> None:
    """Over some cuts, each of the sectors has each content that it may have."""
    seen = set()
    for seed in range(200):
        content[:] = bytes(SIZE)
        with Client(disk.path) as client:
            for sector, letter in ((1, b"a"), (2, b"b"), (1, b"c")):
                client.request(WRITE, sector, fill(letter))
        disk.cut_power(random.Random(seed))
        seen.add(bytes(content[SECTOR : 3 * SECTOR : SECTOR]))
        assert not any(content[3 * SECTOR :])
    assert seen == {first + second for first in (b"\0", b"a", b"c") for second in (b"\0", b"b")}


def test_silent_disk_answers_nothing_and_keeps_no_later_write(
    disk: VolatileDisk, content: bytearray
) -> None:
    disk.go_silent(1, at_flush=True)
    with Client(disk.path) as client:
        for sector in range(3):
            client.request(WRITE, sector, fill(b"a"))
        client.send(FLUSH)
        client.send(WRITE, 5, fill(b"b"))
        assert disk.is_silent.wait(20)
    assert disk.cut_power(random.Random(1)).unflushed == 3
    assert not any(content[5 * SECTOR :])
    assert not disk.is_silent.is_set()
