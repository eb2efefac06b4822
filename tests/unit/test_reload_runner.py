"""A reload applies a changed configuration, names settings that need a restart, or is rejected."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from tests.unit.test_pipeline_config import FILE, actions, with_cases
from turnlane.cli import run
from turnlane.cli.app import app
from turnlane.cli.spark_session import SparkStartup
from turnlane.cli.supervise import PipelineSupervisor, get_stamp, list_restart_sections
from turnlane.config import load, loads

OTHER_DATA = "OTHER"
MORE = f"  - {{name: c, queue: disk, {FILE}}}\n"


def changed_by(change: str) -> str:
    text = actions(f"{{name: a, {FILE}}}", more=change.removeprefix(OTHER_DATA))
    return text.replace("data: d", "data: e") if change.startswith(OTHER_DATA) else text


def test_changed_section_that_needs_a_restart_is_listed() -> None:
    old = loads(with_cases())
    assert list(list_restart_sections(old, loads(with_cases()), old.knobs())) == []
    lanes = loads(with_cases().replace("name: a,", "name: a, filter: x,"))
    assert list(list_restart_sections(old, lanes, old.knobs())) == []
    other = with_cases().replace("data: d", "data: e").replace("queue: disk", "queue: memory")
    assert list(list_restart_sections(old, loads(other + "spark: {master: m}"), old.knobs())) == [
        "node",
        "spark",
        "queue b",
    ]


@pytest.mark.parametrize(
    ("more", "late", "on_cluster"),
    [
        ("tables: {t: {url: 'sqlite:///t.db'}}", ["tables"], []),
        ("nodes: {token_env: T}", [], ["nodes.token_env"]),
        ("nodes: {token_file: f, endpoint: 'turnlane://h:1'}", [], []),
    ],
)
def test_changed_token_variable_needs_a_restart_on_a_cluster(
    more: str, late: list[str], on_cluster: list[str]
) -> None:
    old, new = loads(with_cases()), loads(with_cases() + more)
    assert list(list_restart_sections(old, new, old.knobs())) == late
    told = list(list_restart_sections(old, new, old.knobs(), on_cluster=True))
    assert told == late + on_cluster


@pytest.mark.parametrize(
    ("changes", "late"),
    [
        ([OTHER_DATA, OTHER_DATA + MORE, MORE], [["node"], ["node"], []]),
        ([MORE, MORE.replace("disk", "memory"), "", MORE], [[], ["queue c"], [], []]),
    ],
    ids=["sections", "a queue that a reload has made"],
)
def test_needed_restart_is_computed_from_the_running_settings(
    changes: list[str], late: list[list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("pyspark.sql")
    file = tmp_path / "c.yaml"
    told: list[Any] = []
    file.write_text(changed_by(""))
    operation = PipelineSupervisor(
        file,
        load(file),
        SparkStartup(lambda: cast("Any", None)),
        report=lambda _, __, **about: told.append(about.get("needs_restart")),
        stamp=get_stamp(file),
        endpoint="turnlane://h:1",
    )
    operation._runner = cast("Any", SimpleNamespace(plan=None, start=lambda _: []))
    for change in changes:
        file.write_text(changed_by(change))
        operation._reload()
    assert [each for each in told if each is not None] == late


# ── a reload ─────────────────────────────────────────────────────────────────────────────────────


def test_reload_keeps_the_directory_of_checkpoints() -> None:
    """With another directory, lanes would lose their state and file sinks would refuse to write."""
    pytest.importorskip("pyspark.sql")
    old, new = (loads(actions(f"{{name: a, {FILE}}}").replace("d}", f"{at}}}")) for at in "xy")

    def no_session() -> Any:
        return None

    operation = PipelineSupervisor(
        Path("c.yaml"),
        old,
        SparkStartup(no_session),
        report=lambda *_, **__: None,
        stamp=None,
        endpoint="turnlane://h:1",
    )
    plan = operation._plan(new)
    assert plan is not None
    assert plan.checkpoints == Path("x/checkpoints").absolute()
    assert list(list_restart_sections(old, new, old.knobs())) == ["node"]


def access_after(old: str, new: str, **knobs: Any) -> dict[str, str]:
    """How a pipeline that began with one `nodes` reaches its nodes once it has another."""
    pytest.importorskip("pyspark.sql")
    begun, taken = (
        loads(actions(f"{{name: a, {FILE}}}", more=f"nodes: {{{nodes}}}\n")) for nodes in (old, new)
    )
    opening = SparkStartup(lambda: cast("Any", None))
    made = PipelineSupervisor(
        Path("c.yaml"), begun, opening, report=lambda *_, **__: None, stamp=None, **knobs
    )
    plan = made._plan(taken)
    assert plan is not None
    return dict(plan.access)


A_NODE, B_NODE = "turnlane://a:1", "turnlane://b:1"


def test_reload_uses_the_nodes_of_the_changed_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TURNLANE_URL", raising=False)
    old, new = (f"endpoint: '{url}'" for url in (A_NODE, B_NODE))
    assert access_after(old, new) == {"endpoint": B_NODE}
    assert access_after(old, "") == {"endpoint": "turnlane://127.0.0.1:8815"}
    monkeypatch.setenv("TURNLANE_URL", "turnlane://c:1")
    assert access_after(old, "") == {"endpoint": "turnlane://c:1"}


def test_nodes_of_an_option_override_the_file() -> None:
    access = access_after(f"endpoint: '{A_NODE}'", f"endpoint: '{B_NODE}'", endpoint=A_NODE)
    assert access == {"endpoint": A_NODE}


def test_executors_of_a_cluster_keep_the_first_token() -> None:
    """They got their variables at the start. A local Spark has the variables of this process."""
    known = {"endpoint": A_NODE, "on_cluster": True}
    assert access_after("token_env: A", "token_env: B", endpoint=A_NODE)["tokenEnv"] == "B"
    assert access_after("token_env: A", "token_env: B", **known)["tokenEnv"] == "A"
    assert "tokenEnv" not in access_after("token_file: f", "token_env: B", **known)
    assert access_after("token_file: f", "token_env: B", **known)["tokenFile"] == "f"
    assert access_after("token_env: A", "token_file: f", **known)["tokenFile"] == "f"


class Lanes:
    """A runner whose lanes do not end before the test says so."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.asked: list[list[str]] = []
        self.left = ["main"]

    def start(self, plan: Any) -> list[str]:
        from turnlane.spark.pipeline import LanesStillRunning

        self.asked.append(list(plan.settings.lane_names()))
        self.plan = None
        if self.left:
            raise LanesStillRunning(self.left)
        self.plan = plan
        return list(plan.settings.lane_names())

    def stop(self) -> list[str]:
        return self.left

    def list_changes(self) -> list[Any]:
        return []


