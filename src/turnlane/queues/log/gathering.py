"""Several blocks as one frame, without copying their events together first.

A record batch message is a description of buffers, and then their bytes. So the message for joined
blocks can be made from blocks that were never joined: Arrow describes a block whose buffers are
*blanks*, as long as the joined ones would be and never looked into, and in their places go the
blocks' own buffers, one after the other. Offsets are counted anew; they are few bytes an event.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from turnlane.events import join

BLANK_BYTES: Final = 32 << 20
"""Of address space, not of memory. What would be larger is joined."""

LEAST_BYTES: Final = 64 * 1024
MOST_BLOCKS: Final = 32
"""Smaller blocks, and more of them, are joined: copying costs less than looking at each."""

_Column: TypeAlias = "pa.Array[Any]"


class Gathered(NamedTuple):
    """Blocks as one."""

    block: pa.RecordBatch
    """Like the blocks joined, but for the blanks in it, and columns of nulls left out."""
    contents: Mapping[int, Sequence[pa.Buffer]] = {}
    """By the address of a blank: the buffers that belong there."""


class Gatherer:
    """Makes one block of several. For one thread, which is done with one before the next."""

    def __init__(self) -> None:
        self._blanks = pa.py_buffer(mmap.mmap(-1, BLANK_BYTES, access=mmap.ACCESS_READ))

    def gather(self, blocks: Sequence[pa.RecordBatch]) -> Gathered:
        """The blocks as one: gathered if that is quicker, else joined."""
        if not _pays(blocks):
            return Gathered(join(blocks))
        rows = sum(block.num_rows for block in blocks)
        contents: dict[int, list[pa.Buffer]] = {}
        columns: list[_Column] = []
        fields: list[pa.Field[Any]] = []
        used = 0
        for index, field in enumerate(blocks[0].schema):
            pieces = [block.column(index) for block in blocks]
            missing = sum(piece.null_count for piece in pieces)
            if missing == rows:
                continue
            fields.append(field)
            if missing or not _is_gathered(field.type):
                columns.append(pa.concat_arrays(pieces))
                continue
            offsets, buffers = _buffers_of(pieces, rows)
            size = sum(len(buffer) for buffer in buffers)
            if used + size > BLANK_BYTES:
                return Gathered(join(blocks))
            blank = self._blanks.slice(used, size)
            used += size + -size % 64
            contents[blank.address] = buffers
            columns.append(pa.Array.from_buffers(field.type, rows, [None, *offsets, blank]))
        if not columns:
            return Gathered(join(blocks))  # a block without columns would have no rows either
        return Gathered(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)), contents)


def _pays(blocks: Sequence[pa.RecordBatch]) -> bool:
    """Whether the blocks are alike, and large: the first speaks for all, for looking takes time."""
    first = blocks[0]
    if not 1 < len(blocks) <= MOST_BLOCKS or first.get_total_buffer_size() < LEAST_BYTES:
        return False
    return all(block.num_rows and block.schema.equals(first.schema) for block in blocks)


def _is_gathered(kind: pa.DataType) -> bool:
    """Whether a column without nulls is bytes end to end, with or without 32-bit offsets."""
    return _has_offsets(kind) or (pa.types.is_primitive(kind) and not pa.types.is_boolean(kind))


def _has_offsets(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_string(kind)


def _buffers_of(pieces: Sequence[_Column], rows: int) -> tuple[list[pa.Buffer], list[pa.Buffer]]:
    """The offsets of the joined column, if it has any, and its bytes."""
    kind = pieces[0].type
    if not _has_offsets(kind):
        width = kind.bit_width // 8
        return [], [_bytes(piece, piece.offset * width, len(piece) * width) for piece in pieces]
    joined = np.zeros(rows + 1, np.int32)
    at, end = 0, 0
    contents: list[pa.Buffer] = []
    for piece in pieces:
        count = len(piece)
        own = np.frombuffer(_memory(piece.buffers()[1]), np.int32, count + 1, 4 * piece.offset)
        first, size = int(own[0]), int(own[-1] - own[0])
        np.add(own[1:], end - first, out=joined[at + 1 : at + 1 + count])
        contents.append(_bytes(piece, first, size))
        at, end = at + count, end + size
    return [pa.py_buffer(joined.data)], contents


def _memory(buffer: pa.Buffer | None) -> memoryview:
    assert buffer is not None, "a column with rows has offsets"
    return memoryview(buffer)


def _bytes(piece: _Column, at: int, size: int) -> pa.Buffer:
    data = piece.buffers()[-1]
    return _EMPTY if data is None else data.slice(at, size)


_EMPTY = pa.py_buffer(b"")
