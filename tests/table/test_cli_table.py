"""``turnlane table``: its output, and the changes that it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.table.database_fixture import DatabaseFixture, payloads, settle, take
from turnlane.cli.app import app
from turnlane.table import TableQueue
from turnlane.table.sharded import connect_shards

DAY = 86_400 * 10**9


def run_command(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
    """Run a command; returns its output."""
    run = CliRunner().invoke(app, ["table", *arguments], input=stdin)
    assert run.exit_code == code, run.output
    return run.stdout if code == 0 else run.output


def run_json(*arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_command(*arguments, "--json").splitlines()]


def create_filled_queue(db: DatabaseFixture) -> TableQueue:
    """Create a queue with four events: due, due tomorrow with a name, fired, dead."""
    queue = db.queue()
    now = db.now()
    with db.transaction() as connection:
        queue.enqueue_many(
            connection,
            [
                {"user_id": 0, "payload": "due", "fire_at": now - 10**9},
                {"user_id": 1, "payload": "later", "fire_at": now + DAY, "event_name": "tomorrow"},
                {"user_id": 2, "payload": "out", "fire_at": now - 10**9},
                {"user_id": 3, "payload": "given up", "fire_at": now - 10**9},
            ],
        )
    db.execute(f"UPDATE {queue.name} SET state = 'fired', attempts = 1 WHERE user_id = 2")
    db.execute(f"UPDATE {queue.name} SET state = 'dead', attempts = 20 WHERE user_id = 3")
    return queue


@pytest.mark.parametrize(
    "url", ["mysql://h:99999/x", "postgresql://u:se/cret@h/x", "-80=postgresql://[::1/x"]
)
def test_invalid_url_is_reported_without_its_password(url: str) -> None:
    said = run_command("status", "--url", url, code=78)
    assert said == "turnlane: --url: is not an address: its host or its port cannot be read\n"


def test_file_that_is_not_a_database_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("These are the notes of a long meeting, and not a database.")
    said = run_command("status", "--url", f"sqlite:///{path}", code=78)
    assert said == f"turnlane: {path}: is not a database of SQLite\n"


class TestStatements:
    def test_statements_create_show_and_drop_queues(self, db: DatabaseFixture) -> None:
        statement = "CREATE QUEUE cli_mails (customer BIGINT, subject TEXT) SHARD BY (customer)"
        assert run_command("sql", statement, "--url", db.url) == "cli_mails\n"
        assert "cli_mails\n" in run_command("sql", "-", "--url", db.url, stdin="SHOW QUEUES")
        assert {"queue": "cli_mails"} in run_json("sql", "SHOW QUEUES", "--url", db.url)
        assert "already has a queue" in run_command("sql", statement, "--url", db.url, code=1)
        run_command("sql", "DROP QUEUE cli_mails", "--url", db.url)
        assert "cli_mails" not in run_command("sql", "SHOW QUEUES", "--url", db.url)

    def test_printed_ddl_creates_the_queue(self, db: DatabaseFixture) -> None:
        statement = 'CREATE QUEUE cli_odd ("a %s {b}" INT) WITH (max_attempts = 3)'
        listed = run_json("sql", statement, "--print", "--url", db.url)
        assert "cli_odd" not in run_command("sql", "SHOW QUEUES", "--url", db.url)
        try:
            for each in listed:
                db.execute(each["statement"])
            assert run_json("ddl", "cli_odd", "--url", db.url) == listed
            assert f"{listed[0]['statement']};" in run_command("ddl", "cli_odd", "--url", db.url)
        finally:
            run_command("sql", "DROP QUEUE IF EXISTS cli_odd", "--url", db.url)

    def test_statements_create_show_and_drop_schedules(self, db: DatabaseFixture) -> None:
        name = db.queue().name
        statement = f"CREATE SCHEDULE tick ON {name} EVERY '5 * * * *' VALUES (payload = 'x')"
        assert run_command("sql", statement, "--url", db.url) == "tick\n"
        shown = [each["schedule"] for each in run_json("sql", "SHOW SCHEDULES", "--url", db.url)]
        assert [text for text in shown if name in text] == [
            f'CREATE SCHEDULE "tick" ON "{name}" EVERY \'5 * * * *\' VALUES ("payload" = \'x\')'
        ]
        gone = f"DROP SCHEDULE tick ON {name}"
        assert run_json("sql", gone, "--url", db.url) == [{"schedule": "tick"}]
        assert "no schedule 'tick'" in run_command("sql", gone, "--url", db.url, code=1)

    def test_errors_take_one_line(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path}/q.db"
        assert "1:19: there is no type" in run_command(
            "sql", "CREATE QUEUE a (b c)", "--url", url, code=1
        )
        assert "only CREATE QUEUE" in run_command(
            "sql", "SHOW QUEUES", "--print", "--url", url, code=2
        )
        assert "no queue 'b'" in run_command("status", "b", "--url", url, code=1)
        assert "--url: name the database" in run_command("status", code=78)
        assert "not a database" in run_command("status", "--url", "checker://x", code=78)
        assert "no shard has the keys 80-" in run_command("status", "--url", f"-80={url}", code=78)


class TestEvents:
    def test_status_shows_waiting_events_lag_and_leader(
        self, db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        queue = create_filled_queue(db)
        (status,) = run_json("status", queue.name, "--url", db.url)
        assert status["counts"] == {"to_be_fired": 2, "fired": 1, "acked": 0, "dead": 1}
        assert (status["due"], status["window"], status["leader"]) == (1, 1, None)
        assert status["lag"] >= 1
        table = run_command("status", "--url", db.url)
        assert queue.name in table
        assert "nobody" in table
        with queue.receive() as receiver:
            settle(receiver, take(receiver, 1))
            (status,) = run_json("status", queue.name, "--url", db.url)
        assert (status["due"], status["lag"]) == (0, 0)
        assert status["leader"]
        assert status["term"] > 0
        assert 0 < status["lease"] <= 2

    def test_peek_shows_only_the_selected_events(self, db: DatabaseFixture) -> None:
        name = create_filled_queue(db).name

        def list_payloads(*options: str) -> list[str]:
            return [each["payload"] for each in run_json("peek", name, "--url", db.url, *options)]

        assert list_payloads() == ["due", "out", "given up", "later"]
        assert list_payloads("--count", "2") == ["due", "out"]
        assert list_payloads("--state", "dead", "--state", "fired") == ["out", "given up"]
        assert (
            list_payloads("--name", "tomorrow")
            == list_payloads("--key", "1")
            == list_payloads("--since", "+1h")
            == ["later"]
        )
        assert list_payloads("--until", "+1h", "--state", "to_be_fired") == ["due"]
        assert "tomorrow" in run_command("peek", name, "--url", db.url)
        assert run_command("peek", name, "--id", "123456", "--url", db.url) == "there are none\n"
        assert "--state: is one of" in run_command(
            "peek", name, "--state", "lost", "--url", db.url, code=78
        )

    def test_retried_events_fire_again(self, db: DatabaseFixture) -> None:
        queue = create_filled_queue(db)
        assert run_command("retry", queue.name, "--key", "9", "--url", db.url).startswith(
            "0 events"
        )
        (done,) = run_json("retry", queue.name, "--url", db.url)
        assert done == {"queue": queue.name, "events": 1}
        out = run_command("retry", queue.name, "--state", "fired", "--url", db.url)
        assert out == "1 event to be fired again\n"
        with queue.receive() as receiver:
            events = take(receiver, 3)
            assert {event["payload"] for event in events} == {"due", "out", "given up"}
            # A dead event starts with 0 attempts; a fired event keeps its attempt.
            attempts = {event["payload"]: event.attempts for event in events}
            assert (attempts["given up"], attempts["out"]) == (0, 1)
            settle(receiver, events)

    def test_cancelled_events_never_fire(self, db: DatabaseFixture) -> None:
        queue = create_filled_queue(db)
        assert "say which" in run_command("cancel", queue.name, "--url", db.url, code=78)
        out = run_command("cancel", queue.name, "--name", "tomorrow", "--yes", "--url", db.url)
        assert out == "1 event cancelled\n"
        (done,) = run_json("cancel", queue.name, "--all", "--url", db.url)
        assert done["events"] == 1
        assert queue.counts() == {"to_be_fired": 0, "fired": 1, "acked": 0, "dead": 1}
        with queue.receive() as receiver:
            db.fill(queue, 1)
            assert payloads(take(receiver, 1)) == ["p0"]
            assert receiver.take(timeout=0) == []


def test_status_and_reshard_work_on_several_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [(f"sqlite:///{tmp_path}/a.db", "-80"), (f"sqlite:///{tmp_path}/b.db", "80-")]
    urls = [word for url, part in shards for word in ("--url", f"{part}={url}")]
    run_command("sql", "CREATE QUEUE jobs (user_id BIGINT) SHARD BY (user_id)", *urls)
    with connect_shards(shards) as databases:
        databases.queue("jobs").put({"user_id": n, "fire_at": 2**62} for n in range(50))
    both = run_json("status", "jobs", *urls)
    assert [each["shard"] for each in both] == ["-80", "80-"]
    assert sum(each["counts"]["to_be_fired"] for each in both) == 50
    assert len(run_json("peek", "jobs", "--count", "100", *urls)) == 50
    assert len(run_json("peek", "jobs", "--key", "7", *urls)) == 1

    assert "no reshard" in run_command("reshard", "jobs", *urls, code=1)
    merged = f"sqlite:///{tmp_path}/c.db"
    *steps, result = run_json("reshard", "jobs", "--to", f"-={merged}", *urls)
    assert [each["step"] for each in steps][-1] == "done"
    assert result["moved"] == 50
    assert result["shards"] == [{"range": "-", "url": merged}]
    monkeypatch.setenv("TURNLANE_TABLE_URL", merged)
    assert run_json("status", "jobs")[0]["counts"]["to_be_fired"] == 50
