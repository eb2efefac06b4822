"""The parts of a queue table that decide and touch nothing."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.errors import ConfigError, SyntaxFault
from turnlane.table.assignment import ReceiverSlot, assign_events
from turnlane.table.definition import SYSTEM_COLUMNS, Layout, TableOrdering, TableSettings
from turnlane.table.event import EVENT_COLUMNS, TableEvent
from turnlane.table.grammar import CreateQueue, DropQueue, ShowQueues, parse, parse_definition
from turnlane.table.id_gaps import MAX_GAPS, STALE_AFTER, IdGaps, StaleIdGaps, TransactionSnapshot
from turnlane.table.in_flight import InFlightEvents
from turnlane.table.ordering import KeyOrder
from turnlane.table.shards import (
    KEYSPACE_SHIFT,
    WHOLE_KEYSPACE,
    KeyRange,
    keyspace_id,
    subtract_ranges,
)
from turnlane.table.window import MAX_FIRE_TIME, RangeBacklogs, Window


class Nowhere:
    """Where events of these tests come from."""

    positions: Mapping[str, int] = MappingProxyType({"key": len(EVENT_COLUMNS)})

    def ack(self, events: list[TableEvent]) -> None:
        raise AssertionError

    def nack(self, events: list[TableEvent], delay: float | None, error: str | None) -> None:
        raise AssertionError


def event(event_id: int, fire_at: int = 0, priority: int = 0, key: object = None) -> TableEvent:
    return TableEvent((event_id, fire_at, priority, 0, None, None, None, key), Nowhere(), 0.0)


def ids(events: list[TableEvent]) -> list[int]:
    return [each.id for each in events]


# ── the grammar ──────────────────────────────────────────────────────────────────────────────────


def test_the_seeds_own_example_can_be_read() -> None:
    parsed = parse("CREATE QUEUE my_queue(\n  user_id BIGINT(10),\n  payload VARCHAR(256),\n)\n")
    assert isinstance(parsed, CreateQueue)
    assert parsed.definition.names == ("user_id", "payload")


def test_options_and_the_key_are_read() -> None:
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


def test_the_other_statements_are_read() -> None:
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
def test_mistakes_are_shown_where_they_are(text: str, place: str, words: str) -> None:
    with pytest.raises(SyntaxFault) as caught:
        parse(text)
    assert str(caught.value).startswith(f"{place}: ")
    assert words in str(caught.value)


names = st.text(
    st.characters(min_codepoint=32, max_codepoint=0xFFFF, exclude_categories=["C", "Z"]), min_size=1
).filter(lambda name: len(name.encode()) <= 48 and name.lower() not in SYSTEM_COLUMNS)


@given(names, names, st.booleans(), st.integers(1, 10**6))
def test_a_definition_is_read_back_from_its_text(
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
def test_whatever_is_not_a_statement_is_a_syntax_fault(text: str) -> None:
    with pytest.raises(SyntaxFault):
        parse(f"CREATE QUEUE {text}")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="backoff"):
        TableSettings.of(backoff="1h", max_backoff="1m")


# ── the key space ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["-", "-80", "80-", "40-80", "c0-", "4020-4021"])
def test_key_ranges_are_written_as_they_are_read(text: str) -> None:
    assert str(KeyRange.parse(text)) == text


@pytest.mark.parametrize("text", ["", "80", "80-40", "8-", "zz-", "80-80", "-00"])
def test_what_is_no_key_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="key range"):
        KeyRange.parse(text)


@given(st.one_of(st.integers(), st.text()))
def test_every_key_lies_in_one_half_and_in_its_own_place(key: object) -> None:
    found = keyspace_id(key)
    assert -KEYSPACE_SHIFT <= found < KEYSPACE_SHIFT
    low, high = KeyRange.parse("-80"), KeyRange.parse("80-")
    assert low.contains(found) != high.contains(found)
    for each in (low, high):
        first, last = each.stored
        assert each.contains(found) == (first <= found <= last)


# ── times and limits ─────────────────────────────────────────────────────────────────────────────


def test_gaps_are_asked_for_until_they_are_seen_or_old() -> None:
    gaps = IdGaps(10)
    gaps.saw([11, 12, 15], now=0.0)
    assert gaps.missing(1.0) == [13, 14]
    gaps.saw([13], now=1.0)
    assert gaps.missing(1.0) == [14]
    assert gaps.missing(STALE_AFTER) == []
    assert gaps.highest == 15
    gaps.saw([10 * MAX_GAPS], now=2.0)
    assert len(gaps.missing(2.0)) <= MAX_GAPS


# ── what fires next ──────────────────────────────────────────────────────────────────────────────


def test_the_window_gives_out_what_is_due_by_priority() -> None:
    window = Window()
    window.add([event(1, 0), event(2, 0, 5), event(3, 100), event(4, 50)], now=10)
    assert ids(window.take(10, 10)) == [2, 1]
    assert window.take(10, 49) == []
    assert window.next_time() == 50
    assert ids(window.take(10, 100)) == [4, 3]
    assert len(window) == 0


def test_what_is_put_back_goes_out_first_and_what_is_discarded_not_at_all() -> None:
    window = Window()
    window.add([event(at) for at in range(5)], now=0)
    taken = window.take(3, 0)
    window.put_back(taken)
    window.discard(1)
    assert ids(window.take(10, 0)) == [0, 2, 3, 4]


def test_an_event_that_is_moved_fires_at_its_new_time_only() -> None:
    window = Window()
    window.add([event(1, 10)], now=0)
    window.add([event(1, 50)], now=0)
    assert window.take(1, 20) == []
    assert ids(window.take(1, 50)) == [1]


def test_a_key_has_one_event_out_and_the_others_wait_in_order() -> None:
    order = KeyOrder(lambda each: each["key"], lambda _: WHOLE_KEYSPACE, 100)
    first, second, third, other = (
        event(1, 5, key="a"),
        event(2, 9, key="a"),
        event(3, 7, key="a"),
        event(4, key="b"),
    )
    assert ids(order.admit([first, second, third, other])) == [1, 4]
    assert ids(order.admit([first])) == [1], "its own retry may go"
    assert 3 in order
    following = order.settled(first)
    assert following is not None
    assert following.id == 3
    assert order.settled(first) is None
    assert order.admit([event(5, 1, key="a")]) == [], "the next one has its key"
    assert ids(order.admit([third])) == [3]


def test_too_many_that_wait_in_order_are_left_in_the_table() -> None:
    place = KeyRange(7, 8)
    order = KeyOrder(lambda each: each["key"], lambda _: place, 4)
    hot = [event(at, at, key="hot") for at in range(9)]
    cold = [event(at, at, key="cold") for at in (20, 21)]
    assert ids(order.admit([*hot, *cold])) == [0, 20]
    assert len(order) <= 4
    assert 21 in order, "the longest line gives way"
    assert 1 in order
    assert not order.is_left(hot[1])
    assert order.is_left(hot[8])
    assert order.passed((8, 8), lambda _: True) == [place]
    assert order.passed((8, 8), lambda _: False) == [], "the one that all wait for may be there"
    assert order.passed((0, 0), lambda _: True) == [], "some before that are not left"
    seen = []
    following: TableEvent | None = hot[0]
    while following is not None:
        seen.append(following.id)
        following = order.settled(following)
    assert seen == list(range(len(seen))) != list(range(9))
    assert order.admit([hot[8]]) == [], "others come before it"
    assert list(order.wanted()) == ["hot"]
    left = order.wanted()["hot"]
    assert left.where == place
    page = [each for each in hot if (each.fire_at, each.id) > left.after][:2]
    order.advance(["hot"], (page[-1].fire_at, page[-1].id))
    assert ids(order.line_up(page)) == [len(seen)]
    assert ids(order.admit([page[0]])) == [len(seen)]
    order.advance(["hot"], None)
    assert order.wanted() == {}
    assert order.line_up([hot[8]]) == []
    assert 8 in order


def test_the_retry_that_all_others_wait_for_is_never_left() -> None:
    order = KeyOrder(lambda each: each["key"], lambda _: WHOLE_KEYSPACE, 2)
    events = [event(at, at, key="a") for at in range(6)]
    order.admit(events)
    retried = events[0].moved(99, 1)
    assert not order.is_left(retried)
    assert ids(order.admit([retried])) == [0]
    assert ids(order.line_up([retried])) == [0]
    behind, left = order.leave(events[0])
    assert left is not None
    assert behind
    assert left.first == (behind[-1].fire_at + 1, behind[-1].id + 1)
    assert not order.wanted()


def test_ranges_are_cut_out_of_ranges() -> None:
    left = subtract_ranges([KeyRange(0, 10), KeyRange(20, 30)], [KeyRange(3, 4), KeyRange(8, 25)])
    assert left == [KeyRange(0, 3), KeyRange(4, 8), KeyRange(25, 30)]
    assert subtract_ranges([WHOLE_KEYSPACE], [WHOLE_KEYSPACE]) == []


def test_settled_events_are_not_remembered_until_they_would_be_late() -> None:
    flights = InFlightEvents(ack_timeout=30.0, look_after=1.0)
    events = [event(at) for at in range(100)]
    known = [weakref.ref(each.home) for each in events]  # each has its own
    flights.add(events, 0.0)
    del events
    for at in range(1, 100):
        flights.pop(at)
    assert sum(ref() is not None for ref in known) == 1
    assert flights.next_time() == 1.0
    assert ids(flights.unseen(1.0)) == [0]
    assert flights.late(29.9) == []
    assert ids(flights.late(30.0)) == [0]
    flights.pop(0)
    flights.add([event(0)], 30.0)  # fired again: another flight
    assert flights.late(40.0) == []
    assert ids(flights.unseen(40.0)) == [0]
    assert ids(flights.late(60.0)) == [0]


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=6),
)
def test_events_are_dealt_so_that_loads_are_even(count: int, seats: list[tuple[int, int]]) -> None:
    made = [ReceiverSlot(capacity, load) for capacity, load in seats]
    events = [event(at) for at in range(count)]
    result = assign_events(events, made, lambda each: each.id)
    shares = {id(seat): len(given_) for seat, given_ in result.given}
    room = sum(seat.room for seat in made)
    assert sum(shares.values()) == min(count, room)
    assert len(result.left) == count - sum(shares.values())
    loads = [(seat.load + shares.get(id(seat), 0), seat) for seat in made]
    for load, seat in loads:
        if shares.get(id(seat)):
            # Nobody with room is left behind by more than one event.
            assert all(load <= other + 1 for other, each in loads if other < each.capacity)


def test_events_go_to_who_covers_their_key() -> None:
    low, high = (
        ReceiverSlot(2, key_range=KeyRange.parse("-80")),
        ReceiverSlot(9, key_range=KeyRange.parse("c0-")),
    )
    keys = {1: -KEYSPACE_SHIFT, 2: -KEYSPACE_SHIFT, 3: -KEYSPACE_SHIFT, 4: 1, 5: KEYSPACE_SHIFT - 1}
    result = assign_events([event(at) for at in keys], [low, high], lambda each: keys[each.id])
    assert [(seat, ids(mine)) for seat, mine in result.given] == [(low, [1, 2]), (high, [5])]
    assert ids(result.left) == [3]
    assert ids(result.homeless) == [4]


def test_a_window_that_is_too_full_forgets_what_is_due_last() -> None:
    window = Window()
    window.add([event(1), *(event(at, at) for at in range(10, 20))], now=5)
    assert window.trim(8) == 17
    assert window.trim(8) is None
    assert window.next_time() == 10
    assert window.count_due(5) == 1
    assert ids(window.due(12)) == [1, 10, 11, 12]
    window.forget([event(10), event(11)])
    assert window.count_due(12) == 2
    assert ids(window.take(99, 99)) == [1, 12, 13, 14, 15, 16]


def test_what_is_left_in_the_table_takes_what_waits_behind_it_along() -> None:
    order = KeyOrder(lambda each: each["key"], lambda _: WHOLE_KEYSPACE, 100)
    first, second, other = event(1, key="a"), event(2, key="a"), event(3, key="b")
    order.admit([first, second, other])
    behind, left = order.leave(first)
    assert (ids(behind), left) == ([2], None)
    assert 2 not in order
    assert ids(order.admit([first])) == [1], "its key is free"
    retried = other.moved(9, 1)
    assert order.leave(retried) == ([], None)
    assert order.admit([event(4, key="b")]) == [], "what was fired before keeps its key busy"


def test_backlogs_are_read_from_the_first_event_that_was_left() -> None:
    backlogs = RangeBacklogs()
    assert list(backlogs.others) == [WHOLE_KEYSPACE]
    low, high = KeyRange.parse("-80"), KeyRange.parse("80-")
    assert backlogs.cut([low])
    assert not backlogs.cut([low, low])
    assert backlogs.spans == (low, high)
    assert (backlogs.span(-KEYSPACE_SHIFT), backlogs.span(0)) == (low, high)
    for fire_at, event_id in ((70, 7), (50, 5), (60, 6)):
        backlogs.leave(high, fire_at, event_id)
    assert backlogs.position(high) == (50, 4)
    assert list(backlogs.others) == [low]
    backlogs.advance(high, (60, 6))
    backlogs.lower((55, 0))  # a sweep comes from there
    assert backlogs.position(high) == (55, 0)
    backlogs.advance(high, None)
    assert high not in backlogs
    backlogs.leave(low, 30, 3)
    assert backlogs.cut([low, high, WHOLE_KEYSPACE])
    assert not backlogs
    assert backlogs.take_first() == 30
    assert backlogs.take_first() == MAX_FIRE_TIME


def test_an_id_lapses_until_its_transaction_is_over() -> None:
    lapsed = StaleIdGaps()
    assert not lapsed
    lapsed.add(range(5, 7))
    assert not lapsed.over(TransactionSnapshot(10, 20))
    assert not lapsed.over(TransactionSnapshot(15, 25))
    assert lapsed.ids == [5, 6]
    assert not lapsed.saw([5])
    lapsed.over(TransactionSnapshot(20, 30))
    assert not lapsed


def test_of_a_long_row_of_missing_ids_some_stand_for_all() -> None:
    lapsed = StaleIdGaps()
    lapsed.add(range(1_000_000))
    assert len(lapsed.ids) < 100
    assert lapsed.saw([0]), "there are more than were asked for"
    for at in range(10_000):
        lapsed.add(range(at * 2, at * 2 + 1))
    assert len(lapsed.ids) <= 2_000


def test_transactions_that_are_older_than_the_lead_are_waited_for() -> None:
    lapsed = StaleIdGaps()
    lapsed.began(TransactionSnapshot(20, 20))
    assert not lapsed, "none is open"
    lapsed.began(TransactionSnapshot(10, 20))
    assert lapsed
    assert not lapsed.over(TransactionSnapshot(19, 30))
    assert lapsed.over(TransactionSnapshot(20, 31))
    assert not lapsed
