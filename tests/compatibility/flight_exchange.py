"""The Flight protocol: record the calls of a client with their answers, and replay them.

``RecordingClient`` takes the place of ``pyarrow.flight.FlightClient`` under a real client, and
keeps every descriptor, action, block and piece of metadata as they are sent. ``replay`` sends the
same again with plain Arrow Flight and compares the answers.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Self

import pyarrow as pa
from pyarrow import flight

from tests.compatibility.comparison import find_differences, mask
from tests.compatibility.flight_peer import FlightPeer, read_metadata, read_rows
from tests.compatibility.identifiers import Identifiers
from tests.compatibility.running import TIMEOUT

Call = dict[str, Any]

FlightClient: Final = flight.FlightClient
"""The real one."""

VARYING: Final = {
    *("disk_available_bytes", "disk_bytes", "bytes", "utilization", "memory_blocks", "pushes"),
    *("syncs", "meta_syncs", "rotations", "flushes", "full_waits", "blocked_publishers"),
    *("releases", "wait", "after", "fire_at", "message", "open_for"),
}
"""Values that differ in every run, that count the work of the node, or that are texts."""


# ── recording ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def record_calls() -> Iterator[list[Call]]:
    """Record all Flight calls of this process."""
    calls: list[Call] = []

    class Client(RecordingClient):
        log = calls

    module: Any = flight
    module.FlightClient = Client
    try:
        yield calls
    finally:
        module.FlightClient = FlightClient


class RecordingClient:
    """A Flight client that keeps what goes through it."""

    log: list[Call]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._client = FlightClient(*arguments, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def do_action(self, action: flight.Action, options: Any = None) -> list[Any]:
        call = self._note(call="action", type=action.type, body=_text(action.body))
        with _noting_error(call):
            results = list(self._client.do_action(action, options))
        call["answers"] = [read_metadata(result.body) for result in results]
        return results

    def do_get(self, ticket: flight.Ticket, options: Any = None) -> Any:
        call = self._note(call="get", ticket=_text(ticket.ticket), received=[])
        with _noting_error(call):
            reader = self._client.do_get(ticket, options)
        return _RecordingReader(reader, call)

    def do_put(self, descriptor: flight.FlightDescriptor, schema: Any, options: Any = None) -> Any:
        sent = [{"schema": _encode(schema.serialize()), "after_rows": 0}]
        call = self._note(call="put", command=_text(descriptor.command), sent=sent, received=[])
        do_put: Any = self._client.do_put
        with _noting_error(call):
            writer, reader = do_put(descriptor, schema, options)
        return _RecordingWriter(writer, call), _RecordingReader(reader, call)

    def do_exchange(self, descriptor: flight.FlightDescriptor, options: Any = None) -> Any:
        call = self._note(call="exchange", command=_text(descriptor.command), sent=[], received=[])
        with _noting_error(call):
            writer, reader = self._client.do_exchange(descriptor, options)
        return _RecordingWriter(writer, call), _RecordingReader(reader, call)

    def list_flights(self, criteria: str | None = None, options: Any = None) -> list[Any]:
        call = self._note(call="list_flights")
        found = list(self._client.list_flights(criteria, options))
        call["answers"] = [_describe_flight(each) for each in found]
        return found

    def get_flight_info(self, descriptor: flight.FlightDescriptor, options: Any = None) -> Any:
        path = [_text(each) for each in descriptor.path or ()]
        call = self._note(call="get_flight_info", path=path)
        with _noting_error(call):
            found = self._client.get_flight_info(descriptor, options)
        call["answers"] = [_describe_flight(found)]
        return found

    def list_actions(self, options: Any = None) -> list[Any]:
        call = self._note(call="list_actions")
        with _noting_error(call):
            found = list(self._client.list_actions(options))
        call["answers"] = sorted(each.type for each in found)
        return found

    def _note(self, **about: Any) -> Call:
        self.log.append(about)
        return about


class _RecordingWriter:
    """A writer whose messages are kept."""

    def __init__(self, writer: Any, call: Call) -> None:
        self._writer = writer
        self._call = call

    def begin(self, schema: pa.Schema) -> None:
        self._note(schema=_encode(schema.serialize()))
        with _noting_error(self._call):
            self._writer.begin(schema)

    def write_batch(self, block: pa.RecordBatch) -> None:
        self._note(block=_encode(block.serialize()))
        with _noting_error(self._call):
            self._writer.write_batch(block)

    def write_with_metadata(self, block: pa.RecordBatch, metadata: pa.Buffer) -> None:
        self._note(block=_encode(block.serialize()), metadata=_text(metadata))
        with _noting_error(self._call):
            self._writer.write_with_metadata(block, metadata)

    def write_metadata(self, metadata: pa.Buffer) -> None:
        self._note(metadata=_text(metadata))
        with _noting_error(self._call):
            self._writer.write_metadata(metadata)

    def done_writing(self) -> None:
        self._note(done=True)
        with _noting_error(self._call):
            self._writer.done_writing()

    def close(self) -> None:
        with _noting_error(self._call):
            self._writer.close()

    def _note(self, **message: Any) -> None:
        rows = sum(len(each.get("rows", ())) for each in self._call["received"])
        self._call["sent"].append({**message, "after_rows": rows})


class _RecordingReader:
    """A reader whose messages are kept: of blocks, or of metadata alone."""

    def __init__(self, reader: Any, call: Call) -> None:
        self._reader = reader
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with _noting_error(self._call):
            chunk = next(self._reader)
        self._call["received"].append(_describe_chunk(chunk))
        return chunk

    def read(self) -> Any:
        with _noting_error(self._call):
            metadata = self._reader.read()
        if metadata is not None:
            self._call["received"].append({"metadata": read_metadata(metadata)})
        return metadata

    @property
    def schema(self) -> pa.Schema:
        found: pa.Schema = self._reader.schema
        return found

    def cancel(self) -> None:
        self._call["cancelled"] = True
        self._reader.cancel()


def _text(data: bytes | pa.Buffer | None) -> str:
    return bytes(data or b"").decode()


def _encode(buffer: pa.Buffer) -> str:
    return base64.b64encode(bytes(buffer)).decode()


def _describe_chunk(chunk: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"metadata": read_metadata(chunk.app_metadata)}
    if chunk.data is not None:
        message["columns"] = {field.name: str(field.type) for field in chunk.data.schema}
        message["rows"] = read_rows(chunk.data)
    return message


def _describe_flight(info: flight.FlightInfo) -> dict[str, Any]:
    return {
        "path": [_text(each) for each in info.descriptor.path or ()],
        "columns": {field.name: str(field.type) for field in info.schema},
        "records": info.total_records,
        "tickets": [json.loads(_text(each.ticket.ticket)) for each in info.endpoints],
    }


@contextmanager
def _noting_error(call: Call) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        if not call.get("cancelled"):
            call["error"] = describe_error(error)
        raise


def describe_error(error: pa.ArrowException) -> dict[str, Any]:
    """Describe an error as a client sees it: Flight's kind, and turnlane's name."""
    about: dict[str, Any] = {"kind": type(error).__name__}
    extra = getattr(error, "extra_info", None)
    if extra:
        about["extra"] = json.loads(extra)
        name = about["extra"]["error"]
        about["has_prefix"] = f"turnlane:{name}: " in str(error)
    return about


# ── replaying ────────────────────────────────────────────────────────────────────────────────────


def replay(calls: list[Call], peer: FlightPeer) -> list[str]:
    """Send recorded calls to a node; return the differences of its answers."""
    identifiers = Identifiers()
    replays: dict[str, Callable[[Call, FlightPeer, Identifiers], Call]] = {
        "action": _replay_action,
        "get": _replay_get,
        "put": _replay_put,
        "exchange": _replay_exchange,
        "list_flights": _replay_list_flights,
        "get_flight_info": _replay_flight_info,
        "list_actions": _replay_list_actions,
    }
    differences: list[str] = []
    for number, call in enumerate(calls):
        answer = replays[call["call"]](call, peer, identifiers)
        identifiers.bind(call, answer)
        place = f"call {number}, {call['call']} {call.get('type', call.get('command', ''))}"
        differences += find_differences(
            mask(_expected(call), VARYING), mask(identifiers.to_recorded(answer), VARYING), place
        )
    return differences


def _expected(call: Call) -> Call:
    """Return the answers of a recorded call, without everything that depends on the timing."""
    expected = {key: call[key] for key in ("answers", "error") if key in call}
    return expected | (_summarise(call["received"], call) if "received" in call else {})


def _summarise(received: list[dict[str, Any]], call: Call) -> Call:
    """Join blocks and reports, which come in other portions each time."""
    words = [each["metadata"] for each in received if "rows" not in each]
    reports = [each for each in words if "accepted" in each]
    levels = _awaited_levels(call)
    with_rows = [each for each in received if "rows" in each]
    return {
        "words": [each for each in words if "accepted" not in each],
        "report": {level: reports[-1][level] for level in levels} if reports else {},
        "levels": sorted(reports[0]) if reports and levels else [],
        "columns": with_rows[0]["columns"] if with_rows else {},
        "rows": [row for each in with_rows for row in each["rows"]],
        "metadata": [sorted(each["metadata"]) for each in with_rows[:1]],
        "about": with_rows[0]["metadata"] if with_rows else {},
    }


def _awaited_levels(call: Call) -> list[str]:
    """Return the levels that a publishing stream reaches in every run."""
    if "error" in call:
        return []
    has_end = any("done" in message for message in call.get("sent", ()))
    is_on_disk = json.loads(call.get("command", "{}")).get("publish") != "memory"
    return ["accepted", "persisted"] if is_on_disk and not has_end else ["accepted"]


def _replay_action(call: Call, peer: FlightPeer, identifiers: Identifiers) -> Call:
    action = flight.Action(call["type"], identifiers.to_actual(call["body"]).encode())
    try:
        results = list(peer.client.do_action(action, peer.options))
    except pa.ArrowException as error:
        return {"error": describe_error(error)}
    return {"answers": [read_metadata(result.body) for result in results]}


def _replay_get(call: Call, peer: FlightPeer, identifiers: Identifiers) -> Call:
    ticket = flight.Ticket(identifiers.to_actual(call["ticket"]).encode())
    received: list[dict[str, Any]] = []
    answer: Call = {}
    try:
        received += map(_describe_chunk, peer.client.do_get(ticket, peer.options))
    except pa.ArrowException as error:
        answer["error"] = describe_error(error)
    return {**answer, "received": received, **_summarise(received, call)}


def _replay_put(call: Call, peer: FlightPeer, identifiers: Identifiers) -> Call:
    schema, *messages = call["sent"]
    do_put: Any = peer.client.do_put
    received: list[dict[str, Any]] = []
    answer: Call = {}
    try:
        writer, reader = do_put(
            _descriptor(call, identifiers), _decode_schema(schema["schema"]), peer.options
        )
        _send(writer, messages, _decode_schema(schema["schema"]), identifiers)
        while (metadata := reader.read()) is not None:
            received.append({"metadata": read_metadata(metadata)})
        writer.close()
    except pa.ArrowException as error:
        answer["error"] = describe_error(error)
    return {**answer, "received": received, **_summarise(received, call)}


def _replay_exchange(call: Call, peer: FlightPeer, identifiers: Identifiers) -> Call:
    stream = _Listening(*peer.client.do_exchange(_descriptor(call, identifiers), peer.options))
    schema: pa.Schema | None = None
    try:
        for message in call["sent"]:
            stream.wait_for_rows(message["after_rows"])
            if "schema" in message:
                schema = _decode_schema(message["schema"])
            with suppress(pa.ArrowException):  # the listener has the error
                _send(stream.writer, [message], schema, identifiers)
        stream.wait_for_all(call)
    finally:
        stream.close()
    answer: Call = {} if stream.error is None else {"error": stream.error}
    return {**answer, "received": stream.received, **_summarise(stream.received, call)}


class _Listening:
    """A stream in both directions, with a thread that receives the messages of the node."""

    def __init__(self, writer: Any, reader: Any) -> None:
        self.writer = writer
        self.received: list[dict[str, Any]] = []
        self.error: dict[str, Any] | None = None
        self._reader = reader
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        try:
            for chunk in self._reader:
                with self._changed:
                    self.received.append(_describe_chunk(chunk))
                    self._changed.notify_all()
        except pa.ArrowException as error:
            if not isinstance(error, pa.ArrowCancelled):
                self.error = describe_error(error)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for_rows(self, count: int) -> None:
        """Wait until this many rows have come."""
        self._wait_for(lambda: sum(len(each.get("rows", ())) for each in self.received) >= count)

    def wait_for_all(self, call: Call) -> None:
        """Wait until the node has sent as much as it had when the call was recorded."""
        wanted = _summarise(call["received"], call)

        def is_there() -> bool:
            found = _summarise(self.received, call)
            return (
                "error" not in call
                and len(found["words"]) >= len(wanted["words"])
                and len(found["rows"]) >= len(wanted["rows"])
                and all(found["report"].get(key, -1) >= at for key, at in wanted["report"].items())
            )

        self._wait_for(is_there)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._is_over, TIMEOUT)

    def close(self) -> None:
        """End the call."""
        if not self._is_over:
            self._reader.cancel()
        self._thread.join(TIMEOUT)
        with suppress(pa.ArrowException):
            self.writer.close()


def _replay_list_flights(call: Call, peer: FlightPeer, identifiers: Identifiers) -> Call:
    return {"answers": [_describe_flight(each) for each in peer.client.list_flights()]}


def _replay_flight_info(call: Call, peer: FlightPeer, identifiers: Identifiers) -> Call:
    descriptor = flight.FlightDescriptor.for_path(*call["path"])
    try:
        info = peer.client.get_flight_info(descriptor, peer.options)
    except pa.ArrowException as error:
        return {"error": describe_error(error)}
    return {"answers": [_describe_flight(info)]}


def _replay_list_actions(call: Call, peer: FlightPeer, identifiers: Identifiers) -> Call:
    try:
        types = {each.type for each in peer.client.list_actions(peer.options)}
    except pa.ArrowException as error:
        return {"error": describe_error(error)}
    return {"answers": sorted(types & set(call.get("answers", ())))}


def _descriptor(call: Call, identifiers: Identifiers) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(identifiers.to_actual(call["command"]).encode())


def _send(
    writer: Any, messages: list[Call], schema: pa.Schema | None, identifiers: Identifiers
) -> None:
    for message in messages:
        metadata = pa.py_buffer(identifiers.to_actual(message.get("metadata", "")).encode())
        if "schema" in message:
            writer.begin(schema)
        elif "block" in message:
            assert schema is not None
            block: Any = pa.ipc.read_record_batch(_decode(message["block"]), schema)
            if metadata.size:
                writer.write_with_metadata(block, metadata)
            else:
                writer.write_batch(block)
        elif "done" in message:
            writer.done_writing()
        else:
            writer.write_metadata(metadata)


def _decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(_decode(text))


def _decode(text: str) -> pa.Buffer:
    return pa.py_buffer(base64.b64decode(text))
