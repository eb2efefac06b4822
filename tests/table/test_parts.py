"""The pure parts of a queue table: grammar, key space, window, order, assignment."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.errors import ConfigError, SyntaxFault
from turnlane.table.definition import SYSTEM_COLUMNS, Layout, TableOrdering, TableSettings
from turnlane.table.dispatcher import assign_events
from turnlane.table.fetcher import MAX_GAPS, STALE_AFTER, IdGaps, StaleIdGaps
from turnlane.table.grammar import CreateQueue, DropQueue, ShowQueues, parse, parse_definition
from turnlane.table.leader_state import InFlightEvents, ReceiverSlot
from turnlane.table.ordering import KeyOrder
from turnlane.table.receiver import EVENT_COLUMNS, TableEvent
from turnlane.table.shards import (
    KEYSPACE_SHIFT,
    WHOLE_KEYSPACE,
    KeyRange,
    keyspace_id,
    subtract_ranges,
)
from turnlane.table.store import TransactionSnapshot
from turnlane.table.window import MAX_FIRE_TIME, RangeBacklogs, Window


class FailingAckHandler:
    """An ack handler that must not be called."""

    positions: Mapping[str, int] = MappingProxyType({"key": len(EVENT_COLUMNS)})

    def ack(self, events: list[TableEvent]) -> None:
        raise AssertionError

    def nack(self, events: list[TableEvent], delay: float | None, error: str | None) -> None:
        raise AssertionError


def make_event(
    event_id: int, fire_at: int = 0, priority: int = 0, key: object = None
) -> TableEvent:
    return TableEvent(
        (event_id, fire_at, priority, 0, None, None, None, key), FailingAckHandler(), 0.0
    )


def get_ids(events: list[TableEvent]) -> list[int]:
    return [each.id for each in events]


# ── the grammar ──────────────────────────────────────────────────────────────────────────────────


def test_example_with_a_trailing_comma_is_parsed() -> None:
    parsed = parse("CREATE QUEUE my_queue(\n  user_id BIGINT(10),\n  payload VARCHAR(256),\n)\n")
    assert isinstance(parsed, CreateQueue)
    assert parsed.definition.column_names == ("user_id", "payload")


def test_options_and_key_are_parsed() -> None:
    definition = parse_definition(
        "create queue Q (a bigint not null) -- a comment\nshard by (A) "
        "with (ack_timeout = 1m30s, max_qps = 0.5, ordering = key, layout = 'keyspace');"
    )
    assert definition.name == "q"
    assert definition.shard_by == "a"
    assert definition.settings.ack_timeout == 90
    assert definition.settings.max_qps == 0.5
    assert definition.settings.ordering is TableOrdering.KEY
    assert definition.settings.layout is Layout.KEYSPACE


def test_drop_and_show_are_parsed() -> None:
    assert parse("DROP QUEUE IF EXISTS q") == DropQueue("q", if_exists=True)
    assert parse("SHOW QUEUES;") == ShowQueues()


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "1:1", "expected CREATE or DROP or SHOW"),
        ("CREATE TABLE q (a INT)", "1:8", "expected QUEUE"),
        ("CREATE QUEUE q\n  (a INTT)", "2:6", "did you mean INT"),
        ("CREATE QUEUE q (a INT", "1:22", "expected ')', found the end"),
        ("CREATE QUEUE q (a INT) WITH (max_qsp = 1)", "1:29", "did you mean max_qps"),
        ("CREATE QUEUE q (a INT) WITH (backoff = soon)", "1:29", "not a duration"),
        ("CREATE QUEUE q (a INT) WITH (max_qps = 1, max_qps = 2)", "1:43", "twice"),
        ("CREATE QUEUE q (a INT) SHARD BY (b)", "1:14", "no column 'b'"),
        ("CREATE QUEUE q (a JSON) SHARD BY (a)", "1:14", "cannot be the key"),
        ("CREATE QUEUE q (a INT) WITH (ordering = key)", "1:14", "needs SHARD BY"),
        ("CREATE QUEUE q (State INT)", "1:14", "of its own"),
        ("CREATE QUEUE q (a INT, A TEXT)", "1:14", "twice"),
        ("CREATE QUEUE q (a VARCHAR)", "1:19", "takes 1 numbers"),
        ("CREATE QUEUE turnlane_lease (a INT)", "1:14", "turnlane's own"),
        ('CREATE QUEUE "" (a INT)', "1:14", "empty"),
        ('CREATE QUEUE "a\x00b" (a INT)', "1:14", "cannot be printed"),
        (f"CREATE QUEUE {'q' * 49} (a INT)", "1:14", "too long"),
        ("DROP QUEUE q; DROP QUEUE r", "1:15", "expected the end"),
        ("SHOW QUEUES €", "1:13", "cannot read"),
    ],
)
def test_syntax_error_has_its_position(text: str, place: str, words: str) -> None:
    with pytest.raises(SyntaxFault) as caught:
        parse(text)
    assert str(caught.value).startswith(f"{place}: ")
    assert words in str(caught.value)


names = st.text(
    st.characters(min_codepoint=32, max_codepoint=0xFFFF, exclude_categories=["C", "Z"]), min_size=1
).filter(lambda name: len(name.encode()) <= 48 and name.lower() not in SYSTEM_COLUMNS)


@given(names, names, st.booleans(), st.integers(1, 10**6))
def test_text_of_a_definition_parses_to_an_equal_definition(
    name: str, column: str, required: bool, attempts: int
) -> None:
    quoted = '"' + column.replace('"', '""') + '"'
    tail = "NOT NULL" if required else ""
    text = (
        f"CREATE QUEUE x ({quoted} TEXT {tail}) SHARD BY ({quoted}) WITH (max_attempts={attempts})"
    )
    definition = parse_definition(text)
    assert parse_definition(str(definition)) == definition


@given(st.text(max_size=60))
def test_any_other_text_is_a_syntax_fault(text: str) -> None:
    with pytest.raises(SyntaxFault):
        parse(f"CREATE QUEUE {text}")


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="backoff"):
        TableSettings.from_options(backoff="1h", max_backoff="1m")


# ── the key space ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["-", "-80", "80-", "40-80", "c0-", "4020-4021"])
def test_key_range_formats_as_it_was_parsed(text: str) -> None:
    assert str(KeyRange.parse(text)) == text


@pytest.mark.parametrize("text", ["", "80", "80-40", "8-", "zz-", "80-80", "-00"])
def test_invalid_key_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="key range"):
        KeyRange.parse(text)


@given(st.one_of(st.integers(), st.text()))
def test_every_key_lies_in_exactly_one_half(key: object) -> None:
    found = keyspace_id(key)
    assert -KEYSPACE_SHIFT <= found < KEYSPACE_SHIFT
    low, high = KeyRange.parse("-80"), KeyRange.parse("80-")
    assert low.contains(found) != high.contains(found)
    for each in (low, high):
        first, last = each.stored_bounds
        assert each.contains(found) == (first <= found <= last)


# ── times and limits ─────────────────────────────────────────────────────────────────────────────


def test_missing_ids_are_read_until_found_or_stale() -> None:
    gaps = IdGaps(10)
    gaps.record_read([11, 12, 15], now=0.0)
    assert gaps.get_missing(1.0) == [13, 14]
    gaps.record_read([13], now=1.0)
    assert gaps.get_missing(1.0) == [14]
    assert gaps.get_missing(STALE_AFTER) == []
    assert gaps.highest == 15
    gaps.record_read([10 * MAX_GAPS], now=2.0)
    assert len(gaps.get_missing(2.0)) <= MAX_GAPS


# ── what fires next ──────────────────────────────────────────────────────────────────────────────


def test_window_returns_due_events_by_priority() -> None:
    window = Window()
    window.add(
        [make_event(1, 0), make_event(2, 0, 5), make_event(3, 100), make_event(4, 50)], now=10
    )
    assert get_ids(window.take(10, 10)) == [2, 1]
    assert window.take(10, 49) == []
    assert window.get_next_time() == 50
    assert get_ids(window.take(10, 100)) == [4, 3]
    assert len(window) == 0


def test_events_put_back_come_first_and_discarded_events_never() -> None:
    window = Window()
    window.add([make_event(at) for at in range(5)], now=0)
    taken = window.take(3, 0)
    window.put_back(taken)
    window.discard(1)
    assert get_ids(window.take(10, 0)) == [0, 2, 3, 4]


def test_rescheduled_event_is_due_at_its_new_time_only() -> None:
    window = Window()
    window.add([make_event(1, 10)], now=0)
    window.add([make_event(1, 50)], now=0)
    assert window.take(1, 20) == []
    assert get_ids(window.take(1, 50)) == [1]


def test_key_has_one_event_in_flight_and_others_wait_in_order() -> None:
    order = KeyOrder(lambda each: each["key"], lambda _: WHOLE_KEYSPACE, 100)
    first, second, third, other = (
        make_event(1, 5, key="a"),
        make_event(2, 9, key="a"),
        make_event(3, 7, key="a"),
        make_event(4, key="b"),
    )
    assert get_ids(order.admit([first, second, third, other])) == [1, 4]
    assert get_ids(order.admit([first])) == [1], "its own retry may go"
    assert 3 in order
    following = order.release(first)
    assert following is not None
    assert following.id == 3
    assert order.release(first) is None
    assert order.admit([make_event(5, 1, key="a")]) == [], "the next one has its key"
    assert get_ids(order.admit([third])) == [3]


def test_too_many_waiting_events_are_left_in_the_table() -> None:
    place = KeyRange(7, 8)
    order = KeyOrder(lambda each: each["key"], lambda _: place, 4)
    hot = [make_event(at, at, key="hot") for at in range(9)]
    cold = [make_event(at, at, key="cold") for at in (20, 21)]
    assert get_ids(order.admit([*hot, *cold])) == [0, 20]
    assert len(order) <= 4
    assert 21 in order, "the longest line gives way"
    assert 1 in order
    assert not order.is_in_backlog(hot[1])
    assert order.is_in_backlog(hot[8])
    assert order.find_skippable_ranges((8, 8), lambda _: True) == [place]
    assert order.find_skippable_ranges((8, 8), lambda _: False) == [], (
        "the one that all wait for may be there"
    )
    assert order.find_skippable_ranges((0, 0), lambda _: True) == [], (
        "some before that are not left"
    )
    received = []
    following: TableEvent | None = hot[0]
    while following is not None:
        received.append(following.id)
        following = order.release(following)
    assert received == list(range(len(received))) != list(range(9))
    assert order.admit([hot[8]]) == [], "others come before it"
    assert list(order.find_readable_backlogs()) == ["hot"]
    left = order.find_readable_backlogs()["hot"]
    assert left.key_range == place
    page = [each for each in hot if (each.fire_at, each.id) > left.after][:2]
    order.advance(["hot"], (page[-1].fire_at, page[-1].id))
    assert get_ids(order.add_from_backlog(page)) == [len(received)]
    assert get_ids(order.admit([page[0]])) == [len(received)]
    order.advance(["hot"], None)
    assert order.find_readable_backlogs() == {}
    assert order.add_from_backlog([hot[8]]) == []
    assert 8 in order


def test_retry_that_makes_its_key_busy_is_never_left_in_the_table() -> None:
    order = KeyOrder(lambda each: each["key"], lambda _: WHOLE_KEYSPACE, 2)
    events = [make_event(at, at, key="a") for at in range(6)]
    order.admit(events)
    retried = events[0].copy_for_retry(99, 1)
    assert not order.is_in_backlog(retried)
    assert get_ids(order.admit([retried])) == [0]
    assert get_ids(order.add_from_backlog([retried])) == [0]
    behind, left = order.remove(events[0])
    assert left is not None
    assert behind
    assert left.first_position == (behind[-1].fire_at + 1, behind[-1].id + 1)
    assert not order.find_readable_backlogs()


def test_subtract_ranges_removes_overlaps() -> None:
    left = subtract_ranges([KeyRange(0, 10), KeyRange(20, 30)], [KeyRange(3, 4), KeyRange(8, 25)])
    assert left == [KeyRange(0, 3), KeyRange(4, 8), KeyRange(25, 30)]
    assert subtract_ranges([WHOLE_KEYSPACE], [WHOLE_KEYSPACE]) == []


def test_settled_events_leave_memory_before_their_timeout() -> None:
    in_flight = InFlightEvents(ack_timeout=30.0, check_after=1.0)
    events = [make_event(at) for at in range(100)]
    known = [weakref.ref(each.ack_handler) for each in events]  # each event has its own handler
    in_flight.add(events, 0.0)
    del events
    for at in range(1, 100):
        in_flight.pop(at)
    assert sum(ref() is not None for ref in known) == 1
    assert in_flight.get_next_time() == 1.0
    assert get_ids(in_flight.find_unchecked(1.0)) == [0]
    assert in_flight.find_overdue(29.9) == []
    assert get_ids(in_flight.find_overdue(30.0)) == [0]
    in_flight.pop(0)
    in_flight.add([make_event(0)], 30.0)  # sent again
    assert in_flight.find_overdue(40.0) == []
    assert get_ids(in_flight.find_unchecked(40.0)) == [0]
    assert get_ids(in_flight.find_overdue(60.0)) == [0]


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=6),
)
def test_assignment_makes_loads_even(count: int, slots: list[tuple[int, int]]) -> None:
    made = [ReceiverSlot(capacity, load) for capacity, load in slots]
    events = [make_event(at) for at in range(count)]
    result = assign_events(events, made, lambda each: each.id)
    shares = {id(slot): len(given_) for slot, given_ in result.sent}
    room = sum(slot.room for slot in made)
    assert sum(shares.values()) == min(count, room)
    assert len(result.without_room) == count - sum(shares.values())
    loads = [(slot.load + shares.get(id(slot), 0), slot) for slot in made]
    for load, slot in loads:
        if shares.get(id(slot)):
            # A receiver with room has at most one event less than the others.
            assert all(load <= other + 1 for other, each in loads if other < each.capacity)


def test_events_go_to_receivers_that_cover_their_key() -> None:
    low, high = (
        ReceiverSlot(2, key_range=KeyRange.parse("-80")),
        ReceiverSlot(9, key_range=KeyRange.parse("c0-")),
    )
    keys = {1: -KEYSPACE_SHIFT, 2: -KEYSPACE_SHIFT, 3: -KEYSPACE_SHIFT, 4: 1, 5: KEYSPACE_SHIFT - 1}
    result = assign_events([make_event(at) for at in keys], [low, high], lambda each: keys[each.id])
    assert [(slot, get_ids(mine)) for slot, mine in result.sent] == [(low, [1, 2]), (high, [5])]
    assert get_ids(result.without_room) == [3]
    assert get_ids(result.without_receiver) == [4]


def test_full_window_drops_the_latest_events() -> None:
    window = Window()
    window.add([make_event(1), *(make_event(at, at) for at in range(10, 20))], now=5)
    assert window.trim(8) == 17
    assert window.trim(8) is None
    assert window.get_next_time() == 10
    assert window.count_due(5) == 1
    assert get_ids(window.list_due(12)) == [1, 10, 11, 12]
    window.discard_due([make_event(10), make_event(11)])
    assert window.count_due(12) == 2
    assert get_ids(window.take(99, 99)) == [1, 12, 13, 14, 15, 16]


def test_event_left_in_the_table_takes_waiting_events_along() -> None:
    order = KeyOrder(lambda each: each["key"], lambda _: WHOLE_KEYSPACE, 100)
    first, second, other = make_event(1, key="a"), make_event(2, key="a"), make_event(3, key="b")
    order.admit([first, second, other])
    behind, left = order.remove(first)
    assert (get_ids(behind), left) == ([2], None)
    assert 2 not in order
    assert get_ids(order.admit([first])) == [1], "its key is free"
    retried = other.copy_for_retry(9, 1)
    assert order.remove(retried) == ([], None)
    assert order.admit([make_event(4, key="b")]) == [], "what was fired before keeps its key busy"


def test_backlog_is_read_from_its_first_event() -> None:
    backlogs = RangeBacklogs()
    assert list(backlogs.ranges_without_backlog) == [WHOLE_KEYSPACE]
    low, high = KeyRange.parse("-80"), KeyRange.parse("80-")
    assert backlogs.set_receiver_ranges([low])
    assert not backlogs.set_receiver_ranges([low, low])
    assert backlogs.ranges == (low, high)
    assert (backlogs.find_range(-KEYSPACE_SHIFT), backlogs.find_range(0)) == (low, high)
    for fire_at, event_id in ((70, 7), (50, 5), (60, 6)):
        backlogs.leave(high, fire_at, event_id)
    assert backlogs.get_position(high) == (50, 4)
    assert list(backlogs.ranges_without_backlog) == [low]
    backlogs.advance(high, (60, 6))
    backlogs.move_back_to((55, 0))  # the position of a sweep
    assert backlogs.get_position(high) == (55, 0)
    backlogs.advance(high, None)
    assert high not in backlogs
    backlogs.leave(low, 30, 3)
    assert backlogs.set_receiver_ranges([low, high, WHOLE_KEYSPACE])
    assert not backlogs
    assert backlogs.take_resume_time() == 30
    assert backlogs.take_resume_time() == MAX_FIRE_TIME


def test_stale_id_stays_until_its_transaction_is_over() -> None:
    stale = StaleIdGaps()
    assert not stale
    stale.add(range(5, 7))
    assert not stale.expire(TransactionSnapshot(10, 20))
    assert not stale.expire(TransactionSnapshot(15, 25))
    assert stale.ids == [5, 6]
    assert not stale.remove_found([5])
    stale.expire(TransactionSnapshot(20, 30))
    assert not stale


def test_probes_stand_for_a_long_run_of_missing_ids() -> None:
    stale = StaleIdGaps()
    stale.add(range(1_000_000))
    assert len(stale.ids) < 100
    assert stale.remove_found([0]), "there are more than were asked for"
    for at in range(10_000):
        stale.add(range(at * 2, at * 2 + 1))
    assert len(stale.ids) <= 2_000


def test_transactions_older_than_the_lease_are_awaited() -> None:
    stale = StaleIdGaps()
    stale.expect_open_transactions(TransactionSnapshot(20, 20))
    assert not stale, "none is open"
    stale.expect_open_transactions(TransactionSnapshot(10, 20))
    assert stale
    assert not stale.expire(TransactionSnapshot(19, 30))
    assert stale.expire(TransactionSnapshot(20, 31))
    assert not stale
