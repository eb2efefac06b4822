"""Fuzz targets: one function for each parser of bytes that other programs or damaged disks supply.

A target takes any bytes and raises only if a promise is broken: an error of a type that the parser
does not document, a result that does not survive a round trip, events that depend on where a stream
was cut. ``python -m tests.fuzz.run TARGET`` looks for such bytes; ``corpus/TARGET`` has bytes that
reach different branches, and bytes that once failed. This module does not need atheris.

Checksums keep a fuzzer away from the code behind them. So the targets of stored data sign what they
make of their bytes.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numpy as np
import pyarrow as pa

from tests.inputs.test_syslog_framing import in_parts, reference
from tests.unit.test_syslog_columns import check as check_syslog
from turnlane.errors import (
    ConfigError,
    EventTooLarge,
    Never,
    NotAQueue,
    PartlyDelivered,
    RetryLater,
    SyntaxFault,
)
from turnlane.events import BASE_SCHEMA, block_of, get_values
from turnlane.formats.framing import Framing
from turnlane.formats.lines import (
    build_event_block,
    build_headers,
    split_body_lines,
    split_json_array,
    split_lines,
)
from turnlane.formats.otlp import (
    JSON,
    PROTOBUF,
    Malformed,
    Signal,
    SplitUnit,
    build_request_block,
    count_records,
    decode,
    decode_rejected,
    joined,
)
from turnlane.formats.otlp_columns import decode_columns
from turnlane.formats.syslog import parse_priorities
from turnlane.inputs.elasticsearch import parse_bulk, parse_secret
from turnlane.inputs.files.tracker import PositionsFile
from turnlane.node.commit_record import CommitLog, CommitPlan
from turnlane.node.flight import messages
from turnlane.node.http.events import decode_json, decode_ndjson, encode_events, parse_object
from turnlane.node.node import load_registry
from turnlane.outputs.elasticsearch import ElasticsearchOutput, ElasticsearchOutputSettings
from turnlane.outputs.http_client import HttpResponse, parse_retry_after
from turnlane.serving.http_body import BodyTooLarge, decompress, parse_encodings
from turnlane.serving.proxy_header import InvalidProxyHeader, ProxyHeader, parse_proxy_header
from turnlane.storage.directory import QueueDirectory, read_identity_files
from turnlane.storage.disk_io import Disk
from turnlane.storage.fastqueue import POSITION_HEADER, FastQueueDirectory
from turnlane.storage.frames import FrameKind, encode_frame, encode_sequences
from turnlane.storage.journal import Journal
from turnlane.storage.journal_records import (
    MAGIC,
    RECORD_SIZE,
    JournalState,
    apply_records,
    compute_seed,
    encode_snapshot,
    parse_header,
    parse_payload,
    sign_record,
)
from turnlane.storage.segments import encode_schema_frame, format_segment_name
from turnlane.storage.walk import IntactFrame, SegmentWalk, list_segment_files
from turnlane.table.grammar import CreateQueue, CreateSchedule, parse

Target = Callable[[bytes], None]
TARGETS: Final[dict[str, Target]] = {}
DISK: Final = Disk()
QUEUE_ID: Final = "0123456789abcdef" * 2
MOST: Final = 1 << 16
"""The most bytes of a decompressed body."""


def add_target(target: Target) -> Target:
    TARGETS[target.__name__.removeprefix("fuzz_")] = target
    return target


def take_bytes(data: bytes, count: int) -> tuple[list[int], bytes]:
    """Return the first bytes as numbers, zeros where there are none, and the rest."""
    return [*data[:count].ljust(count, b"\0")], data[count:]


# ── inputs ───────────────────────────────────────────────────────────────────────────────────────


@add_target
def fuzz_framing(data: bytes) -> None:
    """A stream gives the same messages wherever it is cut, each with its priority."""
    (framing, longest, first, second), stream = take_bytes(data, 4)
    kind = list(Framing)[framing % 3]
    expected = reference(stream, 12 + longest, kind)
    assert in_parts(stream, [], 12 + longest, kind) == expected
    assert in_parts(stream, [first, second], 12 + longest, kind) == expected
    assert (
        in_parts(stream, [*range(first, len(stream), 1 + second)], 12 + longest, kind) == expected
    )
    found = parse_priorities(pa.array(expected, pa.binary())).to_pylist()
    assert found == [read_priority(each) for each in expected]


def read_priority(message: bytes) -> int | None:
    number, end, _ = message[1:5].partition(b">")
    if not message.startswith(b"<") or not end or not number.isdigit() or len(number) > 3:
        return None
    return int(number) if int(number) <= 191 else None


@add_target
def fuzz_syslog(data: bytes) -> None:
    """The messages of a block have the columns that a plain parser finds."""
    check_syslog(data.split(b"\0"))


@add_target
def fuzz_proxy_header(data: bytes) -> None:
    """A header is found wherever the stream is cut, and takes none of the bytes after it."""
    parts = [parse_header_or_none(data[:end]) for end in range(1, min(len(data), 120) + 1)]
    found = next((each for each in parts if each is not None), None)
    assert found is None or all(each == found for each in parts[parts.index(found) :])
    if isinstance(found, ProxyHeader):
        assert found.size <= len(data)
        assert parse_header_or_none(data[: found.size] + b"more") == found


def parse_header_or_none(data: bytes) -> ProxyHeader | str | None:
    """Return the header, its error, or ``None`` if its rest is missing."""
    try:
        return parse_proxy_header(data)
    except InvalidProxyHeader:
        return "invalid"


@add_target
def fuzz_lines(data: bytes) -> None:
    """Lines of files and bodies, and JSON arrays, are those that Python finds."""
    (longest,), text = take_bytes(data, 1)
    wanted = [line.removesuffix(b"\r") for line in text.split(b"\n")[:-1]]
    wanted.append(text.split(b"\n")[-1])
    assert split_body_lines(text).to_pylist() == [each for each in wanted if each]
    padded = text + b"\n" + bytes(4096)  # long bodies are split in another way
    assert split_body_lines(padded).to_pylist()[:-1] == [
        line for each in text.split(b"\n") if (line := each.removesuffix(b"\r"))
    ]
    lines = split_lines(text, 1 + longest, whole=True)
    found: list[Any] = [] if lines is None else lines.values.to_pylist()
    assert b"".join(found) == b"".join(wanted)
    assert lines is None or lines.ends[-1] == len(text)
    with contextlib.suppress(ValueError):
        elements: list[Any] = split_json_array(text).to_pylist()
        parsed = json.loads(text)
        expected = parsed if isinstance(parsed, list) else [parsed]
        assert repr([*map(json.loads, elements)]) == repr(expected)


@add_target
def fuzz_bodies(data: bytes) -> None:
    """A compressed body is decompressed within the limit, or refused."""
    (which,), body = take_bytes(data, 1)
    names = ["gzip", "deflate", "zstd", "snappy", "x-snappy-framed", "x-gzip"]
    encodings = [names[which % 6], *([names[which // 6 % 6]] if which >= 128 else [])]
    assert parse_encodings([", ".join(encodings)]) == encodings
    with contextlib.suppress(ValueError, BodyTooLarge):
        assert len(decompress(body, MOST, encodings)) <= MOST
    for name, packed in compress(body):
        assert decompress(packed, MOST, [name]) == body


def compress(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the body in each encoding."""
    yield "gzip", zlib.compress(body, wbits=31) + zlib.compress(b"", wbits=31)
    yield "deflate", zlib.compress(body)
    yield "deflate", zlib.compress(body, wbits=-15)
    for name in ("zstd", "snappy"):
        yield name, pa.Codec(name).compress(body, asbytes=True) if body else b""


