"""A node elsewhere, by its Flight address: one call for each thing that can be asked of it."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
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
from turnlane.runtime import Closeable

# ── pieces ──
# Blocks in pieces that a node takes, however many events were gathered in one.

SEND_BYTES = 64 << 20
"""A node refuses blocks beyond its ``max_block_bytes``, and holds each of them in memory."""


def split_block(block: Block) -> Iterator[Block]:
    """The block, halved until each piece has at most ``SEND_BYTES``, or is a single event."""
    rows = block.num_rows
    if rows > 1 and block.nbytes > SEND_BYTES:
        for half in (block.slice(0, rows // 2), block.slice(rows // 2)):
            yield from split_block(half)
    else:
        yield block


# ── progress ──
# Streams of a node that may hang: its machine still takes what is sent, and nobody answers.
#
# Flight's own time limits are for a whole stream, which may well take long. These are for its
# next
# step.

Answer = TypeVar("Answer")

STEP_SECONDS: Final = 30.0
"""How long a node may take over the next block of what it reads."""
STORE_SECONDS: Final = 120.0
"""The same of what it has to bring to its disk."""
_LOOK_SECONDS: Final = 1.0


def run_with_timeout(
    place: str, step: Callable[[], Answer], seconds: float = STORE_SECONDS
) -> Answer:
    """Take a step that cannot be cancelled, on a thread of its own. Raises ``TransportDown``.

    If it takes too long the thread is left behind, until the connection ends.
    """
    done: Future[Answer] = Future()

    def run() -> None:
        try:
            done.set_result(step())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="turnlane-step", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        raise _build_timeout_error(place, seconds) from None


class StepWatchdog:
    """Cancels streams whose next step takes too long. One for a process, from any thread.

    Looks only while there is something to look at; costs next to nothing for each step.
    """

    def __init__(self) -> None:
        self._steps: dict[object, tuple[float, Callable[[], None]]] = {}
        """By stream: when to cancel the step that is being taken, and how."""
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def step(self, place: str, cancel: Callable[[], None], seconds: float) -> Iterator[None]:
        """A step within. Raises ``TransportDown`` if it had to be cancelled."""
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
        """Have a thread; one that a fork has left behind is none."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="turnlane-watch", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while self._some.wait():
            self._some.clear()
            while self._steps:
                time.sleep(_LOOK_SECONDS)
                now = time.monotonic()
                for token, (deadline, cancel) in list(self._steps.items()):
                    if now > deadline and self._steps.pop(token, None) is not None:
                        cancel()


STEP_WATCHDOG: Final = StepWatchdog()


def _build_timeout_error(place: str, seconds: float) -> TransportDown:
    return TransportDown(f"{place}: nothing has come of it in {seconds:g} seconds")


# ── stage_writer ──
# Staging on a node elsewhere: what a commit will publish, written to its disk.


class StageWriter(Closeable):
    """Has blocks written to a node's disk, for a commit to publish."""

    def __init__(self, node: RemoteNode, command: Mapping[str, Any], schema: pa.Schema) -> None:
        self.ids: list[str] | None = None
        """Of the stages there are; set by :meth:`finish`."""
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
        """Wait until it is on the node's disk; returns the id to commit it by."""
        (found,) = self.finish_all()
        return found

    def finish_all(self) -> list[str]:
        """The same of what has become several stages, or none."""
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
        """Let go; what was not finished is given up."""
        if self.ids is None and not self._failed:
            self._node.abort(self.finish_all())
            self.ids = None


ANSWER_SECONDS: Final = 30.0
"""How long a node may take over an answer, beside what it was asked to wait."""
OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5000),  # in truth the time that connecting may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Nodes restart at the same address: a channel that shares its connection with one that has
    # given up would have given up, too.
    ("grpc.use_local_subchannel_pool", 1),
    # Streams on which nothing happens are no idle connections to their node; gRPC allows no more
    # than one ping in five minutes.
    ("grpc.keepalive_time_ms", 360_000),
]


