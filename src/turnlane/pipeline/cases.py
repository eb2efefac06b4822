"""Cases that test a pipeline: events in, what each action is expected to get, and the difference.

No Spark in here: what the actions really got is handed in as plain rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pydantic import Field, NonNegativeInt, model_validator

from turnlane.pipeline.settings import Part
from turnlane.validation import did_you_mean

Row = Mapping[str, Any]
"""The columns of an event, as JSON has them."""

MOST_SHOWN: Final = 5
"""Rows of an action that a difference shows."""


class CaseEvent(Part):
    """An event as it comes in. A bare text is an event's value."""

    value: str | None = Field(default=None, description="Its contents.")
    key: str | None = Field(default=None, description="Its key.")
    headers: dict[str, str] = Field(default={}, description="Its headers.")
    timestamp: datetime | None = Field(
        default=None, description="When it came in. Default: the moment of the test."
    )
    severity: int | None = Field(default=None, ge=0, le=7, description="How grave it is.")
    source: str | None = Field(default=None, description="Where it comes from.")

    @model_validator(mode="before")
    @classmethod
    def _worded(cls, given: object) -> object:
        return {"value": given} if isinstance(given, str) else given


class Case(Part):
    """One case."""

    name: str = Field(description="What it is about.")
    events: tuple[CaseEvent, ...] = Field(description="What comes in, in this order.")
    expect: dict[str, NonNegativeInt | tuple[dict[str, Any], ...]] = Field(
        description="By action, what it is to get: how many events, or in any order the events, "
        "each by some of its columns. Actions that are not named may get anything."
    )


class Cases(Part):
    """A file of cases."""

    tests: tuple[Case, ...] = Field(description="The cases.")


def differences(case: Case, got: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """What is not as expected, line by line; nothing if everything is."""
    for action, wanted in case.expect.items():
        rows = got.get(action, ())
        if isinstance(wanted, int):
            if len(rows) != wanted:
                yield f"{action}: expected {_events(wanted)}, got {len(rows)}"
                yield from _shown("got", rows)
        else:
            yield from _difference(action, wanted, rows)


def _difference(action: str, wanted: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    partners = _matched(wanted, rows)
    missing = [row for at, row in enumerate(wanted) if at not in partners]
    taken = set(partners.values())
    others = [row for at, row in enumerate(rows) if at not in taken]
    if not missing and not others:
        return
    yield f"{action}: expected {_events(len(wanted))}, got {len(rows)}"
    yield from _no_columns(wanted, rows)
    for row in missing[:MOST_SHOWN]:
        yield f"  - {_text(row)}"
        close = _closest(row, others)
        if close is not None:
            others.remove(close)
            yield f"  + {_text({name: close.get(name) for name in row})}"
    yield from _more(missing)
    names = list(dict.fromkeys(name for row in wanted for name in row))
    yield from _shown("+", [{name: row.get(name) for name in names} or row for row in others])


def _no_columns(wanted: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    known = {name for row in rows for name in row}
    for name in dict.fromkeys(name for row in wanted for name in row):
        if known and name not in known:
            yield f"  there is no column {name!r}{did_you_mean(name, known)}"


def _matched(wanted: Sequence[Row], rows: Sequence[Row]) -> dict[int, int]:
    """Which row stands for which expectation: as many pairs as there can be.

    Kuhn's algorithm: an expectation may take another one's row if that one finds a new one.
    """
    fitting = [[at for at, row in enumerate(rows) if _is_subset(each, row)] for each in wanted]
    owners: dict[int, int] = {}

    def finds(each: int, tried: set[int]) -> bool:
        for at in fitting[each]:
            if at not in tried:
                tried.add(at)
                if at not in owners or finds(owners[at], tried):
                    owners[at] = each
                    return True
        return False

    for each in range(len(wanted)):
        finds(each, set())
    return {each: at for at, each in owners.items()}


def _is_subset(wanted: Row, row: Row) -> bool:
    return all(name in row and _same(value, row[name]) for name, value in wanted.items())


def _same(wanted: object, found: object) -> bool:
    """Mappings are compared as far as they are given; 200 and 200.0 are one number."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return _is_subset(wanted, found)
    if isinstance(wanted, bool) or isinstance(found, bool):
        return wanted is found
    return wanted == found


def _closest(row: Row, others: Sequence[Row]) -> Row | None:
    """The row that agrees in most columns, if any does in one."""
    scored = [
        (sum(name in other and _same(value, other[name]) for name, value in row.items()), at)
        for at, other in enumerate(others)
    ]
    score, at = max(scored, default=(0, 0), key=lambda each: (each[0], -each[1]))
    return others[at] if score or (len(others) == 1 and row) else None


def _shown(mark: str, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows[:MOST_SHOWN]:
        yield f"  {mark} {_text(row)}"
    yield from _more(rows)


def _more(rows: Sequence[Row]) -> Iterator[str]:
    if len(rows) > MOST_SHOWN:
        yield f"  … and {len(rows) - MOST_SHOWN} more"


def _events(count: int) -> str:
    return "1 event" if count == 1 else f"{count} events"


def _text(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, default=str)
