"""Tests of administration over HTTP: queues, probes, metrics, and the document."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.harness import wait_until
from tests.node.http_harness import HttpNode, serve_http
from turnlane.inputs.api import Counters
from turnlane.node.http import describe_plane
from turnlane.node.metrics import NodeCollector
from turnlane.node.node import Node


def test_queues_are_created_shown_and_dropped(shared: HttpNode) -> None:
    made = shared.http.put("/queues/new", json={"max_bytes": "1Mi", "durability": "always"})
    assert made.status_code == 201
    assert made.json()["settings"]["max_bytes"] == 2**20
    assert (made.json()["low"], made.json()["end"]) == (0, 0)
    assert "path" not in made.json()["settings"]
    same = shared.http.put("/queues/new", json={"max_bytes": "1Mi", "durability": "always"})
    assert same.status_code == 200
    other = shared.http.put("/queues/new", json={})
    assert (other.status_code, other.json()["error"]) == (409, "QueueExists")
    listed = shared.http.get("/queues").json()
    assert listed["instance"] == shared.node.instance
    assert [each["name"] for each in listed["queues"]] == ["memory", "new", "orders"]
    assert shared.http.get("/queues/new").json()["stats"]["ledger"]["adds_up"] is True
    assert shared.http.delete("/queues/new").status_code == 204
    assert shared.http.get("/queues/new").status_code == 404
    assert shared.http.delete("/queues/new").status_code == 404


def test_drop_of_a_configured_queue_is_refused(shared: HttpNode) -> None:
    answer = shared.http.delete("/queues/orders")
    assert (answer.status_code, answer.json()["error"]) == (400, "ConfigError")


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("new", {"sise": 5}, "sise: there is no such knob; did you mean size?"),
        ("new", {"size": -1}, "size: must be at least 1"),
        ("new", {"kind": "proxy"}, "kind: "),
        ("new", {"kind": []}, "kind: "),
        ("new", {"path": "/tmp/x"}, "path: there is no such knob"),
        ("new", {"name": "other"}, "name: there is no such knob"),
        ("new", {"self": 1}, "self: there is no such knob"),
        ("new", [], "the body is an object"),
        ("-new", {}, "is not a name"),
        ("..", {}, None),
    ],
)
def test_queue_with_wrong_settings_is_refused_with_the_reason(
    shared: HttpNode, name: str, body: Any, said: str | None
) -> None:
    answer = shared.http.put(f"/queues/{name}", json=body)
    if said is None:
        assert answer.status_code in (400, 404, 405)
    else:
        assert (answer.status_code, said in answer.json()["detail"]) == (400, True)
    assert set(shared.node.queues()) == {"memory", "orders"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/queues/", 404),
        ("GET", "/queues/orders/", 404),
        ("GET", "/queues/orders/nope", 404),
        ("OPTIONS", "/queues", 405),
        ("POST", "/queues", 405),
        ("PATCH", "/queues/orders", 405),
        ("DELETE", "/queues/orders/events", 405),
        ("POST", "/metrics", 405),
        ("TRACE", "/healthz", 405),
        ("HEAD", "/healthz", 200),
        ("HEAD", "/queues", 200),
    ],
)
def test_unknown_path_is_404_and_unknown_method_is_405(
    shared: HttpNode, method: str, path: str, status: int
) -> None:
    answer = shared.http.request(method, path)
    assert answer.status_code == status
    assert ("allow" in answer.headers) == (status == 405)
    if status != 200 and method != "HEAD":
        assert answer.json()["status"] == status


def test_running_node_is_alive_and_ready(shared: HttpNode) -> None:
    assert shared.http.get("/healthz").json() == {"status": "ok"}
    assert shared.http.get("/readyz").json() == {"status": "ready"}


def test_starting_node_is_not_ready(tmp_path: Path) -> None:
    waiting: list[str | None] = ["inputs"]
    with serve_http(tmp_path, get_startup_blocker=lambda: waiting[0]) as at:
        answer = at.http.get("/readyz")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["reasons"] == ["the node is starting: inputs"]
        waiting[0] = None
        assert at.http.get("/readyz").status_code == 200
        at.node.closing = True
        assert at.http.get("/readyz").json()["reasons"] == ["the node is closing"]
        assert at.http.get("/healthz").status_code == 200


def test_node_with_a_failing_disk_is_not_ready_and_names_the_queue(tmp_path: Path) -> None:
    with serve_http(tmp_path) as at:
        at.disk.fail("sync", times=None, match="chunk")
        at.post(b"x", params={"timeout": "0"})
        wait_until(lambda: at.http.get("/readyz").status_code == 503)
        (reason,) = at.http.get("/readyz").json()["reasons"]
        assert "queue 'orders' cannot write to its disk: " in reason
        assert "Input/output error" in reason
        at.disk.clear()
        wait_until(lambda: at.http.get("/readyz").status_code == 200)


# ── metrics ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class FakeInput:
    """The parts of an input that its metrics need."""

    label: str
    counters: Counters = field(default_factory=Counters)

    @property
    def settings(self) -> FakeInput:
        return self


def read_samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_the_events_of_a_queue(tmp_path: Path) -> None:
    with serve_http(tmp_path) as at:
        at.post([{"value": "x"}] * 5)
        lease = at.take(max_events=2).json()["lease"]
        at.http.post(f"/leases/{lease}/release")
        lease = at.take(max_events=2).json()["lease"]
        at.http.post(f"/leases/{lease}/done")
        at.take(max_events=1)
        answer = at.http.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = read_samples(answer.text)
    for name, value in {
        "queue_size": 3,
        "queue_pending_events": 3,
        "queue_in_flight_events": 1,
        "queue_push_total": 1,
        "queue_accepted_events_total": 5,
        "queue_delivered_events_total": 2,
        "queue_retry_total": 1,
        "queue_disk_full_total": 0,
        "queue_disk_failing": 0,
    }.items():
        assert found[f"turnlane_{name}", "orders"] == value, name
    assert found["turnlane_queue_disk_available_bytes", "orders"] > 0
    assert ("turnlane_queue_disk_available_bytes", "memory") not in found
    assert found["turnlane_fastqueue_disk_bytes", "orders"] > 0
    assert found["turnlane_queue_dropped_total", "orders", "oldest"] == 0
    assert found["turnlane_leases_active",] == 1


def test_documented_metric_names_exist(tmp_path: Path) -> None:
    with serve_http(tmp_path) as at:
        text = at.http.get("/metrics").text
    for name in (
        *("size", "bytes", "max_size", "max_bytes", "utilization_ratio", "disk_available_bytes"),
        *("push_total", "dropped_total", "retry_total", "disk_full_total"),
    ):
        assert f"\nturnlane_queue_{name}{{" in text, name
    for name in (
        "inmemory_blocks",
        "disk_bytes",
        "meta_sync_total",
        "chunk_rotations_total",
        "inmemory_flushes_total",
    ):
        assert f"\nturnlane_fastqueue_{name}{{" in text, name


def test_inputs_with_the_same_label_are_added_up(tmp_path: Path) -> None:
    inputs = [
        FakeInput("syslog", Counters(events=2, bytes=10)),
        FakeInput("syslog"),
        FakeInput("b"),
    ]
    inputs[1].counters.events = 3
    registry = CollectorRegistry()
    with Node(tmp_path, {"orders": {}}) as node:
        registry.register(NodeCollector(node, inputs))
        found = read_samples(generate_latest(registry).decode())
    assert found["turnlane_input_events_total", "syslog"] == 5
    assert found["turnlane_input_bytes_total", "syslog"] == 10
    assert found["turnlane_input_connections", "b"] == 0


def test_promtool_accepts_the_metrics(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is not installed: apt install prometheus")
        pytest.skip("promtool is not installed")
    registry = CollectorRegistry()
    with Node(tmp_path, {"orders": {}, "memory": {"kind": "memory"}}) as node:
        registry.register(NodeCollector(node, [FakeInput("syslog"), FakeInput("http")]))
        text = generate_latest(registry)
    run = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False, timeout=60
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


# ── the description ─────────────────────────────────────────────────────────────────────────────


def test_document_and_routes_have_the_same_operations(shared: HttpNode) -> None:
    described = shared.http.get("/openapi.json").json()
    assert described == describe_plane()
    for path, operations in described["paths"].items():
        methods = {name.upper() for name in operations if name != "parameters"}
        where = path.replace("{queue}", "orders").replace("{lease}", "x").replace("{action}", "x")
        assert shared.http.request("PATCH", where).status_code == 405, path
        allowed = set(shared.http.request("PATCH", where).headers["allow"].split(", ")) - {"HEAD"}
        assert methods == allowed, path
        for name, operation in operations.items():
            if name != "parameters":
                assert operation["operationId"]
                assert operation["responses"]
