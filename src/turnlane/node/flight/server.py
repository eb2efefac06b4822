"""The Flight plane: the queues of a node over Arrow Flight. ``docs/protocol.md`` is the contract.

gRPC runs every call on a thread of its own, so a call that waits does not delay others. A waiting
call checks regularly whether the plane is stopping or its client has left.

:class:`CallLimiter` decides by the headers of a call whether the call is allowed. Arrow reads the
first message of a stream before it calls a method of the server, so a check in the method would
come too late.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import ConfigError, StorageFailed, TransportDown
from turnlane.logs import get_logger
from turnlane.node.event_refs import QueueCopy
from turnlane.node.flight import messages
from turnlane.node.flight.actions import ACTIONS, Actions, Caller
from turnlane.node.flight.publish import Peer, PublishStream, SequenceMaps, read_chunks, read_schema
from turnlane.node.flight.read import (
    AbortableWait,
    consume_stream,
    get_queue_schema,
    read_stream,
    serve_receiver,
)
from turnlane.node.node import Node
from turnlane.node.staging import Stage
from turnlane.node.tables import Tables
from turnlane.runtime import start_thread
from turnlane.serving.address import Address, ConnectionWatch, shut_down_connections
from turnlane.serving.auth import Authority, Right, TlsSettings, parse_bearer

log = get_logger(__name__)

SENDING_METHODS: Final = (flight.FlightMethod.DO_PUT, flight.FlightMethod.DO_EXCHANGE)
"""The calls whose clients send blocks."""

CLOSE_SECONDS = 1.0
"""How long clients have to leave when the node stops, before their connections are shut down."""

_Commands = dict[str, type[messages.Command]]

PUT_COMMANDS: Final[_Commands] = {
    "publish": messages.PublishCommand,
    "stage": messages.StageCommand,
    "copy": messages.CopyCommand,
}
EXCHANGE_COMMANDS: Final[_Commands] = {
    "publish": messages.PublishCommand,
    "receive": messages.ReceiveCommand,
}
GET_COMMANDS: Final[_Commands] = {"read": messages.ReadCommand, "consume": messages.ConsumeCommand}

Reader = flight.MetadataRecordBatchReader

Headers = dict[str, list[str] | list[bytes]]


class FlightCall(flight.ServerMiddleware):
    """One call with its token; it counts against the limit of calls until it is completed."""

    def __init__(self, token: str | None, leave: Callable[[], None]) -> None:
        self.token = token
        self._leave = leave

    def call_completed(self, exception: BaseException | None) -> None:
        """Make room for another call."""
        del exception
        self._leave()


class CallLimiter(flight.ServerMiddlewareFactory):
    """Accepts or refuses calls by token, number and memory. Flight calls it from any thread."""

    def __init__(self, authority: Authority, limits: messages.FlightLimits) -> None:
        self.running = 0
        self._authority = authority
        self._most = limits.max_calls
        self._memory = limits.get_max_memory()
        self._lock = threading.Lock()

    def start_call(self, info: flight.CallInfo, headers: Headers) -> FlightCall:
        """Accept a call, or raise the error for its client."""
        values = [each for each in headers.get("authorization", ()) if isinstance(each, str)]
        token = parse_bearer(values[0] if values else None)
        with messages.translate_errors():
            self._authority.identify(token)
            if info.method in SENDING_METHODS and pa.total_allocated_bytes() > self._memory:
                raise TransportDown("the node is short of memory: try again", after=1.0)
            with self._lock:
                if self.running >= self._most:
                    message = f"the node has too many calls, {self._most} are allowed (max_calls)"
                    raise TransportDown(message, after=1.0)
                self.running += 1
        return FlightCall(token, self._leave)

    def _leave(self) -> None:
        with self._lock:
            self.running -= 1


class FlightPlane:
    """Serves a node over Arrow Flight from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        node: Node,
        authority: Authority,
        address: Address,
        tls: TlsSettings | None = None,
        *,
        limits: messages.FlightLimits | None = None,
        tables: Tables | None = None,
    ) -> None:
        self.node = node
        self.tables = tables or Tables()
        self.authority = authority
        self.sequence_maps = SequenceMaps()
        self.actions = Actions(node)
        self.limits = limits or messages.FlightLimits()
        self.calls = CallLimiter(authority, self.limits)
        self.stopping = False
        self._wanted = address
        self._tls = tls
        self._server: _FlightServer | None = None
        self._watch: ConnectionWatch | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._streams: set[PublishStream] = set()

    def start(self) -> None:
        """Listen; returns once it does. Raises ``ConfigError`` or ``AddressTaken``."""
        if self._wanted.port:
            # gRPC would share the port with another process that listens on it.
            self._wanted.listen(knob="flight.listen").close()
        arguments = {} if self._tls is None else self._tls.build_flight_arguments()
        scheme = "grpc+tcp" if self._tls is None else "grpc+tls"
        try:
            self._server = _FlightServer(self, f"{scheme}://{self._wanted}", arguments)
        except pa.ArrowException as error:
            raise ConfigError(
                "flight.listen", f"cannot listen on {self._wanted}: {error}"
            ) from None
        self._watch = ConnectionWatch(
            self._server.port, self.limits.max_connections, idle_timeout=self.limits.idle_timeout
        )
        # A program that ends without stop() would otherwise wait for its clients forever.
        atexit.register(self.stop)
        log.info("flight.listening", address=self.address)

    @property
    def address(self) -> Address:
        """The address that it listens on, with the real port once it was started."""
        return self._wanted if self._server is None else self._wanted.with_port(self._server.port)

    def stop(self, timeout: float = 5.0) -> None:
        """Refuse new calls, ask clients to leave, and shut down the remaining connections."""
        if self._server is None or self._watch is None or os.getpid() != self._process:
            return  # not started, or not in a forked child
        atexit.unregister(self.stop)
        self._watch.close()
        until = time.monotonic() + timeout
        self.stopping = True
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.leave("the node is stopping")
        stopper = start_thread("turnlane-flight-stop", self._server.shutdown)
        stopper.join(min(CLOSE_SECONDS, timeout / 2))
        while stopper.is_alive() and time.monotonic() < until:
            shut_down_connections(self._server.port)
            stopper.join(0.1)
        if stopper.is_alive():
            log.warning("flight.stop_timeout", address=self.address, seconds=timeout)

    # ── called by the server ─────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def run_call(self) -> Iterator[None]:
        """Run a call: refuse it while the node is stopping, and convert its errors."""
        with messages.translate_errors():
            if self.stopping or self.node.closing:
                raise TransportDown("the node is stopping")
            yield

    def get_caller(self, context: flight.ServerCallContext) -> Caller:
        """Return the caller of a call."""
        call = context.get_middleware("call")
        assert isinstance(call, FlightCall)
        return Caller(
            self.authority,
            call.token,
            lambda: self.stopping or self.node.closing or context.is_cancelled(),
        )

    def serve_stream(self, command: messages.PublishCommand, peer: Peer, caller: Caller) -> None:
        """Serve a client that publishes."""
        caller.check(Right.PUBLISH, command.publish)
        queue = self.node.queue(command.publish)
        if command.producer is not None:
            command = command.model_copy(update={"producer": caller.qualify_name(command.producer)})
        peer = peer._replace(check=lambda: caller.check(Right.PUBLISH, command.publish))
        stream = PublishStream(self.node.instance, queue, command, self.sequence_maps, peer)
        with self._lock:
            self._streams.add(stream)
        if self.stopping:
            stream.leave("the node is stopping")
        try:
            stream.run()
        finally:
            with self._lock:
                self._streams.discard(stream)

    def stage(self, opened: Stage | QueueCopy, peer: Peer) -> None:
        """Stage a client's blocks, or copies by its offsets; send the ids once they are on disk."""
        try:
            with opened:
                for block, _ in peer.chunks:
                    if block is not None and block.num_rows:
                        opened.add(block)
                if not peer.is_gone():  # else blocks may be missing
                    key = "stage" if isinstance(opened, Stage) else "stages"
                    answer = {key: opened.finish(), "events": opened.events}
                    peer.send(json.dumps(answer).encode())
        except OSError as error:
            raise StorageFailed(f"cannot stage: {error.strerror or error}") from error