@add_target
def fuzz_http_events(data: bytes) -> None:
    """Events of the HTTP plane are refused with a reason, or come back as they were sent."""
    (form,), body = take_bytes(data, 1)
    if form % 3 == 2:
        with contextlib.suppress(ValueError):
            assert isinstance(parse_object(body), dict)
        return
    try:
        block = (decode_json, decode_ndjson)[form % 3](body, 7)
    except ValueError as error:
        assert str(error)
        return
    assert block.schema.equals(BASE_SCHEMA)
    block.validate(full=True)
    shown = encode_events(block, 0)
    sent = [{name: text for name, text in each.items() if name != "offset"} for each in shown]
    again = decode_json(json.dumps(sent).encode(), 7)
    assert encode_events(again, 0) == shown
    assert get_values([again]) == get_values([block])


@add_target
def fuzz_otlp(data: bytes) -> None:
    """An export request becomes events, which together are the same request."""
    (kind,), body = take_bytes(data, 1)
    signal, encoding = list(Signal)[kind % 3], JSON if kind & 64 else PROTOBUF
    headers = pa.array([signal.value], pa.string())
    decode_columns(pa.array([body], pa.binary()), headers)
    with contextlib.suppress(Malformed):
        decode_rejected(signal, body, encoding)
    try:
        request = decode(signal, body, encoding)
        block = build_request_block(signal, request)
    except (Malformed, EventTooLarge):
        return
    values = get_values([block])
    together = decode(signal, joined(values))
    assert list_records(together) == list_records(request)
    assert count_records(signal, together) == count_records(signal, request)
    whole = get_values([build_request_block(signal, request, unit=SplitUnit.REQUEST)])
    assert len(whole) == bool(values)
    signals = pa.array([signal.value] * len(values), pa.string())
    decode_columns(pa.array(values, pa.binary()), signals)