class HungUp:
    """Signals, the first of which asks for a reload."""

    hung_up = True


@pytest.fixture
def told() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def operation(
    tmp_path: Path, told: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> PipelineSupervisor:
    """One that runs an action ``a``; its file has changed, and has ``b``."""
    pytest.importorskip("pyspark.sql")
    monkeypatch.setattr("turnlane.cli.supervise.RETRY_SECONDS", 0.0)
    path = tmp_path / "c.yaml"
    path.write_text(actions(f"{{name: b, queue: disk, {FILE}}}"))
    session: Any = SimpleNamespace(stop=lambda: None)
    made = PipelineSupervisor(
        path,
        loads(actions(f"{{name: a, queue: disk, {FILE}}}")),
        SparkStartup(lambda: session),
        report=lambda event, _, **about: told.append((event, about)),
        stamp=get_stamp(path),
        endpoint="turnlane://h:1",
    )
    made._runner = Lanes(made._plan(made.config))  # type: ignore[assignment]
    return made


def due(operation: PipelineSupervisor, signals: Any) -> None:
    """Do the work that is due."""
    work = operation._find_due_work(signals)
    assert work is not None
    work()


def test_reload_during_the_end_of_lanes_is_retried(
    operation: PipelineSupervisor, told: list[tuple[str, dict[str, Any]]]
) -> None:
    """And those before it, which have made room for it, are not started instead."""
    runner: Any = operation._runner
    signals: Any = HungUp()
    due(operation, signals)
    due(operation, signals)
    assert [event for event, _ in told] == ["waiting"] * 2
    why = "lane main of the earlier configuration has not ended yet"
    assert told[0][1]["reason"] == why
    runner.left = []
    due(operation, signals)
    assert runner.asked == [["main", "b"]] * 3
    assert [about["accepted"] for event, about in told if event == "reload"] == [True]
    assert operation._find_due_work(signals) is None


def test_rejected_reload_restarts_the_lanes_before_it(
    operation: PipelineSupervisor, told: list[tuple[str, dict[str, Any]]]
) -> None:
    runner: Any = operation._runner
    signals: Any = HungUp()
    due(operation, signals)
    operation._path.write_text("actions: 7")
    due(operation, signals)
    assert told[-1][1]["accepted"] is False
    runner.left = []
    due(operation, signals)
    assert runner.asked == [["main", "b"], ["main", "a"]]
    assert operation._find_due_work(signals) is None


def test_reload_of_a_pipeline_alone_needs_no_secrets_of_the_node(
    operation: PipelineSupervisor, told: list[tuple[str, dict[str, Any]]]
) -> None:
    """Nor did it for its start: they are where the node is."""
    runner: Any = operation._runner
    runner.left = []
    tokens = "tokens: [{name: t, secret_env: NOT_SET, rights: {'*': [read]}}]"
    text = operation._path.read_text().replace("data: d", f"data: d, {tokens}")
    operation._path.write_text(text)
    due(operation, HungUp())
    assert [about["accepted"] for event, about in told if event == "reload"] == [True]


@pytest.mark.parametrize("nodes", ["token_env: NOT_SET", "endpoint: 'http://nope'"])
def test_reload_with_invalid_nodes_is_rejected(
    nodes: str, operation: PipelineSupervisor, told: list[tuple[str, dict[str, Any]]]
) -> None:
    lines = operation._path.read_text().count("\n")
    with operation._path.open("a") as file:
        file.write(f"nodes: {{{nodes}}}\n")
    due(operation, HungUp())
    (fault,) = told[-1][1]["faults"]
    knob = nodes.partition(":")[0]
    assert fault.startswith(f"{operation._path}:{lines + 1}:{11 + len(knob)}: nodes.{knob}: ")


def test_lanes_that_did_not_end_are_named(
    operation: PipelineSupervisor, told: list[tuple[str, dict[str, Any]]]
) -> None:
    operation.stop()
    assert told == [("lanes", {"count": 1, "names": ["main"]})]


class NoNode(contextlib.nullcontext[Any]):
    """In the place of a node's process."""

    def __init__(self, *_about: Any) -> None:
        super().__init__(self)

    def start(self) -> None:
        """Nothing is."""

    def stop(self, _patience: float) -> None:
        """Nor stopped."""

    def close(self) -> None:
        """Nor closed."""


@pytest.mark.parametrize("command", ["run", "pipeline"])
def test_change_during_the_start_causes_a_reload(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading of it and the first look at it Java is looked for, and a node started."""
    file = tmp_path / "c.yaml"
    file.write_text(actions(f"{{name: a, {FILE}}}"))
    news: list[bool] = []

    def edit() -> None:
        file.write_text(actions(f"{{name: b, {FILE}}}"))

    class Looking(PipelineSupervisor):
        def run(self, _signals: Any) -> None:
            signals = cast("Any", SimpleNamespace(hung_up=False))
            assert not self._is_reload_due(signals), "the file may still be written"
            news.append(self._is_reload_due(signals))

    monkeypatch.setattr(run, "require_spark", edit)
    monkeypatch.setattr(run, "start_session", lambda *_, **__: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(run, "NodeProcess", NoNode)
    monkeypatch.setattr(run, "PipelineSupervisor", Looking)
    monkeypatch.setattr(run, "exit_if_stuck", lambda _: None)  # threads here are of other tests
    said = CliRunner().invoke(app, [command, str(file)])
    assert said.exit_code == 0, said.output
    assert news == [True]
