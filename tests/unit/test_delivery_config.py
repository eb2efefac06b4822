"""Does the section ``delivery`` of an action reach its lane, and are contradictions refused?"""

from __future__ import annotations

import pytest

from turnlane.config import ConfigFileError, loads
from turnlane.delivery.settings import Ordering
from turnlane.outputs.file import FileOutputSettings
from turnlane.spark.lane_shape import build_lane_step, build_main_steps
from turnlane.spark.steps import LaneStep

FILE = "output: {type: file, path: out}"
SINK = "{type: spark, format: csv}"


def write_actions(*lines: str, more: str = "") -> str:
    """Return a configuration whose third line is the first action."""
    return "node: {data: d}\nactions:\n" + "".join(f"  - {line}\n" for line in lines) + more


def get_issue(text: str) -> str:
    with pytest.raises(ConfigFileError) as caught:
        loads(text, "c.yaml", {})
    (issue,) = str(caught.value).splitlines()
    return issue


def test_settings_reach_the_action_with_the_second_output_checked() -> None:
    failover = "failover: {output: {type: file, path: second}, after: 5m}"
    delivery = f"delivery: {{ordering: key, backoff: 200ms, batch_bytes: 64Ki, {failover}}}"
    (action,) = loads(write_actions(f"{{name: a, queue: disk, {delivery}, {FILE}}}")).actions
    assert action.delivery.ordering is Ordering.KEY
    assert (action.delivery.backoff, action.delivery.batch_bytes) == (0.2, 65536)
    assert action.delivery.failover is not None
    assert action.delivery.failover.after == 300
    assert isinstance(action.delivery.failover.output, FileOutputSettings)
    again = LaneStep.model_validate_json(build_lane_step(action).model_dump_json())
    assert again.delivery.failover is not None
    assert again.delivery.failover.output["path"] == "second"


def test_empty_delivery_section_has_the_defaults() -> None:
    lines = [f"{{name: {name}, {FILE}{more}}}" for name, more in (("a", ""), ("b", ", delivery: "))]
    one, other = loads(write_actions(*lines)).actions
    assert one.delivery == other.delivery


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ("", (65_536, 8 << 20, 1)),
        ("delivery: {batch_events: 7, max_concurrency: 3}, ", (7, 8 << 20, 3)),
        (f"delivery: {{failover: {{{FILE}}}}}, ", (1000, 1 << 20, 32)),
    ],
    ids=["defaults", "own settings", "with a second output"],
)
def test_file_output_has_larger_batches_unless_the_settings_differ(
    more: str, batch: tuple[int, int, int]
) -> None:
    (action,) = loads(write_actions(f"{{name: a, queue: disk, {more}{FILE}}}")).actions
    delivery = build_lane_step(action).delivery
    assert (delivery.batch_events, delivery.batch_bytes, delivery.max_concurrency) == batch


def test_main_lane_has_steps_for_the_actions_that_it_calls() -> None:
    config = loads(
        write_actions(
            "{name: noise, filter: severity = 7, output: {type: discard}}",
            f"{{name: direct, {FILE}}}",
            f"{{name: instead, delivery: {{only_when_suspended: true}}, {FILE}}}",
            f"{{name: tried, queue: disk, delivery: {{mode: try_direct}}, {FILE}}}",
            f"{{name: spare, queue: disk, delivery: {{only_when_suspended: true}}, {FILE}}}",
            f"{{name: queued, queue: disk, {FILE}}}",
        )
    )
    pipeline = config.pipeline()
    assert pipeline is not None
    steps = {step.action: step for step in build_main_steps(pipeline)}
    assert list(steps) == ["direct", "instead", "tried", "spare"]
    assert steps["direct"].rereads
    assert steps["tried"].queue == "tried"
    assert not steps["tried"].rereads, "its dead letters go back into its own queue"
    assert steps["spare"].output is None
    assert steps["spare"].only_when_suspended
    assert {step.dead_letters for step in steps.values()} == {f"{name}.dead" for name in steps}


SUSPENDED = "delivery: {only_when_suspended: true}"


@pytest.mark.parametrize(
    ("lines", "issue"),
    [
        ([f"{{name: a, {SUSPENDED}, {FILE}}}"], "3:47: actions[0].delivery.only_when_suspended: "),
        (
            [f"{{name: a, queue: disk, {FILE}}}", f"{{name: b, {SUSPENDED}, {FILE}}}"],
            "only_when_suspended: the action before has a queue",
        ),
        (
            ["{name: a, output: {type: discard}}", f"{{name: b, {SUSPENDED}, {FILE}}}"],
            "only_when_suspended: there is no action before",
        ),
        ([f"{{name: a, delivery: {{mode: try_direct}}, {FILE}}}"], "delivery.mode: needs a queue"),
        (
            [f"{{name: a, queue: disk, delivery: {{mode: try_direct, ordering: strict}}, {FILE}}}"],
            "delivery.mode: lets events overtake",
        ),
        (
            [f"{{name: a, queue: disk, sql: SELECT 1, delivery: {{mode: try_direct}}, {FILE}}}"],
            "actions[0].sql: runs in the action's lane",
        ),
        (
            ["{name: a, queue: disk, delivery: {backoff: 1s}, output: {type: spark, format: csv}}"],
            "actions[0].delivery: has no effect here: Spark itself",
        ),
        (
            [f"{{name: a, {FILE}, delivery: {{failover: {{output: {SINK}}}}}}}"],
            "delivery.failover.output.type: Spark writes this only",
        ),
        ([f"{{name: a, {FILE}, delivery: {{bakoff: 1s}}}}"], "did you mean backoff"),
        (
            [f"{{name: a, {FILE}, delivery: {{failover: {{output: {{type: fle}}}}}}}}"],
            "delivery.failover.output.type: there is no output 'fle'; did you mean file",
        ),
        (
            [f"{{name: a, {FILE}}}", f"{{name: a.dead, queue: disk, {FILE}}}"],
            "actions[1].name: a queue of dead letters has this name; choose another one",
        ),
    ],
)
def test_contradictory_delivery_settings_are_refused_with_their_position(
    lines: list[str], issue: str
) -> None:
    assert issue in get_issue(write_actions(*lines))


def test_dead_letter_queue_takes_its_settings_from_queues() -> None:
    more = "queues: {a.dead: {max_bytes: 1Gi}}\n"
    config = loads(write_actions(f"{{name: a, {FILE}}}", more=more))
    assert config.knobs()["a.dead"]["max_bytes"] == 1 << 30