def list_records(request: Any) -> list[tuple[bytes, ...]]:
    """Return the records of a request, each with its resource and its scope."""
    found: list[tuple[bytes, ...]] = []
    for [resources] in [[value for _, value in request.ListFields()] or [[]]]:
        for group in resources:
            [scopes] = [value for field, value in group.ListFields() if field.number == 2] or [[]]
            for scope in scopes:
                [records] = [v for field, v in scope.ListFields() if field.number == 2] or [[]]
                common = (
                    group.resource.SerializeToString(deterministic=True),
                    group.schema_url.encode(),
                    scope.scope.SerializeToString(deterministic=True),
                    scope.schema_url.encode(),
                )
                found += [(*common, each.SerializeToString(deterministic=True)) for each in records]
    return found


@add_target
def fuzz_bulk(data: bytes) -> None:
    """A bulk request is refused as a whole, or every item is an event or has a problem."""
    (has_index,), body = take_bytes(data, 1)
    parse_secret(body.decode("latin-1"))
    try:
        items = parse_bulk(body, "logs" if has_index % 2 else None)
    except ValueError:
        return
    assert len(items) <= body.count(b"\n") + 1
    good = [item for item in items if item.problem is None]
    build_event_block(
        pa.array([item.document for item in good], pa.binary()),
        keys=[item.id for item in good],
        headers=build_headers(
            ("index", "action"), [item.target for item in good], [item.action for item in good]
        ),
    ).validate(full=True)
    lines = []
    for item in good:
        lines.append(json.dumps({item.action: {"_index": item.target, "_id": item.id}}).encode())
        lines += [item.document] if item.action != "delete" else []
    assert parse_bulk(b"\n".join(lines)) == good


@add_target
def fuzz_flight_commands(data: bytes) -> None:
    """A command of a Flight client is parsed, or refused with the name of a field."""
    (kind,), body = take_bytes(data, 1)
    kinds = sorted(
        (each for each in vars(messages).values() if is_command(each)), key=lambda c: c.__name__
    )
    with contextlib.suppress(ConfigError):
        command = messages.parse_command(kinds[kind % len(kinds)], body)
        text = command.model_dump_json(by_alias=True).encode()
        assert messages.parse_command(type(command), text) == command
    with contextlib.suppress(ConfigError):
        messages.parse_one_of({"publish": messages.PublishCommand}, body)


def is_command(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, messages.Command)


# ── answers to outputs ───────────────────────────────────────────────────────────────────────────

_OUTPUT: Final = ElasticsearchOutput(
    ElasticsearchOutputSettings(type="elasticsearch", url="http://127.0.0.1:9", index="logs")
)


