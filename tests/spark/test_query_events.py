"""Events of queries: each batch is reported once, to the handler of its query only."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from turnlane.spark.lane import QueryEvent, QueryEventListener

PATIENCE = 120.0
FILES = 5


class EventCollector:
    """The events of the queries of one name."""

    def __init__(self) -> None:
        self.events: list[QueryEvent] = []
        self.ended = threading.Event()

    def __call__(self, event: QueryEvent) -> None:
        self.events.append(event)
        if event.progress is None:
            self.ended.set()

    def runs(self) -> set[str]:
        return {each.run for each in self.events}


@pytest.fixture
def lines(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """A stream of files, each of which is a batch."""
    place = tmp_path / "files"
    place.mkdir()
    for number in range(FILES):
        (place / f"{number}.txt").write_text("line\n" * (number + 1))
    return spark.readStream.option("maxFilesPerTrigger", 1).text(str(place))


def run(rows: DataFrame, name: str, checkpoint: Path) -> StreamingQuery:
    writer = rows.writeStream.format("noop").queryName(name).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    query.awaitTermination()
    return query


def test_each_batch_is_an_event_followed_by_the_end(
    spark: SparkSession, lines: DataFrame, tmp_path: Path
) -> None:
    mine, other = EventCollector(), EventCollector()
    listener = QueryEventListener(spark, {"mine": mine, "other": other})
    listener.start()
    try:
        run(lines, "nobody", tmp_path / "nobody")
        query = run(lines, "mine", tmp_path / "mine")
        assert mine.ended.wait(PATIENCE)
    finally:
        listener.stop()
    assert mine.runs() == {str(query.runId)}
    *batches, last = [each.progress for each in mine.events]
    assert last is None
    assert [each and each.batchId for each in batches] == list(range(FILES))
    assert sum(each.numInputRows for each in batches if each) == sum(range(FILES + 1))
    assert not other.events


class FailingCollector(EventCollector):
    """A handler that raises at the events of the first batches."""

    def __call__(self, event: QueryEvent) -> None:
        if event.progress is not None and event.progress.batchId < 2:
            raise ValueError("cannot take it")
        super().__call__(event)


def test_failing_handler_does_not_stop_later_events(
    spark: SparkSession, lines: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hard = FailingCollector()
    listener = QueryEventListener(spark, {"hard": hard})
    listener.start()
    try:
        listener._java_events.add("no json")
        run(lines, "hard", tmp_path / "hard")
        assert hard.ended.wait(PATIENCE)
    finally:
        listener.stop()
    batches = [each.progress and each.progress.batchId for each in hard.events]
    assert batches == [*range(2, FILES), None]
    errors = [str(each.exc_info[1]) for each in caplog.records if each.exc_info]
    assert errors.count("cannot take it") == 2
    messages = [each.getMessage() for each in caplog.records]
    assert 'query_events.dispatch_failed event_text="no json"' in messages


def test_failed_run_sends_its_end(spark: SparkSession, lines: DataFrame, tmp_path: Path) -> None:
    mine = EventCollector()
    listener = QueryEventListener(spark, {"mine": mine})
    listener.start()
    try:
        with pytest.raises(Exception, match="as it must"):
            run(lines.selectExpr("raise_error('as it must')"), "mine", tmp_path / "c")
        assert mine.ended.wait(PATIENCE)
    finally:
        listener.stop()
    assert [each.progress for each in mine.events] == [None]


def test_run_started_before_the_listener_is_ignored(
    spark: SparkSession, lines: DataFrame, tmp_path: Path
) -> None:
    early, late = EventCollector(), EventCollector()
    listeners = (
        QueryEventListener(spark, {"mine": early}),
        QueryEventListener(spark, {"mine": late}),
    )
    listeners[0].start()
    try:
        writer = lines.writeStream.format("noop").queryName("mine")
        query = writer.option("checkpointLocation", str(tmp_path / "c")).start()
        listeners[1].start()
        query.processAllAvailable()
        query.stop()
        assert early.ended.wait(PATIENCE)
    finally:
        for each in listeners:
            each.stop()
    assert len(early.events) == FILES + 1
    assert not late.events


def test_runs_leave_no_threads(spark: SparkSession, lines: DataFrame, tmp_path: Path) -> None:
    """A failing lane is started again and again."""
    mine = EventCollector()
    listener = QueryEventListener(spark, {"mine": mine})
    listener.start()
    try:
        run(lines, "mine", tmp_path / "first")
        before = threading.active_count()
        for number in range(3):
            run(lines, "mine", tmp_path / str(number))
    finally:
        listener.stop()
    assert len(mine.runs()) == 4
    assert threading.active_count() <= before - 1, "the listener's own thread has ended, too"
