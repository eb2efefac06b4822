"""Tests of ``turnlane dlq``: dead letters are shown, sent again and purged, and never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner, Result

from tests.contract.harness import wait_until
from tests.node.conftest import Serve, ServedNode, values
from tests.node.lane import stage_block
from turnlane.cli.app import app
from turnlane.client import dead_letters
from turnlane.client.dead_letters import DeadLetters, LetterFilter, SelectedLetters
from turnlane.delivery.results import (
    STEP_FAILED,
    DeadLetter,
    DeadLetterLog,
    make_dead_letter_block,
)
from turnlane.errors import ConfigError, RetryLater
from turnlane.events import Block, block_of
from turnlane.node.commit_record import Commit

PATIENCE = 120.0
QUEUES: dict[str, dict[str, Any]] = {
    "main": {},
    "alerts": {},
    "alerts.dead": {},
    "direct.dead": {},
}
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


def build_letters(
    numbers: range, reason: str = "Never", hour: int = 0, action: str = "alerts"
) -> Block:
    """Return dead letters as a lane stages them."""
    keys = [f"key-{number % 3}" for number in numbers]
    rows = block_of([b"event %d" % number for number in numbers], keys=keys)
    letter = DeadLetter(rows, np.arange(len(numbers)), reason, f"refused: {reason}", 1)
    moment = NOON + timedelta(hours=hour)
    return make_dead_letter_block([letter], action, int(moment.timestamp() * 1e9), "v1")


def publish_letters(served: ServedNode, block: Block, queue: str = "alerts.dead") -> None:
    served.node.queue(queue).producer(ack="persisted").publish_block(block)


@pytest.fixture
def node_with_letters(serve: Serve) -> ServedNode:
    """A node with thirty dead letters of one action, with three reasons and three times."""
    served = serve(QUEUES)
    for hour, reason in enumerate(("Never", "PayloadTooLarge", "ValueError")):
        publish_letters(served, build_letters(range(hour * 10, hour * 10 + 10), reason, hour))
    return served


def run_command(served: ServedNode, *words: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["dlq", *words, "--endpoint", served.url], input=given)


def parse_objects(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def count_pending(served: ServedNode, queue: str = "alerts.dead") -> int:
    return served.node.queue(queue).find_unsettled(1).pending


def read_numbers(served: ServedNode, queue: str) -> list[int]:
    return [int(value.split()[1]) for value in values(served.node, queue)]


def test_list_groups_dead_letters_by_action_and_reason(node_with_letters: ServedNode) -> None:
    found = parse_objects(run_command(node_with_letters, "list", "--json"))
    assert {each["reason"]: each["events"] for each in found} == {
        "Never": 10,
        "PayloadTooLarge": 10,
        "ValueError": 10,
    }
    assert {each["action"] for each in found} == {"alerts"}
    table = run_command(node_with_letters, "list").stdout
    assert "PayloadTooLarge" in table
    assert "2026-11-16 13:00:00" in table


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], range(10)),
        (["--limit", "30"], range(30)),
        (["--reason", "ValueError"], range(20, 30)),
        (["--since", "2026-11-16T13:00", "--until", "2026-11-16T14:00"], range(10, 20)),
        (["--key", "key-1"], range(1, 30, 3)),
        (["--where", "value LIKE '%5' AND dead_attempts = 1"], range(5, 30, 10)),
        (["--where", "dead_time >= '2026-11-16T14'", "--limit", "2"], range(20, 22)),
        (["--reason", "Nobody"], range(0)),
    ],
)
def test_show_selects_the_requested_dead_letters(
    node_with_letters: ServedNode, options: list[str], expected: range
) -> None:
    found = parse_objects(run_command(node_with_letters, "show", "alerts", "--json", *options))
    assert [int(each["value"].split()[1]) for each in found] == list(expected)
    for each in found:
        assert (each["dead_action"], each["dead_config"]) == ("alerts", "v1")


def test_show_prints_the_reason_and_the_event(node_with_letters: ServedNode) -> None:
    text = run_command(node_with_letters, "show", "alerts", "--limit", "1").stdout
    assert text.splitlines()[:2] == ["0  2026-11-16 12:00:00  Never", "  refused: Never"]
    assert "  value: event 0" in text
    assert (
        run_command(node_with_letters, "show", "alerts", "--reason", "x").stdout
        == "there are none\n"
    )


def test_show_prints_any_content_of_an_event(serve: Serve) -> None:
    """Binary values, times that Python cannot represent, and control characters."""
    served = serve(QUEUES)
    block = build_letters(range(2))
    times = pa.array([2**60, 0], block.schema.field("timestamp").type)
    headers = pa.array([[("a", "b")], []], block.schema.field("headers").type)
    for name, column in (
        ("timestamp", times),
        ("headers", headers),
        ("value", pa.array([b"\xff\x00", b"\x1b[2J"])),
    ):
        block = block.set_column(block.schema.get_field_index(name), name, column)
    nanoseconds: Any = pa.array([1, None], pa.timestamp("ns", tz="UTC"))
    publish_letters(served, block.append_column("seen", nanoseconds))
    condition = "timestamp LIKE '%Z' AND (seen IS NULL OR seen LIKE '%01Z')"
    first, second = parse_objects(
        run_command(served, "show", "alerts", "--json", "--where", condition)
    )
    assert (first["value_base64"], first["headers"]) == ("/wA=", {"a": "b"})
    assert first["timestamp"].endswith("Z")
    assert (second["value"], second["headers"]) == ("\x1b[2J", {})
    assert "\x1b" not in run_command(served, "show", "alerts").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "alrts"], "did you mean alerts"),
        (["show", "alerts", "--since", "soon"], "--since: must be a time such as"),
        (["show", "alerts", "--where", "level = 1"], "no such column: level"),
        (["show", "alerts", "--where", "1); DROP TABLE letters; --"], "where"),
        (["show", "alerts", "--where", "(SELECT load_extension('x'))"], "where"),
        (["replay", "direct"], "--to: action 'direct' has no queue"),
        (["replay", "alerts", "--to", "nowhere"], "there is no queue 'nowhere'"),
    ],
)
def test_impossible_request_is_refused_with_the_reason(
    node_with_letters: ServedNode, words: list[str], message: str
) -> None:
    result = run_command(node_with_letters, *words)
    assert result.exit_code != 0
    assert message in result.output
    assert count_pending(node_with_letters) == 30


class TestReplay:
    def test_resend_publishes_the_original_events(self, node_with_letters: ServedNode) -> None:
        (said,) = parse_objects(
            run_command(node_with_letters, "replay", "alerts", "--reason", "Never", "--json")
        )
        assert said == {"action": "alerts", "to": "alerts", "events": 10}
        assert read_numbers(node_with_letters, "alerts") == list(range(10))
        found = node_with_letters.node.queue("alerts").read(0, 100)
        assert found is not None
        assert not [name for name in found[1].schema.names if name.startswith("dead_")]
        assert found[1].column("key").to_pylist()[:2] == ["key-0", "key-1"]
        assert count_pending(node_with_letters) == 20
        assert run_command(node_with_letters, "replay", "alerts").stdout == (
            "20 dead letters sent again, into queue alerts\n"
        )
        assert read_numbers(node_with_letters, "alerts") == list(range(30))

    def test_resend_respects_its_limit_and_target(self, node_with_letters: ServedNode) -> None:
        run_command(node_with_letters, "replay", "alerts", "--limit", "7", "--to", "main")
        assert read_numbers(node_with_letters, "main") == list(range(7))
        assert count_pending(node_with_letters) == 23

    @pytest.mark.parametrize("limit", [15, 30])
    def test_two_concurrent_resends_send_an_event_once(
        self, node_with_letters: ServedNode, limit: int
    ) -> None:
        """The slower command finds the events settled and changes nothing."""
        node = node_with_letters.client().nodes[0]

        def another_one() -> None:
            DeadLetters(node, "alerts").replay(LetterFilter(), "alerts", limit, lambda _: None)

        mine = DeadLetters(node, "alerts")
        chosen = mine.chosen
        mine.chosen = lambda *given: _call_after_selection(another_one, chosen(*given))  # type: ignore[method-assign]
        if limit < 30:
            with pytest.raises(RetryLater, match="another consumer has settled"):
                mine.replay(LetterFilter(), "alerts", None, lambda _: None)
        else:
            assert mine.replay(LetterFilter(), "alerts", None, lambda _: None) == 0
        assert sorted(read_numbers(node_with_letters, "alerts")) == list(range(limit))
        assert len(node_with_letters.node.staging) == 0

    def test_resend_skips_letters_that_die_again_while_it_runs(
        self, node_with_letters: ServedNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dead_letters, "STEP", 10)
        died: list[int] = []

        def die_again(count: int) -> None:
            died.extend(range(len(died), len(died) + count))
            publish_letters(node_with_letters, build_letters(range(died[-count], died[-1] + 1)))

        mine = DeadLetters(node_with_letters.client().nodes[0], "alerts")
        assert mine.replay(LetterFilter(), "alerts", None, die_again) == 30
        assert (read_numbers(node_with_letters, "alerts"), died) == (
            list(range(30)),
            list(range(30)),
        )
        assert count_pending(node_with_letters) == 30

    def test_killed_resend_loses_nothing_and_sends_nothing_twice(self, serve: Serve) -> None:
        served = serve(QUEUES)
        count = 50_000
        publish_letters(served, build_letters(range(count)))
        command = [sys.executable, "-m", "turnlane", "dlq", "replay", "alerts"]
        kills = 0
        for _ in range(3):
            before = served.node.queue("alerts").end
            life = subprocess.Popen(
                [*command, "--endpoint", served.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            wait_until(
                lambda life=life, before=before: (  # type: ignore[misc]
                    life.poll() is not None or served.node.queue("alerts").end > before
                ),
                "a step",
                PATIENCE,
            )
            os.kill(life.pid, signal.SIGKILL)
            life.communicate()
            kills += life.returncode == -signal.SIGKILL
        assert kills, "nothing was killed: this test tests nothing"
        subprocess.run(
            [*command, "--endpoint", served.url], check=True, timeout=PATIENCE, capture_output=True
        )
        assert Counter(read_numbers(served, "alerts")) == Counter(range(count))
        assert count_pending(served) == 0
        assert all(queue.stats().ledger.adds_up for queue in served.node.queues().values())


def _call_after_selection(
    do: Callable[[], None], pieces: Iterator[SelectedLetters]
) -> Iterator[SelectedLetters]:
    """Yield the pieces; call a function between selection and use."""
    for piece in pieces:
        do()
        yield piece


class TestPurge:
    def test_purge_asks_for_confirmation(self, node_with_letters: ServedNode) -> None:
        refused = run_command(node_with_letters, "purge", "alerts", "--key", "key-2", given="n\n")
        assert refused.exit_code == 1
        assert "Throw 10 dead letters of alerts away for good (key key-2)?" in refused.output
        assert count_pending(node_with_letters) == 30
        assert not node_with_letters.node.audit.path.exists()

    def test_purge_removes_only_the_confirmed_letters(
        self, node_with_letters: ServedNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def agree(*_: object, **__: object) -> bool:
            publish_letters(node_with_letters, build_letters(range(30, 40)))
            return True

        monkeypatch.setattr(typer, "confirm", agree)
        assert (
            run_command(node_with_letters, "purge", "alerts").stdout
            == "30 dead letters thrown away\n"
        )
        assert read_numbers(node_with_letters, "alerts.dead") == list(range(30, 40))

    def test_purge_removes_the_selection_and_writes_the_audit_log(
        self, node_with_letters: ServedNode
    ) -> None:
        done = run_command(node_with_letters, "purge", "alerts", "--key", "key-2", "--yes")
        assert done.stdout == "10 dead letters thrown away\n"
        assert count_pending(node_with_letters) == 20
        (line,) = node_with_letters.node.audit.path.read_text().splitlines()
        noted = json.loads(line)
        assert (noted["what"], noted["queue"], noted["events"]) == ("purge", "alerts.dead", 10)
        assert noted["why"] == "dlq: key key-2"
        assert noted["time"]
        ledger = node_with_letters.node.queue("alerts.dead").stats().ledger
        assert (ledger.dead, ledger.pending) == (10, 20)
        assert run_command(node_with_letters, "purge", "alerts", "--yes", "--json").stdout == (
            '{"action": "alerts", "events": 20}\n'
        )
        assert run_command(node_with_letters, "list").stdout == "there are no dead letters\n"

    def test_purge_without_a_writable_audit_log_removes_nothing(
        self, node_with_letters: ServedNode
    ) -> None:
        node_with_letters.node.audit.path.mkdir()
        result = run_command(node_with_letters, "purge", "alerts", "--yes")
        assert result.exit_code == 75
        assert "cannot write audit.jsonl" in result.output
        assert count_pending(node_with_letters) == 30


def test_letters_with_different_columns_are_shown_together(serve: Serve) -> None:
    """For example after a change of parsing: missing columns are null."""
    served = serve(QUEUES)
    publish_letters(served, build_letters(range(2)))
    more = build_letters(range(2, 4))
    publish_letters(served, more.append_column("level", more.column("dead_attempts")))
    found = parse_objects(
        run_command(served, "show", "alerts", "--json", "--where", "level IS NULL")
    )
    assert [each["value"] for each in found] == ["event 0", "event 1"]


def test_large_letters_are_read_in_small_batches(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand large letters do not have to fit into memory."""
    monkeypatch.setattr(dead_letters, "STEP_BYTES", 1)
    served = serve({**QUEUES, "alerts.dead": {"memory_bytes": 1, "durability": "always"}})
    for first in (0, 10, 20):
        publish_letters(served, build_letters(range(first, first + 10)))
    steps: list[int] = []
    mine = DeadLetters(served.client().nodes[0], "alerts")
    assert mine.replay(LetterFilter(), "alerts", 25, steps.append) == 25
    assert steps == [10, 10, 5]
    assert read_numbers(served, "alerts") == list(range(25))
    assert count_pending(served) == 5


