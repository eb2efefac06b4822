"""Queues that SQL joins with: only those that nobody else reads, for a join takes events out."""

from __future__ import annotations

import pytest

from turnlane.config import ConfigFileError, loads
from turnlane.pipeline.settings import PipelineSettings

OTHER = "queue: disk, output: {type: file, path: out}"
HELD = "queue: disk, output: {type: discard}"
JOIN = "{name: j, sql: SELECT 1, with_queues: [%s], " + OTHER + "}"


def config(*actions: str, queues: str = "{plain: }") -> str:
    """A configuration whose fourth line is the first of the actions."""
    listed = "".join(f"  - {each}\n" for each in actions)
    return f"node: {{data: d}}\nqueues: {queues}\nactions:\n{listed}"


def faults_of(text: str) -> list[str]:
    with pytest.raises(ConfigFileError) as caught:
        loads(text, "c.yaml", {})
    return str(caught.value).splitlines()


def pipeline_of(text: str) -> PipelineSettings:
    pipeline = loads(text).pipeline()
    assert pipeline is not None
    return pipeline


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("main", "the main lane reads this queue"),
        ("other", "the lane of action 'other' reads this queue"),
        ("direct", "there is no queue 'direct'"),
        ("j", "the lane of action 'j' reads this queue"),
        ("other.dead", "dead letters wait here"),
        ("asks", "the lane of action 'asks' reads this queue"),
        ("events", "SQL has the action's own events under this name"),
    ],
)
def test_a_join_takes_nothing_that_somebody_else_reads(name: str, why: str) -> None:
    text = config(
        JOIN % name,
        f"{{name: other, {OTHER}}}",
        "{name: direct, output: {type: discard}}",
        f"{{name: asks, sql: SELECT 1, {HELD}}}",
        queues="{plain: , events: }",
    )
    (fault,) = faults_of(text)
    assert fault.startswith(f"c.yaml:4:44: actions[0].with_queues[0]: {why}"), fault


def test_unparsed_events_wait_for_somebody_to_look_at_them() -> None:
    (fault,) = faults_of(config(JOIN % "main.dead") + "parse: {format: json, on_error: dead}\n")
    assert "with_queues[0]: dead letters wait here" in fault


def test_two_joins_would_take_each_others_events() -> None:
    again = JOIN.replace("name: j", "name: k") % "plain"
    (fault,) = faults_of(config(JOIN % "plain", again))
    assert "actions[1].with_queues[0]: action 'j' joins with it already" in fault
    (fault,) = faults_of(config(JOIN % "plain, Plain", queues="{plain: , Plain: }"))
    assert "actions[0].with_queues[1]: is there twice" in fault


def test_a_join_has_queues_of_the_node_and_of_actions_that_only_keep_events_for_it() -> None:
    pipeline = pipeline_of(
        config(JOIN % "plain, held", f"{{name: held, {HELD}}}", f"{{name: dropped, {HELD}}}")
    )
    assert list(pipeline.lane_names()) == ["main", "j", "dropped"], (
        "the join reads held, no lane does"
    )
    assert pipeline.joined_queues == {"plain", "held"}
    assert [action.name for action in pipeline.queued_actions] == ["j", "held", "dropped"]
    assert [action.name for action in pipeline.actions_with_lane] == ["j", "dropped"]
