"""Are the events that a destination will not have found, and with few sends?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.delivery.batching import BadRowSearch

COUNT = 1000


def searched(
    count: int, verdict: Callable[[range], str], start: BadRowSearch | None = None
) -> tuple[list[int], list[int], int]:
    """Send until nothing is left: what was delivered, what was found, with how many sends."""
    search = start or BadRowSearch(count)
    delivered: list[int] = []
    found: list[int] = []
    sends = 0
    while search.left:
        first = count - search.left
        trial = range(first, first + search.trial)
        assert 1 <= len(trial) <= search.left
        sends += 1
        match verdict(trial):
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


def refusing(bad: Collection[int]) -> Callable[[range], str]:
    return lambda trial: "refused" if any(row in trial for row in bad) else "ok"


def sends_to_find(count: int, at: int) -> int:
    """How many sends it takes to know which one it is, without that of the rest behind it."""
    behind = at + 1 < count
    return searched(count, refusing([at]))[2] - behind


@pytest.mark.parametrize("at", [0, 1, 499, 500, 998, 999])
def test_one_poison_of_a_thousand_takes_few_sends(at: int) -> None:
    delivered, found, sends = searched(COUNT, refusing([at]))
    assert found == [at]
    assert len(delivered) == COUNT - 1
    assert sends <= 2 * math.log2(COUNT)


def test_wherever_it_is() -> None:
    worst = max(searched(COUNT, refusing([at]))[2] for at in range(COUNT))
    assert worst <= 2 * math.log2(COUNT)


@pytest.mark.parametrize("count", range(2, 70))
def test_the_bound_holds_for_any_batch_and_wherever_it_is(count: int) -> None:
    for at in range(count):
        delivered, found, _ = searched(count, refusing([at]))
        assert found == [at]
        assert len(delivered) == count - 1
        assert sends_to_find(count, at) <= 2 * math.log2(count)


@given(st.integers(2, 5000), st.data())
def test_the_bound_holds_for_large_ones_too(count: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, count - 1))
    assert sends_to_find(count, at) <= 2 * math.log2(count)


@given(st.sets(st.integers(0, COUNT - 1), min_size=1, max_size=40))
def test_several_are_found_and_nothing_else(bad: set[int]) -> None:
    delivered, found, sends = searched(COUNT, refusing(bad))
    assert found == sorted(bad)
    assert delivered == sorted(set(range(COUNT)) - bad)
    assert sends <= 2 * math.log2(COUNT) * len(bad)


@given(st.integers(1, 300), st.data())
def test_any_number_of_any_batch(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    delivered, found, _ = searched(count, refusing(bad))
    assert found == sorted(bad)
    assert delivered == sorted(set(range(count)) - bad)


def test_if_all_are_poison_hardly_more_than_one_send_each() -> None:
    _, found, sends = searched(COUNT, refusing(range(COUNT)))
    assert len(found) == COUNT
    assert sends <= COUNT + 4 * math.log2(COUNT)


def test_too_large_is_halved_and_what_fits_is_kept_to() -> None:
    delivered, found, sends = searched(
        COUNT, lambda trial: "ok" if len(trial) <= 260 else "too large"
    )
    assert len(delivered) == COUNT
    assert found == []
    assert sends == 2 + 4


def test_one_giant_does_not_make_the_others_go_alone() -> None:
    _, found, sends = searched(COUNT, lambda trial: "too large" if 700 in trial else "ok")
    assert found == [700]
    assert sends <= 2 * math.log2(COUNT)


@given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)), st.integers(1, 100))
def test_giants_and_poison_together(giants: set[int], poison: set[int], most: int) -> None:
    def verdict(trial: range) -> str:
        if len(trial) > most or any(row in trial for row in giants):
            return "too large"
        return "refused" if any(row in trial for row in poison) else "ok"

    delivered, found, _ = searched(100, verdict)
    assert found == sorted(giants | poison)
    assert delivered == sorted(set(range(100)) - giants - poison)


def test_a_refusal_that_does_not_come_again_costs_no_event() -> None:
    moods = iter(["refused", "ok", "ok"])
    delivered, found, _ = searched(10, lambda _: next(moods, "ok"))
    assert len(delivered) == 10
    assert found == []
