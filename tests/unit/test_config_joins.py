"""Queues that SQL joins with must have no other reader, because a join removes events."""

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


def load_with_issues(text: str) -> list[str]:
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
def test_join_with_a_queue_that_has_a_reader_is_refused(name: str, why: str) -> None:
    text = config(
        JOIN % name,
        f"{{name: other, {OTHER}}}",
        "{name: direct, output: {type: discard}}",
        f"{{name: asks, sql: SELECT 1, {HELD}}}",
        queues="{plain: , events: }",
    )
    (fault,) = load_with_issues(text)
    assert fault.startswith(f"c.yaml:4:44: actions[0].with_queues[0]: {why}"), fault


def test_join_with_unparsed_events_is_refused() -> None:
    (fault,) = load_with_issues(
        config(JOIN % "main.dead") + "parse: {format: json, on_error: dead}\n"
    )
    assert "with_queues[0]: dead letters wait here" in fault


def test_two_joins_with_one_queue_are_refused() -> None:
    again = JOIN.replace("name: j", "name: k") % "plain"
    (fault,) = load_with_issues(config(JOIN % "plain", again))
    assert "actions[1].with_queues[0]: action 'j' joins with it already" in fault
    (fault,) = load_with_issues(config(JOIN % "plain, Plain", queues="{plain: , Plain: }"))
    assert "actions[0].with_queues[1]: is listed twice" in fault


def test_join_with_queues_without_a_reader_is_accepted() -> None:
    pipeline = pipeline_of(
        config(JOIN % "plain, held", f"{{name: held, {HELD}}}", f"{{name: dropped, {HELD}}}")
    )
    assert list(pipeline.lane_names()) == ["main", "j", "dropped"], (
        "the join reads held, no lane does"
    )
    assert pipeline.joined_queues == {"plain", "held"}
    assert [action.name for action in pipeline.queued_actions] == ["j", "held", "dropped"]
    assert [action.name for action in pipeline.actions_with_lane] == ["j", "dropped"]
