"""What does the engine do on each kind of failure?"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest

from tests.delivery.harness import (
    PATIENCE,
    block_of_offsets,
    check_account,
    offsets_of,
    run,
    settings_of,
    taken,
)
from turnlane.delivery.breaker import AllowedSends, BreakerState
from turnlane.delivery.destination import (
    DestinationClient,
    LocalDestinationState,
    SendPermit,
    SendReport,
)
from turnlane.delivery.engine import Engine
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

LONG = {"backoff": 60.0, "max_backoff": 600.0, "jitter": 0.0, "breaker_reset": 60.0}
"""Waits that no task sits out."""


def poison(*bad: int) -> FaultyOutput:
    def fault(block: Block) -> BaseException | None:
        return Never("poison") if set(bad).intersection(offsets_of(block)) else None

    return FaultyOutput(fault)


def test_a_poison_event_dies_alone_after_few_sends() -> None:
    output = poison(617)
    block = block_of_offsets(0, 1000)
    (outcome,) = run(output, settings_of(), [block])
    (letter,) = outcome.dead
    assert outcome.delivered == 999
    assert letter.numbers.tolist() == [617]
    assert (letter.error, letter.text) == ("Never", "poison")
    assert letter.attempts >= 1
    assert output.sends <= 2 * math.log2(1000)


def test_too_large_is_halved_until_it_fits_and_that_is_remembered() -> None:
    output = FaultyOutput(lambda block: PayloadTooLarge("413") if block.num_rows > 300 else None)
    settings = settings_of(concurrency=1, pipelined=False)
    outcomes = run(output, settings, [block_of_offsets(first, 1000) for first in (0, 1000, 2000)])
    assert sum(outcome.delivered for outcome in outcomes) == 3000
    assert output.failures <= 6


def test_a_single_event_that_is_too_large_is_dead() -> None:
    output = FaultyOutput(lambda block: PayloadTooLarge("413") if 5 in offsets_of(block) else None)
    (outcome,) = run(output, settings_of(), [block_of_offsets(0, 100)])
    (letter,) = outcome.dead
    assert (letter.numbers.tolist(), letter.error) == ([5], "PayloadTooLarge")
    assert outcome.delivered == 99


def test_a_short_failure_is_sat_out() -> None:
    output = FaultyOutput()
    output.fail(RetryLater("busy"), times=3)
    gate = LocalDestinationState(settings_of())
    (outcome,) = run(output, settings_of(), [block_of_offsets(0, 100)], gate)
    assert outcome.delivered == 100
    totals = gate.get_status().totals
    assert (totals["failures"], totals["retries"], totals["retry_successes"]) == (3, 3, 1)
    assert gate.get_status().retry_failures == {"RetryLater": 2}


def test_a_destination_that_is_away_keeps_no_task_waiting() -> None:
    output = FaultyOutput(lambda _: RetryLater("down"))
    began = time.monotonic()
    blocks = [block_of_offsets(first, 1000) for first in range(0, 50_000, 1000)]
    outcomes = run(output, settings_of(**LONG), blocks)
    assert time.monotonic() - began < 30  # not 60: nobody sat out the backoff
    assert sum(len(outcome.deferred) for outcome in outcomes) == 50_000
    assert output.sends == 1


def test_an_open_breaker_is_not_sat_out_however_soon_the_probe() -> None:
    """A task that did, alone of its batch, would have the destination to itself afterwards."""
    settings = settings_of(breaker_failures=1, breaker_reset=0.5)
    gate = LocalDestinationState(settings, clock=ManualClock())
    output = FaultyOutput()
    output.fail(RetryLater("down"), times=1)
    for sends in (1, 1):  # neither the task that opened it, nor one that finds it open
        (outcome,) = run(output, settings, [block_of_offsets(0, 100)], gate)
        assert len(outcome.deferred) == 100
        assert output.sends == sends


class _FailsElsewhere(LocalDestinationState):
    """After a failure, another task is always first to try again, and fails, too."""

    def request_permit(self) -> SendPermit:
        if self.get_status().failures and self.peek_permit().allowed is AllowedSends.ALL:
            self.report(SendReport(failures=1, error="RetryLater: down"))
        return super().request_permit()


def test_a_breaker_that_others_open_meanwhile_is_not_sat_out_either() -> None:
    settings = settings_of(breaker_failures=2, breaker_reset=60)
    output = FaultyOutput()
    output.fail(RetryLater("down"), times=1)
    began = time.monotonic()
    (outcome,) = run(output, settings, [block_of_offsets(0, 100)], _FailsElsewhere(settings))
    assert (len(outcome.deferred), output.sends) == (100, 1)
    assert time.monotonic() - began < 30  # not 60: it ended when it heard of that


def test_retry_after_is_obeyed_in_the_task_if_it_is_short() -> None:
    sent: list[float] = []

    def fault(_: Block) -> BaseException | None:
        sent.append(time.monotonic())
        return RetryLater("429", after=0.3) if len(sent) == 1 else None

    (outcome,) = run(FaultyOutput(fault), settings_of(), [block_of_offsets(0, 10)])
    assert outcome.delivered == 10
    assert sent[1] - sent[0] >= 0.3


def test_retry_after_is_left_to_the_gate_if_it_is_long() -> None:
    gate = LocalDestinationState(settings_of())
    output = FaultyOutput(lambda _: RetryLater("429", after=100))
    (outcome,) = run(output, settings_of(), [block_of_offsets(0, 10)], gate)
    assert len(outcome.deferred) == 10
    assert gate.peek_permit().allowed is AllowedSends.NONE
    assert gate.peek_permit().wait > 90


def test_some_failures_among_successes_do_not_stop_the_others() -> None:
    seen: set[int] = set()
    lock = threading.Lock()

    def fault(block: Block) -> BaseException | None:
        first = offsets_of(block)[0]
        with lock:
            new = first not in seen
            seen.add(first)
        return RetryLater("hiccup") if new and first % 1000 == 0 else None

    output = FaultyOutput(fault)
    settings = settings_of(batch_events=100, concurrency=4)
    outcomes = run(output, settings, [block_of_offsets(0, 10_000)])
    assert outcomes[0].delivered == 10_000
    assert sorted(taken(output)) == list(range(10_000))


def test_retry_after_is_obeyed_also_if_it_is_said_of_some_rows() -> None:
    settings = settings_of(**LONG)
    gate = LocalDestinationState(settings, clock=ManualClock())
    output = FaultyOutput(lambda _: PartlyDelivered({0: RetryLater("busy", after=100)}))
    (outcome,) = run(output, settings, [block_of_offsets(0, 5)], gate)
    assert (outcome.delivered, outcome.deferred.tolist()) == (4, [0])
    assert gate.get_status().wait == 100


def test_rows_that_were_refused_have_their_own_fates() -> None:
    tries: list[list[int]] = []

    def fault(block: Block) -> BaseException | None:
        tries.append(offsets_of(block))
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
    block = block_of_offsets(0, 10)
    outcomes = run(output, settings_of(), [block])
    delivered, dead, kept = check_account(output, [block], outcomes)
    assert (len(delivered), dead, kept) == (8, {3, 4}, set())
    assert tries[1] == [1, 5]
    assert len(outcomes[0].dead) == 1, "one letter for one reason"


def test_what_cannot_be_prepared_is_found_without_a_failing_send() -> None:
    output = FaultyOutput(
        prepare_fault=lambda block: KeyError("no field") if 333 in offsets_of(block) else None
    )
    (outcome,) = run(output, settings_of(), [block_of_offsets(0, 1000)])
    assert outcome.delivered == 999
    assert [letter.error for letter in outcome.dead] == ["KeyError"]
    assert output.failures == 0


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_preparation_that_may_go_better_later_is_tried_again(pipelined: bool) -> None:
    errors = [RetryLater("no template yet"), MemoryError()]
    output = FaultyOutput(prepare_fault=lambda _: errors.pop() if errors else None)
    (outcome,) = run(output, settings_of(pipelined=pipelined), [block_of_offsets(0, 10)])
    assert outcome.delivered == 10


@pytest.mark.parametrize("pipelined", [True, False])
def test_what_cannot_be_prepared_now_is_said_and_left_alone_for_a_while(pipelined: bool) -> None:
    """Somebody has to mend the settings: they must hear of it, and it is no use to hurry."""
    clock = ManualClock()
    settings = settings_of(breaker_failures=2, pipelined=pipelined, **LONG)
    gate = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(prepare_fault=lambda _: RetryLater("there is no column"))
    for state in (BreakerState.CLOSED, BreakerState.OPEN, BreakerState.OPEN):
        (outcome,) = run(output, settings, [block_of_offsets(0, 50)], gate)
        assert len(outcome.deferred) == 50
        status = gate.get_status()
        assert (status.state, status.error) == (state, "RetryLater: there is no column")
        assert status.wait > 1
        clock.advance(700)
    assert gate.peek_permit().allowed is AllowedSends.PROBE, "the probe came back"
    assert output.sends == 0


def test_an_unknown_error_is_tried_so_often_and_then_only_the_culprit_is_dead() -> None:
    output = FaultyOutput(lambda block: OSError("odd") if 7 in offsets_of(block) else None)
    (outcome,) = run(output, settings_of(max_attempts=4), [block_of_offsets(0, 100)])
    (letter,) = outcome.dead
    assert (letter.numbers.tolist(), letter.error) == ([7], "OSError")
    assert letter.attempts >= 4
    assert outcome.delivered == 99


def test_an_outage_behind_a_culprit_costs_no_innocent_event() -> None:
    """Attempts that one bad event has used up are not those of the others."""
    settings = settings_of(max_attempts=4, breaker_failures=100)
    outage = [ConnectionResetError("reset") for _ in range(3)]
    found = threading.Event()

    def fault(block: Block) -> BaseException | None:
        offsets = offsets_of(block)
        if 7 in offsets:
            if offsets == [7]:
                found.set()
            return OSError("odd")
        return outage.pop() if found.is_set() and outage else None

    output = FaultyOutput(fault)
    (outcome,) = run(output, settings, [block_of_offsets(0, 100)])
    assert [letter.numbers.tolist() for letter in outcome.dead] == [[7]]
    assert (outcome.delivered, outage) == (99, [])


def test_an_outage_in_the_middle_of_a_search_costs_no_innocent_event() -> None:
    """The halves fail, down to the first event, which has done nothing."""
    settings = settings_of(max_attempts=4, breaker_failures=100)
    outage = [ConnectionResetError("reset") for _ in range(9)]
    sizes: list[int] = []

    def fault(block: Block) -> BaseException | None:
        sizes.append(block.num_rows)
        if sizes.count(100) < 4:
            return OSError("odd")
        return outage.pop() if outage else OSError("odd") if 70 in offsets_of(block) else None

    (outcome,) = run(FaultyOutput(fault), settings, [block_of_offsets(0, 100)])
    assert sizes[:10] == [100, 100, 100, 100, 50, 25, 12, 6, 3, 1]
    assert [letter.numbers.tolist() for letter in outcome.dead] == [[70]]
    assert (outcome.delivered, outage) == (99, [])


def test_the_first_of_all_is_found_too_however_few_attempts_a_task_has() -> None:
    clock = ManualClock()
    settings = settings_of(max_attempts=3, breaker_failures=100, **LONG)
    gate = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda block: OSError("odd") if 0 in offsets_of(block) else None)
    block, dead, tasks = block_of_offsets(0, 50), 0, 0
    while not dead:
        (outcome,) = run(output, settings, [block], gate)
        dead, tasks = len(outcome.dead), tasks + 1
        clock.advance(700)
    assert [letter.numbers.tolist() for letter in outcome.dead] == [[0]]
    assert tasks <= 2 * 3
    (outcome,) = run(output, settings, [block.slice(1)], gate)
    assert outcome.delivered == 49


def test_those_found_one_after_another_have_their_attempts_each() -> None:
    output = FaultyOutput(lambda block: OSError("odd") if {7, 50} & {*offsets_of(block)} else None)
    settings = settings_of(max_attempts=4, breaker_failures=100)
    (outcome,) = run(output, settings, [block_of_offsets(0, 100)])
    assert [letter.numbers.tolist() for letter in outcome.dead] == [[7], [50]]
    assert all(letter.attempts >= 4 for letter in outcome.dead)


def test_an_event_that_fails_alone_is_a_failure_to_the_breaker() -> None:
    clock = ManualClock()
    settings = settings_of(max_attempts=1, breaker_failures=1, **LONG)
    gate = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda _: ConnectionResetError("reset"))
    (outcome,) = run(output, settings, [block_of_offsets(0, 2)], gate)
    assert [letter.numbers.tolist() for letter in outcome.dead] == [[0]]
    assert outcome.deferred.tolist() == [1], "nothing more goes before the breaker says so"
    assert gate.get_status().state is BreakerState.OPEN


def test_what_is_said_of_some_events_is_no_attempt_of_the_others() -> None:
    moods = iter(
        [
            PartlyDelivered({0: Bug("odd"), 1: RetryLater("busy", alone=True)}),
            ConnectionResetError("reset"),
        ]
    )
    output = FaultyOutput(lambda _: next(moods, None))
    settings = settings_of(max_attempts=2, breaker_failures=100)
    gate = LocalDestinationState(settings)
    gate.report(SendReport(attempts={"0/0": 1}))
    (outcome,) = run(output, settings, [block_of_offsets(0, 3)], gate)
    assert [letter.numbers.tolist() for letter in outcome.dead] == [[0]]
    assert outcome.delivered == 2
    assert gate.peek_permit().attempts == {}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_few_refused_together_take_few_sends(count: int) -> None:
    last = count - 1
    output = FaultyOutput(lambda block: Never("bad") if last in offsets_of(block) else None)
    (outcome,) = run(output, settings_of(), [block_of_offsets(0, count)])
    (letter,) = outcome.dead
    assert (letter.numbers.tolist(), letter.text, letter.attempts) == ([last], "bad", 1)
    assert outcome.delivered == last
    assert output.sends <= 2 * math.log2(count)


def test_one_that_may_be_innocent_is_sent_alone_before_it_is_dead() -> None:
    errors = [OSError("odd") for _ in range(3)]
    output = FaultyOutput(lambda _: errors.pop() if errors else None)
    settings = settings_of(max_attempts=3, breaker_failures=100)
    (outcome,) = run(output, settings, [block_of_offsets(0, 2)])
    assert (outcome.delivered, outcome.dead) == (2, [])


def test_attempts_are_remembered_from_task_to_task() -> None:
    clock = ManualClock()
    settings = settings_of(max_attempts=4, breaker_failures=100, **LONG)
    gate = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda block: OSError("odd") if 7 in offsets_of(block) else None)
    # Each time the batch begins elsewhere; the last one has the culprit in the middle.
    for first in (7, 5, 3):
        (outcome,) = run(output, settings, [block_of_offsets(first, 50)], gate)
        assert len(outcome.deferred) == 50
        clock.advance(700)
    (outcome,) = run(output, settings, [block_of_offsets(0, 50)], gate)
    assert [letter.numbers.tolist() for letter in outcome.dead] == [[7]]
    assert outcome.delivered == 49
    assert gate.peek_permit().attempts == {}


def test_the_breaker_opens_and_one_probe_decides() -> None:
    clock = ManualClock()
    settings = settings_of(breaker_failures=2, batch_events=10, concurrency=4, **LONG)
    gate = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda _: RetryLater("down"))
    for _ in range(2):
        run(output, settings, [block_of_offsets(0, 100)], gate)
        clock.advance(60)
    assert gate.get_status().state is not BreakerState.CLOSED
    output.sends = 0
    clock.advance(600)
    run(output, settings, [block_of_offsets(0, 100)], gate)
    assert output.sends == 1, "a probe is one send"
    clock.advance(600)

    release = threading.Event()
    output.fault = lambda _: None if release.wait(PATIENCE) else RetryLater("too late")
    output.sends = 0
    results: list[int] = []
    blocks = [block_of_offsets(0, 100)]
    task = threading.Thread(
        target=lambda: results.append(run(output, settings, blocks, gate)[0].delivered)
    )
    task.start()
    assert output.await_sends(1)
    assert gate.request_permit().allowed is AllowedSends.NONE, "nobody else gets a probe"
    assert output.sends == 1
    release.set()
    task.join(PATIENCE)
    assert results == [100]
    assert gate.get_status().state is BreakerState.CLOSED


def test_late_answers_do_not_speak_for_the_probe() -> None:
    clock = ManualClock()
    settings = settings_of(breaker_failures=1, **LONG)
    gate = LocalDestinationState(settings, clock=clock)
    client = DestinationClient(gate, clock, has_rate_limit=False)
    for _ in range(3):
        assert client.can_send(limit=10, in_flight=0)
        assert client.start_send(1) is None
    client.on_failure(None, RetryLater("down"))
    clock.advance(60)
    assert client.can_send(limit=10, in_flight=2)
    probe = client.start_send(1)
    assert probe is not None
    for _ in range(2):  # those that were under way when the breaker opened
        client.on_answer(None, 0.1)
    client.on_failure(probe, RetryLater("still down"))
    status = gate.get_status()
    assert (status.state, status.failures, status.opened) == (BreakerState.OPEN, 2, 1)
    assert status.totals["sends"] == 4


def test_a_probe_that_had_nothing_to_send_is_released() -> None:
    clock = ManualClock()
    settings = settings_of(breaker_failures=1, **LONG)
    gate = LocalDestinationState(settings, clock=clock)
    gate.report(SendReport(failures=1))
    clock.advance(600)
    run(FaultyOutput(), settings, [], gate)
    assert gate.peek_permit().allowed is AllowedSends.PROBE


def test_a_gate_that_does_not_answer_keeps_everything() -> None:
    class Away:
        share = None

        def request_permit(self) -> SendPermit:
            raise TransportDown("no node")

        def report(self, report: SendReport) -> None:
            raise TransportDown("no node")

        def claim(self, count: int, within: float) -> float:
            raise TransportDown("no node")

    output = FaultyOutput()
    (outcome,) = run(output, settings_of(), [block_of_offsets(0, 10)], Away())
    assert len(outcome.deferred) == 10
    assert output.sends == 0


def test_without_word_of_the_rate_nothing_is_sent() -> None:
    class Mute(LocalDestinationState):
        def claim(self, count: int, within: float) -> float:
            raise TransportDown("no node")

    settings = settings_of(rate_limit=1000, max_time=0.1)
    output = FaultyOutput()
    (outcome,) = run(output, settings, [block_of_offsets(0, 10)], Mute(settings))
    assert len(outcome.deferred) == 10
    assert output.sends == 0


def test_after_max_time_the_rest_is_kept() -> None:
    output = FaultyOutput(lambda _: time.sleep(0.02))
    settings = settings_of(max_time=0.2, batch_events=1, concurrency=1)
    blocks = [block_of_offsets(first, 500) for first in (0, 500)]
    outcomes = run(output, settings, blocks)
    _, dead, kept = check_account(output, blocks, outcomes)
    assert not dead
    assert kept >= set(range(500, 1000))


def test_a_rate_limit_is_kept() -> None:
    began = time.monotonic()
    output = FaultyOutput()
    settings = settings_of(rate_limit=2000, batch_events=100)
    (outcome,) = run(output, settings, [block_of_offsets(0, 1000)])
    assert outcome.delivered == 1000
    assert time.monotonic() - began >= 0.49


def test_a_rate_below_a_batch_makes_batches_smaller() -> None:
    output = FaultyOutput()
    (outcome,) = run(output, settings_of(rate_limit=50), [block_of_offsets(0, 60)])
    assert outcome.delivered == 60
    assert max(block.num_rows for block in output.taken) == 50


def test_a_rate_needs_no_more_time_than_a_task_has() -> None:
    output = FaultyOutput()
    settings = settings_of(rate_limit=20, max_time=0.9)
    deadline = time.monotonic() + PATIENCE
    while not output.taken and time.monotonic() < deadline:
        run(output, settings, [block_of_offsets(0, 60)])
    assert output.taken, "a second's worth never comes together in less than a second"


def test_all_engines_of_a_process_share_its_limit() -> None:
    output = FaultyOutput(lambda _: time.sleep(0.005))
    settings = settings_of(batch_events=10, concurrency=8, max_in_flight=3)
    outcomes: list[int] = []

    def task(first: int) -> None:
        blocks = [block_of_offsets(first, 500)]
        outcomes.append(run(output, settings, blocks)[0].delivered)

    tasks = [threading.Thread(target=task, args=(first,)) for first in (0, 500, 1000)]
    for each in tasks:
        each.start()
    for each in tasks:
        each.join(PATIENCE)
    assert outcomes == [500] * 3
    assert output.most_in_flight == 3


def test_a_send_that_gets_no_thread_is_not_counted_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(IN_FLIGHT)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        run(FaultyOutput(), settings_of(pipelined=False), [block_of_offsets(0, 5)])
    assert len(IN_FLIGHT) == before


def test_sends_go_side_by_side_up_to_the_limit() -> None:
    together = threading.Barrier(4, timeout=PATIENCE)

    def fault(_: Block) -> None:
        together.wait()

    output = FaultyOutput(fault)
    settings = settings_of(batch_events=25, concurrency=4)
    (outcome,) = run(output, settings, [block_of_offsets(0, 200)])
    assert outcome.delivered == 200
    assert output.most_in_flight == 4


def test_what_did_well_is_known_to_the_next_task() -> None:
    settings = settings_of(batch_events=1)
    gate = LocalDestinationState(settings)
    run(FaultyOutput(lambda _: time.sleep(0.001)), settings, [block_of_offsets(0, 300)], gate)
    hint = gate.peek_permit().concurrency
    assert hint is not None
    assert hint > 1


def test_stop_lets_sends_end_and_keeps_the_rest() -> None:
    release = threading.Event()
    output = FaultyOutput(lambda _: None if release.wait(PATIENCE) else RetryLater("late"))
    settings = settings_of(batch_events=10, concurrency=2)
    with Engine(output, settings, LocalDestinationState(settings)) as engine:

        def stop() -> None:
            output.await_sends(2)
            engine.stop()
            release.set()

        stopper = threading.Thread(target=stop)
        stopper.start()
        outcome = engine.deliver(block_of_offsets(0, 1000))
        stopper.join()
        assert 20 <= outcome.delivered < 1000
        assert outcome.delivered + len(outcome.deferred) == 1000
        again = engine.deliver(block_of_offsets(0, 10))
        assert len(again.deferred) == 10


def test_a_send_that_overruns_is_given_up_and_its_events_are_kept() -> None:
    release = threading.Event()
    output = FaultyOutput(lambda _: None if release.wait(PATIENCE) else RetryLater("late"))
    settings = settings_of(batch_events=10, concurrency=2, max_time=0.05)
    gate = LocalDestinationState(settings)
    with Engine(output, settings, gate, grace=0.05) as engine:
        outcome = engine.deliver(block_of_offsets(0, 100))
        assert len(outcome.deferred) == 100
        release.set()
        output.fault = None
        settings_again = settings_of()
        (later,) = run(output, settings_again, [block_of_offsets(0, 100)], gate)
        assert later.delivered == 100


def test_a_closed_engine_ends_its_run() -> None:
    output = FaultyOutput(lambda _: time.sleep(0.01))
    settings = settings_of(batch_events=1, concurrency=1)
    engine = Engine(output, settings, LocalDestinationState(settings))

    def close() -> None:
        output.await_sends(3)
        engine.close()

    closer = threading.Thread(target=close)
    closer.start()
    outcome = engine.deliver(block_of_offsets(0, 10_000))
    closer.join(PATIENCE)
    engine.close()
    assert outcome.delivered >= 3
    assert len(outcome.deferred) == 10_000 - outcome.delivered


def test_a_closed_engine_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    settings = settings_of(batch_events=10, concurrency=4)
    run(FaultyOutput(), settings, [block_of_offsets(0, 1000)])
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in left)


def test_a_source_that_fails_ends_the_run_and_releases_the_probe() -> None:
    clock = ManualClock()
    settings = settings_of(breaker_failures=1, **LONG)
    gate = LocalDestinationState(settings, clock=clock)
    gate.report(SendReport(failures=1))
    clock.advance(600)

    def broken() -> Iterator[Block]:
        raise OSError("the shuffle file is gone")
        yield

    with pytest.raises(OSError, match="shuffle"):
        run(FaultyOutput(), settings, broken(), gate)
    assert gate.peek_permit().allowed is AllowedSends.PROBE


def test_a_destination_that_wants_some_events_later_is_left_alone_ever_longer() -> None:
    """Whichever task comes next: the gate knows. It is there, so the breaker stays closed."""
    settings = settings_of(
        backoff=2.0, max_backoff=60.0, jitter=0.0, breaker_reset=10.0, concurrency=1
    )
    clock = ManualClock()
    gate = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput(lambda _: PartlyDelivered({3: RetryLater("429")}))
    waits = []
    for _ in range(5):
        (outcome,) = run(output, settings, [block_of_offsets(0, 10)], gate, clock=clock)
        assert (outcome.delivered, outcome.deferred.tolist()) == (9, [3])
        waits.append(gate.get_status().wait)
        assert gate.get_status().state is BreakerState.CLOSED
        assert gate.get_status().error == "RetryLater: 429"
        clock.advance(waits[-1])
    assert waits == [2.0, 4.0, 8.0, 10.0, 10.0], "no longer than the breaker would stay open"
    output.fault = None
    run(output, settings, [block_of_offsets(0, 10)], gate, clock=clock)
    assert gate.get_status().wait == 0.0
    assert gate.get_status().error is None


def test_a_probe_of_which_some_events_are_wanted_later_closes_the_breaker() -> None:
    settings = settings_of(**{**LONG, "breaker_failures": 1})
    clock = ManualClock()
    gate = LocalDestinationState(settings, clock=clock)
    output = FaultyOutput()
    output.fail(RetryLater("away"))
    run(output, settings, [block_of_offsets(0, 10)], gate, clock=clock)
    assert gate.get_status().state is BreakerState.OPEN
    clock.advance(gate.get_status().wait)
    output.fail(PartlyDelivered({3: RetryLater("429")}))
    run(output, settings, [block_of_offsets(0, 10)], gate, clock=clock)
    assert gate.get_status().state is BreakerState.CLOSED
    assert gate.get_status().wait == 60.0
