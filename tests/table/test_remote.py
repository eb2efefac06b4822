"""Receivers in other processes: over Flight and over HTTP, with real sockets."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from pyarrow import flight

import turnlane
from tests.conftest import skip_or_fail
from tests.ports import free_port
from tests.table.shard_site import ShardSite, sqlite_site, sqlite_url
from tests.table.site import PATIENCE, eventually
from turnlane import table
from turnlane.client import Client
from turnlane.client.table import RemoteReceiver
from turnlane.config import Config, ConfigFaults, loads
from turnlane.delivery.destination import SendReport
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import LeadLost, NoSuchQueue, NotAllowed
from turnlane.node.breakers import Asker
from turnlane.node.flight.errors import FlightLimits
from turnlane.node.flight.server import FlightPlane
from turnlane.service import Service
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Authority
from turnlane.table.event import TableEvent
from turnlane.table.shards import KeyRange, keyspace_id

Receiving = table.Receiver | RemoteReceiver


@dataclass
class Serving:
    """A node that serves a sharded queue."""

    site: ShardSite
    config: dict[str, Any]
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self) -> Service:
        """Run a node; ready once it leads every shard."""
        service = self.opened.enter_context(Service(Config.model_validate(self.config)).start())

        def leads() -> bool:
            served = service.tables.table(self.site.name)
            return served.is_open and all(m.fires for m in served.queue.managers().values())

        eventually(leads)
        return service

    def client(self, service: Service, **more: Any) -> Client:
        return self.opened.enter_context(turnlane.connect(service.url("flight"), **more))

    def put(self, count: int, label: str = "p") -> set[str]:
        names = [f"{label}{at}" for at in range(count)]
        self.site.queue().put({"user_id": at, "payload": each} for at, each in enumerate(names))
        return set(names)


def config_of(site: ShardSite, data: Path, **more: Any) -> dict[str, Any]:
    shards = [{"url": url, "range": key_range} for url, key_range in site.shards]
    planes = {plane: {"listen": "127.0.0.1:0"} for plane in ("flight", "http")}
    node = {"data": data, "shutdown_timeout": "2s", **planes, **more}
    return {"node": node, "tables": {site.name: {"shards": shards}}}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with sqlite_site(tmp_path, "-80", "80-") as site:
        made = Serving(site, config_of(site, tmp_path / "node"))
        with made.opened:
            yield made


def take(receiver: Receiving, count: int) -> list[TableEvent]:
    taken: list[TableEvent] = []
    while len(taken) < count:
        more = receiver.take(count - len(taken), timeout=PATIENCE)
        assert more, f"{len(taken)} of {count} events came"
        taken += more
    return taken


def payloads(events: list[TableEvent]) -> set[str]:
    return {event["payload"] for event in events}


# ── Flight ───────────────────────────────────────────────────────────────────────────────────────


def test_events_are_received_and_acked_over_flight(serving: Serving) -> None:
    client = serving.client(serving.start())
    expected = serving.put(500)
    with client.table(serving.site.name).receive() as receiver:
        events = take(receiver, 500)
        assert payloads(events) == expected
        assert set(events[0].columns) == {"user_id", "payload"}
        assert events[0].attempts == 0
        receiver.ack(events)
        assert receiver.flush(PATIENCE)
        assert not any(serving.site.queue().counts().values())


def test_a_remote_receiver_has_its_key_range(serving: Serving) -> None:
    client = serving.client(serving.start())
    serving.put(200)
    middle = KeyRange.parse("40-c0")
    inside = {f"p{at}" for at in range(200) if middle.contains(keyspace_id(at))}
    with client.table(serving.site.name).receive("40-c0") as receiver:
        assert payloads(take(receiver, len(inside))) == inside
        assert receiver.take(timeout=0.3) == []


def test_a_receiver_that_leaves_has_its_events_fired_elsewhere(serving: Serving) -> None:
    service = serving.start()
    expected = serving.put(50)
    first, second = serving.client(service), serving.client(service)
    with first.table(serving.site.name).receive() as gone:
        events = take(gone, 50)
        gone.ack(events[:10])
        assert gone.flush(PATIENCE)
    kept = payloads(events[:10])
    with second.table(serving.site.name).receive() as receiver:
        assert payloads(take(receiver, 40)) == expected - kept


def test_a_nacked_event_comes_again(serving: Serving) -> None:
    client = serving.client(serving.start())
    serving.put(1)
    with client.table(serving.site.name).receive() as receiver:
        (event,) = take(receiver, 1)
        event.nack(delay=0.05, error="not now")
        (again,) = take(receiver, 1)
        assert again.attempts == 1
        again.ack()
        again.ack()
        assert receiver.flush(PATIENCE)


def test_a_receiver_that_stalls_gets_no_more_and_loses_what_it_has(tmp_path: Path) -> None:
    options = "backoff = 10ms, max_backoff = 50ms, ack_timeout = 500ms"
    with sqlite_site(tmp_path, "-", options=options) as site:
        serving = Serving(site, config_of(site, tmp_path / "node"))
        with serving.opened:
            service = serving.start()
            stalled = serving.client(service).table(site.name).receive(prefetch=5)
            serving.opened.enter_context(stalled)
            expected = serving.put(20)
            take(stalled, 5)
            seen: set[str] = set()
            with serving.client(service).table(site.name).receive() as receiver:
                while seen != expected:
                    events = take(receiver, 1)
                    seen |= payloads(events)
                    receiver.ack(events)
            assert stalled.take(timeout=0.2) == []


def test_a_receiver_outlives_its_node(serving: Serving) -> None:
    """Acks of a stream that broke are not confirmed; the events come again on the next."""
    port = free_port()
    serving.config["node"]["flight"] = {"listen": f"127.0.0.1:{port}"}
    service = serving.start()
    expected = serving.put(20)
    with serving.client(service).table(serving.site.name).receive() as receiver:
        events = take(receiver, 20)
        service.stop(0.0)
        receiver.ack(events)
        with pytest.raises(LeadLost):
            receiver.flush(PATIENCE)
        serving.start()
        again = take(receiver, 20)
        assert payloads(again) == expected
        receiver.ack(again)
        assert receiver.flush(PATIENCE)


def test_flush_tells_of_lost_acks_of_the_events_that_it_is_given(serving: Serving) -> None:
    """However often it is called, and whoever was told of them already."""
    service = serving.start()
    serving.put(3)
    with serving.client(service).table(serving.site.name).receive() as receiver:
        stored, lost, open_ = take(receiver, 3)
        receiver.ack([stored])
        assert receiver.flush(PATIENCE, [stored])
        service.stop(0.0)
        receiver.ack([lost])
        with pytest.raises(LeadLost):
            receiver.flush(PATIENCE)
        for _ in range(2):
            assert receiver.flush(PATIENCE, [stored, open_])
            with pytest.raises(LeadLost):
                receiver.flush(PATIENCE, [stored, lost])


def test_a_loss_that_is_answered_too_late_is_told_by_the_next_flush(serving: Serving) -> None:
    service = serving.start()
    serving.put(2)
    with serving.client(service).table(serving.site.name).receive() as receiver:
        stored, lost = take(receiver, 2)
        receiver.ack([stored])
        assert receiver.flush(PATIENCE)
        for url, _ in serving.site.shards:
            serving.site.execute(url, "UPDATE turnlane_lease SET token = token + 1, expires_at = 0")
        receiver.ack([lost])
        managers = service.tables.table(serving.site.name).queue.managers().values()
        eventually(lambda: any(manager.lost_acks for manager in managers))
        assert not receiver.flush(0.0)
        with pytest.raises(LeadLost):
            receiver.flush(PATIENCE)
        assert receiver.flush(PATIENCE), "this thread was told"
        assert receiver.flush(PATIENCE, [stored])
        with pytest.raises(LeadLost):
            receiver.flush(PATIENCE, [lost])


def test_two_nodes_one_receiver(serving: Serving, tmp_path: Path) -> None:
    """One of the nodes leads; a client of both need not know which."""
    first = serving.start()
    other = {**serving.config, "node": {**serving.config["node"], "data": tmp_path / "other"}}
    second = serving.opened.enter_context(Service(Config.model_validate(other)).start())
    eventually(lambda: second.tables.table(serving.site.name).is_open)
    both = f"{first.url('flight')},{second.url('flight').removeprefix('turnlane://')}"
    client = serving.opened.enter_context(turnlane.connect(both))
    with client.table(serving.site.name).receive() as receiver:
        before = serving.put(20)
        events = take(receiver, 20)
        assert payloads(events) == before
        receiver.ack(events)
        assert receiver.flush(PATIENCE)
        first.stop(2.0)
        after = serving.put(20, "q")
        assert payloads(take(receiver, 20)) == after


def test_a_resharded_table_keeps_its_remote_receivers(serving: Serving, tmp_path: Path) -> None:
    client = serving.client(serving.start())
    with client.table(serving.site.name).receive() as receiver:
        serving.site.queue().reshard([(sqlite_url(tmp_path, "all"), "-")])
        expected = serving.put(50)
        assert payloads(take(receiver, 50)) == expected


def test_rights_are_those_of_queues(serving: Serving) -> None:
    name = serving.site.name
    serving.config["node"]["tokens"] = [
        {"name": "reader", "secret": "reads", "rights": {name: ["read"]}},
        {"name": "writer", "secret": "writes", "rights": {name: ["publish"]}},
    ]
    service = serving.start()
    serving.put(1)
    for token in (None, "writes"):
        client = serving.client(service, token=token)
        with client.table(name).receive() as refused, pytest.raises(NotAllowed):
            refused.take(timeout=PATIENCE)
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        answer = httpx.get(f"{service.url('http')}/tables/{name}/events", headers=headers)
        assert answer.status_code == (401 if token is None else 403)
        listed = httpx.get(f"{service.url('http')}/tables", headers=headers)
        assert listed.status_code == 401 if token is None else listed.json() == {"tables": []}
    with serving.client(service, token="reads").table(name).receive() as receiver:
        assert take(receiver, 1)


def test_streams_end_when_their_token_expires(serving: Serving) -> None:
    name = serving.site.name
    serving.config["node"]["tokens"] = [
        {
            "name": "reader",
            "secret": "reads",
            "rights": {name: ["read"]},
            "expires": "2100-01-01T00:00:00Z",
        },
    ]
    service = serving.start()
    serving.put(1)
    url, headers = f"{service.url('http')}/tables/{name}/events", {"authorization": "Bearer reads"}
    with (
        serving.client(service, token="reads").table(name).receive() as receiver,
        httpx.stream("GET", url, headers=headers, timeout=PATIENCE) as answer,
    ):
        read = answer.iter_lines()
        assert "stream" in next(read)
        receiver.take(1, timeout=0.0)
        plane = service.planes["flight"]
        assert isinstance(plane, FlightPlane)
        plane.authority._now = lambda: 4_200_000_000.0
        for _ in read:
            pass  # until it ends
        with pytest.raises(NotAllowed, match="has expired"):
            deque(iter(partial(receiver.take, timeout=PATIENCE), None), maxlen=0)


def test_an_idle_receiver_comes_back_without_a_word(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    service = serving.start()
    limits = FlightLimits().model_copy(update={"idle_timeout": 0.2})
    plane = FlightPlane(
        service.node, Authority(), Address(LOOPBACK, 0), limits=limits, tables=service.tables
    )
    plane.start()
    serving.opened.callback(plane.stop)
    client = serving.opened.enter_context(turnlane.connect(f"turnlane://{plane.address}"))
    with client.table(serving.site.name).receive() as receiver:
        eventually(lambda: service.tables.streams == 1)
        first = _streams(receiver)
        eventually(lambda: bool(_streams(receiver)) and _streams(receiver) != first)
        missing = serving.put(5)
        while missing:  # one that is cut off meanwhile gets some of them twice
            missing -= payloads(take(receiver, 1))
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def _streams(receiver: RemoteReceiver) -> list[object]:
    """The streams that a receiver has at this moment."""
    return [link._stream for link in receiver._links if link._stream is not None]


def test_a_table_that_nobody_serves(serving: Serving) -> None:
    client = serving.client(serving.start())
    with client.table("other").receive() as receiver, pytest.raises(NoSuchQueue):
        receiver.take(timeout=PATIENCE)


def test_any_flight_client_can_receive(serving: Serving) -> None:
    """First the fields, then the rows; acks by number, on the same stream."""
    service = serving.start()
    serving.put(3)
    client = flight.connect(service.url("flight").replace("turnlane", "grpc"))
    with client:
        command = {"receive": serving.site.name, "prefetch": 10}
        descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
        writer, reader = client.do_exchange(descriptor)
        assert reader.schema.names[-2:] == ["user_id", "payload"]
        got, chunks = 0, iter(reader)
        while got < 3:
            chunk = next(chunks)
            got += chunk.data.num_rows if chunk.data is not None else 0
        writer.write_metadata(pa.py_buffer(b'{"ack": [[0, 3]], "flush": 7}'))
        answer = next(chunks)
        assert json.loads(bytes(answer.app_metadata or b"")) == {"flushed": 7, "stored": True}
        writer.write_metadata(pa.py_buffer(b'{"ack": [[0, 99]]}'))
        with pytest.raises(flight.FlightServerError, match="never sent on this stream"):
            next(chunks)
        with contextlib.suppress(pa.ArrowException):
            writer.close()


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────


class Lines:
    """A stream over HTTP."""

    def __init__(self, base: str, table_name: str, **params: Any) -> None:
        self.base = f"{base}/tables/{table_name}"
        self._opened = contextlib.ExitStack()
        self._http = self._opened.enter_context(httpx.Client(timeout=PATIENCE))
        answer = self._opened.enter_context(
            self._http.stream("GET", f"{self.base}/events", params=params)
        )
        assert answer.status_code == 200, answer.read()
        self._lines = (line for line in answer.iter_lines() if line)
        about = json.loads(next(self._lines))
        self.id, self.fields = about["stream"], about["fields"]
        self.names = [each["name"] for each in self.fields]

    def take(self, count: int) -> dict[int, dict[str, Any]]:
        got: dict[int, dict[str, Any]] = {}
        while len(got) < count:
            about = json.loads(next(self._lines))
            for at, row in enumerate(about["rows"], about["first"]):
                got[at] = dict(zip(self.names, row, strict=True))
        return got

    def post(self, verb: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.base}/streams/{self.id}/{verb}", json=body, timeout=PATIENCE)

    def close(self) -> None:
        self._opened.close()


@pytest.fixture
def lines() -> Iterator[Callable[..., Lines]]:
    with contextlib.ExitStack() as opened:

        def opening(*arguments: Any, **params: Any) -> Lines:
            return opened.enter_context(contextlib.closing(Lines(*arguments, **params)))

        yield opening


def test_events_are_received_and_acked_over_http(
    serving: Serving, lines: Callable[..., Lines]
) -> None:
    service = serving.start()
    expected = serving.put(30)
    stream = lines(service.url("http"), serving.site.name)
    assert stream.fields[-1] == {"name": "payload", "type": "string"}
    events = stream.take(30)
    assert {event["payload"] for event in events.values()} == expected
    assert stream.post("ack", events=[0, [1, 30]]).status_code == 204
    assert not any(serving.site.queue().counts().values())
    assert stream.post("ack", events=[0]).status_code == 204  # a second time
    wrong = stream.post("ack", events=[30])
    assert (wrong.status_code, wrong.json()["error"]) == (400, "ValueError")
    assert stream.post("ack", events="all").status_code == 400
    assert stream.post("nack", events=[1], delay=-1).status_code == 400
    assert stream.post("ack", event=[1]).status_code == 400


def test_an_http_receiver_that_leaves_has_its_events_fired_elsewhere(
    serving: Serving, lines: Callable[..., Lines]
) -> None:
    service = serving.start()
    expected = serving.put(10)
    gone = lines(service.url("http"), serving.site.name)
    gone.take(10)
    gone.close()
    again = lines(service.url("http"), serving.site.name, key_range="-")
    assert {event["payload"] for event in again.take(10).values()} == expected
    eventually(lambda: gone.post("ack", events=[0]).status_code == 404)


def test_an_http_receiver_nacks(serving: Serving, lines: Callable[..., Lines]) -> None:
    service = serving.start()
    serving.put(1)
    stream = lines(service.url("http"), serving.site.name, prefetch=1)
    stream.take(1)
    assert stream.post("nack", events=[0], delay=0.01, error="later").status_code == 204
    (again,) = stream.take(1).values()
    assert again["attempts"] == 1


def test_what_http_refuses(serving: Serving) -> None:
    http = serving.start().url("http")
    for path, status in (
        ("/tables/other/events", 404),
        (f"/tables/{serving.site.name}/events?key_range=xyz", 400),
        (f"/tables/{serving.site.name}/events?prefetch=0", 400),
    ):
        assert httpx.get(f"{http}{path}").status_code == status
    assert httpx.get(f"{http}/tables").json() == {
        "tables": [
            {
                "name": serving.site.name,
                "open": True,
                "shards": [{"range": "-80", "leads": True}, {"range": "80-", "leads": True}],
            }
        ]
    }


# ── the node ─────────────────────────────────────────────────────────────────────────────────────


def test_values_of_every_type_are_sent(tmp_path: Path, lines: Callable[..., Lines]) -> None:
    """One that does not fit its column, as SQLite allows, is a dead letter and hurts no other."""
    url = sqlite_url(tmp_path, "types")
    with table.connect(url) as database:
        database.sql(
            "CREATE QUEUE t (k BIGINT, b BLOB, f DOUBLE, yes BOOLEAN, n NUMERIC(6, 2), d DATE, "
            "w TIMESTAMP, j JSON) WITH (backoff = 1ms, max_backoff = 2ms, max_attempts = 2)"
        )
        connection = database.connect()
        connection.execute("INSERT INTO t (k) VALUES ('poison')")
        connection.execute(
            "INSERT INTO t (k, b, f, yes, n, d, w, j) VALUES (1, x'00ff', 0.5, 1, 12.5, "
            "'2026-01-31', '2026-01-31 12:00:00', '{\"a\": 1}')"
        )
        connection.close()
        node = {"data": tmp_path / "node", "flight": {"enabled": False}}
        node["http"] = {"listen": "127.0.0.1:0"}
        config = Config.model_validate({"node": node, "tables": {"t": {"url": url}}})
        with Service(config).start() as service:
            eventually(lambda: service.tables.table("t").is_open)
            stream = lines(service.url("http"), "t")
            (event,) = stream.take(1).values()
            assert event["b"] == base64.b64encode(b"\x00\xff").decode()
            assert (event["k"], event["f"], event["yes"], event["n"]) == (1, 0.5, True, "12.50")
            assert (event["d"], event["j"]) == ("2026-01-31", '{"a": 1}')
            queue = database.queue("t")
            eventually(lambda: queue.counts()["dead"] == 1)


def test_a_node_starts_without_its_databases(tmp_path: Path) -> None:
    """Receivers are told to come back later; once the table is there, they get its events."""
    url = sqlite_url(tmp_path, "late")
    node: dict[str, Any] = {"data": tmp_path / "node"}
    node |= {plane: {"listen": "127.0.0.1:0"} for plane in ("flight", "http")}
    config = Config.model_validate({"node": node, "tables": {"late": {"url": url}}})
    with Service(config).start() as service, turnlane.connect(service.url("flight")) as client:
        answer = httpx.get(f"{service.url('http')}/tables/late/events")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        with client.table("late").receive() as receiver, table.connect(url) as database:
            database.sql("CREATE QUEUE late (payload TEXT)")
            database.queue("late").insert([{"payload": "here"}])
            assert take(receiver, 1)[0]["payload"] == "here"


def test_metrics_by_queue_and_shard(serving: Serving) -> None:
    service = serving.start()
    serving.put(40)
    with serving.client(service).table(serving.site.name).receive() as receiver:
        events = take(receiver, 40)
        receiver.ack(events[:20])
        assert receiver.flush(PATIENCE)
        text = httpx.get(f"{service.url('http')}/metrics").text
        assert sum(values(text, "turnlane_table_leading")) == 2
        assert sum(values(text, "turnlane_table_fired_total")) == 40
        assert sum(values(text, "turnlane_table_acked_total")) == 20
        assert sum(values(text, "turnlane_table_in_flight_events")) == 20
        assert sum(values(text, "turnlane_table_fire_lag_seconds_count")) == 40
        assert sum(values(text, "turnlane_table_ack_lag_seconds_count")) == 20
        assert sum(values(text, "turnlane_table_ack_lag_seconds_sum")) > 0
        assert sum(values(text, "turnlane_table_events")) == 20
        assert values(text, "turnlane_table_streams") == [1]
        label = f'turnlane_table_window_fill_ratio{{queue="{serving.site.name}",shard="-80"}}'
        assert label in text


def test_metrics_tell_of_lost_acks_and_of_rows_that_cannot_be_read(serving: Serving) -> None:
    service, name = serving.start(), serving.site.name

    def counted(metric: str) -> float:
        text = httpx.get(f"{service.url('http')}/metrics").text
        return sum(values(text, f"turnlane_table_{metric}_total"))

    assert counted("lost_acks") == counted("unreadable") == 0
    serving.put(6)
    for url, _ in serving.site.shards:
        row = "(user_id, payload) VALUES (1, CAST(x'ff' AS TEXT))"
        serving.site.execute(url, f"INSERT INTO {name} {row}")
    with service.tables.table(name).queue.receive() as receiver:
        events = take(receiver, 6)
        eventually(lambda: counted("unreadable") == 2)
        for url, _ in serving.site.shards:
            taken = "SET token = token + 1, expires_at = 0"
            serving.site.execute(url, f"UPDATE turnlane_lease {taken} WHERE queue = '{name}'")
        receiver.ack(events)
        eventually(lambda: counted("lost_acks") == 6)
        assert counted("lost_leads") > 0


def test_promtool_has_nothing_to_say_of_a_node_at_work(serving: Serving) -> None:
    """With all that there are metrics of: queues, inputs, breakers, tables."""
    promtool = shutil.which("promtool")
    if promtool is None:
        skip_or_fail("promtool is not installed: apt install prometheus")
    serving.config["queues"] = {"main": {}, "fast": {"kind": "memory"}}
    serving.config["inputs"] = [{"type": "http", "queue": "main", "listen": "127.0.0.1:0"}]
    service = serving.start()
    service.node.queue("main").producer(ack="persisted").publish(b"x", timeout=PATIENCE)
    asker = Asker("alerts", "main", "1", DeliverySettings(breaker_failures=1))
    service.node.breakers.permit(asker)
    failed = SendReport(failures=1, error="refused", retries=1, retry_failures={"RetryLater": 1})
    service.node.breakers.report(asker, failed)
    serving.put(10)
    with serving.client(service).table(serving.site.name).receive() as receiver:
        receiver.ack(take(receiver, 10))
        assert receiver.flush(PATIENCE)
        text = httpx.get(f"{service.url('http')}/metrics").text
    for sample in (
        "turnlane_queue_accepted_events_total",
        "turnlane_input_events_total",
        "turnlane_circuit_breaker_open_total",
        "turnlane_queue_retry_failure_total",
        "turnlane_table_acked_total",
        "turnlane_table_fire_lag_seconds_count",
    ):
        assert values(text, sample), sample
    run = subprocess.run(
        [promtool, "check", "metrics"],
        input=text, capture_output=True, check=False, timeout=60, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def values(text: str, metric: str) -> list[float]:
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == metric]
    return [float(line.rpartition(" ")[2]) for line in lines]


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("{}", "give either url or shards"),
        ("{url: 'sqlite:///a.db', shards: [{url: 'sqlite:///b.db'}]}", "give either url or shards"),
        ("{shards: [{url: 'sqlite:///a.db', range: -80}]}", "no shard has the keys 80-"),
        ("{shards: [{url: 'sqlite:///a.db', range: '8'}]}", "is not a key range"),
    ],
)
def test_the_section_is_checked(section: str, wrong: str) -> None:
    with pytest.raises(ConfigFaults, match=wrong):
        loads(f"node: {{data: /tmp/x}}\ntables:\n  mails: {section}\n")
