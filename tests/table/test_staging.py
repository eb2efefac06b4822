"""Do staged rows get into the table as whole batches, once? And does a scan find what it should?"""

from __future__ import annotations

from typing import Any

import pytest
from turnlane.table.sql.session import Session

from tests.table.site import Site
from turnlane.table import KeyRange, TableQueue
from turnlane.table.batch_commit import STAGE_PREFIX, STAGE_RETENTION, BatchStaging, get_job_id
from turnlane.table.queue import EventSelection

ODD = "a %s {now} `b`"
COLUMNS = f'user_id BIGINT, payload VARCHAR(256) NOT NULL, "{ODD}" INT'


def staging(site: Site, queue: TableQueue) -> BatchStaging:
    return BatchStaging(site.dialect, queue.definition)


def rows(*payloads: str, **columns: Any) -> list[dict[str, Any]]:
    return [{"payload": each, **columns} for each in payloads]


def payloads(queue: TableQueue) -> list[str]:
    return sorted(row["payload"] for row in queue.scan.events(EventSelection()))


def staged(site: Site, queue: TableQueue) -> int:
    found: int = site.execute(f"SELECT COUNT(*) FROM {STAGE_PREFIX}{queue.name}")[0][0]
    return found


def test_a_batch_is_there_as_a_whole_and_once(site: Site) -> None:
    queue = site.queue(COLUMNS)
    job = get_job_id("a stream")
    before = site.now()
    with staging(site, queue) as one, staging(site, queue) as other:
        one.add(f"{job}/1", 0, rows("a", "b"))
        one.add(f"{job}/1", 2, rows("c", fire_at=5, priority=2, event_name="x", **{ODD: 7}))
        other.add(f"{job}/2", 0, rows("d"))
        other.add(f"{job}/3", 0, rows("of a task that failed"))
        assert payloads(queue) == []
        assert one.commit(job, [f"{job}/1", f"{job}/2"], epoch=4) == 4
        other.add(f"{job}/4", 0, rows("a", "b", "c", "d"))
        assert other.commit(job, [f"{job}/4"], epoch=4) == 0  # it comes again
        other.add(f"{job}/5", 0, [*rows("taken", event_name="x"), *rows("e")])
        assert other.commit(job, [f"{job}/5"], epoch=5) == 1
        assert payloads(queue) == ["a", "b", "c", "d", "e"]
        assert staged(site, queue) == 0
    found = {row["payload"]: row for row in queue.scan.events(EventSelection())}
    assert [found["c"][name] for name in ("fire_at", "priority", "event_name", ODD)] == [
        5,
        2,
        "x",
        7,
    ]
    assert (found["a"]["priority"], found["a"]["event_name"], found["a"][ODD]) == (0, None, None)
    assert before <= found["a"]["fire_at"] <= site.now()


def test_a_commit_that_is_cut_off_changes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = site.queue(COLUMNS)
    job = get_job_id(None)
    with staging(site, queue) as made:
        made.add(f"{job}/1", 0, rows("a"))
        with monkeypatch.context() as broken:

            def cut_off(*_: object) -> None:
                raise KeyboardInterrupt

            broken.setattr(BatchStaging, "_forget", cut_off)  # the last thing that a commit does
            with pytest.raises(KeyboardInterrupt):
                made.commit(job, [f"{job}/1"], epoch=0)
        assert payloads(queue) == []
        assert made.commit(job, [f"{job}/1"], epoch=0) == 1
        assert payloads(queue) == ["a"]


def test_only_the_jobs_own_stages_are_given_up_and_what_is_forgotten(site: Site) -> None:
    queue = site.queue(COLUMNS)
    mine, others = get_job_id(None), get_job_id(None)
    with staging(site, queue) as made:
        made.add(f"{others}/1", 0, rows("a"))
        made.add(f"{others}/2", 0, rows("b"))
        made.add(f"{mine}/1", 0, rows("c"))
        made.discard(mine)
        assert staged(site, queue) == 2
        week = STAGE_RETENTION * 10**9
        site.execute(
            f"UPDATE {STAGE_PREFIX}{queue.name} SET staged_at = staged_at - {week + 10**9} "
            f"WHERE stage = '{others}/2'"
        )
        made.discard(mine)
        assert made.commit(others, [f"{others}/1", f"{others}/2"]) == 1
    assert payloads(queue) == ["a"]


def test_key_ranges_divide_a_table(site: Site) -> None:
    queue = site.queue()
    site.fill(queue, 300)
    parts = [
        {
            row["payload"]: row["keyspace_id"]
            for row in queue.scan.events(EventSelection(key_range=part))
        }
        for part in KeyRange.parse("-").split(3)
    ]
    assert all(parts)
    assert sum(map(len, parts)) == len({payload for part in parts for payload in part}) == 300
    for part, found in zip(KeyRange.parse("-").split(3), parts, strict=True):
        assert all(part.contains(each) for each in found.values())
    some = EventSelection(keys=(7, 8), states=("to_be_fired",))
    assert sorted(row["payload"] for row in queue.scan.events(some)) == ["p7", "p8"]
    assert queue.scan.ids(EventSelection(ids=())) == []
    assert [len(page) for page in queue.scan.pages(EventSelection(), size=120)] == [120, 120, 60]


def test_a_scan_holds_nobody_up(site: Site) -> None:
    queue = site.queue()
    site.fill(queue, 50)
    pages = queue.scan.pages(EventSelection(), size=10)
    assert len(next(pages)) == 10
    with site.transaction() as connection:
        connection.cursor().execute(f"DELETE FROM {queue.name}")
    if site.kind != "mysql":  # which has sent them all, or read them one by one
        assert sum(map(len, pages)) == 40
    pages.close()
    with Session(site.dialect) as session:
        assert session.query(f"SELECT COUNT(*) FROM {queue.name}")[0][0] == 0


def test_a_queue_that_is_made_anew_knows_nothing_of_the_former(site: Site) -> None:
    former = site.queue(COLUMNS)
    with staging(site, former) as staged:
        staged.add("stream/1", 0, rows("a"))
        staged.commit("stream", ["stream/1"], epoch=4)
        staged.add("stream/2", 0, rows("left behind"))
    site.database.catalog.drop(former.name)
    site.database.sql(f"CREATE QUEUE {former.name} (payload VARCHAR(256), other INT)")
    queue = site.database.queue(former.name)
    with staging(site, queue) as anew:
        anew.add("stream/1", 0, rows("b", other=1))
        assert anew.commit("stream", ["stream/1"], epoch=0) == 1
    assert payloads(queue) == ["b"]