class _FlightServer(flight.FlightServerBase):
    """The methods that Flight calls."""

    def __init__(self, plane: FlightPlane, location: str, arguments: dict[str, Any]) -> None:
        self._plane = plane
        super().__init__(location, middleware={"call": plane.calls}, **arguments)

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: Reader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Publish, like ``do_put`` but with a stream that the client can cancel; or receive."""
        with self._plane.run_call():
            caller = self._plane.get_caller(context)
            command = messages.parse_one_of(EXCHANGE_COMMANDS, descriptor.command)
            if isinstance(command, messages.ReceiveCommand):
                caller.check(Right.READ, command.receive)
                has_left = partial(caller.is_over, Right.READ, command.receive)
                serve_receiver(
                    self._plane.tables, command, self._read_chunks(reader), writer, has_left
                )
            elif isinstance(command, messages.PublishCommand):
                peer = Peer(
                    self._read_chunks(reader),
                    lambda data: writer.write_metadata(pa.py_buffer(data)),
                    context.is_cancelled,
                )
                self._plane.serve_stream(command, peer, caller)

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: Reader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Publish blocks, stage them, or stage copies of events of a queue."""
        with self._plane.run_call():
            command = messages.parse_one_of(PUT_COMMANDS, descriptor.command)
            peer = Peer(
                self._read_chunks(reader), partial(_send_metadata, writer), context.is_cancelled
            )
            caller, node = self._plane.get_caller(context), self._plane.node
            if isinstance(command, messages.StageCommand):
                caller.check(Right.PUBLISH, command.stage)
                schema, spare = read_schema(reader), command.spare
                stage = node.stage(command.stage, schema, spare, diskless=command.diskless)
                self._plane.stage(stage, peer)
            elif isinstance(command, messages.CopyCommand):
                caller.check(Right.READ, command.copy_)
                for queue in command.into:
                    caller.check(Right.PUBLISH, queue)
                self._plane.stage(node.copy(node.queue(command.copy_), command.into), peer)
            elif isinstance(command, messages.PublishCommand):
                self._plane.serve_stream(command, peer, caller)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """Read a range, or consume a batch."""
        with contextlib.ExitStack() as call:
            call.enter_context(self._plane.run_call())
            caller, node = self._plane.get_caller(context), self._plane.node
            command = messages.parse_one_of(GET_COMMANDS, ticket.ticket)
            if isinstance(command, messages.ConsumeCommand):
                caller.check(Right.READ, command.consume)
                wait = AbortableWait(command.wait, caller.is_abandoned)
                return consume_stream(node.leases, node.queue(command.consume), command, wait, call)
            assert isinstance(command, messages.ReadCommand)
            caller.check(Right.READ, command.read)
            return read_stream(node.queue(command.read), command, call)

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[bytes]:
        """Run an action and return its answer."""
        with self._plane.run_call():
            answer = self._plane.actions.answer(
                action.type, action.body, self._plane.get_caller(context)
            )
        return iter([json.dumps(answer).encode()])

    def list_actions(  # type: ignore[override] # the stubs have another type
        self, context: flight.ServerCallContext
    ) -> list[flight.ActionType]:
        """Return the actions of the node."""
        del context
        return [
            flight.ActionType(name, action.do.__doc__ or "") for name, action in ACTIONS.items()
        ]

    def list_flights(
        self, context: flight.ServerCallContext, criteria: str
    ) -> Iterator[flight.FlightInfo]:
        """Return the queues that the caller may read."""
        del criteria
        with self._plane.run_call():
            caller = self._plane.get_caller(context)
            names = self._plane.node.queues()
            found = [
                self._describe_queue(name) for name in names if caller.has_right(Right.READ, name)
            ]
        return iter(found)

    def get_flight_info(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        """Return the description of a queue, by its path or by a read command."""
        with self._plane.run_call():
            name = _get_queue_name(descriptor)
            self._plane.get_caller(context).check(Right.READ, name)
            return self._describe_queue(name)

    def _read_chunks(self, reader: Reader) -> messages.Chunks:
        return read_chunks(reader, self._plane.limits.max_block_bytes)

    def _describe_queue(self, name: str) -> flight.FlightInfo:
        queue = self._plane.node.queue(name)
        low, end = queue.low, queue.end
        ticket = flight.Ticket(json.dumps({"read": name, "first": low, "end": end}).encode())
        return flight.FlightInfo(
            get_queue_schema(queue),
            flight.FlightDescriptor.for_path(name),
            [flight.FlightEndpoint(ticket, [])],
            end - low,
            -1,
        )


def _send_metadata(writer: flight.FlightMetadataWriter, data: bytes) -> None:
    try:
        writer.write(pa.py_buffer(data))
    except OSError as error:  # Arrow raises nothing more specific
        raise TransportDown("the client has left") from error


def _get_queue_name(descriptor: flight.FlightDescriptor) -> str:
    if descriptor.path:
        return descriptor.path[0].decode("utf-8", "replace")
    return messages.parse_command(messages.ReadCommand, descriptor.command).read
