"""What does the engine do after each kind of failure?"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from tests.delivery.harness import (
    TIMEOUT,
    check_account,
    deliver,
    get_delivered_offsets,
    get_offsets,
    make_block,
    make_settings,
    peek_permit,
)
from turnlane.delivery.breaker import AllowedSends, BreakerState
from turnlane.delivery.destination import (
    DestinationClient,
    LocalDestinationState,
    SendPermit,
    SendReport,
)
from turnlane.delivery.engine import Engine
from turnlane.delivery.error_policy import AttemptSignal
from turnlane.delivery.workers import IN_FLIGHT
from turnlane.errors import (
    Bug,
    Never,
    PartlyDelivered,
    PayloadTooLarge,
    RetryLater,
    TransportDown,
    TurnlaneError,
)
from turnlane.events import Block
from turnlane.testing import FaultyOutput, ManualClock

LONG_WAITS = {"backoff": 60.0, "max_backoff": 600.0, "jitter": 0.0, "breaker_reset": 60.0}
"""Waits that are too long for a task."""


def make_refusing_output(*bad: int) -> FaultyOutput:
    def fault(block: Block) -> BaseException | None:
        return Never("bad event") if set(bad).intersection(get_offsets(block)) else None

    return FaultyOutput(fault)


def test_one_bad_event_is_found_with_few_sends_and_others_are_delivered() -> None:
    output = make_refusing_output(617)
    block = make_block(0, 1000)
    (result,) = deliver(output, make_settings(), [block])
    (letter,) = result.dead
    assert result.delivered == 999
    assert letter.numbers.tolist() == [617]
    assert (letter.error, letter.text) == ("Never", "bad event")
    assert letter.attempts >= 1
    assert output.sends <= 2 * math.log2(1000)


def test_counting_of_retries_copies_no_payload() -> None:
    payloads = pa.array([bytes(1000)] * 20_000, pa.binary())
    block = make_block(0, 20_000)
    block = block.set_column(1, "payload", payloads)
    settings = make_settings()
    state = LocalDestinationState(settings)
    state.report(SendReport(failed={"/0": [(0, 10)], "/1": [(0, 10)]}))
    before = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(before)
    pa.set_memory_pool(counted)
    try:
        (result,) = deliver(FaultyOutput(), settings, [block], state)
    finally:
        pa.set_memory_pool(before)
    assert result.delivered == 20_000
    assert state.request_permit().failed == {"/1": [(0, 10)]}
    peak = counted.max_memory()
    assert peak is not None
    assert peak < payloads.nbytes // 2


def test_too_large_batches_are_halved_and_the_size_is_remembered() -> None:
    output = FaultyOutput(lambda block: PayloadTooLarge("413") if block.num_rows > 300 else None)
    settings = make_settings(concurrency=1, pipelined=False)
    results = deliver(output, settings, [make_block(first, 1000) for first in (0, 1000, 2000)])
    assert sum(result.delivered for result in results) == 3000
    assert output.failures <= 6


def test_single_event_that_is_too_large_is_dead() -> None:
    output = FaultyOutput(lambda block: PayloadTooLarge("413") if 5 in get_offsets(block) else None)
    (result,) = deliver(output, make_settings(), [make_block(0, 100)])
    (letter,) = result.dead
    assert (letter.numbers.tolist(), letter.error) == ([5], "PayloadTooLarge")
    assert result.delivered == 99


def test_short_failure_is_retried_within_the_run() -> None:
    output = FaultyOutput()
    output.fail(RetryLater("busy"), times=3)
    state = LocalDestinationState(make_settings())
    (result,) = deliver(output, make_settings(), [make_block(0, 100)], state)
    assert result.delivered == 100
    totals = state.get_status().totals
    assert (totals["failures"], totals["retries"], totals["retry_successes"]) == (3, 3, 1)
    assert state.get_status().retry_failures == {"RetryLater": 2}


def test_destination_without_a_backoff_is_tried_until_the_breaker_opens() -> None:
    output = FaultyOutput(lambda _: RetryLater("down"))
    settings = make_settings(backoff=0.0, breaker_failures=4, breaker_reset=600)
    (result,) = deliver(output, settings, [make_block(0, 100)])
    assert (output.sends, len(result.deferred)) == (4, 100)


def test_destination_without_a_breaker_is_tried_until_the_task_ends() -> None:
    output = FaultyOutput()
    output.fail(RetryLater("down"), times=50)
    settings = make_settings(breaker_failures=0, backoff_multiplier=1, breaker_reset=600)
    state = LocalDestinationState(settings)
    (result,) = deliver(output, settings, [make_block(0, 100)], state)
    assert (output.sends, result.delivered) == (51, 100)
    assert state.get_status().opened == 0


def test_preparers_prepare_at_the_same_time() -> None:
    """Each waits for the two others: with fewer threads this would never end."""
    together = threading.Barrier(3, timeout=TIMEOUT)

    def wait_for_others(_: Block) -> None:
        together.wait()

    output = FaultyOutput(prepare_fault=wait_for_others)
    settings = make_settings(batch_events=10, preparers=3, concurrency=1)
    (result,) = deliver(output, settings, [make_block(0, 30)])
    assert result.delivered == 30


@pytest.mark.parametrize("size", [1, 8])
def test_channel_size_limits_the_batches_that_are_prepared_ahead(size: int) -> None:
    """Besides the batch that is being sent. The first send waits until the channel is full."""
    prepared, sent, ahead = 0, 0, []
    changed = threading.Condition()

    def on_prepare(_: Block) -> None:
        nonlocal prepared
        with changed:
            prepared += 1
            ahead.append(prepared - sent)
            changed.notify_all()

    def on_send(_: Block) -> None:
        nonlocal sent
        with changed:
            assert changed.wait_for(lambda: prepared >= min(30, sent + 1 + size), TIMEOUT)
            sent += 1

    settings = make_settings(batch_events=1, channel_size=size, concurrency=1)
    (result,) = deliver(FaultyOutput(on_send, on_prepare), settings, [make_block(0, 30)])
    assert result.delivered == 30
    assert max(ahead) == size + 1


def test_unavailable_destination_defers_all_events_quickly() -> None:
    output = FaultyOutput(lambda _: RetryLater("down"))
    started = time.monotonic()
    blocks = [make_block(first, 1000) for first in range(0, 50_000, 1000)]
    results = deliver(output, make_settings(**LONG_WAITS), blocks)
    assert time.monotonic() - started < 30  # not 60: the run does not wait for the backoff
    assert sum(len(result.deferred) for result in results) == 50_000
    assert output.sends == 1


def test_run_does_not_wait_for_the_probe_of_an_open_breaker() -> None:
    """A task that waited would use the destination alone afterwards: others ended already."""
    settings = make_settings(breaker_failures=1, breaker_reset=0.5)
    state = LocalDestinationState(settings, clock=ManualClock())
    output = FaultyOutput()
    output.fail(RetryLater("down"), times=1)
    for sends in (1, 1):  # the task that opens it, and a task that finds it open
        (result,) = deliver(output, settings, [make_block(0, 100)], state)
        assert len(result.deferred) == 100
        assert output.sends == sends


class _OtherTaskFails(LocalDestinationState):
    """After a failure, another task always tries first, and fails too."""

    def request_permit(self) -> SendPermit:
        if self.get_status().failures and peek_permit(self).allowed is AllowedSends.ALL:
            self.report(SendReport(failures=1, error="RetryLater: down"))
        return super().request_permit()


def test_run_does_not_wait_if_another_task_opens_the_breaker() -> None:
    settings = make_settings(breaker_failures=2, breaker_reset=60)
    output = FaultyOutput()
    output.fail(RetryLater("down"), times=1)
    started = time.monotonic()
    (result,) = deliver(output, settings, [make_block(0, 100)], _OtherTaskFails(settings))
    assert (len(result.deferred), output.sends) == (100, 1)
    assert time.monotonic() - started < 30  # not 60: the run ended when it learned of it


def test_short_requested_wait_is_waited_for_within_the_run() -> None:
    sent: list[float] = []

    def fault(_: Block) -> BaseException | None:
        sent.append(time.monotonic())
        return RetryLater("429", after=0.3) if len(sent) == 1 else None

    (result,) = deliver(FaultyOutput(fault), make_settings(), [make_block(0, 10)])
    assert result.delivered == 10
    assert sent[1] - sent[0] >= 0.3


def test_long_requested_wait_defers_and_is_kept_in_the_destination_state() -> None:
    state = LocalDestinationState(make_settings())
    output = FaultyOutput(lambda _: RetryLater("429", after=100))
    (result,) = deliver(output, make_settings(), [make_block(0, 10)], state)
    assert len(result.deferred) == 10
    assert peek_permit(state).allowed is AllowedSends.NONE
    assert peek_permit(state).wait > 90


def test_failures_among_successes_do_not_stop_other_batches() -> None:
    seen: set[int] = set()
    lock = threading.Lock()

    def fault(block: Block) -> BaseException | None:
        first = get_offsets(block)[0]
        with lock:
            new = first not in seen
            seen.add(first)
        return RetryLater("hiccup") if new and first % 1000 == 0 else None

    output = FaultyOutput(fault)
    settings = make_settings(batch_events=100, concurrency=4)
    results = deliver(output, settings, [make_block(0, 10_000)])
    assert results[0].delivered == 10_000
    assert sorted(get_delivered_offsets(output)) == list(range(10_000))


def test_requested_wait_for_some_rows_applies_to_all_sends() -> None:
    settings = make_settings(**LONG_WAITS)
    state = LocalDestinationState(settings, clock=ManualClock())
    output = FaultyOutput(lambda _: PartlyDelivered({0: RetryLater("busy", after=100)}))
    (result,) = deliver(output, settings, [make_block(0, 5)], state)
    assert (result.delivered, result.deferred.tolist()) == (4, [0])
    assert state.get_status().wait == 100


def test_partly_delivered_batch_settles_each_row_by_its_own_error() -> None:
    tries: list[list[int]] = []

    def fault(block: Block) -> BaseException | None:
        tries.append(get_offsets(block))
        if len(tries) > 1:
            return None
        failures: dict[int, TurnlaneError] = {
            1: RetryLater("429"),
            3: Never("mapping"),
            4: Never("mapping"),
            5: RetryLater("503"),
        }
        return PartlyDelivered(failures)

    output = FaultyOutput(fault)
    block = make_block(0, 10)
    results = deliver(output, make_settings(), [block])
    delivered, dead, deferred = check_account(output, [block], results)
    assert (len(delivered), dead, deferred) == (8, {3, 4}, set())
    assert tries[1] == [1, 5]
    assert len(results[0].dead) == 1, "one letter for one reason"


def test_event_that_cannot_be_prepared_is_found_without_a_failed_send() -> None:
    output = FaultyOutput(
        prepare_fault=lambda block: KeyError("no field") if 333 in get_offsets(block) else None
    )
    (result,) = deliver(output, make_settings(), [make_block(0, 1000)])
    assert result.delivered == 999
    assert [letter.error for letter in result.dead] == ["KeyError"]
    assert output.failures == 0


@pytest.mark.parametrize("pipelined", [True, False])
def test_retryable_prepare_error_is_retried(pipelined: bool) -> None:
    errors = [RetryLater("no template yet"), MemoryError()]
    output = FaultyOutput(prepare_fault=lambda _: errors.pop() if errors else None)
    (result,) = deliver(output, make_settings(pipelined=pipelined), [make_block(0, 10)])
    assert result.delivered == 10


@pytest.mark.parametrize("pipelined", [True, False])
def test_retryable_prepare_error_counts_as_a_failure_of_the_destination(pipelined: bool) -> None:
    """A person must correct the settings: the status shows it, and retries wait."""
    clock = ManualClock()
    settings = make_settings(breaker_failures=2, pipelined=pipelined, **LONG_WAITS)
    state = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(prepare_fault=lambda _: RetryLater("there is no column"))
    for expected in (BreakerState.CLOSED, BreakerState.OPEN, BreakerState.OPEN):
        (result,) = deliver(output, settings, [make_block(0, 50)], state)
        assert len(result.deferred) == 50
        status = state.get_status()
        assert (status.state, status.error) == (expected, "RetryLater: there is no column")
        assert status.wait > 1
        clock.advance(700)
    assert peek_permit(state).allowed is AllowedSends.PROBE, "the probe came back"
    assert output.sends == 0


def test_unknown_error_is_retried_max_attempts_times_and_then_only_the_bad_event_is_dead() -> None:
    output = FaultyOutput(lambda block: OSError("odd") if 7 in get_offsets(block) else None)
    (result,) = deliver(output, make_settings(max_attempts=4), [make_block(0, 100)])
    (letter,) = result.dead
    assert (letter.numbers.tolist(), letter.error) == ([7], "OSError")
    assert letter.attempts >= 4
    assert result.delivered == 99


def test_outage_after_a_bad_event_loses_no_good_event() -> None:
    """The attempts that a bad event used do not count for other events."""
    settings = make_settings(max_attempts=4, breaker_failures=100)
    outage = [ConnectionResetError("reset") for _ in range(3)]
    found = threading.Event()

    def fault(block: Block) -> BaseException | None:
        offsets = get_offsets(block)
        if 7 in offsets:
            if offsets == [7]:
                found.set()
            return OSError("odd")
        return outage.pop() if found.is_set() and outage else None

    output = FaultyOutput(fault)
    (result,) = deliver(output, settings, [make_block(0, 100)])
    assert [letter.numbers.tolist() for letter in result.dead] == [[7]]
    assert (result.delivered, outage) == (99, [])


def test_outage_during_a_search_loses_no_good_event() -> None:
    """The halves fail, down to the first event, which is good."""
    settings = make_settings(max_attempts=4, breaker_failures=100)
    outage = [ConnectionResetError("reset") for _ in range(9)]
    sizes: list[int] = []

    def fault(block: Block) -> BaseException | None:
        sizes.append(block.num_rows)
        if sizes.count(100) < 4:
            return OSError("odd")
        return outage.pop() if outage else OSError("odd") if 70 in get_offsets(block) else None

    (result,) = deliver(FaultyOutput(fault), settings, [make_block(0, 100)])
    assert sizes[:10] == [100, 100, 100, 100, 50, 25, 12, 6, 3, 1]
    assert [letter.numbers.tolist() for letter in result.dead] == [[70]]
    assert (result.delivered, outage) == (99, [])


def test_bad_first_event_is_found_over_several_short_tasks() -> None:
    clock = ManualClock()
    settings = make_settings(max_attempts=3, breaker_failures=100, **LONG_WAITS)
    state = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda block: OSError("odd") if 0 in get_offsets(block) else None)
    block, dead, tasks = make_block(0, 50), 0, 0
    while not dead:
        (result,) = deliver(output, settings, [block], state)
        dead, tasks = len(result.dead), tasks + 1
        clock.advance(700)
    assert [letter.numbers.tolist() for letter in result.dead] == [[0]]
    assert tasks <= 2 * 3
    (result,) = deliver(output, settings, [block.slice(1)], state)
    assert result.delivered == 49


def test_each_of_several_bad_events_gets_all_its_attempts() -> None:
    output = FaultyOutput(lambda block: OSError("odd") if {7, 50} & {*get_offsets(block)} else None)
    settings = make_settings(max_attempts=4, breaker_failures=100)
    (result,) = deliver(output, settings, [make_block(0, 100)])
    assert [letter.numbers.tolist() for letter in result.dead] == [[7], [50]]
    assert all(letter.attempts >= 4 for letter in result.dead)


def test_event_that_fails_alone_counts_as_a_failure_for_the_breaker() -> None:
    clock = ManualClock()
    settings = make_settings(max_attempts=1, breaker_failures=1, **LONG_WAITS)
    state = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda _: ConnectionResetError("reset"))
    (result,) = deliver(output, settings, [make_block(0, 2)], state)
    assert [letter.numbers.tolist() for letter in result.dead] == [[0]]
    assert result.deferred.tolist() == [1], "nothing more is sent while the breaker is open"
    assert state.get_status().state is BreakerState.OPEN


def test_errors_of_some_events_do_not_count_as_attempts_of_others() -> None:
    errors = iter(
        [
            PartlyDelivered({0: Bug("odd"), 1: RetryLater("busy", alone=True)}),
            ConnectionResetError("reset"),
        ]
    )
    output = FaultyOutput(lambda _: next(errors, None))
    settings = make_settings(max_attempts=2, breaker_failures=100)
    state = LocalDestinationState(settings)
    state.report(SendReport(attempts={"0/0": 1}))
    (result,) = deliver(output, settings, [make_block(0, 3)], state)
    assert [letter.numbers.tolist() for letter in result.dead] == [[0]]
    assert result.delivered == 2
    assert peek_permit(state).attempts == {}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_few_events_refused_together_take_few_sends(count: int) -> None:
    last = count - 1
    output = FaultyOutput(lambda block: Never("bad") if last in get_offsets(block) else None)
    (result,) = deliver(output, make_settings(), [make_block(0, count)])
    (letter,) = result.dead
    assert (letter.numbers.tolist(), letter.text, letter.attempts) == ([last], "bad", 1)
    assert result.delivered == last
    assert output.sends <= 2 * math.log2(count)


def test_event_that_may_be_good_is_sent_alone_before_it_is_dead() -> None:
    errors = [OSError("odd") for _ in range(3)]
    output = FaultyOutput(lambda _: errors.pop() if errors else None)
    settings = make_settings(max_attempts=3, breaker_failures=100)
    (result,) = deliver(output, settings, [make_block(0, 2)])
    assert (result.delivered, result.dead) == (2, [])


def test_attempts_of_one_task_are_remembered_by_the_next() -> None:
    clock = ManualClock()
    settings = make_settings(max_attempts=4, breaker_failures=100, **LONG_WAITS)
    state = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda block: OSError("odd") if 7 in get_offsets(block) else None)
    # Each batch begins with another event; the last one has the bad event in the middle.
    for first in (7, 5, 3):
        (result,) = deliver(output, settings, [make_block(first, 50)], state)
        assert len(result.deferred) == 50
        clock.advance(700)
    (result,) = deliver(output, settings, [make_block(0, 50)], state)
    assert [letter.numbers.tolist() for letter in result.dead] == [[7]]
    assert result.delivered == 49
    assert peek_permit(state).attempts == {}


def test_failures_open_the_breaker_and_one_probe_decides() -> None:
    clock = ManualClock()
    settings = make_settings(breaker_failures=2, batch_events=10, concurrency=4, **LONG_WAITS)
    state = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda _: RetryLater("down"))
    for _ in range(2):
        deliver(output, settings, [make_block(0, 100)], state)
        clock.advance(60)
    assert state.get_status().state is not BreakerState.CLOSED
    output.sends = 0
    clock.advance(600)
    deliver(output, settings, [make_block(0, 100)], state)
    assert output.sends == 1, "a probe is one send"
    clock.advance(600)

    release = threading.Event()
    output.fault = lambda _: None if release.wait(TIMEOUT) else RetryLater("too late")
    output.sends = 0
    results: list[int] = []
    blocks = [make_block(0, 100)]
    task = threading.Thread(
        target=lambda: results.append(deliver(output, settings, blocks, state)[0].delivered)
    )
    task.start()
    assert output.await_sends(1)
    assert state.request_permit().allowed is AllowedSends.NONE, "no other task gets a probe"
    assert output.sends == 1
    release.set()
    task.join(TIMEOUT)
    assert results == [100]
    assert state.get_status().state is BreakerState.CLOSED


def test_late_answers_of_other_sends_are_not_reported_with_the_probe() -> None:
    clock = ManualClock()
    settings = make_settings(breaker_failures=1, **LONG_WAITS)
    state = LocalDestinationState(settings, clock=clock)
    client = DestinationClient(state, clock, has_rate_limit=False)
    for _ in range(3):
        assert client.can_send(limit=10, in_flight=0)
        assert client.start_send(1) is None
    client.on_attempt(AttemptSignal.FAILED, None, 0.1, RetryLater("down"))
    clock.advance(60)
    assert client.can_send(limit=10, in_flight=2)
    probe = client.start_send(1)
    assert probe is not None
    for _ in range(2):  # sends that were in progress when the breaker opened
        client.on_attempt(AttemptSignal.ANSWERED, None, 0.1, None)
    client.on_attempt(AttemptSignal.FAILED, probe, 0.1, RetryLater("still down"))
    status = state.get_status()
    assert (status.state, status.failures, status.opened) == (BreakerState.OPEN, 2, 1)
    assert status.totals["sends"] == 4


def test_probe_without_events_to_send_is_released() -> None:
    clock = ManualClock()
    settings = make_settings(breaker_failures=1, **LONG_WAITS)
    state = LocalDestinationState(settings, clock=clock)
    state.report(SendReport(failures=1))
    clock.advance(600)
    deliver(FaultyOutput(), settings, [], state)
    assert peek_permit(state).allowed is AllowedSends.PROBE


def test_unreachable_destination_state_defers_all_events() -> None:
    class Unreachable:
        share = None

        def request_permit(self) -> SendPermit:
            raise TransportDown("no node")

        def report(self, report: SendReport) -> None:
            raise TransportDown("no node")

        def claim(self, count: int, within: float) -> float:
            raise TransportDown("no node")

    output = FaultyOutput()
    (result,) = deliver(output, make_settings(), [make_block(0, 10)], Unreachable())
    assert len(result.deferred) == 10
    assert output.sends == 0


def test_unreachable_rate_limit_defers_all_events() -> None:
    class NoRate(LocalDestinationState):
        def claim(self, count: int, within: float) -> float:
            raise TransportDown("no node")

    settings = make_settings(rate_limit=1000, max_time=0.1)
    output = FaultyOutput()
    (result,) = deliver(output, settings, [make_block(0, 10)], NoRate(settings))
    assert len(result.deferred) == 10
    assert output.sends == 0


def test_events_left_after_max_time_are_deferred() -> None:
    output = FaultyOutput(lambda _: time.sleep(0.02))
    settings = make_settings(max_time=0.2, batch_events=1, concurrency=1)
    blocks = [make_block(first, 500) for first in (0, 500)]
    results = deliver(output, settings, blocks)
    _, dead, deferred = check_account(output, blocks, results)
    assert not dead
    assert deferred >= set(range(500, 1000))


def test_time_in_which_blocks_arrive_is_not_the_time_of_sends() -> None:
    """On a busy machine, Spark may take longer for each block than a task may send."""
    clock = ManualClock()
    settings = make_settings(max_time=5.0, batch_events=10)

    def blocks() -> Iterator[Block]:
        for first in (0, 10, 20):
            clock.advance(60.0)
            yield make_block(first, 10)

    output = FaultyOutput()
    state = LocalDestinationState(settings, clock=clock)
    results = deliver(output, settings, blocks(), state, clock=clock)
    assert [result.delivered for result in results] == [10, 10, 10]


def test_sends_keep_to_the_rate_limit() -> None:
    started = time.monotonic()
    output = FaultyOutput()
    settings = make_settings(rate_limit=2000, batch_events=100)
    (result,) = deliver(output, settings, [make_block(0, 1000)])
    assert result.delivered == 1000
    assert time.monotonic() - started >= 0.49


def test_rate_limit_below_the_batch_size_makes_smaller_batches() -> None:
    output = FaultyOutput()
    (result,) = deliver(output, make_settings(rate_limit=50), [make_block(0, 60)])
    assert result.delivered == 60
    assert max(block.num_rows for block in output.taken) == 50


def test_low_rate_limit_delivers_within_the_time_of_a_task() -> None:
    output = FaultyOutput()
    settings = make_settings(rate_limit=20, max_time=0.9)
    deadline = time.monotonic() + TIMEOUT
    while not output.taken and time.monotonic() < deadline:
        deliver(output, settings, [make_block(0, 60)])
    assert output.taken, "a burst must fit into the time of a task"


def test_engines_of_one_process_share_max_in_flight() -> None:
    output = FaultyOutput(lambda _: time.sleep(0.005))
    settings = make_settings(batch_events=10, concurrency=8, max_in_flight=3)
    results: list[int] = []

    def task(first: int) -> None:
        blocks = [make_block(first, 500)]
        results.append(deliver(output, settings, blocks)[0].delivered)

    tasks = [threading.Thread(target=task, args=(first,)) for first in (0, 500, 1000)]
    for each in tasks:
        each.start()
    for each in tasks:
        each.join(TIMEOUT)
    assert results == [500] * 3
    assert output.most_in_flight == 3


def test_send_that_gets_no_thread_is_not_counted_as_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(IN_FLIGHT)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        deliver(FaultyOutput(), make_settings(pipelined=False), [make_block(0, 5)])
    assert len(IN_FLIGHT) == before


def test_concurrent_sends_reach_but_do_not_exceed_the_limit() -> None:
    together = threading.Barrier(4, timeout=TIMEOUT)

    def fault(_: Block) -> None:
        together.wait()

    output = FaultyOutput(fault)
    settings = make_settings(batch_events=25, concurrency=4)
    (result,) = deliver(output, settings, [make_block(0, 200)])
    assert result.delivered == 200
    assert output.most_in_flight == 4


def test_adapted_concurrency_is_known_to_the_next_task() -> None:
    settings = make_settings(batch_events=1)
    state = LocalDestinationState(settings)
    deliver(FaultyOutput(lambda _: time.sleep(0.001)), settings, [make_block(0, 300)], state)
    hint = peek_permit(state).concurrency
    assert hint is not None
    assert hint > 1


def test_stop_lets_sends_end_and_defers_the_rest() -> None:
    release = threading.Event()
    output = FaultyOutput(lambda _: None if release.wait(TIMEOUT) else RetryLater("late"))
    settings = make_settings(batch_events=10, concurrency=2)
    with Engine(output, settings, LocalDestinationState(settings)) as engine:

        def stop() -> None:
            output.await_sends(2)
            engine.stop()
            release.set()

        stopper = threading.Thread(target=stop)
        stopper.start()
        result = engine.deliver(make_block(0, 1000))
        stopper.join()
        assert 20 <= result.delivered < 1000
        assert result.delivered + len(result.deferred) == 1000
        again = engine.deliver(make_block(0, 10))
        assert len(again.deferred) == 10


def test_send_beyond_the_grace_is_given_up_and_its_events_deferred() -> None:
    release = threading.Event()
    output = FaultyOutput(lambda _: None if release.wait(TIMEOUT) else RetryLater("late"))
    settings = make_settings(batch_events=10, concurrency=2, max_time=0.05)
    state = LocalDestinationState(settings)
    with Engine(output, settings, state, grace=0.05) as engine:
        result = engine.deliver(make_block(0, 100))
        assert len(result.deferred) == 100
        release.set()
        output.fault = None
        settings_again = make_settings()
        (later,) = deliver(output, settings_again, [make_block(0, 100)], state)
        assert later.delivered == 100


def test_closing_the_engine_ends_a_run_on_another_thread() -> None:
    output = FaultyOutput(lambda _: time.sleep(0.01))
    settings = make_settings(batch_events=1, concurrency=1)
    engine = Engine(output, settings, LocalDestinationState(settings))

    def close() -> None:
        output.await_sends(3)
        engine.close()

    closer = threading.Thread(target=close)
    closer.start()
    result = engine.deliver(make_block(0, 10_000))
    closer.join(TIMEOUT)
    engine.close()
    assert result.delivered >= 3
    assert len(result.deferred) == 10_000 - result.delivered


def test_closed_engine_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    settings = make_settings(batch_events=10, concurrency=4)
    deliver(FaultyOutput(), settings, [make_block(0, 1000)])
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in left)


def test_failing_source_of_blocks_ends_the_run_and_releases_the_probe() -> None:
    clock = ManualClock()
    settings = make_settings(breaker_failures=1, **LONG_WAITS)
    state = LocalDestinationState(settings, clock=clock)
    state.report(SendReport(failures=1))
    clock.advance(600)

    def broken() -> Iterator[Block]:
        raise OSError("the shuffle file is gone")
        yield

    with pytest.raises(OSError, match="shuffle"):
        deliver(FaultyOutput(), settings, broken(), state)
    assert peek_permit(state).allowed is AllowedSends.PROBE


def test_repeated_partial_answers_lengthen_the_wait() -> None:
    """The wait is kept for all tasks. The destination answers, so the breaker stays closed."""
    settings = make_settings(
        backoff=2.0, max_backoff=60.0, jitter=0.0, breaker_reset=10.0, concurrency=1
    )
    clock = ManualClock()
    state = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda _: PartlyDelivered({3: RetryLater("429")}))
    waits = []
    for _ in range(5):
        (result,) = deliver(output, settings, [make_block(0, 10)], state, clock=clock)
        assert (result.delivered, result.deferred.tolist()) == (9, [3])
        waits.append(state.get_status().wait)
        assert state.get_status().state is BreakerState.CLOSED
        assert state.get_status().error == "RetryLater: 429"
        clock.advance(waits[-1])
    assert waits == [2.0, 4.0, 8.0, 10.0, 10.0], "at most breaker_reset"
    output.fault = None
    deliver(output, settings, [make_block(0, 10)], state, clock=clock)
    assert state.get_status().wait == 0.0
    assert state.get_status().error is None


def test_partly_delivered_probe_closes_the_breaker() -> None:
    settings = make_settings(**{**LONG_WAITS, "breaker_failures": 1})
    clock = ManualClock()
    state = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput()
    output.fail(RetryLater("away"))
    deliver(output, settings, [make_block(0, 10)], state, clock=clock)
    assert state.get_status().state is BreakerState.OPEN
    clock.advance(state.get_status().wait)
    output.fail(PartlyDelivered({3: RetryLater("429")}))
    deliver(output, settings, [make_block(0, 10)], state, clock=clock)
    assert state.get_status().state is BreakerState.CLOSED
    assert state.get_status().wait == 60.0
