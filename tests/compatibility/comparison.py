"""Compare the answers of a stored version with the answers of this version."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, Final

MOST_SHOWN: Final = 40
"""Differences in the message of a test that fails."""


def find_differences(old: Any, new: Any, place: str = "") -> list[str]:
    """List everything in ``old`` that is missing or different in ``new``.

    A new version may add keys to objects. It may neither remove nor change anything.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        found = [f"{place}.{key}: is gone" for key in old if key not in new]
        for key in old:
            if key in new:
                found += find_differences(old[key], new[key], f"{place}.{key}")
        return found
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [f"{place}: had {len(old)} items, has {len(new)}: {old} became {new}"]
        pairs = enumerate(zip(old, new, strict=True))
        return [
            each
            for at, (was, now) in pairs
            for each in find_differences(was, now, f"{place}[{at}]")
        ]
    if _is_number(old) and _is_number(new):
        is_same = math.isclose(old, new)
    else:
        is_same = type(old) is type(new) and old == new
    return [] if is_same else [f"{place}: {old!r} became {new!r}"]


def check_same(old: Any, new: Any) -> None:
    """Fail with a list of the differences, if there are any."""
    check_none(find_differences(old, new))


def check_none(differences: list[str]) -> None:
    """Fail with a list of the differences, if there are any."""
    assert not differences, "\n".join(["not compatible:", *differences[:MOST_SHOWN]])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def mask(value: Any, names: Collection[str]) -> Any:
    """Replace the values of some keys by their types: they are different in every run."""
    if isinstance(value, dict):
        return {
            key: f"<{_type_of(each)}>" if key in names else mask(each, names)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [mask(each, names) for each in value]
    return value


def hide(value: Any, names: Collection[str]) -> Any:
    """Replace the values of some keys: even their types are different in some runs."""
    if isinstance(value, dict):
        return {
            key: "<varies>" if key in names else hide(each, names) for key, each in value.items()
        }
    return [hide(each, names) for each in value] if isinstance(value, list) else value


def list_names(names: Iterable[str]) -> dict[str, Any]:
    """Return names as the keys of an object: a newer version may add some."""
    return {name: {} for name in sorted(names)}


def _type_of(value: Any) -> str:
    return "number" if _is_number(value) else type(value).__name__
