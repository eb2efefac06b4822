"""What is wrong with a configuration file, each fault with its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from turnlane.errors import ConfigError


class Place(NamedTuple):
    """Where something stands in the file; both count from 1."""

    line: int
    column: int


class Fault(NamedTuple):
    """One thing that is wrong: where, with which setting (dotted path), and what to do."""

    place: Place
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.place.line}:{self.place.column}"
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class ConfigFaults(ConfigError):
    """A configuration file that cannot be used; ``faults`` has everything that is wrong with it.

    As text it is a line ``file:line:column: dotted.path: message`` for each.
    """

    def __init__(self, file: str, faults: Sequence[Fault]) -> None:
        self.file = file
        self.faults = tuple(sorted(set(faults)))
        super().__init__(self.faults[0].path, self.faults[0].message)

    def __str__(self) -> str:
        return "\n".join(f"{self.file}:{fault}" for fault in self.faults)
