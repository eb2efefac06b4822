"""The client of one node: one method for each request of the Flight plane.

A node may hang: its machine still accepts data, but the node does not answer. Flight's own timeouts
limit a whole stream, which may take long. The timeouts here limit the next step of a stream.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
from pyarrow import flight

from turnlane.client.address import raise_node_errors
from turnlane.errors import ConfigError, NoSuchStage, TransportDown
from turnlane.events import Block
from turnlane.intervals import COPY_SCHEMA
from turnlane.runtime import Closeable, call_in_thread, start_thread

SEND_BYTES = 64 << 20
"""The most bytes of a block that is sent: a node refuses blocks above ``max_block_bytes``."""


def split_block(block: Block) -> Iterator[Block]:
    """Yield the block in pieces of at most ``SEND_BYTES`` or of a single event."""
    rows = block.num_rows
    if rows > 1 and block.nbytes > SEND_BYTES:
        for half in (block.slice(0, rows // 2), block.slice(rows // 2)):
            yield from split_block(half)
    else:
        yield block


# ── timeouts ─────────────────────────────────────────────────────────────────────────────────────

Answer = TypeVar("Answer")

STEP_SECONDS: Final = 30.0
"""How long a node may take for the next block that it reads."""
STORE_SECONDS: Final = 120.0
"""How long a node may take for a block that it writes to its disk."""
_POLL_SECONDS: Final = 1.0


def run_with_timeout(
    place: str, step: Callable[[], Answer], seconds: float = STORE_SECONDS
) -> Answer:
    """Run a step that cannot be cancelled on its own thread. Raises ``TransportDown``.

    After a timeout the thread stays until the connection ends.
    """
    done = call_in_thread("turnlane-step", step)
    try:
        return done.result(seconds)
    except TimeoutError:
        raise _build_timeout_error(place, seconds) from None


class StepWatchdog:
    """Cancels streams whose next step takes too long. Thread-safe; one for the whole process.

    Its thread is idle without steps, so a step costs almost nothing.
    """

    def __init__(self) -> None:
        self._steps: dict[object, tuple[float, Callable[[], None]]] = {}
        """The deadline and the cancel function of each running step."""
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def step(self, place: str, cancel: Callable[[], None], seconds: float) -> Iterator[None]:
        """Watch the step in the block. Raises ``TransportDown`` if it was cancelled."""
        self._begin()
        token = object()
        self._steps[token] = time.monotonic() + seconds, cancel
        self._some.set()
        try:
            yield
        except Exception:
            if token not in self._steps:
                raise _build_timeout_error(place, seconds) from None
            raise
        finally:
            self._steps.pop(token, None)

    def _begin(self) -> None:
        """Start the thread, also again in a forked child, which has no threads."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = start_thread("turnlane-watch", self._look)

    def _look(self) -> None:
        while self._some.wait():
            self._some.clear()
            while self._steps:
                time.sleep(_POLL_SECONDS)
                now = time.monotonic()
                for token, (deadline, cancel) in list(self._steps.items()):
                    if now > deadline and self._steps.pop(token, None) is not None:
                        cancel()


STEP_WATCHDOG: Final = StepWatchdog()


def _build_timeout_error(place: str, seconds: float) -> TransportDown:
    return TransportDown(f"{place}: no answer within {seconds:g} seconds")


# ── the node ─────────────────────────────────────────────────────────────────────────────────────


class StageWriter(Closeable):
    """Writes blocks to a stage on the disk of a node, for a commit."""

    def __init__(self, node: RemoteNode, command: Mapping[str, Any], schema: pa.Schema) -> None:
        self.ids: list[str] | None = None
        """The ids of the stages, once they are finished."""
        self._failed = False
        self._node = node
        self._place = node.place
        with raise_node_errors(self._place):
            self._writer, self._answers = node.put(command, schema)

    def write(self, block: Block) -> None:
        """Stage another block."""
        self._failed = True
        with raise_node_errors(self._place):
            for piece in split_block(block):
                run_with_timeout(self._place, partial(self._writer.write_batch, piece))
        self._failed = False

    def finish(self) -> str:
        """Wait until the stage is on the node's disk; return the id for the commit."""
        (found,) = self.finish_all()
        return found

    def finish_all(self) -> list[str]:
        """Finish a copy, which has any number of stages; return their ids."""
        self._failed = True
        with raise_node_errors(self._place):
            answer = run_with_timeout(self._place, self._end)
        if answer is None:
            raise NoSuchStage(f"{self._place} has not finished the stage")
        self._failed = False
        said = json.loads(bytes(answer))
        self.ids = said["stages"] if "stages" in said else [said["stage"]]
        return self.ids

    def _end(self) -> pa.Buffer | None:
        self._writer.done_writing()
        answer = self._answers.read()
        self._writer.close()
        return answer

    def close(self) -> None:
        """Close the stream, and discard the stages if they are not finished."""
        if self.ids is None and not self._failed:
            self._node.abort(self.finish_all())
            self.ids = None


