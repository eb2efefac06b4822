"""Test cases of a pipeline, for ``turnlane test``: input events and the expected result.

A case names, for each action, the events that it should get. ``turnlane.spark.checks`` runs the
pipeline over the input events; :func:`find_differences` compares the rows with the case. This
module does not import Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pydantic import Field, NonNegativeInt, model_validator

from turnlane.validation import SettingsModel, suggest

CaseRow = Mapping[str, Any]
"""The columns of an event as JSON values."""

MOST_SHOWN: Final = 5
"""The most rows of an action that a difference shows."""


class CaseEvent(SettingsModel):
    """An input event. A bare text stands for an event with that value."""

    value: str | None = Field(default=None, description="The content of the event.")
    key: str | None = Field(default=None, description="The key of the event.")
    headers: dict[str, str] = Field(default={}, description="The headers of the event.")
    timestamp: datetime | None = Field(
        default=None, description="When it arrived. Default: the time of the test."
    )
    severity: int | None = Field(
        default=None, ge=0, le=7, description="Its severity, as in syslog: 0 is the worst."
    )
    source: str | None = Field(default=None, description="The source of the event.")

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_to_json(cls, given: object) -> object:
        return {"value": given} if isinstance(given, str) else given


class Case(SettingsModel):
    """A test case: events, and what actions should get of them."""

    name: str = Field(description="What the case tests.")
    events: tuple[CaseEvent, ...] = Field(description="The input events, in this order.")
    expect: dict[str, NonNegativeInt | tuple[dict[str, Any], ...]] = Field(
        description="What each action should get: the number of events, or the events in any "
        "order, each described by some of its columns. Actions without an entry are not compared."
    )


class Cases(SettingsModel):
    """A file with test cases."""

    tests: tuple[Case, ...] = Field(description="The test cases.")


def find_differences(case: Case, got: Mapping[str, Sequence[CaseRow]]) -> Iterator[str]:
    """Yield the differences between a case and the rows of its actions, as lines of text."""
    for action, wanted in case.expect.items():
        rows = got.get(action, ())
        if isinstance(wanted, int):
            if len(rows) != wanted:
                yield f"{action}: expected {_count_events(wanted)}, got {len(rows)}"
                yield from _show("got", rows)
        else:
            yield from _compare_rows(action, wanted, rows)


def _compare_rows(action: str, wanted: Sequence[CaseRow], rows: Sequence[CaseRow]) -> Iterator[str]:
    partners = _match(wanted, rows)
    missing = [row for at, row in enumerate(wanted) if at not in partners]
    taken = set(partners.values())
    others = [row for at, row in enumerate(rows) if at not in taken]
    if not missing and not others:
        return
    yield f"{action}: expected {_count_events(len(wanted))}, got {len(rows)}"
    yield from _find_unknown_columns(wanted, rows)
    for row in missing[:MOST_SHOWN]:
        yield f"  - {_to_json(row)}"
        close = _find_closest(row, others)
        if close is not None:
            others.remove(close)
            yield f"  + {_to_json({name: close.get(name) for name in row})}"
    yield from _show_rest(missing)
    names = list(dict.fromkeys(name for row in wanted for name in row))
    yield from _show("+", [{name: row.get(name) for name in names} or row for row in others])


def _find_unknown_columns(wanted: Sequence[CaseRow], rows: Sequence[CaseRow]) -> Iterator[str]:
    known = {name for row in rows for name in row}
    for name in dict.fromkeys(name for row in wanted for name in row):
        if known and name not in known:
            yield f"  there is no column {name!r}{suggest(name, known)}"


def _match(wanted: Sequence[CaseRow], rows: Sequence[CaseRow]) -> dict[int, int]:
    """Match expectations with rows, as many pairs as possible.

    Kuhn's algorithm: an expectation may take the row of another expectation if that one finds
    another row.
    """
    candidates = [[at for at, row in enumerate(rows) if _is_subset(each, row)] for each in wanted]
    owners: dict[int, int] = {}

    def find_row(each: int, tried: set[int]) -> bool:
        for at in candidates[each]:
            if at not in tried:
                tried.add(at)
                if at not in owners or find_row(owners[at], tried):
                    owners[at] = each
                    return True
        return False

    for each in range(len(wanted)):
        find_row(each, set())
    return {each: at for at, each in owners.items()}


def _is_subset(wanted: CaseRow, row: CaseRow) -> bool:
    return all(name in row and _is_same(value, row[name]) for name, value in wanted.items())


def _is_same(wanted: object, found: object) -> bool:
    """Whether values agree. A mapping needs only the expected keys; 200 equals 200.0."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return _is_subset(wanted, found)
    if isinstance(wanted, bool) or isinstance(found, bool):
        return wanted is found
    return wanted == found


def _find_closest(row: CaseRow, others: Sequence[CaseRow]) -> CaseRow | None:
    """Return the row that agrees in most columns, if any agrees in one."""
    scored = [
        (sum(name in other and _is_same(value, other[name]) for name, value in row.items()), at)
        for at, other in enumerate(others)
    ]
    score, at = max(scored, default=(0, 0), key=lambda each: (each[0], -each[1]))
    return others[at] if score or (len(others) == 1 and row) else None


def _show(mark: str, rows: Sequence[CaseRow]) -> Iterator[str]:
    for row in rows[:MOST_SHOWN]:
        yield f"  {mark} {_to_json(row)}"
    yield from _show_rest(rows)


def _show_rest(rows: Sequence[CaseRow]) -> Iterator[str]:
    if len(rows) > MOST_SHOWN:
        yield f"  … and {len(rows) - MOST_SHOWN} more"


def _count_events(count: int) -> str:
    return "1 event" if count == 1 else f"{count} events"


def _to_json(row: CaseRow) -> str:
    return json.dumps(row, ensure_ascii=False, default=str)
