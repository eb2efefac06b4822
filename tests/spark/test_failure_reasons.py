"""The one-line reason of an error, found in texts as Spark writes them."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException, StreamingQueryException

from turnlane.errors import TransportDown
from turnlane.spark import transforms
from turnlane.spark.errors import MAX_REASON_LENGTH, describe_failure
from turnlane.spark.lane import LaneState, LaneStatus
from turnlane.spark.pipeline import PipelineRunner

QUERY = """\
[STREAM_FAILED] Query [id = {id}, runId = {run}] terminated with exception: {cause} SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = {id}, runId = {run}]
Current Committed Offsets: {{RateStreamV2[rowsPerSecond=5, numPartitions=default: 0}}
Current Available Offsets: {{RateStreamV2[rowsPerSecond=5, numPartitions=default: 1}}

Current State: ACTIVE
Thread State: RUNNABLE

Logical Plan:
WriteToMicroBatchDataSource noop-table
+- ~Filter checked(value#1L)#2
   +- ~StreamingDataSourceV2ScanRelation[timestamp#0, value#1L] RateStream(rowsPerSecond=5)
"""

WORKER = """\
[PYTHON_EXCEPTION] An exception was thrown from the Python worker: \
Traceback (most recent call last):
  File "/shop/rules.py", line 14, in checked
    def checked(v): raise BadOrder('order 17 has no total')
                    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{raised}
 SQLSTATE: 38000"""

FOREACH_BATCH = """\
[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function in foreach \
batch sink. Reason: An exception was raised by the Python Proxy. Return Message: \
Traceback (most recent call last):
  File "/site-packages/py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/site-packages/pyspark/errors/exceptions/captured.py", line 262, in deco
    raise converted from None
  File "/shop/rules.py", line 11, in bad
    def bad(v): raise BadOrder('order 17 has no total')
          ^^^^^^^^^^^^^^^^^
pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/shop/rules.py", line 11, in bad
    def bad(v): raise BadOrder('order 17 has no total')
                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
BadOrder: order 17 has no total
 SQLSTATE: 39000"""

GROUP = """\
[PYTHON_EXCEPTION] An exception was thrown from the Python worker:   + Exception Group Traceback \
(most recent call last):
  |   File "/shop/rules.py", line 22, in group
  |     def group(v): raise ExceptionGroup('several', [ValueError('a'), BadOrder('b')])
  |                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  | ExceptionGroup: several (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +---------------- 2 ----------------
    | BadOrder: b
    +------------------------------------
 SQLSTATE: 38000"""

TASK = """\
Job aborted due to stage failure: Task 0 in stage {stage}.0 failed 1 times, most recent failure: \
Lost task 0.0 in stage {stage}.0 (TID {stage}) (192.0.2.2 executor driver): {raised}
	at org.apache.spark.scheduler.Task.run(Task.scala:147)
	at java.base/java.lang.Thread.run(Thread.java:840)
Caused by: java.io.EOFException
	at java.base/java.io.DataInputStream.readInt(DataInputStream.java:386)
	... 30 more

Driver stacktrace:"""

TURNLANES = """\
[PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform \
initialOffset: Traceback (most recent call last):
  File "/turnlane/client/failures.py", line 65, in understood
    raise failure(error, place) from None
turnlane.errors.TransportDown: 127.0.0.1:1: Connection refused
 SQLSTATE: 38000"""

CRASHED = "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)."


def make_query_error(cause: str) -> StreamingQueryException:
    """Return the error of a failed query, with a new id each time."""
    return StreamingQueryException(
        message=QUERY.format(id=uuid.uuid4(), run=uuid.uuid4(), cause=cause)
    )


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("ValueError: a value", "ValueError: a value"),
        ("BadOrder: order 17 has no total", "BadOrder: order 17 has no total"),
        ("pyarrow.lib.ArrowInvalid: cannot do it", "pyarrow.lib.ArrowInvalid: cannot do it"),
        ("SystemExit: enough", "SystemExit: enough"),
        ("AssertionError", "AssertionError (rules.py:14)"),
        ("Loud: order 17\nhas no total:\n  none at all\n\nAsk the shop", "Loud: order 17"),
        ("BadOrder: order 17\nsome note", "BadOrder: order 17"),
        ('  File "<string>", line 1\n    1 +\nSyntaxError: invalid', "SyntaxError: invalid"),
        ("turnlane.errors.Never: it says no", "Never: it says no"),
    ],
)
def test_exception_of_a_function_is_the_reason(raised: str, reason: str) -> None:
    assert describe_failure(make_query_error(WORKER.format(raised=raised))) == reason


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (FOREACH_BATCH, "BadOrder: order 17 has no total"),
        (GROUP, "ExceptionGroup: several (2 sub-exceptions)"),
        (TURNLANES, "TransportDown: 127.0.0.1:1: Connection refused"),
        (TASK.format(stage=7, raised=CRASHED), CRASHED),
        ("[USER_RAISED_EXCEPTION] not below SQLSTATE: P0001", "[USER_RAISED_EXCEPTION] not below"),
    ],
)
def test_exception_is_found_within_errors_of_spark(cause: str, reason: str) -> None:
    assert describe_failure(make_query_error(cause)) == reason


def test_exception_is_found_without_a_query() -> None:
    text = WORKER.format(raised="BadOrder: order 17").replace(": Traceback", ":\nTraceback")
    assert describe_failure(PySparkException(message=text)) == "BadOrder: order 17"
    java = "An error occurred while calling o1.start.\n: java.io.IOException: no\n\tat java.lang"
    assert describe_failure(Py4JError(java)) == "java.io.IOException: no"


def test_every_error_has_a_reason_of_limited_length() -> None:
    assert describe_failure(PySparkException(message="")) == "PySparkException"
    assert len(describe_failure(PySparkException(message="x" * 10_000))) == MAX_REASON_LENGTH


def test_own_error_is_described_by_its_message() -> None:
    assert describe_failure(TransportDown("a:1 is away")) == "a:1 is away"


RULES = """\
def key(events):
    return events["team"]

def bare(events):
    assert "team" in events

def within(events):
    return sorted(events, key=key)
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "shop_reasons.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(transforms, "_versions", {})
    yield transforms.import_user_module("shop_reasons")
    del sys.modules["shop_reasons"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda rules: rules.key({}), "KeyError: 'team' (shop_reasons.py:2)"),
        (lambda rules: rules.bare({}), "AssertionError (shop_reasons.py:5)"),
        (lambda rules: rules.within([{}]), "KeyError: 'team' (shop_reasons.py:2)"),
        (lambda _: importlib.import_module("no.such"), "ModuleNotFoundError: No module named 'no'"),
    ],
)
def test_other_error_is_described_with_the_line_of_the_users_module(
    call: Callable[[Any], Any], reason: str, rules: ModuleType
) -> None:
    with pytest.raises(Exception) as caught:
        call(rules)
    assert describe_failure(caught.value) == reason


@pytest.mark.parametrize("cause", [WORKER.format(raised="BadOrder"), TASK])
def test_repeated_failure_with_the_same_reason_is_no_change(cause: str) -> None:
    class Failing(PipelineRunner):
        def __init__(self) -> None:
            self._reported, self._stage = {}, 0

        def status(self) -> list[LaneStatus]:
            self._stage += 1
            text = cause.replace("{stage}", str(self._stage)).replace("{raised}", CRASHED)
            why = describe_failure(make_query_error(text))
            return [LaneStatus("a", LaneState.WAITING, self._stage, why, 0, 0)]

    runner = Failing()
    assert [len(list(runner.list_changes())) for _ in range(3)] == [1, 0, 0]