ANSWER_SECONDS: Final = 30.0
"""How long a node may take for an answer, in addition to the requested wait."""
OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5000),  # in fact the timeout for connecting
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Nodes restart at the same address. A shared connection would also share the backoff of
    # another channel.
    ("grpc.use_local_subchannel_pool", 1),
    # Pings keep connections with quiet streams from being idle for the node. gRPC allows at most
    # one ping in five minutes.
    ("grpc.keepalive_time_ms", 360_000),
]


Spans = Sequence[tuple[int, int]]
"""Ranges of offsets: the first offset, and the offset after the last."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The token and the TLS files of a client."""

    token: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert", "tls_cert and tls_key belong together: set both or none")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("token", "must be printable ASCII text")

    def __repr__(self) -> str:
        return "Credentials(…)"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``FlightClient``. Raises ``ConfigError`` for invalid files."""
        files = {
            "tls_root_certs": ("tls_ca", self.tls_ca),
            "cert_chain": ("tls_cert", self.tls_cert),
            "private_key": ("tls_key", self.tls_key),
        }
        contents = {
            argument: _contents(knob, path)
            for argument, (knob, path) in files.items()
            if path is not None
        }
        self._check_files()
        return contents

    def _check_files(self) -> None:
        """Check the files now: gRPC would only report that it cannot connect. ``ConfigError``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for knob, path in (("tls_ca", self.tls_ca), ("tls_cert", self.tls_cert)):
            if path is not None:
                try:
                    context.load_verify_locations(path)
                except ssl.SSLError:
                    raise ConfigError(knob, f"{path} contains no certificate (PEM)") from None
        if self.tls_cert is not None and self.tls_key is not None:
            try:
                # No passphrase: without this, OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: b"")
            except ssl.SSLError:
                what = f"{self.tls_key} is not the unencrypted private key of {self.tls_cert}"
                raise ConfigError("tls_key", what) from None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of every call."""
        return [] if self.token is None else [(b"authorization", b"Bearer " + self.token.encode())]


class QueueEnds(NamedTuple):
    """The range of unsettled offsets of a queue."""

    end: int
    """The offset of the next event."""
    low: int
    """All offsets below this one are settled."""
    queue_id: str
    """The id of the queue. A queue that is created again under the same name has a new id."""


class UnsettledSpans(NamedTuple):
    """Unsettled events of a queue."""

    spans: list[tuple[int, int]]
    """The requested number of events: the first offset, and the offset after the last."""
    pending: int
    """The number of all unsettled events."""
    end: int
    low: int
    kept: int
    """How many events the last commit of the lane has kept."""


class RemoteNode(Closeable):
    """A remote node. Safe to use from any thread; connects when it is used.

    Every call raises the errors of the node, or ``TransportDown`` if it cannot be reached.
    """

    def __init__(self, place: str, location: str, credentials: Credentials) -> None:
        self.place = place
        self._headers = credentials.headers()
        with raise_node_errors(place):
            self._flight = flight.FlightClient(
                location, generic_options=OPTIONS, **credentials.arguments()
            )

    def __repr__(self) -> str:
        return f"RemoteNode({self.place!r})"

    # ── queues ───────────────────────────────────────────────────────────────────────────────────

    def ping(self, timeout: float = ANSWER_SECONDS) -> str:
        """Return the instance of the node, which is new at every start."""
        return str(self.act("ping", timeout=timeout)["instance"])

    def queues(self) -> dict[str, dict[str, Any]]:
        """Return the queues that the token may use, with the settings that were given."""
        return self.act("queues")

    def stats(self, queue: str | None = None) -> dict[str, Any]:
        """Return the stats of a queue, or of all queues, by name."""
        return self.act("stats", queue=queue)

    def create(self, queue: str, **knobs: Any) -> bool:
        """Create a queue; false if it exists with the same settings."""
        return bool(self.act("create", queue=queue, knobs=_plain(knobs))["created"])

    def create_for_action(self, queue: str, **knobs: Any) -> bool:
        """Create a queue for an action: the node warns of its events if the action is removed."""
        answer = self.act("create", queue=queue, knobs=_plain(knobs), by_pipeline=True)
        return bool(answer["created"])

    def drop(self, queue: str) -> None:
        """Delete a queue with all its events."""
        self.act("drop", queue=queue)

    # ── reading by offset ────────────────────────────────────────────────────────────────────────

    def wait(self, queue: str, beyond: int, timeout: float) -> QueueEnds:
        """Wait until the end of the queue is beyond an offset; return its ends."""
        answer = self.act(
            "wait",
            timeout=timeout + ANSWER_SECONDS,
            body={"queue": queue, "beyond": beyond, "timeout": timeout},
        )
        return QueueEnds(answer["end"], answer["low"], answer["queue_id"])

    def unsettled(
        self,
        queue: str,
        events: int,
        *,
        newest: int = 0,
        first: int = 0,
        timeout: float = 0.0,
        lane: str | None = None,
        into: Sequence[str] = (),
    ) -> UnsettledSpans:
        """Return the oldest unsettled events from ``first`` on, at most ``events``.

        If there are more, ``newest`` of the returned events are the newest ones. If the queue has
        none, waits up to ``timeout``. A lane gets at most as many as the queues ``into`` have room
        for.
        """
        place = {"queue": queue, "first": first, "lane": lane, "into": list(into)}
        body = {**place, "events": events, "newest": newest, "timeout": timeout}
        answer = self.act("unsettled", timeout=timeout + ANSWER_SECONDS, body=body)
        spans = [(first, end) for first, end in answer.pop("spans")]
        return UnsettledSpans(spans, **answer)

    def read(
        self,
        queue: str,
        first: int = 0,
        end: int | None = None,
        columns: Collection[str] | None = None,
        *,
        settled: bool = False,
    ) -> Iterator[tuple[int, Block]]:
        """Yield the events ``first`` to ``end - 1`` as blocks with their first offsets.

        The events stay in the queue. Settled events are left out; with ``settled``, those that the
        node still has come too. ``end`` is by default the present end of the queue. With
        ``columns``, blocks have only these, as far as they exist.
        """
        if end is None:
            end = self.wait(queue, -1, 0.0).end
        while first < end:
            at = first
            for offset, block in self._read_once(queue, first, end, columns, settled=settled):
                yield offset, block
                first = offset + block.num_rows
            if first == at:
                return  # the rest is settled

    def _read_once(
        self,
        queue: str,
        first: int,
        end: int,
        columns: Collection[str] | None,
        *,
        settled: bool,
    ) -> Iterator[tuple[int, Block]]:
        command: dict[str, Any] = {"read": queue, "first": first, "end": end}
        if settled:
            command["settled"] = True
        if columns is not None:
            command["columns"] = sorted(columns)
        with raise_node_errors(self.place):
            # Flight waits for the first answer here, without a timeout of its own.
            chunks = run_with_timeout(self.place, partial(self.get, command, None), STEP_SECONDS)
            while (chunk := self._next(chunks)) is not None:
                if chunk.data is not None:
                    yield parse_metadata(chunk.app_metadata)["first"], chunk.data

    def _next(self, chunks: flight.FlightStreamReader) -> flight.FlightStreamChunk | None:
        """Return the next chunk of a stream. Raises ``TransportDown`` if the node hangs."""
        with STEP_WATCHDOG.step(self.place, chunks.cancel, STEP_SECONDS):
            return next(chunks, None)

    def settle(self, queue: str, first: int, end: int, queue_id: str | None = None) -> bool:
        """Settle offsets that were read.

        With ``queue_id``, returns false and does nothing if the queue now has another id.
        """
        body = {"queue": queue, "first": first, "end": end, "queue_id": queue_id}
        return bool(self.act("settle", body=body)["settled"])

    # ── staging and committing ───────────────────────────────────────────────────────────────────

    def stage(
        self, queue: str, schema: pa.Schema, spare: int = 0, *, diskless: bool = False
    ) -> StageWriter:
        """Begin to stage blocks for a queue; a commit publishes them.

        If the queue is full at the commit, the ``spare`` newest events may wait in the memory of
        the node; with ``diskless`` also if the disk of the node is full or fails.
        """
        return StageWriter(self, {"stage": queue, "spare": spare, "diskless": diskless}, schema)

    def copy(self, queue: str, into: Sequence[str]) -> StageWriter:
        """Begin to stage events of a queue for others, chosen by blocks of ``COPY_SCHEMA``."""
        return StageWriter(self, {"copy": queue, "into": list(into)}, COPY_SCHEMA)

    def commit(
        self,
        stages: Sequence[str] = (),
        ranges: Sequence[tuple[str, int, int]] = (),
        *,
        writer: str | None = None,
        epoch: int = 0,
        lane: str | None = None,
        run: str = "-",
        kept: Spans = (),
        dead: Spans = (),
        batch: int | None = None,
        exact: bool = False,
        timeout: float = 300.0,
    ) -> bool:
        """Publish stages and settle ranges (queue, first, end) atomically and durably.

        With ``lane`` it also settles the offsets of the last :meth:`plan`, except the ``kept``
        ones; the ``dead`` ones as undeliverable. With ``batch``, only if it was planned last.
        Returns false if it is a repeat: then nothing happens. After ``TransportDown`` repeat it.
        ``exact`` raises ``RetryLater`` if some offsets of the ranges are settled already.
        """
        spans = [{"queue": queue, "first": first, "end": end} for queue, first, end in ranges]
        body = {
            "stages": list(stages),
            "ranges": spans,
            "writer": writer,
            "epoch": epoch,
            "lane": lane,
            "run": run,
            "kept": kept,
            "dead": dead,
            "batch": batch,
            "exact": exact,
        }
        return bool(self.act("commit", timeout=timeout, body=body)["committed"])

    def plan(
        self, lane: str, run: str, queue: str, spans: Spans, batch: int = 0
    ) -> list[tuple[int, int]]:
        """Store the offsets that a run of a lane reads now; its commit settles them.

        Returns the offsets that are still unsettled: the lane reads only these. Raises
        ``LaneTaken``.
        """
        body = {"lane": lane, "run": run, "queue": queue, "spans": spans, "batch": batch}
        return [(first, end) for first, end in self.act("plan", body=body)["spans"]]

    def planned(self, lane: str, run: str) -> int:
        """Return the batch of a run that was planned last. Raises ``LaneTaken`` if none was."""
        return int(self.act("planned", lane=lane, run=run)["batch"])

    def report_stall(self, queue: str) -> None:
        """Have the node count that the lane of a queue has stalled."""
        self.act("stalled", queue=queue)

    def abort(self, stages: Sequence[str]) -> None:
        """Discard stages."""
        self.act("abort", stages=list(stages))

    def epoch(self, writer: str) -> int | None:
        """Return the last epoch that a writer has committed, ``None`` if there is none."""
        epoch: int | None = self.act("epoch", writer=writer)["epoch"]
        return epoch

    def purge(self, queue: str, spans: Spans, why: str = "") -> int:
        """Throw events away, with an entry in the node's audit log; return the number."""
        return int(self.act("purge", body={"queue": queue, "spans": spans, "why": why})["events"])

    def full(self, queues: Sequence[str]) -> list[str]:
        """Return the queues that have no room for a commit."""
        full: list[str] = self.act("full", queues=list(queues))["queues"]
        return full

    # ── breakers ─────────────────────────────────────────────────────────────────────────────────

    def breakers(self, actions: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return the breakers of these actions, or of all. Unused breakers do not exist."""
        return self.act("breakers", actions=None if actions is None else list(actions))

    def reset_breaker(self, action: str) -> dict[str, Any]:
        """Close the breaker of a destination that works again. Raises ``NoSuchBreaker``."""
        return self.act("reset_breaker", action=action)

    # ── Flight ───────────────────────────────────────────────────────────────────────────────────

    def act(
        self,
        kind: str,
        *,
        timeout: float = ANSWER_SECONDS,
        body: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> dict[str, Any]:
        """Run an action of the node and return its answer."""
        action = flight.Action(kind, json.dumps(values if body is None else body).encode())
        with raise_node_errors(self.place):
            (result,) = self._flight.do_action(action, self.options(timeout))
        return parse_metadata(result.body)

    def get(self, command: Mapping[str, Any], timeout: float | None) -> flight.FlightStreamReader:
        """Open a stream of blocks from the node."""
        ticket = flight.Ticket(json.dumps(command).encode())
        return self._flight.do_get(ticket, self.options(timeout))

    def exchange(
        self, command: Mapping[str, Any]
    ) -> tuple[flight.FlightStreamWriter, flight.FlightStreamReader]:
        """Open a stream of blocks in both directions, which can be cancelled."""
        return self._flight.do_exchange(_descriptor(command), self.options(None))

    def put(
        self, command: Mapping[str, Any], schema: pa.Schema, timeout: float | None = None
    ) -> tuple[flight.FlightStreamWriter, flight.FlightMetadataReader]:
        """Open a stream of blocks to the node."""
        call: Any = self._flight.do_put  # the stubs have the types of do_exchange
        made: tuple[flight.FlightStreamWriter, flight.FlightMetadataReader] = call(
            _descriptor(command), schema, self.options(timeout)
        )
        return made

    def options(self, timeout: float | None) -> flight.FlightCallOptions:
        """Return the options of a call."""
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the connection."""
        self._flight.close()


def parse_metadata(metadata: pa.Buffer | None) -> dict[str, Any]:
    """Parse the JSON metadata of a node; empty without metadata."""
    values: dict[str, Any] = json.loads(b"{}" if metadata is None else bytes(metadata))
    return values


def _descriptor(command: Mapping[str, Any]) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(json.dumps(command).encode())


def _plain(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values; values that JSON does not have become text."""
    plain: dict[str, Any] = json.loads(json.dumps(knobs, default=str))
    return plain


def _contents(knob: str, path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(knob, f"{path}: {error.strerror or error}") from None
