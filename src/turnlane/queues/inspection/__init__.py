"""Looking into queue directories from outside, and repairing them: the work behind the CLI."""

from __future__ import annotations

from pathlib import Path

from turnlane.errors import NotSupported
from turnlane.queues.inspection.fastqueue import FastQueueInspection
from turnlane.queues.inspection.inspection import Inspection
from turnlane.queues.inspection.slices import Inspected
from turnlane.queues.log.directory import IDENTITY
from turnlane.queues.log.fastqueue import FastQueueDirectory


def inspect(path: Path) -> Inspected:
    """Look at a directory, turnlane's or FastQueue's. Raises ``NotAQueue``."""
    return FastQueueInspection(path) if _is_fastqueue(path) else Inspection(path)


def inspect_own(path: Path) -> Inspection:
    """Look at a directory that has to be turnlane's: FastQueue kept no account of anything."""
    if _is_fastqueue(path):
        msg = f"{path}: is FastQueue's; it can be looked at (peek, verify, export) and no more"
        raise NotSupported(msg)
    return Inspection(path)


def _is_fastqueue(path: Path) -> bool:
    return not (path / IDENTITY).exists() and FastQueueDirectory.recognises(path)
