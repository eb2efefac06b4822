"""Frames are decoded unchanged, and damage is always found."""

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
SEQUENCES = [ProducerSequence(b"a" * 16, 7), ProducerSequence(b"b" * 16, 9)]
RANGES = [
    ProducerSequence(b"a" * 16, 22, 20),
    ProducerSequence(b"b" * 16, 9),
    ProducerSequence(b"a" * 16, 31, 30),
]


def join_pieces(pieces: list[BufferLike]) -> bytes:
    return b"".join(bytes(memoryview(piece)) for piece in pieces)


def build_frame(*, snappy: bool = False, stamps: list[ProducerSequence] | None = None) -> bytes:
    payload: list[BufferLike] = [encode_sequences(stamps)] if stamps else []
    payload.append(BLOCK.serialize())
    if snappy:
        payload = [bytes(pa.Codec("snappy").compress(join_pieces(payload)))]
    pieces = encode_frame(
        FrameKind.EVENTS, 5, 3, payload, is_compressed=snappy, has_sequences=bool(stamps)
    )
    return join_pieces(pieces)


def test_checksum_is_crc_32c() -> None:
    """CRC-32C of the usual nine digits, in pieces too."""
    assert (
        compute_checksum([b"123456789"])
        == compute_checksum([b"1234", pa.py_buffer(b"56789")])
        == 0xE3069283
    )


@pytest.mark.parametrize("snappy", [False, True])
@pytest.mark.parametrize("stamps", [[], SEQUENCES, RANGES])
def test_encoded_frame_is_decoded_unchanged(snappy: bool, stamps: list[ProducerSequence]) -> None:
    data = build_frame(snappy=snappy, stamps=stamps)
    header = parse_header(data)
    assert header is not None
    assert (header.first, header.end, header.kind) == (5, 8, FrameKind.EVENTS)
    assert header.stored_size == len(data)
    payload = data[HEADER_SIZE : HEADER_SIZE + header.length]
    assert compute_checksum([payload]) == header.payload_crc
    block, found = decode_events(header, payload, BLOCK.schema)
    assert block.equals(BLOCK)
    assert found == stamps


def test_range_of_sequences_is_two_entries_and_older_readers_use_the_second() -> None:
    packed = encode_sequences([ProducerSequence(b"a" * 16, 22, 20)])
    assert packed == struct.pack("<Q16sQ16sQ", 2, b"a" * 16, 20 | 1 << 63, b"a" * 16, 22)
    assert encode_sequences(SEQUENCES) == struct.pack("<Q16sQ16sQ", 2, b"a" * 16, 7, b"b" * 16, 9)


def test_every_frame_begins_with_a_word_that_has_bit_62_set() -> None:
    word = struct.unpack_from("<Q", build_frame(snappy=True))[0]
    assert word >> 62 == 0b11


def test_flipped_bit_in_the_header_makes_it_invalid() -> None:
    data = bytearray(build_frame())
    for bit in range(28 * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert parse_header(bytes(data)) is None
        data[bit // 8] ^= 1 << bit % 8
    assert parse_header(bytes(data)) is not None


def test_kind_or_flag_of_another_version_makes_the_header_invalid() -> None:
    for flags in (2, 0x200):
        checked = struct.pack("<QQII", 1 << 62, 0, 0, flags)
        assert parse_header(checked + struct.pack("<II", compute_checksum([checked]), 0)) is None


@given(
    st.binary(max_size=300).map(lambda junk: junk[: len(junk) // 8 * 8]),
    st.binary(max_size=50),
)
def test_next_header_is_found_after_random_bytes(junk: bytes, after: bytes) -> None:
    assert find_header(junk + build_frame() + after) == len(junk)
    assert find_header(junk + build_frame()[8:] + after) is None


def test_header_at_an_odd_byte_is_not_found() -> None:
    assert find_header(b"1234" + build_frame()) is None


@pytest.mark.parametrize("size", [0, 1, 8, 31])
def test_too_few_bytes_have_no_header(size: int) -> None:
    assert parse_header(build_frame()[:size]) is None
    assert find_header(build_frame()[:size]) is None


def test_compressed_payload_that_claims_a_terabyte_allocates_nothing() -> None:
    bomb = b"\x80\x80\x80\x80\x80\x20" + b"x" * 20
    header = parse_header(
        join_pieces(encode_frame(FrameKind.EVENTS, 0, 1, [bomb], is_compressed=True))
    )
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
def test_payload_that_is_not_a_record_batch_is_damaged(payload: bytes, stamped: bool) -> None:
    header = parse_header(
        join_pieces(encode_frame(FrameKind.EVENTS, 0, 1, [payload], has_sequences=stamped))
    )
    assert header is not None
    with pytest.raises(FrameDamaged):
        decode_events(header, payload, BLOCK.schema)


def test_wrong_number_of_events_is_damage() -> None:
    payload = BLOCK.serialize()
    header = parse_header(join_pieces(encode_frame(FrameKind.EVENTS, 0, 4, [payload])))
    assert header is not None
    with pytest.raises(FrameDamaged, match="3 events"):
        decode_events(header, payload, BLOCK.schema)


def test_decoded_length_is_known_before_decompression() -> None:
    header = parse_header(build_frame(snappy=True))
    assert header is not None
    assert get_decoded_length(header, build_frame(snappy=True)[HEADER_SIZE:]) == len(
        BLOCK.serialize()
    )


def test_message_in_pieces_equals_the_serialized_message() -> None:
    schema, block = ColumnFitter().fit(pa.schema([]), block_of([b"x" * 100] * 1000, timestamps=1))
    messages = MessageEncoder(schema)
    for part in (block, block.slice(10, 20), block):
        assert join_pieces(messages.encode(part)) == part.serialize().to_pybytes()


def test_missing_column_uses_memory_only_for_its_rows() -> None:
    """One value of a type that a publisher defines may take a megabyte."""
    kinds: dict[str, pa.DataType] = {"value": pa.binary(), "wide": pa.binary(1 << 20)}
    schema = pa.schema(kinds)
    before = pa.total_allocated_bytes()
    fitted = ColumnFitter().fit(schema, block_of([b"x"] * 3))[1]
    assert fitted.column("wide").null_count == 3
    assert pa.total_allocated_bytes() - before < 8 << 20