Spans = Sequence[tuple[int, int]]
"""Offsets, each pair a first one and the one after the last."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows to a node, and by what it knows it."""

    token: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert", "and tls_key belong together: give both or neither")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("token", "must be plain printable text")

    def __repr__(self) -> str:
        return "Credentials(…)"

    def arguments(self) -> dict[str, Any]:
        """For Flight. Raises ``ConfigError`` if a file cannot be read, or holds something else."""
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
        """Find out now: of gRPC one would only hear that there is no address to connect to."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for knob, path in (("tls_ca", self.tls_ca), ("tls_cert", self.tls_cert)):
            if path is not None:
                try:
                    context.load_verify_locations(path)
                except ssl.SSLError:
                    raise ConfigError(knob, f"{path} holds no certificate (PEM)") from None
        if self.tls_cert is not None and self.tls_key is not None:
            try:
                # No passphrase: without this, OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: b"")
            except ssl.SSLError:
                what = f"{self.tls_key} is not the unencrypted private key of {self.tls_cert}"
                raise ConfigError("tls_key", what) from None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """For every call."""
        return [] if self.token is None else [(b"authorization", b"Bearer " + self.token.encode())]


class QueueEnds(NamedTuple):
    """How far a queue goes."""

    end: int
    """The offset that the next event will get."""
    low: int
    """Everything below is settled."""
    queue_id: str
    """Tells the queue from others of its name: one that is made anew has another."""


class UnsettledSpans(NamedTuple):
    """What waits in a queue."""

    spans: list[tuple[int, int]]
    """As much of it as was asked for: first offset and the one after the last."""
    pending: int
    """How many events there are in all."""
    end: int
    low: int
    kept: int
    """How many events the lane's last commit has kept."""


