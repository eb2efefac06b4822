"""The conversations that are recorded over Flight and HTTP, and the node that takes part."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import urllib.request
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

import turnlane
from tests.compatibility.flight_exchange import Call, record_calls
from tests.compatibility.flight_peer import FlightPeer, connect_peer
from tests.compatibility.http_exchange import Exchange, HttpRecorder
from tests.compatibility.identifiers import replace_identifiers
from tests.compatibility.queue_directories import TIMESTAMP, make_block
from tests.compatibility.running import NodeProcess, wait_until
from turnlane import table
from turnlane.errors import TurnlaneError

NO_TOKEN: Final = "no token"
SECRETS: Final = {"shop": "shop-secret-0123456789", "reader": "reader-secret-0123456789"}

CONFIGURATION: Final = """\
node:
  data: data
  flight: {listen: "127.0.0.1:0"}
  http: {listen: "127.0.0.1:0", max_request_bytes: 64Ki}
  shutdown_timeout: 5s
TOKENS
queues:
  orders: {durability: always}
  shipped: {durability: always}
  alerts: {durability: always}
  alerts.dead: {durability: always}
  memory: {kind: memory, size: 100}
  tiny: {kind: memory, size: 3, full_timeout: 200ms, max_event_bytes: 1Ki}
  web: {durability: always}
tables:
  mails: {url: "sqlite:///mails.db"}
inputs:
  - {type: http, queue: web, listen: "127.0.0.1:0", routes: {"/orders/*": orders}}
  - {type: otlp, queue: web, listen: "127.0.0.1:0"}
  - {type: elasticsearch, queue: web, listen: "127.0.0.1:0"}
"""
TOKENS: Final = f"""\
  tokens:
    - {{name: shop, secret: {SECRETS["shop"]}, rights: {{orders: [publish], "*": [read]}}}}
    - {{name: reader, secret: {SECRETS["reader"]}, rights: {{memory: [read]}}}}
