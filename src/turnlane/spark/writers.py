"""Who writes: the name by which nodes and databases know the batches of a streaming query."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote, urlsplit


def writer_of(writer_id: str | None, checkpoint: str | None) -> str | None:
    """The name, if the query has one: as it was given, or that of its checkpoint.

    A new checkpoint in the place of an old one is another writer: its batches begin at 0 again, and
    are no repeats.
    """
    if writer_id is not None or checkpoint is None:
        return writer_id
    query = _query_of(checkpoint)
    return checkpoint if query is None else f"{checkpoint}#{query}"


def _query_of(checkpoint: str) -> str | None:
    """The id that Spark has given to a query, or nothing if it is kept on another file system."""
    place = urlsplit(checkpoint)
    if place.scheme not in ("", "file"):
        return None
    path = Path(unquote(place.path) if place.scheme else checkpoint)
    try:
        found = json.loads((path / "metadata").read_bytes())
    except FileNotFoundError:  # a path without a scheme may mean Hadoop's own file system
        return None
    return str(found["id"])
