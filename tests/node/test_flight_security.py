"""Tests of access over Flight: tokens, rights and TLS."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight
from pydantic import SecretStr

from tests.certificates import CertAndKey, Certificates
from tests.contract.harness import PATIENCE, wait_until
from tests.node.conftest import Serve, ServedNode
from turnlane.client import Client, connect
from turnlane.errors import AddressTaken, ConfigError, NotAllowed, TransportDown
from turnlane.events import block_of
from turnlane.node.flight.server import FlightPlane
from turnlane.node.node import Node
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Authority, TlsSettings, TokenSettings

QUEUES = {"orders": {"kind": "memory"}, "logs": {"kind": "memory"}}


def _build_token(secret: str, rights: dict[str, Any], **more: Any) -> TokenSettings:
    return TokenSettings(name=secret, secret=SecretStr(secret), rights=rights, **more)


PAST = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
TOKENS = [
    _build_token("writer", {"orders": ["publish"]}),
    _build_token("reader", {"*": ["read"]}),
    _build_token("clerk", {"orders": ["read"]}),
    _build_token("boss", {"*": ["publish", "read", "admin"]}),
    _build_token("stale", {"*": ["publish", "read", "admin"]}, expires=PAST),
]


@pytest.fixture
def guarded_node(serve: Serve) -> ServedNode:
    """A node with tokens."""
    return serve(QUEUES, authority=Authority(TOKENS))


def _publish(client: Client, queue: str) -> None:
    writer, reader = client.nodes[0].exchange({"publish": queue})
    reader.read_chunk()
    writer.close()


CALLS: dict[str, Callable[[Client, str], object]] = {
    "publish": _publish,
    "stage": lambda client, queue: client.stage(queue, block_of([]).schema).finish(),
    "read": lambda client, queue: list(client.read(queue, 0, 1)),
    "wait": lambda client, queue: client.wait(queue, 0, 0.0),
    "consume": lambda client, queue: list(client.nodes[0].get({"consume": queue}, 5)),
    "settle": lambda client, queue: client.settle(queue, 0, 0),
    "stats": lambda client, queue: client.stats(queue),
    "full": lambda client, queue: client.nodes[0].full([queue]),
    "create": lambda client, queue: client.create(queue, kind="memory"),
    "drop": lambda client, queue: client.drop("made"),
}
NEEDS = {
    "publish": "publish",
    "stage": "publish",
    "full": "publish",
    "create": "admin",
    "drop": "admin",
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("token", [None, "wrong", "stale", "writer", "reader", "boss"])
def test_token_gives_only_its_rights(
    guarded_node: ServedNode, call: str, token: str | None
) -> None:
    guarded_node.node.create("made", kind="memory")
    rights = {"writer": ["publish"], "reader": ["read"], "boss": ["publish", "read", "admin"]}
    allowed = NEEDS.get(call, "read") in rights.get(token or "", [])
    client = guarded_node.client(token=token)
    if allowed:
        CALLS[call](client, "orders")
        return
    with pytest.raises((NotAllowed, flight.FlightError), match=r"turnlane:NotAllowed|token|right"):
        CALLS[call](client, "orders")


def test_copy_needs_rights_on_source_and_target(guarded_node: ServedNode) -> None:
    for token, is_allowed in {"writer": False, "reader": False, "boss": True}.items():
        copy = guarded_node.client(token=token).nodes[0].copy("logs", ["orders"])
        with contextlib.nullcontext() if is_allowed else pytest.raises(NotAllowed):
            assert copy.finish_all() == []


def test_rights_apply_to_their_queue_only(guarded_node: ServedNode) -> None:
    client = guarded_node.client(token="writer")
    with pytest.raises(NotAllowed, match="token writer does not give the right to publish on "):
        client.queue("logs").producer(ack="persisted").publish(b"x")
    assert set(client.queues()) == {"orders"}


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (None, flight.FlightUnauthenticatedError),
        ("wrong", flight.FlightUnauthenticatedError),
        ("stale", flight.FlightUnauthenticatedError),
        ("writer", flight.FlightUnauthorizedError),
    ],
)
def test_unknown_token_and_missing_right_have_different_errors(
    guarded_node: ServedNode, token: str | None, kind: type[Exception]
) -> None:
    headers: Any = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    options = flight.FlightCallOptions(headers=headers)
    with pytest.raises(kind, match="turnlane:NotAllowed"):
        guarded_node.flight().do_get(flight.Ticket(b'{"read": "orders"}'), options).read_all()


@pytest.mark.parametrize(
    "header", [b"writer", b"Basic writer", b"Bearer", b"Bearer  ", b"bearer x"]
)
def test_other_headers_are_not_accepted_as_tokens(guarded_node: ServedNode, header: bytes) -> None:
    options = flight.FlightCallOptions(headers=[(b"authorization", header)])  # type: ignore[list-item]
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(guarded_node.flight().do_action(flight.Action("ping", b""), options))


def test_lists_show_only_readable_queues(guarded_node: ServedNode) -> None:
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(guarded_node.flight().list_flights())
    options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer writer")])  # type: ignore[list-item]
    assert list(guarded_node.flight().list_flights(options=options)) == []
    descriptor = flight.FlightDescriptor.for_path("orders")
    with pytest.raises(flight.FlightUnauthorizedError):
        guarded_node.flight().get_flight_info(descriptor, options)


def test_lease_needs_the_right_to_read_its_queue(guarded_node: ServedNode) -> None:
    guarded_node.node.queue("orders").producer().publish(b"x")
    batch = guarded_node.client(token="reader").queue("orders").get(timeout=5)
    with pytest.raises(NotAllowed):
        guarded_node.client(token="writer").nodes[0].act("done", lease=batch.lease)  # type: ignore[attr-defined]
    with pytest.raises(NotAllowed):
        guarded_node.client().nodes[0].act("done", lease="nope")
    batch.done()


def test_commit_needs_rights_on_all_its_queues(guarded_node: ServedNode) -> None:
    guarded_node.node.queue("orders").producer().publish(b"x")
    writer, boss = guarded_node.client(token="writer"), guarded_node.client(token="boss")
    with boss.stage("logs", block_of([]).schema) as stage:
        stage.write(block_of([b"x"]))
        stage_id = stage.finish()
    calls: list[Callable[[], object]] = [
        lambda: writer.commit([stage_id]),
        lambda: writer.commit([], [("orders", 0, 1)]),
        lambda: writer.abort([stage_id]),
        lambda: guarded_node.client().nodes[0].epoch("w"),
    ]
    for call in calls:
        with pytest.raises(NotAllowed):
            call()
    assert boss.commit([stage_id], [("orders", 0, 1)])


def test_lane_takeover_needs_the_right_to_read_its_queue(guarded_node: ServedNode) -> None:
    boss, clerk = (
        guarded_node.client(token="boss").nodes[0],
        guarded_node.client(token="clerk").nodes[0],
    )
    lane = {"lane": "main", "spans": [[0, 1]]}
    boss.act("plan", body={**lane, "run": "1", "queue": "logs"})
    with pytest.raises(NotAllowed):
        clerk.act("plan", body={**lane, "run": "2", "queue": "orders"})
    boss.act("plan", body={**lane, "run": "1", "queue": "logs"})


def test_writers_of_different_tokens_are_independent(guarded_node: ServedNode) -> None:
    """Otherwise another client could turn the next epochs of a writer into repeats."""
    reader, boss = guarded_node.client(token="reader"), guarded_node.client(token="boss")
    guarded_node.node.queue("orders").producer().publish_block(block_of([b"x"] * 3))
    assert reader.commit(ranges=[("orders", 0, 1)], writer="w", epoch=1000)
    assert boss.nodes[0].epoch("w") is None
    assert boss.commit(ranges=[("orders", 1, 2)], writer="w", epoch=1)
    assert not boss.commit(ranges=[("orders", 2, 3)], writer="w", epoch=1)
    assert (boss.nodes[0].epoch("w"), reader.nodes[0].epoch("w")) == (1, 1000)


def test_producer_id_of_commits_is_refused(guarded_node: ServedNode) -> None:
    """Its sequence numbers would turn committed events into repeats."""
    with pytest.raises(ConfigError, match="producer"):
        guarded_node.client(token="boss").queue("orders", producer_id="turnlane.commits").producer(
            ack="persisted"
        ).publish(b"x", timeout=PATIENCE)


def test_producers_of_different_tokens_are_independent(serve: Serve) -> None:
    """Otherwise another client could turn the next events of a producer into repeats."""
    tokens = [_build_token(name, {"orders": ["publish"]}) for name in ("a", "b")]
    served = serve({"orders": {"durability": "always"}}, authority=Authority(tokens))
    queue = served.client(token="a").queue("orders", producer_id="web-1")
    one = queue.producer(ack="persisted")
    assert one.publish(b"one", timeout=PATIENCE)
    command = {"publish": "orders", "producer": "web-1", "ack": "persisted"}
    writer, _ = served.client(token="b").nodes[0].exchange(command)
    block = block_of([b"far ahead"])
    writer.begin(block.schema)
    writer.write_with_metadata(block, pa.py_buffer(b'{"sequence": 1000000}'))
    writer.done_writing()
    wait_until(lambda: served.node.queue("orders").end == 2)
    assert one.publish(b"two", timeout=PATIENCE)
    assert served.node.queue("orders").end == 3


@pytest.mark.parametrize("name", ["files/logs/1/2/3-x/0", "turnlane.commits"])
def test_reserved_producer_ids_are_refused(served: ServedNode, name: str) -> None:
    with pytest.raises(flight.FlightServerError, match="producer ids that begin with"):
        served.stream("disk", name).finish()


def test_stream_ends_when_its_token_expires(serve: Serve) -> None:
    """Also while it publishes, so the node always has progress to report."""
    now = [0.0]
    token = _build_token("soon", {"*": ["publish"]}, expires=dt.datetime.fromtimestamp(100, dt.UTC))
    served = serve(
        {"orders": {"durability": "always"}}, authority=Authority([token], now=lambda: now[0])
    )
    producer = served.client(token="soon").queue("orders").producer(ack="persisted")
    producer.publish(b"x", timeout=PATIENCE)
    now[0] = 200.0

    def publish_on() -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            producer.publish(b"y", timeout=PATIENCE)

    with pytest.raises(NotAllowed, match="has expired"):
        publish_on()


def test_expired_token_fails_the_queue_of_a_client(serve: Serve) -> None:
    """Every attempt would be refused; its publishers get the error."""
    now = [0.0]
    token = _build_token("soon", {"*": ["publish"]}, expires=dt.datetime.fromtimestamp(100, dt.UTC))
    authority = Authority([token], now=lambda: now[0])
    served = serve({"orders": {"durability": "always"}}, authority=authority, name="same")
    queue = served.client(token="soon").queue("orders")
    producer = queue.producer(ack="persisted")
    producer.publish(b"x")
    now[0] = 200.0
    port = served.plane.address.port
    served.plane.stop()
    again = FlightPlane(served.node, authority, Address(LOOPBACK, port))
    again.start()
    try:
        with pytest.raises(NotAllowed, match="has expired"):
            producer.publish(b"y")
    finally:
        again.stop()


# TLS


@pytest.fixture
def connect_client() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connecting(served: ServedNode, scheme: str = "turnlanes", **arguments: Any) -> Client:
        clients.append(connect(f"{scheme}://{served.plane.address}", **arguments))
        return clients[-1]

    yield connecting
    for client in clients:
        client.close()


Connected = Callable[..., Client]


def _list_visible(identity: CertAndKey) -> dict[str, Path]:
    cert, key = identity
    return {"tls_cert": cert, "tls_key": key}


def test_events_are_published_over_tls(
    serve: Serve, certificates: Certificates, connect_client: Connected
) -> None:
    served = serve(
        QUEUES, tls=TlsSettings(**certificates.server_knob()), authority=Authority(TOKENS)
    )
    client = connect_client(served, tls_ca=certificates.ca, token="boss")
    queue = client.queue("orders")
    queue.producer().publish(b"secret")
    with queue.get(timeout=10) as batch:
        assert [event.value for event in batch] == [b"secret"]


@pytest.mark.parametrize("scheme", ["turnlane", "turnlanes"])
def test_client_without_tls_or_with_another_authority_cannot_connect(
    serve: Serve, certificates: Certificates, connect_client: Connected, scheme: str
) -> None:
    served = serve(QUEUES, tls=TlsSettings(**certificates.server_knob()))
    arguments = {"tls_ca": certificates.strangers_ca} if scheme == "turnlanes" else {}
    with pytest.raises(TransportDown):
        connect_client(served, scheme, **arguments).nodes[0].ping(timeout=5)


def test_mutual_tls_requires_a_certificate_of_the_authority(
    serve: Serve, certificates: Certificates, connect_client: Connected
) -> None:
    served = serve(QUEUES, tls=TlsSettings(**certificates.server_knob(mutual=True)))
    good = connect_client(served, tls_ca=certificates.ca, **_list_visible(certificates.client))
    assert good.nodes[0].ping() == served.node.instance
    for bad in ({}, _list_visible(certificates.stranger)):
        with pytest.raises(TransportDown):
            connect_client(served, tls_ca=certificates.ca, **bad).nodes[0].ping(timeout=5)


def test_expired_certificate_is_refused(
    serve: Serve, certificates: Certificates, connect_client: Connected
) -> None:
    cert, key = certificates.issue("old", not_after=PAST, not_before=PAST)
    served = serve(QUEUES, tls=TlsSettings(cert=cert, key=key))
    with pytest.raises(TransportDown):
        connect_client(served, tls_ca=certificates.ca).nodes[0].ping(timeout=5)


# Listening


def test_taken_port_is_refused_at_the_start(serve: Serve, tmp_path: Path) -> None:
    """gRPC would share the port, and some connections would reach the other process."""
    first = serve(QUEUES)
    with Node(tmp_path / "second", QUEUES) as node:
        plane = FlightPlane(node, Authority(), first.plane.address)
        with pytest.raises(AddressTaken, match=r"flight.listen: cannot listen on"):
            plane.start()
        plane.stop()


def test_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with Node(tmp_path / "node", QUEUES) as node:
        plane = FlightPlane(node, Authority(), Address("192.0.2.1", 0))
        with pytest.raises(ConfigError, match="cannot listen on"):
            plane.start()


def test_ipv6_address_is_served(tmp_path: Path) -> None:
    with Node(tmp_path / "node", QUEUES) as node:
        plane = FlightPlane(node, Authority(), Address("::1", 0))
        try:
            plane.start()
        except ConfigError:
            pytest.skip("there is no IPv6 here")
        with connect(f"turnlane://{plane.address}") as client:
            assert client.nodes[0].ping() == node.instance
        plane.stop()
