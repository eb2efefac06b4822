"""Do all tasks of all executors see one breaker, and does exactly one of them probe?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from tests.contract.harness import wait_until
from tests.node.conftest import Serve, Served
from tests.node.http_harness import Served as HttpServed
from tests.node.http_harness import served as served_over_http
from turnlane.cli.app import app
from turnlane.client.gate import RemoteGate
from turnlane.delivery.breaker import Allowed, State
from turnlane.delivery.gate import Permit, Report
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import NoSuchBreaker, NotAllowed
from turnlane.node.breakers import Asker
from turnlane.serving.rights import Authority, TokenSettings

AT_ONCE = DeliverySettings(
    backoff=0.001, max_backoff=0.001, breaker_failures=2, breaker_reset=0.0, jitter=0.0
)
PATIENT = DeliverySettings(backoff=0.001, max_backoff=0.001, breaker_failures=2, breaker_reset=600)
FAILED = Report(failures=1, error="refused")


def gate(served: Served, settings: DeliverySettings, action: str = "alerts") -> RemoteGate:
    made = RemoteGate(served.client().nodes[0], action, "disk", settings, lambda: (1, 2))
    return served.opened.enter_context(made)


def opened(served: Served, settings: DeliverySettings) -> RemoteGate:
    """A gate whose breaker has just opened."""
    made = gate(served, settings)
    made.permit()
    while served.node.breakers.of("alerts").gate.status().state is State.CLOSED:
        made.report(FAILED)
    return made


def allowed(made: RemoteGate, wanted: Allowed) -> Permit:
    """The permit, once it is what is wanted."""
    while (permit := made.permit()).allowed is not wanted:
        pass
    return permit


def test_all_tasks_claim_from_one_rate(served: Served) -> None:
    limited = DeliverySettings(rate_limit=0.001, max_time=3600.0)
    one, other = gate(served, limited), gate(served, limited)
    assert 900 < one.claim(1, 10_000.0) <= 1000
    assert 1900 < other.claim(1, 10_000.0) <= 2000, "behind the one that was claimed before"
    assert 2900 < one.claim(1, 500.0) <= 3000, "too late for it, so it is not taken"
    assert 2900 < other.claim(1, 10_000.0) <= 3000
    assert gate(served, AT_ONCE, "free").claim(1000, 0.0) == 0.0


def test_failures_of_one_task_are_known_to_all(served: Served) -> None:
    one, other = gate(served, PATIENT), gate(served, PATIENT)
    assert one.permit().allowed is other.permit().allowed is Allowed.ALL
    one.report(FAILED)
    allowed(other, Allowed.ALL)  # after the backoff
    other.report(FAILED)
    for each in (one, other, gate(served, PATIENT)):
        permit = each.permit()
        assert (permit.state, permit.allowed) == (State.OPEN, Allowed.NONE)
        assert 590 < permit.wait <= 600
    found = served.client().nodes[0].breakers()["alerts"]
    assert (found["state"], found["error"], found["opened"]) == ("open", "refused", 1)
    assert found["rejected"] >= 3
    assert gate(served, PATIENT, "another action").permit().allowed is Allowed.ALL


def test_one_probe_however_many_ask_at_once(served: Served) -> None:
    opened(served, AT_ONCE)
    wait_until(lambda: served.node.breakers.of("alerts").gate.status().wait == 0, "half-open")
    askers = [gate(served, AT_ONCE) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        permits = list(pool.map(lambda each: each.permit(), askers))
    probes = [permit for permit in permits if permit.allowed is Allowed.PROBE]
    assert len(probes) == 1
    assert all(permit.allowed is Allowed.NONE for permit in permits if permit not in probes)
    askers[permits.index(probes[0])].report(Report(successes=1, probe=probes[0].probe))
    assert askers[0].permit().state is State.CLOSED


def test_a_probe_that_fails_or_is_not_used_makes_way_for_the_next(served: Served) -> None:
    made = opened(served, AT_ONCE)
    for report in (Report(), FAILED):
        permit = allowed(made, Allowed.PROBE)
        how = Report(failures=report.failures, error=report.error, probe=permit.probe)
        made.report(how)
    permit = allowed(made, Allowed.PROBE)
    made.report(Report(successes=1, probe=permit.probe))
    assert made.permit().allowed is Allowed.ALL


def test_a_person_can_close_it(served: Served) -> None:
    made = opened(served, PATIENT)
    node = served.client().nodes[0]
    assert node.reset_breaker("alerts")["state"] == "closed"
    assert made.permit().allowed is Allowed.ALL
    with pytest.raises(NoSuchBreaker, match=r"'alrts'.*there are: alerts"):
        node.reset_breaker("alrts")


def test_other_settings_make_it_anew(served: Served) -> None:
    opened(served, PATIENT)
    assert gate(served, AT_ONCE).permit().allowed is Allowed.ALL


def test_tasks_at_work_are_those_that_have_not_left(served: Served) -> None:
    one, other = gate(served, PATIENT), gate(served, PATIENT)
    for each in (one, other):
        each.permit()
    node = served.client().nodes[0]
    found = node.breakers(["alerts"])["alerts"]
    assert (found["tasks"], found["preparing"], found["sending"]) == (2, 2, 4)
    one.close()
    assert node.breakers(["alerts"])["alerts"]["tasks"] == 1
    assert node.breakers(["none"]) == {}


def _token(secret: str, rights: dict[str, Any]) -> TokenSettings:
    return TokenSettings(name=secret, secret=SecretStr(secret), rights=rights)


def test_only_those_who_may_read_its_queue_see_and_change_a_breaker(serve: Serve) -> None:
    tokens = [
        _token("boss", {"*": ["read", "admin"]}),
        _token("lane", {"disk": ["read"]}),
        _token("stranger", {"slow": ["read", "admin"]}),
    ]
    served = serve(authority=Authority(tokens))
    boss, lane, stranger = (served.client(token=each.name).nodes[0] for each in tokens)
    with RemoteGate(lane, "alerts", "disk", PATIENT) as mine:
        mine.permit()
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


def test_the_command_line_lists_and_resets(served: Served) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["breaker", *words, "--endpoint", served.url])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run("list") == "no task has delivered anything yet\n"
    opened(served, PATIENT)
    (line,) = run("list").splitlines()[1:]
    assert line.split()[:3] == ["alerts", "open", "2"]
    assert line.endswith("refused")
    (found,) = [json.loads(each) for each in run("list", "--json").splitlines()]
    assert (found["action"], found["state"]) == ("alerts", "open")
    assert run("reset", "alerts") == "alerts: closed\n"
    assert json.loads(run("list", "--json"))["state"] == "closed"


class TestOverHttp:
    @pytest.fixture
    def http(self, tmp_path: Path) -> Iterator[HttpServed]:
        with served_over_http(tmp_path) as made:
            asker = Asker("alerts", "orders", "1", PATIENT)
            made.node.breakers.permit(asker)
            for _ in range(50):  # those within one backoff count once
                made.node.breakers.report(asker, FAILED)
                made.node.breakers.permit(asker)
                time.sleep(0.002)
            yield made

    def test_breakers_are_seen_and_reset(self, http: HttpServed) -> None:
        found = http.http.get("/breakers").json()["breakers"]["alerts"]
        assert (found["state"], found["error"], found["queue"]) == ("open", "refused", "orders")
        reset = http.http.post("/breakers/alerts/reset")
        assert (reset.status_code, reset.json()["state"]) == (200, "closed")
        assert http.http.get("/breakers").json()["breakers"]["alerts"]["state"] == "closed"
        unknown = http.http.post("/breakers/alrts/reset")
        assert (unknown.status_code, unknown.json()["error"]) == (404, "NoSuchBreaker")

    def test_metrics_are_those_of_actions(self, http: HttpServed) -> None:
        lines = http.http.get("/metrics").text.splitlines()
        assert 'turnlane_circuit_breaker_state{action="alerts",state="open"} 1.0' in lines
        assert 'turnlane_circuit_breaker_state{action="alerts",state="closed"} 0.0' in lines
        assert 'turnlane_circuit_breaker_open_total{action="alerts"} 1.0' in lines
        assert 'turnlane_queue_workers_active{action="alerts"} 1.0' in lines
        names = {line.split("{")[0] for line in lines if "action=" in line}
        assert names >= {
            f"turnlane_{name}"
            for name in (
                "queue_workers_total",
                "queue_preparers_active",
                "queue_senders_active",
                "queue_sends_inflight",
                "queue_backoff_seconds",
                "queue_retry_success_total",
                "circuit_breaker_rejected_total",
            )
        }