@add_target
def fuzz_answers(data: bytes) -> None:
    """An answer of Elasticsearch accounts for every document; others are tried again."""
    (count,), body = take_bytes(data, 1)
    parse_retry_after(body.decode("latin-1"), 0.0)
    block = block_of([b"{}"] * (count % 4 + 1)).append_column(
        "payload", pa.array([b"{}"] * (count % 4 + 1), pa.binary())
    )
    request = _OUTPUT._make_request(block, np.arange(block.num_rows))
    try:
        _OUTPUT._check_response(request, HttpResponse(200, {}, body))
    except PartlyDelivered as error:
        assert error.failures
        assert set(error.failures) <= set(range(block.num_rows))
        assert all(isinstance(each, RetryLater | Never) for each in error.failures.values())
    except RetryLater:
        pass
    else:
        answer = json.loads(body)
        assert len(answer["items"]) == block.num_rows
        assert answer.get("errors") is False or all(map(is_success, answer["items"])), answer


def is_success(item: dict[str, Any]) -> bool:
    [outcome] = item.values()
    return 200 <= int(outcome["status"]) < 300 or outcome["status"] == 409  # it exists already


# ── files ────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def write_files(**files: bytes) -> Iterator[Path]:
    """Yield a directory with these files."""
    with tempfile.TemporaryDirectory(prefix="turnlane-fuzz-") as place:
        for name, data in files.items():
            Path(place, name).write_bytes(data)
        yield Path(place)


@add_target
def fuzz_frames(data: bytes) -> None:
    """A walk through a segment ends, in order, with events where the checksums are right."""
    (form,), rest = take_bytes(data, 1)
    content = b"".join(bytes(each) for each in encode_schema_frame(BASE_SCHEMA, 0, QUEUE_ID))
    content = content[: form * 2] if form & 1 else content
    content += rest if form & 2 else b"".join(map(bytes, sign_frames(rest)))
    with write_files(**{format_segment_name(0): content}) as place:
        files = list_segment_files(place, DISK, QUEUE_ID)
        found = [*SegmentWalk(DISK, files, lambda _first, _end: True)]
    reached = covered = 0
    for each in found:
        assert each.byte >= reached
        assert each.first >= covered
        assert each.end >= each.first
        reached, covered = each.byte, each.end
        if isinstance(each, IntactFrame):
            assert each.block is not None
            assert each.block.num_rows == each.end - each.first
            assert each.byte + each.stored_size <= len(content)


def sign_frames(data: bytes) -> Iterator[pa.Buffer | bytes]:
    """Make frames with the right checksums of any bytes; some have events of the schema."""
    at = 0
    while data:
        (flags, first, count, length), data = take_bytes(data, 4)
        payload: bytes = data[:length]
        data = data[length:]
        if flags & 1:
            block = block_of([payload] * (count % 8), timestamps=[first] * (count % 8))
            payload, count = block.serialize().to_pybytes(), count % 8
        if flags & 2:
            payload = encode_sequences([]) + payload
        if flags & 4:
            payload = pa.Codec("snappy").compress(payload, asbytes=True)
        yield from encode_frame(
            FrameKind.SCHEMA if flags & 8 else FrameKind.EVENTS,
            first if flags & 16 else at,
            count,
            [payload],
            is_compressed=bool(flags & 68),
            has_sequences=bool(flags & 34),
        )
        at += count


@add_target
def fuzz_journal(data: bytes) -> None:
    """A journal of any content is read, and its state survives a snapshot."""
    (form, length, cut), rest = take_bytes(data, 3)
    seed = compute_seed(1)
    if form & 1:  # a snapshot of these bytes, signed
        payload, rest = rest[:length], rest[length:]
    else:
        payload = encode_snapshot(JournalState(found=True), QUEUE_ID, 1)[1].rstrip(b"\0")
    start = MAGIC + (1).to_bytes(8, "little") + len(payload).to_bytes(8, "little")
    start += google_crc32c.value(payload).to_bytes(4, "little")
    content = start + google_crc32c.value(start).to_bytes(4, "little")
    content += payload + bytes(-len(payload) % 8)
    bodies = [rest[at : at + RECORD_SIZE - 4] for at in range(0, len(rest), RECORD_SIZE - 4)]
    records = b"".join(sign_record(seed, body) for body in bodies)
    with write_files(**{"journal.a": rest if form & 2 else content + records}) as place:
        state = Journal.read(place, DISK, QUEUE_ID)
    if not form & 1:
        check_journal_state(state)
    if state.found and not form & 1:
        header, again = encode_snapshot(state, QUEUE_ID, 1)
        parsed = parse_header(header)
        assert parsed is not None
        assert parse_payload(again[: parsed[1]], parsed[2], QUEUE_ID) == state
    parts, whole = JournalState(), JournalState()
    middle = cut % (len(bodies) + 1) * RECORD_SIZE
    done = apply_records(records, seed, whole)
    if apply_records(records[:middle], seed, parts) * RECORD_SIZE == middle:
        apply_records(records[middle:], seed, parts)
    assert parts == whole
    assert done <= len(bodies)


