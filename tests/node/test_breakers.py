"""Tests of breakers: all tasks of all executors share one state, and exactly one task probes."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from tests.contract.harness import wait_until
from tests.delivery.harness import TIMEOUT, make_block
from tests.node.conftest import Serve, ServedNode
from tests.node.http_harness import HttpNode, serve_http
from tests.node.sender import EVENTS, LIMIT, deliver
from tests.outputs.web_servers import run_server
from tests.spark.destinations import Destination
from turnlane.cli.app import app
from turnlane.client import destination as client_gate
from turnlane.client.destination import RemoteDestinationState
from turnlane.delivery import breaker
from turnlane.delivery.breaker import AllowedSends, BreakerState
from turnlane.delivery.destination import SendPermit, SendReport
from turnlane.delivery.engine import Engine
from turnlane.delivery.settings import DeliverySettings
from turnlane.delivery.workers import SendActivity
from turnlane.errors import NoSuchBreaker, NotAllowed, RetryLater
from turnlane.events import Block
from turnlane.node.breakers import BreakerRequest
from turnlane.node.metrics import collect_action_metrics
from turnlane.serving.auth import Authority, TokenSettings
from turnlane.testing import FaultyOutput

AT_ONCE = DeliverySettings(
    backoff=0.001, max_backoff=0.001, breaker_failures=2, breaker_reset=0.0, jitter=0.0
)
PATIENT = DeliverySettings(backoff=0.001, max_backoff=0.001, breaker_failures=2, breaker_reset=600)
FAILED = SendReport(failures=1, error="refused")


def gate(
    served: ServedNode,
    settings: DeliverySettings,
    action: str = "alerts",
    busy: Callable[[], int] = lambda: 2,
) -> RemoteDestinationState:
    node = served.client().nodes[0]
    made = RemoteDestinationState(node, action, "disk", settings, lambda: (1, busy()))
    return served.opened.enter_context(made)


def open_breaker(served: ServedNode, settings: DeliverySettings) -> RemoteDestinationState:
    """A destination state whose breaker has just opened."""
    made = gate(served, settings)
    made.request_permit()
    while served.node.breakers.of("alerts").destination.get_status().state is BreakerState.CLOSED:
        made.report(FAILED)
    return made


def wait_for_permit(made: RemoteDestinationState, wanted: AllowedSends) -> SendPermit:
    """Wait for a permit with this decision."""
    while (permit := made.request_permit()).allowed is not wanted:
        pass
    return permit


def test_tasks_share_one_rate_limit(served: ServedNode) -> None:
    limited = DeliverySettings(rate_limit=0.001, max_time=3600.0)
    one, other = gate(served, limited), gate(served, limited)
    assert 900 < one.claim(1, 10_000.0) <= 1000
    assert 1900 < other.claim(1, 10_000.0) <= 2000, "behind the one that was claimed before"
    assert 2900 < one.claim(1, 500.0) <= 3000, "too late for it, so it is not taken"
    assert 2900 < other.claim(1, 10_000.0) <= 3000
    assert gate(served, AT_ONCE, "free").claim(1000, 0.0) == 0.0


def test_failures_of_one_task_open_the_breaker_for_all(served: ServedNode) -> None:
    one, other = gate(served, PATIENT), gate(served, PATIENT)
    assert one.request_permit().allowed is other.request_permit().allowed is AllowedSends.ALL
    one.report(FAILED)
    wait_for_permit(other, AllowedSends.ALL)  # after the backoff
    other.report(FAILED)
    for each in (one, other, gate(served, PATIENT)):
        permit = each.request_permit()
        assert (permit.state, permit.allowed) == (BreakerState.OPEN, AllowedSends.NONE)
        assert 590 < permit.wait <= 600
    found = served.client().nodes[0].breakers()["alerts"]
    assert (found["state"], found["error"], found["opened"]) == ("open", "refused", 1)
    assert found["rejected"] >= 3
    assert gate(served, PATIENT, "another action").request_permit().allowed is AllowedSends.ALL


def test_concurrent_requests_get_one_probe(served: ServedNode) -> None:
    open_breaker(served, AT_ONCE)
    wait_until(
        lambda: served.node.breakers.of("alerts").destination.get_status().wait == 0, "half-open"
    )
    askers = [gate(served, AT_ONCE) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        permits = list(pool.map(lambda each: each.request_permit(), askers))
    probes = [permit for permit in permits if permit.allowed is AllowedSends.PROBE]
    assert len(probes) == 1
    assert all(permit.allowed is AllowedSends.NONE for permit in permits if permit not in probes)
    askers[permits.index(probes[0])].report(SendReport(successes=1, probe=probes[0].probe))
    assert askers[0].request_permit().state is BreakerState.CLOSED


def test_failed_or_unused_probe_is_followed_by_another(served: ServedNode) -> None:
    made = open_breaker(served, AT_ONCE)
    for report in (SendReport(), FAILED):
        permit = wait_for_permit(made, AllowedSends.PROBE)
        how = SendReport(failures=report.failures, error=report.error, probe=permit.probe)
        made.report(how)
    permit = wait_for_permit(made, AllowedSends.PROBE)
    made.report(SendReport(successes=1, probe=permit.probe))
    assert made.request_permit().allowed is AllowedSends.ALL


def test_reset_closes_the_breaker(served: ServedNode) -> None:
    made = open_breaker(served, PATIENT)
    node = served.client().nodes[0]
    assert node.reset_breaker("alerts")["state"] == "closed"
    assert made.request_permit().allowed is AllowedSends.ALL
    with pytest.raises(NoSuchBreaker, match=r"'alrts'.*there are: alerts"):
        node.reset_breaker("alrts")


def test_changed_settings_apply_and_keep_the_state(served: ServedNode) -> None:
    made = gate(served, AT_ONCE)
    open_breaker(served, PATIENT)
    other = made.request_permit()
    assert other.allowed is AllowedSends.NONE, "the destination is away, whoever asks"
    assert 590 < other.wait <= 600
    served.node.breakers.of("alerts").destination.reset()
    while served.node.breakers.of("alerts").destination.get_status().state is BreakerState.CLOSED:
        made.report(FAILED)
    assert wait_for_permit(made, AllowedSends.PROBE).probe, (
        "closed for no longer than its settings say"
    )


def test_pipelines_with_different_settings_keep_the_state(
    served: ServedNode,
) -> None:
    ours, theirs = gate(served, PATIENT), gate(served, AT_ONCE)
    for each in (ours, theirs):
        wait_for_permit(each, AllowedSends.ALL)
        each.report(FAILED)
    status = served.node.breakers.of("alerts").destination.get_status()
    assert (status.failures, status.opened, status.totals["failures"]) == (2, 1, 2)


def test_changed_rate_limit_allows_no_extra_events(served: ServedNode) -> None:
    slow = gate(served, DeliverySettings(rate_limit=0.001, max_time=3600.0))
    fast = gate(served, DeliverySettings(rate_limit=0.002, max_time=3600.0))
    assert 900 < slow.claim(1, 10_000.0) <= 1000
    assert 900 < fast.claim(1, 10_000.0) <= 1000, "two events, of which one was claimed before"


def test_slow_probe_stays_the_only_one(served: ServedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PROBE_LEASE", 1.0)
    monkeypatch.setattr(client_gate, "HEARTBEAT", 0.02)
    open_breaker(served, AT_ONCE)
    other = gate(served, AT_ONCE)
    sending, release = threading.Event(), threading.Event()

    def slow(_: Block) -> None:
        sending.set()
        release.wait(TIMEOUT)

    output = FaultyOutput(slow)
    prober = gate(served, AT_ONCE)
    with Engine(output, AT_ONCE, prober) as engine, ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(engine.deliver, make_block(0, 10))
        assert sending.wait(TIMEOUT)
        until = time.monotonic() + 1.5 * breaker.PROBE_LEASE
        while time.monotonic() < until:
            assert other.request_permit().allowed is AllowedSends.NONE
        release.set()
        assert outcome.result(TIMEOUT).delivered == 10
    assert output.sends == 1
    assert other.request_permit().state is BreakerState.CLOSED


def test_tasks_share_the_limit_of_concurrent_sends(served: ServedNode) -> None:
    limited = DeliverySettings(max_in_flight=5)
    one = gate(served, limited, busy=lambda: 0)
    one.request_permit()
    assert one.share == 5
    other = gate(served, limited, busy=lambda: 0)
    other.request_permit()
    assert other.share == 0, "what the other has not given back is not ours"
    one.report(SendReport())
    other.report(SendReport())
    assert (one.share, other.share) == (2, 2)
    other.close()
    one.request_permit()
    assert one.share == 2, "another one is likely to come"
    again = gate(served, limited, busy=lambda: 0)
    again.request_permit()
    assert again.share == 2, "so that it has its share at once"
    assert gate(served, limited, "another action").request_permit().allowed is AllowedSends.ALL


def test_running_send_keeps_its_share_until_it_ends(served: ServedNode) -> None:
    limited = DeliverySettings(max_in_flight=4)
    sending = 4
    one = gate(served, limited, busy=lambda: sending)
    one.request_permit()
    other = gate(served, limited, busy=lambda: 0)
    other.request_permit()
    one.report(SendReport())
    other.report(SendReport())
    assert (one.share, other.share) == (2, 0)
    sending = 3
    one.report(SendReport())
    other.report(SendReport())
    assert other.share == 1


def test_task_never_exceeds_its_share_of_sends(served: ServedNode) -> None:
    settings = DeliverySettings(batch_events=1, concurrency=8, max_in_flight=6)
    others = [gate(served, settings, busy=lambda: 0) for _ in range(2)]
    together = threading.Barrier(2, timeout=TIMEOUT)

    def meet(_: Block) -> None:
        together.wait()

    output = FaultyOutput(meet)
    mine = gate(served, settings, busy=lambda: 0)
    for each in (*others, mine, *others, mine):
        each.request_permit()
    assert mine.share == 2
    with Engine(output, settings, mine) as engine:
        assert engine.deliver(make_block(0, 200)).delivered == 200
    assert output.most_in_flight == 2


def test_limit_of_concurrent_sends_holds_across_processes(served: ServedNode) -> None:
    with run_server() as server:
        at = Destination(server)

        def take_a_while(_: list[bytes]) -> None:
            server.ended.wait(0.02)  # makes the requests overlap

        at.refuse = take_a_while
        start = multiprocessing.get_context("spawn").Process
        tasks = [start(target=deliver, args=(served.url, server.url)) for _ in range(2)]
        for task in tasks:
            task.start()
        for task in tasks:
            task.join(TIMEOUT)
        assert [task.exitcode for task in tasks] == [0, 0]
    assert len(at.taken) == 2 * EVENTS
    assert 1 < at.most <= LIMIT


def test_task_without_a_share_waits_for_one(served: ServedNode) -> None:
    settings = DeliverySettings(max_in_flight=1, max_time=TIMEOUT)
    hog = gate(served, settings, busy=lambda: 0)
    hog.request_permit()
    output = FaultyOutput()
    mine = gate(served, settings, busy=lambda: 0)
    with Engine(output, settings, mine) as engine, ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(engine.deliver, make_block(0, 10))
        wait_until(lambda: mine.share == 0, "no share")
        hog.close()
        assert outcome.result(TIMEOUT).delivered == 10


def test_tasks_that_left_are_not_counted_as_live(served: ServedNode) -> None:
    one, other = gate(served, PATIENT), gate(served, PATIENT)
    for each in (one, other):
        each.request_permit()
    node = served.client().nodes[0]
    found = node.breakers(["alerts"])["alerts"]
    assert (found["tasks"], found["preparing"], found["sending"]) == (2, 2, 4)
    one.close()
    assert node.breakers(["alerts"])["alerts"]["tasks"] == 1
    assert node.breakers(["none"]) == {}


def read_metrics(served: ServedNode) -> dict[str, float]:
    """Return the metrics of actions by name and by their other labels."""
    found = {}
    for metric in collect_action_metrics(served.node.breakers):
        for sample in metric.samples:
            assert sample.labels.pop("action") == "alerts"
            name = sample.name.removeprefix("turnlane_")
            found["/".join([name, *sample.labels.values()])] = sample.value
    return found


def test_metrics_show_the_activity_of_tasks(served: ServedNode) -> None:
    settings = DeliverySettings(batch_events=5, concurrency=2, max_time=TIMEOUT)
    started, release = threading.Barrier(3, timeout=TIMEOUT), threading.Event()

    def slow(_: Block) -> None:
        started.wait()
        release.wait(TIMEOUT)

    output, activity = FaultyOutput(slow), SendActivity()
    node = served.client().nodes[0]
    with (
        RemoteDestinationState(
            node, "alerts", "disk", settings, activity.get_counts, workers=7
        ) as made,
        Engine(output, settings, made, activity=activity) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        outcome = pool.submit(engine.deliver, make_block(0, 10))
        started.wait()
        wait_until(lambda: read_metrics(served)["queue_sends_inflight"] == 2, "a beat")
        found = read_metrics(served)
        assert (found["queue_workers_active"], found["queue_workers_total"]) == (1, 7)
        assert (found["queue_senders_active"], found["queue_preparers_active"]) == (2, 0)
        release.set()
        assert outcome.result(TIMEOUT).delivered == 10
        engine.stop()
    found = read_metrics(served)
    assert (found["queue_workers_active"], found["queue_sends_inflight"]) == (0, 0)
    assert found["queue_export_latency_ewma_seconds"] > 0
    assert (found["action_delivered_events_total"], found["action_sends_total"]) == (10, 2)


def test_metrics_count_failures_by_kind(served: ServedNode) -> None:
    settings = DeliverySettings(backoff=0.001, max_backoff=0.002, breaker_failures=6)
    slow = RetryLater("no answer")
    slow.__cause__ = TimeoutError()
    failures: list[BaseException] = [
        RetryLater("busy", kind="rate_limit"),
        slow,
        RetryLater("busy", kind="rate_limit"),
        ConnectionResetError(),
        RetryLater("?"),
    ]
    output = FaultyOutput(lambda _: failures.pop() if failures else None)
    with Engine(output, settings, gate(served, settings)) as engine:
        assert engine.deliver(make_block(0, 10)).delivered == 10
    found = read_metrics(served)
    assert {name: value for name, value in found.items() if "retry" in name} == {
        "queue_retry_total": 5,
        "queue_retry_success_total": 1,
        "queue_retry_failure_total/network": 1,
        "queue_retry_failure_total/rate_limit": 2,
        "queue_retry_failure_total/timeout": 1,
    }
    failed = {name: value for name, value in found.items() if "send_failures" in name}
    assert failed == {
        "action_send_failures_total/RetryLater": 1,
        "action_send_failures_total/network": 1,
        "action_send_failures_total/rate_limit": 2,
        "action_send_failures_total/timeout": 1,
    }
    assert found["circuit_breaker_open_total"] == 0
    assert found["circuit_breaker_state/closed"] == 1
    assert found["queue_backoff_seconds"] == 0


def _build_token(secret: str, rights: dict[str, Any]) -> TokenSettings:
    return TokenSettings(name=secret, secret=SecretStr(secret), rights=rights)


def test_breaker_without_read_right_is_hidden_and_unchangeable(serve: Serve) -> None:
    tokens = [
        _build_token("boss", {"*": ["read", "admin"]}),
        _build_token("lane", {"disk": ["read"]}),
        _build_token("stranger", {"slow": ["read", "admin"]}),
    ]
    served = serve(authority=Authority(tokens))
    boss, lane, stranger = (served.client(token=each.name).nodes[0] for each in tokens)
    with RemoteDestinationState(lane, "alerts", "disk", PATIENT) as mine:
        mine.request_permit()
    assert set(boss.breakers()) == set(lane.breakers()) == {"alerts"}
    assert stranger.breakers() == {}
    for queue in ("disk", "slow"):
        for say in ("permit", "report"):
            with pytest.raises(NotAllowed):
                stranger.act(say, action="alerts", queue=queue, task="1")
    for node in (lane, stranger):
        with pytest.raises(NotAllowed):
            node.reset_breaker("alerts")
    assert boss.reset_breaker("alerts")["failures"] == 0


def test_command_lists_and_resets_breakers(served: ServedNode) -> None:
    def run_command(*words: str) -> str:
        result = CliRunner().invoke(app, ["breaker", *words, "--endpoint", served.url])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run_command("list") == "no task has delivered anything yet\n"
    open_breaker(served, PATIENT)
    (line,) = run_command("list").splitlines()[1:]
    assert line.split()[:3] == ["alerts", "open", "2"]
    assert line.endswith("refused")
    (found,) = [json.loads(each) for each in run_command("list", "--json").splitlines()]
    assert (found["action"], found["state"]) == ("alerts", "open")
    assert run_command("reset", "alerts") == "alerts: closed\n"
    assert json.loads(run_command("list", "--json"))["state"] == "closed"


class TestOverHttp:
    @pytest.fixture
    def http(self, tmp_path: Path) -> Iterator[HttpNode]:
        with serve_http(tmp_path) as made:
            asker = BreakerRequest("alerts", "orders", "1", PATIENT)
            made.node.breakers.permit(asker)
            for _ in range(50):  # failures within one backoff count once
                made.node.breakers.report(asker, FAILED)
                made.node.breakers.permit(asker)
                time.sleep(0.002)
            yield made

    def test_http_lists_and_resets_breakers(self, http: HttpNode) -> None:
        found = http.http.get("/breakers").json()["breakers"]["alerts"]
        assert (found["state"], found["error"], found["queue"]) == ("open", "refused", "orders")
        reset = http.http.post("/breakers/alerts/reset")
        assert (reset.status_code, reset.json()["state"]) == (200, "closed")
        assert http.http.get("/breakers").json()["breakers"]["alerts"]["state"] == "closed"
        unknown = http.http.post("/breakers/alrts/reset")
        assert (unknown.status_code, unknown.json()["error"]) == (404, "NoSuchBreaker")

    def test_scrape_includes_the_metrics_of_actions(self, http: HttpNode) -> None:
        lines = http.http.get("/metrics").text.splitlines()
        assert 'turnlane_circuit_breaker_state{action="alerts",state="open"} 1.0' in lines
        assert 'turnlane_circuit_breaker_state{action="alerts",state="closed"} 0.0' in lines
        assert 'turnlane_circuit_breaker_open_total{action="alerts"} 1.0' in lines
        assert 'turnlane_queue_workers_active{action="alerts"} 1.0' in lines
        assert 'turnlane_queue_retry_total{action="alerts"} 0.0' in lines
        assert 'turnlane_queue_retry_total{queue="orders"} 0.0' in lines
        assert lines.count("# TYPE turnlane_queue_retry_total counter") == 1
        assert "# TYPE turnlane_queue_workers_total gauge" in lines
        names = {line.split("{")[0] for line in lines if "action=" in line}
        assert names >= {
            f"turnlane_{name}"
            for name in (
                "queue_workers_total",
                "queue_preparers_active",
                "queue_senders_active",
                "queue_sends_inflight",
                "queue_backoff_seconds",
                "queue_retry_total",
                "queue_retry_success_total",
                "circuit_breaker_rejected_total",
            )
        }
