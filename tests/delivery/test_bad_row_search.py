"""Are bad rows found, with few sends?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.delivery.batching import BadRowSearch

COUNT = 1000


def search_all(
    count: int, answer: Callable[[range], str], start: BadRowSearch | None = None
) -> tuple[list[int], list[int], int]:
    """Send until no row is open; return delivered rows, bad rows and the number of sends."""
    search = start or BadRowSearch(count)
    delivered: list[int] = []
    found: list[int] = []
    sends = 0
    while search.left:
        first = count - search.left
        trial = range(first, first + search.trial)
        assert 1 <= len(trial) <= search.left
        sends += 1
        match answer(trial):
            case "ok":
                delivered += trial
                search = search.after_delivery(len(trial))
                if search.is_first_row_bad:
                    found.append(count - search.left)
                    search = search.after_refusal(1)
            case "refused":
                search = search.after_refusal(len(trial))
                found += trial if len(trial) == 1 else ()
            case _:
                search = search.after_too_large(len(trial))
                found += trial if len(trial) == 1 else ()
    return delivered, found, sends


def refuse_rows(bad: Collection[int]) -> Callable[[range], str]:
    return lambda trial: "refused" if any(row in trial for row in bad) else "ok"


def count_sends_to_find(count: int, at: int) -> int:
    """Return the sends needed to find the bad row, without the send of the rows after it."""
    behind = at + 1 < count
    return search_all(count, refuse_rows([at]))[2] - behind


@pytest.mark.parametrize("at", [0, 1, 499, 500, 998, 999])
def test_one_bad_row_of_a_thousand_takes_few_sends(at: int) -> None:
    delivered, found, sends = search_all(COUNT, refuse_rows([at]))
    assert found == [at]
    assert len(delivered) == COUNT - 1
    assert sends <= 2 * math.log2(COUNT)


def test_bad_row_at_any_position_takes_few_sends() -> None:
    worst = max(search_all(COUNT, refuse_rows([at]))[2] for at in range(COUNT))
    assert worst <= 2 * math.log2(COUNT)


@pytest.mark.parametrize("count", range(2, 70))
def test_bad_row_in_batches_of_any_size_keeps_to_the_bound(count: int) -> None:
    for at in range(count):
        delivered, found, _ = search_all(count, refuse_rows([at]))
        assert found == [at]
        assert len(delivered) == count - 1
        assert count_sends_to_find(count, at) <= 2 * math.log2(count)


@given(st.integers(2, 5000), st.data())
def test_bad_row_in_large_batches_keeps_to_the_bound(count: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, count - 1))
    assert count_sends_to_find(count, at) <= 2 * math.log2(count)


@given(st.sets(st.integers(0, COUNT - 1), min_size=1, max_size=40))
def test_several_bad_rows_are_found_and_no_others(bad: set[int]) -> None:
    delivered, found, sends = search_all(COUNT, refuse_rows(bad))
    assert found == sorted(bad)
    assert delivered == sorted(set(range(COUNT)) - bad)
    assert sends <= 2 * math.log2(COUNT) * len(bad)


@given(st.integers(1, 300), st.data())
def test_any_set_of_bad_rows_is_found(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    delivered, found, _ = search_all(count, refuse_rows(bad))
    assert found == sorted(bad)
    assert delivered == sorted(set(range(count)) - bad)


def test_batch_of_bad_rows_takes_little_more_than_one_send_each() -> None:
    _, found, sends = search_all(COUNT, refuse_rows(range(COUNT)))
    assert len(found) == COUNT
    assert sends <= COUNT + 4 * math.log2(COUNT)


def test_too_large_trials_are_halved_and_the_size_that_fits_is_kept() -> None:
    delivered, found, sends = search_all(
        COUNT, lambda trial: "ok" if len(trial) <= 260 else "too large"
    )
    assert len(delivered) == COUNT
    assert found == []
    assert sends == 2 + 4


def test_one_row_that_is_too_large_does_not_make_others_go_alone() -> None:
    _, found, sends = search_all(COUNT, lambda trial: "too large" if 700 in trial else "ok")
    assert found == [700]
    assert sends <= 2 * math.log2(COUNT)


@given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)), st.integers(1, 100))
def test_too_large_rows_and_bad_rows_are_both_found(
    large: set[int], bad: set[int], most: int
) -> None:
    def answer(trial: range) -> str:
        if len(trial) > most or any(row in trial for row in large):
            return "too large"
        return "refused" if any(row in trial for row in bad) else "ok"

    delivered, found, _ = search_all(100, answer)
    assert found == sorted(large | bad)
    assert delivered == sorted(set(range(100)) - large - bad)


def test_refusal_that_does_not_repeat_loses_no_row() -> None:
    answers = iter(["refused", "ok", "ok"])
    delivered, found, _ = search_all(10, lambda _: next(answers, "ok"))
    assert len(delivered) == 10
    assert found == []