def check_journal_state(state: JournalState) -> None:
    assert state.low >= 0
    bounds = [state.low, *(each for span in state.settled for each in span)]
    assert bounds == sorted(set(bounds)) or not state.settled
    returned = [each for first, end, _ in state.returned for each in (first, end)]
    assert returned == sorted(returned)
    for first, end, _ in state.returned:
        assert first >= state.low
        assert not state.ranges.overlap(first, end), "a returned event is not settled"
    assert all(count >= 0 for count in state.totals.values())
    assert state.floor >= state.low


@add_target
def fuzz_fastqueue(data: bytes) -> None:
    """Every block that FastQueue's chunks hold is read, once and in order; all else is a fault."""
    (metadata, split, start), rest = take_bytes(data, 3)
    hint, chunks = rest[:metadata], rest[metadata:]
    first, second = chunks[:split], chunks[split:]
    files = {"fastqueue.meta": hint, f"{0:016x}": first, f"{64:016x}": second}
    with write_files(**files) as place:
        directory = FastQueueDirectory.open(place)
        assert all(fault.message for fault in directory.faults())
        for begin in (0, start, None):
            rows = [row for batch in directory.blocks(start=begin) for row in batch.to_pylist()]
            places = [(row["source"], int(dict(row["headers"])[POSITION_HEADER])) for row in rows]
            assert places == sorted(set(places))
            for row, (name, position) in zip(rows, places, strict=True):
                base = int(name, 16)
                assert is_at(second if base else first, position - base, row["value"])


def is_at(chunk: bytes, at: int, value: bytes) -> bool:
    """Whether a chunk has this value at this byte."""
    word = int.from_bytes(chunk[at : at + 8], "little")
    stored = chunk[at + 8 : at + 8 + (word & (1 << 62) - 1)]
    if not word >> 63:
        return stored == value
    return pa.Codec("snappy").decompress(stored, len(value), asbytes=True) == value


@add_target
def fuzz_stored_json(content: bytes) -> None:
    """Small files of a node, damaged in any way, are read or refused."""
    files = {"queue.json": content, "queues.json": content, "positions": content}
    with write_files(**files) as place:
        with contextlib.suppress(NotAQueue):
            for file in read_identity_files(place, DISK).values():
                assert file.identity is None or len(file.identity.queue_id) == 32
            QueueDirectory.read_only(place, DISK).close()
        entries, problems = load_registry(place)
        assert isinstance(entries, dict)
        assert all(problems)
        plan = CommitLog(place, DISK).read(place / "queue.json")
        assert plan is None or CommitPlan.from_json(plan.to_json()) == plan
        positions = PositionsFile(place / "positions", DISK)
        saved = positions.load()
        assert positions.was_damaged or positions.exists
        assert all(each.offset >= each.before.length >= 0 for each in saved)


# ── statements ───────────────────────────────────────────────────────────────────────────────────


@add_target
def fuzz_statements(data: bytes) -> None:
    """A statement is refused with line and column, or written back and parsed to the same."""
    text = data.decode(errors="surrogateescape")
    try:
        statement = parse(text)
    except SyntaxFault as error:
        assert 1 <= error.line <= text.count("\n") + 1
        return
    if isinstance(statement, CreateQueue):
        assert parse(str(statement.definition)) == CreateQueue(statement.definition)
        assert all(column.arrow_type for column in statement.definition.columns)
    elif isinstance(statement, CreateSchedule):
        assert parse(str(statement.schedule)) == statement
        assert statement.schedule.find_next(0) > 0