"""


def prepare_node(directory: Path) -> None:
    """Write the configurations of the node, and make its table."""
    (directory / "open.yaml").write_text(CONFIGURATION.replace("TOKENS\n", ""))
    (directory / "tokens.yaml").write_text(CONFIGURATION.replace("TOKENS\n", TOKENS))
    with contextlib.chdir(directory), table.connect("sqlite:///mails.db") as database:
        database.sql("CREATE QUEUE mails (customer BIGINT, subject TEXT) SHARD BY (customer)")


def fill_table(directory: Path) -> None:
    """Insert three events; the same before each exchange, so that they get the same ids."""
    with contextlib.chdir(directory), table.connect("sqlite:///mails.db") as database:
        rows = [{"customer": at, "subject": f"s{at}", "fire_at": 1 + at} for at in range(3)]
        database.queue("mails").insert(rows)


def find_servers(node: NodeProcess) -> dict[str, str]:
    """Return the HTTP addresses of a node and of its inputs, by name."""
    return {"node": node.http, **node.inputs}


def wait_for_leader(node: NodeProcess) -> None:
    """Wait until the node serves its table."""
    recorder = HttpRecorder({"node": node.http})
    wait_until(
        lambda: (
            '"leads": true' in json.dumps(recorder.send("GET", "/tables"))
            or recorder.exchanges[-1]["answer"]["status"] != 200
        ),
        "the node leads its table",
    )


# ── Flight ───────────────────────────────────────────────────────────────────────────────────────


def record_flight(node: NodeProcess) -> list[Call]:
    """Let a client use a node in every way, and return all calls with their answers."""
    with record_calls() as calls:
        for chapter in (
            _administer,
            _publish,
            _consume,
            _read_by_offset,
            _stage_and_commit,
            _run_lane,
            _use_breaker,
            _receive_from_table,
            _make_mistakes,
        ):
            chapter(node)
    text = re.sub(r'(\\"holder\\": \\")[^"\\]*', r"\1a client", json.dumps(calls))
    found: list[Call] = replace_identifiers(json.loads(text))
    return found


def record_flight_with_tokens(node: NodeProcess) -> dict[str, list[Call]]:
    """Ask the same questions with no token, with a wrong token, and with few rights."""
    recorded: dict[str, list[Call]] = {}
    for name in (NO_TOKEN, "wrong", *SECRETS):
        with record_calls() as calls, connect_peer(node.location, find_secret(name)) as peer:
            for queue in ("orders", "memory"):
                _ask(peer, "stats", queue=queue)
                _ask(peer, "create", queue=queue, knobs={})
                with contextlib.suppress(pa.ArrowException):
                    peer.put({"publish": queue}, make_block(0, 1))
            _ask(peer, "queues")
            with contextlib.suppress(pa.ArrowException):
                peer.client.list_actions(peer.options)
        recorded[name] = replace_identifiers(calls)
    return recorded


def find_secret(name: str) -> str | None:
    """Return the secret of a token, by its name."""
    return None if name == NO_TOKEN else SECRETS.get(name, "some-other-secret-01234")


def _administer(node: NodeProcess) -> None:
    with turnlane.connect(node.url) as client:
        first: Any = client.nodes[0]
        first.ping()
        client.create("made", max_bytes="1Gi", durability="never")
        client.create("made", max_bytes="1Gi", durability="never")
        with contextlib.suppress(TurnlaneError):
            client.create("made", kind="memory")
        with contextlib.suppress(TurnlaneError):
            client.create("wrong", max_bytes="lots")
        first.create_for_action("for_action", kind="disk")
        client.queues()
        client.stats("made")
        client.stats()
        client.drop("made")
        client.drop("for_action")
        with contextlib.suppress(TurnlaneError):
            client.drop("made")
        with contextlib.suppress(TurnlaneError):
            client.drop("orders")
    with connect_peer(node.location) as peer:
        peer.client.list_actions(peer.options)
        peer.client.get_flight_info(flight.FlightDescriptor.for_path("shipped"), peer.options)
        list(peer.client.list_flights())


def _publish(node: NodeProcess) -> None:
    with turnlane.connect(node.url) as client:
        with client.queue("orders", producer_id="till-3") as queue:
            producer = queue.producer(ack="persisted")
            producer.publish_block(make_block(0, 5))
            producer.publish_block(make_block(5, 5, is_wide=True))  # another stream
        with client.queue("orders", producer_id="till-3") as queue:  # goes on with its numbers
            queue.producer(ack="persisted").publish(b"one", "ann", timestamp=TIMESTAMP)
        with client.queue("memory") as queue:
            queue.producer(ack="accepted").publish_block(make_block(0, 3))
            queue.get(timeout=5).done()
        with contextlib.suppress(TurnlaneError), client.queue("nowhere") as queue:
            queue.producer(ack="persisted").publish(b"lost")
    with connect_peer(node.location) as peer:
        peer.put({"publish": "orders"}, make_block(20, 2))
        wrong = pa.RecordBatch.from_pydict({"value": [b"x"], "amount": ["a text"]})
        for name, block in (("orders", wrong), ("tiny", turnlane.block_of([b"x" * 2000]))):
            with contextlib.suppress(pa.ArrowException):
                peer.put({"publish": name, "producer": "till-4", "ack": "accepted"}, block)


def _consume(node: NodeProcess) -> None:
    with turnlane.connect(node.url) as client, client.queue("orders") as queue:
        done, dead, released = (queue.get(3, timeout=5) for _ in range(3))
        done.done()
        dead.dead()
        released.release()
        queue.get(3, timeout=5).done()
        with contextlib.suppress(turnlane.QueueEmpty):
            client.queue("shipped").get(timeout=0)
    with connect_peer(node.location) as peer:
        batch = peer.get(consume="orders", max_events=1, lease=30.0)
        lease = batch[0][0]["lease"]
        _ask(peer, "extend", lease=lease)
        _ask(peer, "extend", lease=lease, seconds=5)
        _ask(peer, "release", lease=lease)
        _ask(peer, "done", lease=lease)


def _read_by_offset(node: NodeProcess) -> None:
    with turnlane.connect(node.url) as client:
        first: Any = client.nodes[0]
        client.queue("shipped").producer(ack="persisted").publish_block(make_block(0, 4))
        ends = client.wait("shipped", beyond=-1, timeout=0)
        client.wait("shipped", beyond=100, timeout=0.1)
        list(client.read("shipped", 1, 3))
        list(first.read("shipped", 0, 4, ["key", "severity", "turnlane_priority"]))
        client.settle("shipped", 0, 1)
        client.settle("shipped", 1, 2, queue_id=ends.queue_id)
        client.settle("shipped", 2, 3, queue_id="0" * 31 + "x")
        with contextlib.suppress(TurnlaneError):
            list(client.read("nowhere", 0, 1))


def _stage_and_commit(node: NodeProcess) -> None:
    with turnlane.connect(node.url) as client:
        first: Any = client.nodes[0]
        with client.stage("alerts", make_block(0, 0).schema) as stage:
            stage.write(make_block(0, 3))
            stage_id = stage.finish()
        client.commit([stage_id], [("shipped", 2, 3)], writer="query-1", epoch=4)
        client.commit([stage_id], [("shipped", 2, 3)], writer="query-1", epoch=4)
        with contextlib.suppress(TurnlaneError):
            client.commit([stage_id])
        first.epoch("query-1")
        first.epoch("unknown")
        with client.stage("alerts", make_block(0, 0).schema) as stage:
            stage.write(make_block(10, 1))
            client.abort([stage.finish()])
        with first.stage("alerts.dead", make_block(0, 0).schema, 100, diskless=True) as stage:
            stage.write(make_block(10, 1))
            spare_id = stage.finish()
        first.commit([spare_id], exact=True)
        with first.copy("shipped", ["alerts", "orders"]) as stage:
            columns: list[Any] = [pa.array([3], pa.int64()), pa.array([3], pa.int64())]
            stage.write(pa.RecordBatch.from_arrays(columns, names=["offset", "routes"]))
            ids = stage.finish_all()
        first.commit(ids, [("shipped", 3, 4)])


def _run_lane(node: NodeProcess) -> None:
    with turnlane.connect(node.url) as client:
        first: Any = client.nodes[0]
        first.unsettled("alerts", 10, newest=1, lane="alerts", into=["shipped"])
        first.full(["alerts", "shipped"])
        first.plan("alerts", "run-1", "alerts", [(0, 3)], 7)
        first.planned("alerts", "run-1")
        first.commit((), lane="alerts", run="run-1", batch=7, kept=[(0, 1)], dead=[(1, 2)])
        first.unsettled("alerts", 10, lane="alerts")
        first.plan("alerts", "run-2", "alerts", [(0, 1)])
        with contextlib.suppress(TurnlaneError):
            first.planned("alerts", "run-1")
        with contextlib.suppress(TurnlaneError):
            first.commit((), lane="alerts", run="run-1")
        first.purge("alerts", [(0, 1)], "a trial")


def _use_breaker(node: NodeProcess) -> None:
    """Report on a destination, as the tasks of a lane do."""
    task = {
        "action": "alerts",
        "queue": "alerts",
        "task": "task-1",
        "workers": 2,
        "settings": {
            "concurrency": "adaptive",
            "max_concurrency": 32,
            "max_in_flight": 64,
            "rate_limit": 100.0,
            "backoff": 1.0,
            "max_backoff": 300.0,
            "jitter": 0.0,
            "breaker_failures": 1,
            "breaker_reset": 30.0,
            "max_time": 5.0,
        },
        "preparing": 0,
        "sending": 0,
        "probe": None,
    }
    report: dict[str, Any] = {
        "successes": 2,
        "partial": 0,
        "failures": 0,
        "retry_after": None,
        "probe": None,
        "error": None,
        "attempts": {"0:1": 2},
        "concurrency": 4,
        "delivered": 20,
        "dead": 1,
        "kept": 2,
        "rejected": 0,
        "retries": 2,
        "retry_successes": 1,
        "retry_failures": {"timeout": 1},
        "latency": 0.25,
    }
    failed = {name: type(value)() for name, value in report.items() if value is not None}
    failed |= {"failures": 1, "error": "RetryLater: busy", "concurrency": None, "latency": None}
    with connect_peer(node.location) as peer:
        _ask(peer, "permit", **task)
        _ask(peer, "claim", **task, count=10, within=1.0)
        _ask(peer, "report", **task, report=report)
        _ask(peer, "report", **task, report=failed)
        _ask(peer, "permit", **task)
        _ask(peer, "breakers", actions=["alerts"])
        _ask(peer, "reset_breaker", action="alerts")
        _ask(peer, "report", **task, ended=True)
        _ask(peer, "breakers")
        _ask(peer, "reset_breaker", action="unknown")


def _receive_from_table(node: NodeProcess) -> None:
    with turnlane.connect(node.url) as client, client.table("mails").receive(prefetch=10) as came:
        events: list[table.TableEvent] = []
        while len(events) < 3:
            events += came.take(3 - len(events), timeout=30)
        came.ack(events[:2])
        came.flush(30)
        events[2].nack(delay=3600.0, error="busy")
        came.ack(events[:1])
        came.flush(30)


def _make_mistakes(node: NodeProcess) -> None:
    with connect_peer(node.location) as peer:
        for kind, body in (
            ("stats", b"{"),
            ("stats", b"[]"),
            ("stats", b'{"quue": "orders"}'),
            ("settle", b'{"queue": "orders", "first": -1, "end": 2}'),
            ("create", b'{"queue": "a/b"}'),
            ("done", b'{"lease": "unknown"}'),
            ("unheard-of", b"{}"),
        ):
            with contextlib.suppress(pa.ArrowException):
                peer.client.do_action(flight.Action(kind, body), peer.options)
        for ticket in (b"{}", b'{"read": "nowhere"}', b'{"consume": "orders", "wait": 1000}'):
            with contextlib.suppress(pa.ArrowException):
                list(peer.client.do_get(flight.Ticket(ticket), peer.options))
        with contextlib.suppress(pa.ArrowException):
            peer.put({"publish": "orders", "producer": "turnlane.own"}, make_block(0, 1))


def _ask(peer: FlightPeer, kind: str, **body: Any) -> None:
    with contextlib.suppress(pa.ArrowException):
        peer.act(kind, **body)


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────


def record_http(node: NodeProcess) -> list[Exchange]:
    """Send every kind of request, and return requests and answers."""
    web = HttpRecorder(find_servers(node))
    _publish_over_http(web)
    _consume_over_http(web)
    _administer_over_http(web)
    _receive_over_http(web)
    _send_to_inputs(web)
    found: list[Exchange] = replace_identifiers(web.exchanges)
    return found


def record_http_with_tokens(node: NodeProcess) -> dict[str, list[Exchange]]:
    """Send the same requests with no token, with a wrong token, and with few rights."""
    recorded: dict[str, list[Exchange]] = {}
    for name in (NO_TOKEN, "wrong", *SECRETS):
        web = HttpRecorder(find_servers(node))
        secret = find_secret(name)
        headers: dict[str, Any] = {} if secret is None else {"authorization": f"Bearer {secret}"}
        web.send("GET", "/healthz", **headers)
        web.send("GET", "/queues/memory", **headers)
        web.send("POST", "/queues/orders/events", b"hello", **headers)
        web.send("PUT", "/queues/new", {}, **headers)
        web.send("GET", "/metrics", **headers)
        recorded[name] = replace_identifiers(_without_metrics(web.exchanges))
    return recorded


def _without_metrics(exchanges: list[Exchange]) -> list[Exchange]:
    for each in exchanges:
        if each["request"]["path"] == "/metrics":
            each["answer"].pop("body", None)
    return exchanges


def _publish_over_http(web: HttpRecorder) -> None:
    place = "/queues/orders/events"
    stamp = {"timestamp": TIMESTAMP}
    web.send("POST", place, b"hello", content_type="text/plain")
    web.send("POST", f"{place}?key=k&severity=3&timestamp={TIMESTAMP}", b"\xff\x00")
    web.send(
        "POST", place, b"x", x_turnlane_key="k", x_turnlane_source="s", x_turnlane_severity="4"
    )
    web.send(
        "POST", place, {"value": "a", "key": "k", "severity": 6, "headers": {"a": "b"}, **stamp}
    )
    web.send("POST", place, [{"data": {"order": 1}, **stamp}, {"value_base64": "//4=", **stamp}])
    lines = gzip.compress(b'{"value": "a"}\n{"value": "b"}\n', mtime=0)
    web.send("POST", place, lines, content_type="application/x-ndjson", content_encoding="gzip")
    for _ in range(2):
        web.send("POST", place, b"paid", producer_id="shop", sequence="0")
    web.send("POST", f"{place}?ack=accepted&timeout=1s", b"quick")
    for body in ([{"value": "b", "severty": 3}], [{"value": "a", "data": 1}], 5, [{"value": 7}]):
        web.send("POST", place, body)
    web.send("POST", place, b"{", content_type="application/json")
    web.send("POST", place, b"x", content_encoding="br")
    web.send("POST", place, b"x" * 70_000)
    web.send("POST", f"{place}?ack=never", b"x")
    web.send("POST", "/queues/nowhere/events", b"x")
    web.send("POST", "/queues/tiny/events", b"x" * 2000)
    for _ in range(4):
        web.send("POST", "/queues/tiny/events?timeout=0.1s", b"x")
    web.send("POST", place, b"x", producer_id="turnlane.own", sequence="0")


def _consume_over_http(web: HttpRecorder) -> None:
    place = "/queues/orders/events"
    for verb in ("done", "dead", "release"):
        batch = web.send("GET", f"{place}?max_events=2&wait=5s&lease=1m")
        web.send("POST", f"/leases/{batch['lease']}/extend?lease=2m")
        web.send("POST", f"/leases/{batch['lease']}/{verb}")
    web.send("POST", f"/leases/{batch['lease']}/done")
    web.send("GET", f"{place}?max_events=1")
    web.send("GET", "/queues/shipped/events?wait=0s")
    web.send("GET", f"{place}?lease=5h")
    web.send("GET", "/queues/orders/peek?first=2&max=3")
    web.send("POST", "/queues/orders/settle", {"first": 2, "end": 4})
    web.send("POST", "/queues/orders/settle", {"first": 2})


def _administer_over_http(web: HttpRecorder) -> None:
    web.send("GET", "/healthz")
    web.send("GET", "/readyz")
    web.send("PUT", "/queues/audit", {"durability": "always", "max_bytes": "1Gi"})
    web.send("PUT", "/queues/audit", {"durability": "always", "max_bytes": "1Gi"})
    web.send("PUT", "/queues/audit", {"durability": "never"})
    web.send("PUT", "/queues/other", {"durabilty": "never"})
    web.send("GET", "/queues/audit")
    web.send("GET", "/queues")
    web.send("DELETE", "/queues/audit")
    web.send("DELETE", "/queues/audit")
    web.send("DELETE", "/queues/orders")
    web.send("GET", "/breakers")
    web.send("POST", "/breakers/unknown/reset")
    web.send("GET", "/nowhere")
    web.send("PATCH", "/queues")
    web.send("GET", "/queues", origin="https://elsewhere.example")
    web.send("GET", "/queues", host="elsewhere.example")


def _receive_over_http(web: HttpRecorder) -> None:
    web.send("GET", "/tables")
    web.send("GET", "/tables/unknown/events")
    web.send("GET", "/tables/mails/events?prefetch=10", lines=2)
    web.send("POST", "/tables/mails/streams/unknown/ack", {"events": [0]})
    web.send("POST", "/tables/mails/streams/unknown/nack", {"events": [[0, 1]], "delay": 5})


def _send_to_inputs(web: HttpRecorder) -> None:
    web.send("POST", "/orders/web", [{"id": 1}, {"id": 2}], server="http")
    web.send("PUT", "/notes", b"first\nsecond\n", server="http", content_type="text/plain")
    web.send("POST", "/notes", b"{", server="http", content_type="application/json")
    web.send("GET", "/notes", server="http")
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": {"stringValue": "no"}}]}]}]}
    web.send("POST", "/v1/logs", logs, server="otlp")
    web.send("POST", "/v1/logs", b"\xff", server="otlp", content_type="application/x-protobuf")
    web.send("POST", "/v1/unknown", {}, server="otlp")
    bulk = (
        b'{"index": {"_index": "shop", "_id": "1"}}\n{"total": 1}\n'
        b'{"create": {"_index": "shop", "_id": "2"}}\nnot json\n'
        b'{"delete": {"_index": "shop", "_id": "3"}}\n'
    )
    web.send("GET", "/", server="elasticsearch")
    web.send("GET", "/_license", server="elasticsearch")
    web.send("POST", "/_bulk", bulk, server="elasticsearch", content_type="application/x-ndjson")
    web.send("PUT", "/shop/_doc/7", {"total": 7}, server="elasticsearch")
    web.send("GET", "/shop/_search", server="elasticsearch")


def read_interface(node: NodeProcess) -> dict[str, Any]:
    """Return the paths of the HTTP interface with their methods and parameters."""
    with urllib.request.urlopen(f"{node.http}/openapi.json") as answer:
        described = json.load(answer)
    found: dict[str, Any] = {}
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            if isinstance(about, dict):
                listed = [*methods.get("parameters", ()), *about.get("parameters", ())]
                given = (_follow(each, described) for each in listed)
                found[f"{method.upper()} {path}"] = {
                    f"{each['in']} {each['name']}": {} for each in given
                }
    return found


def _follow(node: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return node
    found: Any = described
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return dict(found)
