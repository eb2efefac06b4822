"""Who writes: the name by which nodes and databases know the batches of a streaming query."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

_LOCAL: Final = re.compile(r"^file:(?://[^/]*)?(?=/)")
"""What may stand before a path that is here. Nothing in the path is escaped: Hadoop says so."""
_SCHEME: Final = re.compile(r"[A-Za-z][\w+.-]*:")


def writer_of(writer_id: str | None, checkpoint: str | None) -> str | None:
    """The name, if the query has one: as it was given, or that of its checkpoint.

    A new checkpoint in the place of an old one is another writer: its batches begin at 0 again, and
    are no repeats.
    """
    if writer_id is not None or checkpoint is None:
        return writer_id
    place = _LOCAL.sub("", checkpoint)  # the same writer, however the place is written
    query = None if _SCHEME.match(place) else _query_of(Path(place))
    return place if query is None else f"{place}#{query}"


def _query_of(checkpoint: Path) -> str | None:
    """The id that Spark has given to a query, or nothing if it is kept on another file system."""
    try:
        found = json.loads((checkpoint / "metadata").read_bytes())
    except FileNotFoundError:  # a path without a scheme may mean Hadoop's own file system
        return None
    return str(found["id"])
