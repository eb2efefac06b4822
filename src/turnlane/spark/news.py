"""What Spark tells of streaming queries, handed to the lanes that run them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # has none
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

log = logging.getLogger(__name__)

OVER: Final = ""
"""What the listener tells itself when it is to end."""


@dataclass(frozen=True, slots=True)
class News:
    """What has happened to one run of a query."""

    run: str
    progress: StreamingQueryProgress | None = None
    """How a batch went; ``None`` if the run has ended."""


Tell = Callable[[News], None]
"""Called on the listener's thread, where all others wait for it."""


class Listener:
    """Hears of all queries of a session, and tells those who run them; ``told`` by query name.

    Of each run it tells of every batch once, in their order, and then of its end. The first news
    may come before the query's ``start()`` has returned. A run is somebody's if it starts while
    this one listens: what comes late of a pipeline before it is nobody's.

    Java keeps what it has to say in a queue, and a thread waits for it here. Were Python called, as
    pyspark's listeners are, each run of a query would leave a thread and a connection behind, and
    each progress would take a hundred calls to be read.
    """

    def __init__(self, spark: SparkSession, told: Mapping[str, Tell]) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001 - pyspark's listeners are called
        self._queries: Any = spark.streams._jsqm  # noqa: SLF001
        self._said: Any = jvm.java.util.concurrent.LinkedBlockingQueue()
        streaming = jvm.org.apache.spark.sql.streaming
        kind = jvm.java.lang.Class.forName(
            "org.apache.spark.sql.streaming.PythonStreamingQueryListener"
        )
        # Whatever it is called with: ``said.add(event.json())``.
        keeping = jvm.java.beans.EventHandler.create(kind, self._said, "add", "json")
        self._keeper: Any = streaming.PythonStreamingQueryListenerWrapper(keeping)
        self._told = told
        self._runs: dict[str, Tell] = {}
        """Those under way. Spark tells of the start of a run before anything else of it."""
        self._thread = threading.Thread(target=self._run, name="lane-news", daemon=True)

    def start(self) -> None:
        """Begin, before the queries do."""
        self._queries.addListener(self._keeper)
        self._thread.start()

    def stop(self) -> None:
        """End; what has been said until now is still told."""
        self._queries.removeListener(self._keeper)
        self._said.add(OVER)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (said := self._said.take()) != OVER:
                self._take(said)
        except (Py4JError, OSError) as error:
            log.warning("Spark tells nothing any more: %s", error)

    def _take(self, said: str) -> None:
        """Hand it on. Whatever is wrong with it, lanes wait for what comes after it."""
        try:
            self._hand_on(json.loads(said))
        except Exception:
            log.exception("news of a query that cannot be handed on: %.300s", said)

    def _hand_on(self, event: Mapping[str, Any]) -> None:
        if "progress" in event:
            self._progress(StreamingQueryProgress.fromJson(event["progress"]))
        elif "name" in event:
            self._started(event["runId"], event["name"])
        elif "timestamp" not in event:  # that would be a query with nothing to do
            self._ended(event["runId"])

    def _started(self, run: str, name: str | None) -> None:
        tell = self._told.get(name or "")
        if tell is not None:
            self._runs[run] = tell

    def _progress(self, progress: StreamingQueryProgress) -> None:
        run = str(progress.runId)
        tell = self._runs.get(run)
        if tell is not None:
            tell(News(run, progress))

    def _ended(self, run: str) -> None:
        tell = self._runs.pop(run, None)
        if tell is not None:
            tell(News(run))
