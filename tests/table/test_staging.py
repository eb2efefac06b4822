"""Staged rows get into the table as whole batches, once; and scans of a table."""

from __future__ import annotations

from typing import Any

import pytest
from turnlane.table.sql.session import Session

from tests.table.database_fixture import DatabaseFixture
from turnlane.databases import Session
from turnlane.table import KeyRange, TableQueue
from turnlane.table.batch_commit import STAGE_PREFIX, STAGE_RETENTION, BatchStaging, get_job_id
from turnlane.table.queue import EventSelection

ODD = "a %s {now} `b`"
COLUMNS = f'user_id BIGINT, payload VARCHAR(256) NOT NULL, "{ODD}" INT'


def open_staging(db: DatabaseFixture, queue: TableQueue) -> BatchStaging:
    return BatchStaging(db.dialect, queue.definition)


def make_rows(*payloads: str, **columns: Any) -> list[dict[str, Any]]:
    return [{"payload": each, **columns} for each in payloads]


def read_payloads(queue: TableQueue) -> list[str]:
    return sorted(row["payload"] for row in queue.scan.read_events(EventSelection()))


def count_staged(db: DatabaseFixture, queue: TableQueue) -> int:
    found: int = db.execute(f"SELECT COUNT(*) FROM {STAGE_PREFIX}{queue.name}")[0][0]
    return found


def test_batch_is_committed_completely_and_once(db: DatabaseFixture) -> None:
    queue = db.queue(COLUMNS)
    job = get_job_id("a stream")
    before = db.now()
    with open_staging(db, queue) as one, open_staging(db, queue) as other:
        one.add(f"{job}/1", 0, make_rows("a", "b"))
        one.add(f"{job}/1", 2, make_rows("c", fire_at=5, priority=2, event_name="x", **{ODD: 7}))
        other.add(f"{job}/2", 0, make_rows("d"))
        other.add(f"{job}/3", 0, make_rows("of a task that failed"))
        assert read_payloads(queue) == []
        assert one.commit(job, [f"{job}/1", f"{job}/2"], epoch=4) == 4
        other.add(f"{job}/4", 0, make_rows("a", "b", "c", "d"))
        assert other.commit(job, [f"{job}/4"], epoch=4) == 0  # the batch is repeated
        other.add(f"{job}/5", 0, [*make_rows("taken", event_name="x"), *make_rows("e")])
        assert other.commit(job, [f"{job}/5"], epoch=5) == 1
        assert read_payloads(queue) == ["a", "b", "c", "d", "e"]
        assert count_staged(db, queue) == 0
    found = {row["payload"]: row for row in queue.scan.read_events(EventSelection())}
    assert [found["c"][name] for name in ("fire_at", "priority", "event_name", ODD)] == [
        5,
        2,
        "x",
        7,
    ]
    assert (found["a"]["priority"], found["a"]["event_name"], found["a"][ODD]) == (0, None, None)
    assert before <= found["a"]["fire_at"] <= db.now()


def test_interrupted_commit_changes_nothing(
    db: DatabaseFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = db.queue(COLUMNS)
    job = get_job_id(None)
    with open_staging(db, queue) as made:
        made.add(f"{job}/1", 0, make_rows("a"))
        with monkeypatch.context() as broken:

            def cut_off(*_: object) -> None:
                raise KeyboardInterrupt

            broken.setattr(BatchStaging, "_delete_stages", cut_off)  # the last step of a commit
            with pytest.raises(KeyboardInterrupt):
                made.commit(job, [f"{job}/1"], epoch=0)
        assert read_payloads(queue) == []
        assert made.commit(job, [f"{job}/1"], epoch=0) == 1
        assert read_payloads(queue) == ["a"]


def test_discard_deletes_only_stages_of_the_job_and_old_ones(db: DatabaseFixture) -> None:
    queue = db.queue(COLUMNS)
    mine, others = get_job_id(None), get_job_id(None)
    with open_staging(db, queue) as made:
        made.add(f"{others}/1", 0, make_rows("a"))
        made.add(f"{others}/2", 0, make_rows("b"))
        made.add(f"{mine}/1", 0, make_rows("c"))
        made.discard(mine)
        assert count_staged(db, queue) == 2
        week = STAGE_RETENTION * 10**9
        db.execute(
            f"UPDATE {STAGE_PREFIX}{queue.name} SET staged_at = staged_at - {week + 10**9} "
            f"WHERE stage = '{others}/2'"
        )
        made.discard(mine)
        assert made.commit(others, [f"{others}/1", f"{others}/2"]) == 1
    assert read_payloads(queue) == ["a"]


def test_key_ranges_divide_a_scan(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.fill(queue, 300)
    parts = [
        {
            row["payload"]: row["keyspace_id"]
            for row in queue.scan.read_events(EventSelection(key_range=part))
        }
        for part in KeyRange.parse("-").split(3)
    ]
    assert all(parts)
    assert sum(map(len, parts)) == len({payload for part in parts for payload in part}) == 300
    for part, found in zip(KeyRange.parse("-").split(3), parts, strict=True):
        assert all(part.contains(each) for each in found.values())
    some = EventSelection(keys=(7, 8), states=("to_be_fired",))
    assert sorted(row["payload"] for row in queue.scan.read_events(some)) == ["p7", "p8"]
    assert queue.scan.read_ids(EventSelection(ids=())) == []
    assert [len(page) for page in queue.scan.read_pages(EventSelection(), size=120)] == [
        120,
        120,
        60,
    ]


def test_scan_blocks_no_writer(db: DatabaseFixture) -> None:
    queue = db.queue()
    db.fill(queue, 50)
    pages = queue.scan.read_pages(EventSelection(), size=10)
    assert len(next(pages)) == 10
    with db.transaction() as connection:
        connection.cursor().execute(f"DELETE FROM {queue.name}")
    if db.kind != "mysql":  # MySQL has sent all rows already
        assert sum(map(len, pages)) == 40
    pages.close()
    with Session(db.dialect) as session:
        assert session.query(f"SELECT COUNT(*) FROM {queue.name}")[0][0] == 0


def test_recreated_queue_has_no_writer_records(db: DatabaseFixture) -> None:
    former = db.queue(COLUMNS)
    with open_staging(db, former) as staged:
        staged.add("stream/1", 0, make_rows("a"))
        staged.commit("stream", ["stream/1"], epoch=4)
        staged.add("stream/2", 0, make_rows("left behind"))
    db.database.catalog.drop(former.name)
    db.database.sql(f"CREATE QUEUE {former.name} (payload VARCHAR(256), other INT)")
    queue = db.database.queue(former.name)
    with open_staging(db, queue) as anew:
        anew.add("stream/1", 0, make_rows("b", other=1))
        assert anew.commit("stream", ["stream/1"], epoch=0) == 1
    assert read_payloads(queue) == ["b"]
