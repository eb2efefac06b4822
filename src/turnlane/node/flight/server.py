"""The Flight plane: a node's queues over Arrow Flight. ``docs/protocol.md`` is its contract.

gRPC gives every call a thread of its own, as many as it takes, so that calls that wait hold nobody
up. Calls that wait look now and then whether the plane is stopping or their client is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import ConfigError, StorageFailed, TransportDown
from turnlane.events import Block
from turnlane.node.flight.actions import ACTIONS, Actions, Caller
from turnlane.node.flight.commands import (
    Command,
    Consume,
    Copy,
    Publish,
    Read,
    Receive,
    StageBlocks,
    one_of,
    parsed,
)
from turnlane.node.flight.errors import FlightLimits, translated
from turnlane.node.flight.publish import Chunks, Peer, PublishStream, Routes, chunks_of, columns_of
from turnlane.node.flight.read import Patience, consume_stream, read_stream, receive, schema_of
from turnlane.node.node import Node
from turnlane.node.tables import Tables
from turnlane.serving.address import Address, ConnectionWatch, cut_connections
from turnlane.serving.auth import Authority, Right, TlsSettings, bearer_of

# ── flight_calls ──
# Who may call over Flight at all, and how many at a time.
#
# Judged by a call's headers, before anything it sends is waited for: Arrow reads the first
# message
# of a stream before it calls any method of ours, so that those would come too late.

BRINGING: Final = (flight.FlightMethod.DO_PUT, flight.FlightMethod.DO_EXCHANGE)
"""The calls whose clients send blocks."""

Headers = dict[str, list[str] | list[bytes]]


class Call(flight.ServerMiddleware):
    """One call: the token that came with it, and its place among all."""

    def __init__(self, token: str | None, leave: Callable[[], None]) -> None:
        self.token = token
        self._leave = leave

    def call_completed(self, exception: BaseException | None) -> None:
        """Make room for another."""
        del exception
        self._leave()


class Calls(flight.ServerMiddlewareFactory):
    """Lets calls in, or refuses them. Flight calls it from any thread."""

    def __init__(self, authority: Authority, limits: FlightLimits) -> None:
        self.running = 0
        self._authority = authority
        self._most = limits.max_calls
        self._memory = limits.memory()
        self._lock = threading.Lock()

    def start_call(self, info: flight.CallInfo, headers: Headers) -> Call:
        """A call begins. Raises what the client is refused with."""
        values = [each for each in headers.get("authorization", ()) if isinstance(each, str)]
        token = bearer_of(values[0] if values else None)
        with translated():
            self._authority.identify(token)
            if info.method in BRINGING and pa.total_allocated_bytes() > self._memory:
                raise TransportDown("the node is short of memory", after=1.0)
            self._enter()
        return Call(token, self._leave)

    def _enter(self) -> None:
        with self._lock:
            if self.running >= self._most:
                raise TransportDown("the node has too many calls at a time", after=1.0)
            self.running += 1

    def _leave(self) -> None:
        with self._lock:
            self.running -= 1


log = logging.getLogger(__name__)

POLITE_SECONDS = 1.0
"""How long clients that were told that the node stops have to leave before they are cut off."""

PUTS: Final[dict[str, type[Command]]] = {"publish": Publish, "stage": StageBlocks, "copy": Copy}
"""What a client may do with blocks."""

Reader = flight.MetadataRecordBatchReader


class FlightPlane:
    """Serves a node over Arrow Flight from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        node: Node,
        authority: Authority,
        address: Address,
        tls: TlsSettings | None = None,
        *,
        limits: FlightLimits | None = None,
        tables: Tables | None = None,
    ) -> None:
        self.node = node
        self.tables = tables or Tables()
        self.authority = authority
        self.routes = Routes()
        self.actions = Actions(node)
        self.limits = limits or FlightLimits()
        self.calls = Calls(authority, self.limits)
        self.stopping = False
        self._wanted = address
        self._tls = tls
        self._server: _Server | None = None
        self._watch: ConnectionWatch | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._streams: set[PublishStream] = set()

    def start(self) -> None:
        """Listen; returns once it does. Raises ``ConfigError`` or ``AddressTaken``."""
        if self._wanted.port:
            # gRPC would share the port with another process that listens on it.
            self._wanted.listen(knob="flight.listen").close()
        arguments = {} if self._tls is None else self._tls.flight_arguments()
        scheme = "grpc+tcp" if self._tls is None else "grpc+tls"
        try:
            self._server = _Server(self, f"{scheme}://{self._wanted}", arguments)
        except pa.ArrowException as error:
            raise ConfigError(
                "flight.listen", f"cannot listen on {self._wanted}: {error}"
            ) from None
        self._watch = ConnectionWatch(
            self._server.port,
            self.limits.max_connections,
            idle_timeout=self.limits.idle_timeout,
        )
        # A program that ends without a stop would else wait for its clients, for ever.
        atexit.register(self.stop)
        log.info("Flight on %s", self.address)

    @property
    def address(self) -> Address:
        """Where it listens, with the port it was given."""
        return self._wanted if self._server is None else self._wanted.with_port(self._server.port)

    def stop(self, timeout: float = 5.0) -> None:
        """Take no more calls, tell clients to leave, and cut off those that do not."""
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
        stopper = threading.Thread(target=self._server.shutdown, daemon=True)
        stopper.start()
        stopper.join(min(POLITE_SECONDS, timeout / 2))
        while stopper.is_alive() and time.monotonic() < until:
            cut_connections(self._server.port)
            stopper.join(0.1)
        if stopper.is_alive():
            log.warning("Flight on %s: some calls did not end in %g s", self.address, timeout)

    # ── for the server ───────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """What is done for a client that was let in."""
        with translated():
            if self.stopping or self.node.closing:
                raise TransportDown("the node is stopping")
            yield

    def caller(self, context: flight.ServerCallContext) -> Caller:
        """Who is calling."""
        call = context.get_middleware("call")
        assert isinstance(call, Call)
        return Caller(
            self.authority,
            call.token,
            lambda: self.stopping or self.node.closing or context.is_cancelled(),
        )

    def serve_stream(self, command: Publish, peer: Peer, caller: Caller) -> None:
        """Serve a publishing client."""
        caller.check(Right.PUBLISH, command.publish)
        queue = self.node.queue(command.publish)
        if command.producer is not None:
            command = command.model_copy(update={"producer": caller.own(command.producer)})
        peer = peer._replace(check=lambda: caller.check(Right.PUBLISH, command.publish))
        stream = PublishStream(self.node.instance, queue, command, self.routes, peer)
        with self._lock:
            self._streams.add(stream)
        if self.stopping:
            stream.leave("the node is stopping")
        try:
            stream.run()
        finally:
            with self._lock:
                self._streams.discard(stream)

    def stage(self, command: StageBlocks, schema: pa.Schema, peer: Peer) -> None:
        """Write a client's blocks to a stage, and say which once it is finished."""
        queue, spare = command.stage, command.spare
        with _storing(), self.node.stage(queue, schema, spare, diskless=command.diskless) as stage:
            if _has_given_all(peer, stage.add):
                answer = {"stage": stage.finish(), "events": stage.events}
                peer.tell(json.dumps(answer).encode())

    def copy(self, command: Copy, peer: Peer) -> None:
        """Stage events of one queue for others, and say which stages once they are on disk."""
        node, source = self.node, self.node.queue(command.copy_)
        with _storing(), node.copying(source, command.into) as copying:
            if _has_given_all(peer, copying.add):
                answer = {"stages": copying.finish(), "events": copying.events}
                peer.tell(json.dumps(answer).encode())


