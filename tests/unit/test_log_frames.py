"""Frames: do they come back as they were, and is damage always seen?"""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.events import block_of
from turnlane.storage.encoder import ColumnFitter, MessageEncoder
from turnlane.storage.frames import (
    HEADER_SIZE,
    BufferLike,
    FrameDamaged,
    FrameKind,
    ProducerSequence,
    compute_checksum,
    decode_events,
    encode_frame,
    encode_sequences,
    find_header,
    get_decoded_length,
    parse_header,
)

BLOCK = block_of([b"one", b"two", b"three"]).select(["value"])
STAMPS = [ProducerSequence(b"a" * 16, 7), ProducerSequence(b"b" * 16, 9)]
RANGES = [
    ProducerSequence(b"a" * 16, 22, 20),
    ProducerSequence(b"b" * 16, 9),
    ProducerSequence(b"a" * 16, 31, 30),
]


def joined(pieces: list[BufferLike]) -> bytes:
    return b"".join(bytes(memoryview(piece)) for piece in pieces)


def frame(*, snappy: bool = False, stamps: list[ProducerSequence] | None = None) -> bytes:
    payload: list[BufferLike] = [encode_sequences(stamps)] if stamps else []
    payload.append(BLOCK.serialize())
    if snappy:
        payload = [bytes(pa.Codec("snappy").compress(joined(payload)))]
    pieces = encode_frame(
        FrameKind.EVENTS, 5, 3, payload, is_compressed=snappy, has_sequences=bool(stamps)
    )
    return joined(pieces)


def test_the_checksum_is_the_one_that_the_format_names() -> None:
    """CRC-32C of the usual nine digits, in pieces too."""
    assert (
        compute_checksum([b"123456789"])
        == compute_checksum([b"1234", pa.py_buffer(b"56789")])
        == 0xE3069283
    )


@pytest.mark.parametrize("snappy", [False, True])
@pytest.mark.parametrize("stamps", [[], STAMPS, RANGES])
def test_a_frame_comes_back_as_it_was(snappy: bool, stamps: list[ProducerSequence]) -> None:
    data = frame(snappy=snappy, stamps=stamps)
    header = parse_header(data)
    assert header is not None
    assert (header.first, header.end, header.kind) == (5, 8, FrameKind.EVENTS)
    assert header.stored_size == len(data)
    payload = data[HEADER_SIZE : HEADER_SIZE + header.length]
    assert compute_checksum([payload]) == header.payload_crc
    block, found = decode_events(header, payload, BLOCK.schema)
    assert block.equals(BLOCK)
    assert found == stamps


def test_a_range_is_two_stamps_of_which_an_older_reader_goes_by_the_second() -> None:
    packed = encode_sequences([ProducerSequence(b"a" * 16, 22, 20)])
    assert packed == struct.pack("<Q16sQ16sQ", 2, b"a" * 16, 20 | 1 << 63, b"a" * 16, 22)
    assert encode_sequences(STAMPS) == struct.pack("<Q16sQ16sQ", 2, b"a" * 16, 7, b"b" * 16, 9)


def test_every_frame_begins_with_a_word_that_has_bit_62_set() -> None:
    word = struct.unpack_from("<Q", frame(snappy=True))[0]
    assert word >> 62 == 0b11


def test_a_flipped_bit_anywhere_in_the_checked_header_is_seen() -> None:
    data = bytearray(frame())
    for bit in range(28 * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert parse_header(bytes(data)) is None
        data[bit // 8] ^= 1 << bit % 8
    assert parse_header(bytes(data)) is not None


def test_a_kind_or_flag_of_another_version_is_no_header() -> None:
    for flags in (2, 0x200):
        checked = struct.pack("<QQII", 1 << 62, 0, 0, flags)
        assert parse_header(checked + struct.pack("<II", compute_checksum([checked]), 0)) is None


@given(
    st.binary(max_size=300).map(lambda junk: junk[: len(junk) // 8 * 8]),
    st.binary(max_size=50),
)
def test_the_next_header_is_found_behind_any_junk(junk: bytes, after: bytes) -> None:
    assert find_header(junk + frame() + after) == len(junk)
    assert find_header(junk + frame()[8:] + after) is None


def test_a_header_off_the_multiples_of_8_is_not_found() -> None:
    assert find_header(b"1234" + frame()) is None


@pytest.mark.parametrize("size", [0, 1, 8, 31])
def test_too_few_bytes_hold_no_header(size: int) -> None:
    assert parse_header(frame()[:size]) is None
    assert find_header(frame()[:size]) is None


def test_a_compressed_payload_that_claims_a_terabyte_allocates_nothing() -> None:
    bomb = b"\x80\x80\x80\x80\x80\x20" + b"x" * 20
    header = parse_header(joined(encode_frame(FrameKind.EVENTS, 0, 1, [bomb], is_compressed=True)))
    assert header is not None
    before = pa.total_allocated_bytes()
    with pytest.raises(FrameDamaged):
        decode_events(header, bomb, BLOCK.schema)
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize(
    ("payload", "stamped"),
    [
        (b"", False),
        (b"junk" * 10, False),
        (b"\xff\xff\xff\xff\xf0\xff\xff\x7f", False),
        (b"x", True),
        (struct.pack("<Q", 1 << 60), True),
    ],
)
def test_a_payload_that_is_no_record_batch_is_damaged(payload: bytes, stamped: bool) -> None:
    header = parse_header(
        joined(encode_frame(FrameKind.EVENTS, 0, 1, [payload], has_sequences=stamped))
    )
    assert header is not None
    with pytest.raises(FrameDamaged):
        decode_events(header, payload, BLOCK.schema)


def test_another_number_of_events_than_the_header_says_is_damage() -> None:
    payload = BLOCK.serialize()
    header = parse_header(joined(encode_frame(FrameKind.EVENTS, 0, 4, [payload])))
    assert header is not None
    with pytest.raises(FrameDamaged, match="3 events"):
        decode_events(header, payload, BLOCK.schema)


def test_the_decoded_length_is_known_before_decompressing() -> None:
    header = parse_header(frame(snappy=True))
    assert header is not None
    assert get_decoded_length(header, frame(snappy=True)[HEADER_SIZE:]) == len(BLOCK.serialize())


def test_a_message_in_pieces_is_the_message_that_serialize_makes() -> None:
    schema, block = ColumnFitter().fit(pa.schema([]), block_of([b"x" * 100] * 1000, timestamps=1))
    messages = MessageEncoder(schema)
    for part in (block, block.slice(10, 20), block):
        assert joined(messages.encode(part)) == part.serialize().to_pybytes()


def test_a_column_that_a_block_lacks_takes_no_more_memory_than_its_rows_need() -> None:
    """Of a publisher's own type, one value may take a megabyte."""
    kinds: dict[str, pa.DataType] = {"value": pa.binary(), "wide": pa.binary(1 << 20)}
    schema = pa.schema(kinds)
    before = pa.total_allocated_bytes()
    fitted = ColumnFitter().fit(schema, block_of([b"x"] * 3))[1]
    assert fitted.column("wide").null_count == 3
    assert pa.total_allocated_bytes() - before < 8 << 20