class RemoteNode(Closeable):
    """A node elsewhere. Safe to use from any thread; made at once, connected when needed.

    Every call raises what the node raised, or ``TransportDown`` if it cannot be reached.
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

    # ── what anybody may ask ─────────────────────────────────────────────────────────────────────

    def ping(self, timeout: float = ANSWER_SECONDS) -> str:
        """The node's instance: another one after every start."""
        return str(self.act("ping", timeout=timeout)["instance"])

    def queues(self) -> dict[str, dict[str, Any]]:
        """The queues that the token may use, with the knobs that were set."""
        return self.act("queues")

    def stats(self, queue: str | None = None) -> dict[str, Any]:
        """What a queue says of itself, by its name; or all."""
        return self.act("stats", queue=queue)

    def create(self, queue: str, **knobs: Any) -> bool:
        """Make a queue; false if it is there with the same settings."""
        return bool(self.act("create", queue=queue, knobs=_plain(knobs))["created"])

    def create_for_action(self, queue: str, **knobs: Any) -> bool:
        """The same for a pipeline: once the action is gone, the node warns of what is left."""
        answer = self.act("create", queue=queue, knobs=_plain(knobs), by_pipeline=True)
        return bool(answer["created"])

    def drop(self, queue: str) -> None:
        """Delete a queue with everything in it."""
        self.act("drop", queue=queue)

    # ── reading by offset ────────────────────────────────────────────────────────────────────────

    def wait(self, queue: str, beyond: int, timeout: float) -> QueueEnds:
        """Wait until the queue's end is beyond an offset; returns how far it goes either way."""
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
        """The oldest events from ``first`` on that are not settled, at most so many.

        If there are more, ``newest`` of those are the newest ones instead. If there is none in the
        queue, waits until there is. A lane hears of no more than ``into`` has room for.
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
    ) -> Iterator[tuple[int, Block]]:
        """Blocks of offsets ``first`` to ``end - 1`` with their first offsets, left in the queue.

        What was settled may be missing. ``end`` is by default the queue's end at this moment.
        With ``columns`` only these are there, as far as the queue has them.
        """
        if end is None:
            end = self.wait(queue, -1, 0.0).end
        while first < end:
            at = first
            for offset, block in self._read_once(queue, first, end, columns):
                yield offset, block
                first = offset + block.num_rows
            if first == at:
                return  # nothing more: the rest is settled

    def _read_once(
        self, queue: str, first: int, end: int, columns: Collection[str] | None
    ) -> Iterator[tuple[int, Block]]:
        command: dict[str, Any] = {"read": queue, "first": first, "end": end}
        if columns is not None:
            command["columns"] = sorted(columns)
        with raise_node_errors(self.place):
            # Flight waits for the first answer here, and could not be told to wait no longer.
            chunks = run_with_timeout(self.place, partial(self.get, command, None), STEP_SECONDS)
            while (chunk := self._next(chunks)) is not None:
                if chunk.data is not None:
                    yield parse_metadata(chunk.app_metadata)["first"], chunk.data

    def _next(self, chunks: flight.FlightStreamReader) -> flight.FlightStreamChunk | None:
        """The next chunk of a stream, unless the node hangs."""
        with STEP_WATCHDOG.step(self.place, chunks.cancel, STEP_SECONDS):
            return next(chunks, None)

    def settle(self, queue: str, first: int, end: int, queue_id: str | None = None) -> bool:
        """Settle offsets that were read.

        With ``queue_id`` only in the queue that has it: false if there is another one of this name
        by now, in which nothing happens.
        """
        body = {"queue": queue, "first": first, "end": end, "queue_id": queue_id}
        return bool(self.act("settle", body=body)["settled"])

    # ── staging and committing ───────────────────────────────────────────────────────────────────

    def stage(
        self, queue: str, schema: pa.Schema, spare: int = 0, *, diskless: bool = False
    ) -> StageWriter:
        """Begin to stage blocks for a queue; they are in it once a commit says so.

        If it is full then, ``spare`` of them may wait in the node's memory, the newest ones;
        ``diskless``: if the node's disk is full or fails, too.
        """
        return StageWriter(self, {"stage": queue, "spare": spare, "diskless": diskless}, schema)

    def copy(self, queue: str, into: Sequence[str]) -> StageWriter:
        """Begin to stage events of a queue for others; blocks of ``COPY_SCHEMA`` say which."""
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
        """Publish stages and settle ranges (queue, first, end) in one durable step.

        With ``lane`` also what :meth:`plan` said of it, but for what is ``kept``, and what is
        ``dead`` as undeliverable; if ``batch`` is given, only if it was planned last. False if it
        is a repeat: then nothing happens. After ``TransportDown`` repeat it. ``exact`` refuses,
        with ``RetryLater``, ranges of which some offsets are settled already.
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
        """A run of a lane reads these offsets now, and its commit settles them.

        Returns those that were not settled meanwhile: only they are to be read. Raises
        ``LaneTaken``.
        """
        body = {"lane": lane, "run": run, "queue": queue, "spans": spans, "batch": batch}
        return [(first, end) for first, end in self.act("plan", body=body)["spans"]]

    def planned(self, lane: str, run: str) -> int:
        """Which batch of a run of a lane was planned last. Raises ``LaneTaken`` if none was."""
        return int(self.act("planned", lane=lane, run=run)["batch"])

    def abort(self, stages: Sequence[str]) -> None:
        """Give stages up."""
        self.act("abort", stages=list(stages))

    def epoch(self, writer: str) -> int | None:
        """The last epoch that a writer has committed."""
        epoch: int | None = self.act("epoch", writer=writer)["epoch"]
        return epoch

    def purge(self, queue: str, spans: Spans, why: str = "") -> int:
        """Throw events away, which the node writes down; returns how many there were."""
        return int(self.act("purge", body={"queue": queue, "spans": spans, "why": why})["events"])

    def full(self, queues: Sequence[str]) -> list[str]:
        """Which of these queues have no room for what a lane commits."""
        full: list[str] = self.act("full", queues=list(queues))["queues"]
        return full

    # ── breakers ─────────────────────────────────────────────────────────────────────────────────

    def breakers(self, actions: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
        """How the breakers of these actions are, or of all; one that nobody has asked is not."""
        return self.act("breakers", actions=None if actions is None else list(actions))

    def reset_breaker(self, action: str) -> dict[str, Any]:
        """Close a breaker: its destination is said to be back. Raises ``NoSuchBreaker``."""
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
        """Carry out one of the node's actions."""
        action = flight.Action(kind, json.dumps(values if body is None else body).encode())
        with raise_node_errors(self.place):
            (result,) = self._flight.do_action(action, self.options(timeout))
        return parse_metadata(result.body)

    def get(self, command: Mapping[str, Any], timeout: float | None) -> flight.FlightStreamReader:
        """A stream of blocks from the node."""
        ticket = flight.Ticket(json.dumps(command).encode())
        return self._flight.do_get(ticket, self.options(timeout))

    def exchange(
        self, command: Mapping[str, Any]
    ) -> tuple[flight.FlightStreamWriter, flight.FlightStreamReader]:
        """A stream of blocks to the node that can be cancelled."""
        return self._flight.do_exchange(_descriptor(command), self.options(None))

    def put(
        self, command: Mapping[str, Any], schema: pa.Schema, timeout: float | None = None
    ) -> tuple[flight.FlightStreamWriter, flight.FlightMetadataReader]:
        """A stream of blocks to the node."""
        call: Any = self._flight.do_put  # its stubs are those of do_exchange
        made: tuple[flight.FlightStreamWriter, flight.FlightMetadataReader] = call(
            _descriptor(command), schema, self.options(timeout)
        )
        return made

    def options(self, timeout: float | None) -> flight.FlightCallOptions:
        """What goes with every call."""
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)  # type: ignore[arg-type]

    def close(self) -> None:
        """Let go of the connection."""
        self._flight.close()


def parse_metadata(metadata: pa.Buffer | None) -> dict[str, Any]:
    """What a node has said, in JSON."""
    values: dict[str, Any] = json.loads(b"{}" if metadata is None else bytes(metadata))
    return values


def _descriptor(command: Mapping[str, Any]) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_command(json.dumps(command).encode())


def _plain(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs as JSON has them; what is not JSON by itself (a size, a mark) is written as text."""
    plain: dict[str, Any] = json.loads(json.dumps(knobs, default=str))
    return plain


def _contents(knob: str, path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(knob, f"{path}: {error.strerror or error}") from None