def test_invalid_condition_is_refused_before_any_change(node_with_letters: ServedNode) -> None:
    node = node_with_letters.client().nodes[0]
    with pytest.raises(ConfigError):
        DeadLetters(node, "alerts").purge(LetterFilter(where="x >"), None, lambda _: None)
    assert count_pending(node_with_letters) == 30


# ── the log ──


def commit_letters(served: ServedNode, letters: Block, queue: str = "alerts.dead") -> None:
    served.node.commits.commit(Commit([stage_block(served.node, queue, letters)], []))


def list_logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    events = [each for each in caplog.records if vars(each).get("event") == "delivery.events_dead"]
    return [vars(each)["fields"] for each in events]


def test_dead_letters_are_logged_at_once_and_then_as_one_summary(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(QUEUES)
    commit_letters(served, build_letters(range(2)))
    commit_letters(served, build_letters(range(1), action="direct"), "direct.dead")
    first = {"events": 2, "queue": "alerts.dead", "reason": "Never: refused: Never"}
    hint = "turnlane dlq show alerts CONFIG"
    assert list_logged(caplog)[0] == {"action": "alerts", **first, "hint": hint}
    for number in range(3):
        commit_letters(served, build_letters(range(number, number + 2), "TooLarge"))
    # Letters that their lane has logged, and events that are sent again, are not mentioned.
    commit_letters(served, build_letters(range(1), STEP_FAILED))
    commit_letters(served, build_letters(range(1)), "alerts")
    assert [each["action"] for each in list_logged(caplog)] == ["alerts", "direct"]
    served.node.commits.close()
    last = list_logged(caplog)[2:]
    assert [(each["events"], each["reason"]) for each in last] == [
        (6, "TooLarge: refused: TooLarge")
    ]


def test_summary_of_dead_letters_comes_without_another_letter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with DeadLetterLog(seconds=0.05) as letters:
        for _ in range(5):
            letters.add("alerts", 1, "alerts.dead", "refused")
        wait_until(lambda: sum(each["events"] for each in list_logged(caplog)) == 5)
        assert list_logged(caplog)[0]["events"] == 1