@contextlib.contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"cannot stage: {error.strerror or error}") from error


def _has_given_all(peer: Peer, take: Callable[[Block], None]) -> bool:
    """Take a client's blocks; false if it is gone, for then this may not have been all."""
    for block, _ in peer.chunks:
        if block is not None and block.num_rows:
            take(block)
    return not peer.is_gone()


class _Server(flight.FlightServerBase):
    """Flight's methods, each in few words."""

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
        """Publish, as ``do_put`` does but so that the client can cancel it; or receive."""
        with self._plane.call():
            caller = self._plane.caller(context)
            command = one_of({"publish": Publish, "receive": Receive}, descriptor.command)
            if isinstance(command, Receive):
                caller.check(Right.READ, command.receive)
                has_left = partial(caller.has_left, Right.READ, command.receive)
                receive(self._plane.tables, command, self._chunks(reader), writer, has_left)
            elif isinstance(command, Publish):
                peer = Peer(
                    self._chunks(reader),
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
        """Publish blocks, stage them, or stage copies of what a queue has."""
        with self._plane.call():
            command = one_of(PUTS, descriptor.command)
            peer = Peer(self._chunks(reader), partial(_tell, writer), context.is_cancelled)
            caller = self._plane.caller(context)
            if isinstance(command, StageBlocks):
                caller.check(Right.PUBLISH, command.stage)
                self._plane.stage(command, columns_of(reader), peer)
            elif isinstance(command, Copy):
                caller.check(Right.READ, command.copy_)
                for queue in command.into:
                    caller.check(Right.PUBLISH, queue)
                self._plane.copy(command, peer)
            elif isinstance(command, Publish):
                self._plane.serve_stream(command, peer, caller)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """Read a range, or consume a batch."""
        with contextlib.ExitStack() as call:
            call.enter_context(self._plane.call())
            caller, node = self._plane.caller(context), self._plane.node
            command = one_of({"read": Read, "consume": Consume}, ticket.ticket)
            if isinstance(command, Consume):
                caller.check(Right.READ, command.consume)
                queue, patience = (
                    node.queue(command.consume),
                    Patience(command.wait, caller.in_vain),
                )
                return consume_stream(node.leases, queue, command, patience, call)
            assert isinstance(command, Read)
            caller.check(Right.READ, command.read)
            return read_stream(node.queue(command.read), command, call)

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[bytes]:
        """Answer a question or carry out an order."""
        with self._plane.call():
            answer = self._plane.actions.answer(
                action.type, action.body, self._plane.caller(context)
            )
        return iter([json.dumps(answer).encode()])

    def list_actions(  # type: ignore[override] # the stubs have another type
        self, context: flight.ServerCallContext
    ) -> list[flight.ActionType]:
        """The actions there are."""
        del context
        return [
            flight.ActionType(name, action.do.__doc__ or "") for name, action in ACTIONS.items()
        ]

    def list_flights(
        self, context: flight.ServerCallContext, criteria: str
    ) -> Iterator[flight.FlightInfo]:
        """The queues that the caller may read."""
        del criteria
        with self._plane.call():
            caller = self._plane.caller(context)
            names = self._plane.node.queues()
            found = [self._info(name) for name in names if caller.may(Right.READ, name)]
        return iter(found)

    def get_flight_info(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        """A queue, by path or by a read command."""
        with self._plane.call():
            name = _queue_of(descriptor)
            self._plane.caller(context).check(Right.READ, name)
            return self._info(name)

    def _chunks(self, reader: Reader) -> Chunks:
        return chunks_of(reader, self._plane.limits.max_block_bytes)

    def _info(self, name: str) -> flight.FlightInfo:
        queue = self._plane.node.queue(name)
        low, end = queue.low, queue.end
        ticket = flight.Ticket(json.dumps({"read": name, "first": low, "end": end}).encode())
        return flight.FlightInfo(
            schema_of(queue),
            flight.FlightDescriptor.for_path(name),
            [flight.FlightEndpoint(ticket, [])],
            end - low,
            -1,
        )


def _tell(writer: flight.FlightMetadataWriter, data: bytes) -> None:
    try:
        writer.write(pa.py_buffer(data))
    except OSError as error:  # all that Arrow says of it
        raise TransportDown("the client is gone") from error


def _queue_of(descriptor: flight.FlightDescriptor) -> str:
    if descriptor.path:
        return descriptor.path[0].decode("utf-8", "replace")
    return parsed(Read, descriptor.command).read
