"""The delivery engine alone, with the output ``http``, compared with a bare loop of urllib3.

Both post the same events in the same batches, at the same concurrency, to the same server. The bare
loop only posts bodies that are ready: it is the limit. The engine gets blocks, makes the bodies and
tracks every event. There are two servers: one needs some time for a request, like a server that
stores its events, and one answers at once. The engine is also measured without ``pipelined``: then
each sender makes its own bodies, one after another.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import pyarrow as pa
import urllib3

from benchmarks.effort import Effort
from benchmarks.http_server import AT_ONCE, AT_WORK, HttpServer
from benchmarks.lines import make_log_lines
from benchmarks.measure import Series, alternate, freeze_gc
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from turnlane.delivery.destination import LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.settings import DeliverySettings
from turnlane.events import Block
from turnlane.outputs.api import DiscardOutput, Output, OutputSettings
from turnlane.outputs.http import HttpOutput, HttpOutputSettings

SIZE = 200
BATCH = 1000
BLOCK = 10_000
CONCURRENCY = 4
BARE, ENGINE = "urllib3 in a loop", "turnlane's engine"
UNSPLIT = "turnlane's engine, not pipelined"
SERVERS: dict[str, tuple[dict[str, float], str]] = {
    "": (AT_WORK, f"a server that takes {AT_WORK['seconds'] * 1000:.0f} ms for a request"),
    "_at_once": (AT_ONCE, "a server that answers at once"),
}
"""By the suffix of their figures: the settings of the server, and a description."""


def make_blocks(events: int) -> list[Block]:
    """Return events in the form in which a lane passes them to its engine."""
    payloads = pa.array(make_log_lines(BLOCK, SIZE), pa.binary())
    whole = [
        pa.RecordBatch.from_arrays(
            [payloads, pa.array(range(first, first + BLOCK), pa.int64())], ["payload", "offset"]
        )
        for first in range(0, events, BLOCK)
    ]
    rest = events % BLOCK
    return [*whole[:-1], whole[-1].slice(0, rest)] if rest else whole


def make_bodies(events: int) -> list[bytes]:
    """Return the same events as request bodies, one for each batch."""
    lines = make_log_lines(BLOCK, SIZE)
    made = [
        b"".join(b"%s\n" % line for line in lines[at : at + BATCH]) for at in range(0, BLOCK, BATCH)
    ]
    count = -(-events // BATCH)
    return [made[number % len(made)] for number in range(count)]


def post_bare(url: str, bodies: Sequence[bytes], concurrency: int) -> float:
    """Return the seconds to post these bodies, ``concurrency`` at a time."""
    left: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for body in bodies:
        left.put(body)
    http = urllib3.PoolManager(maxsize=concurrency)
    headers = {"Content-Type": "text/plain"}

    def post() -> None:
        while True:
            try:
                body = left.get_nowait()
            except queue.Empty:
                return
            answer = http.request("POST", url, body=body, headers=headers, retries=False)
            assert answer.status == 200

    threads = [threading.Thread(target=post) for _ in range(concurrency)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def create_http_output(url: str) -> HttpOutput:
    """Create the output with the settings of the bare loop."""
    return HttpOutput(HttpOutputSettings(url=url, format="raw"))


def measure_delivery(output: Output, settings: DeliverySettings, blocks: Sequence[Block]) -> float:
    """Return the seconds that the engine needs for these blocks."""
    with output, Engine(output, settings, LocalDestinationState(settings)) as engine:
        started = time.perf_counter()
        count = sum(outcome.delivered for outcome in engine.run(blocks))
        seconds = time.perf_counter() - started
    assert count == sum(block.num_rows for block in blocks)
    return seconds


def run(effort: Effort, server: HttpServer) -> Outcome:
    """Compare the engine with the bare loop, and measure its cost for each batch."""
    events = effort.events(100_000, 1_000_000)
    blocks, bodies = make_blocks(events), make_bodies(events)
    settings = DeliverySettings(concurrency=CONCURRENCY, batch_events=BATCH, max_time=600)
    unsplit = settings.model_copy(update={"pipelined": False})
    contestants: dict[str, Callable[[], float]] = {
        BARE: lambda: events / post_bare(server.url, bodies, CONCURRENCY),
        ENGINE: lambda: events / measure_delivery(create_http_output(server.url), settings, blocks),
        UNSPLIT: lambda: events / measure_delivery(create_http_output(server.url), unsplit, blocks),
    }
    found: dict[str, dict[str, Series]] = {}
    with freeze_gc():
        for ending, (kind, _) in SERVERS.items():
            server.control(**kind)
            turns = alternate(contestants, effort.rounds)
            found[ending] = {name: Series(rates) for name, rates in turns.items()}
        overhead = Series([_measure_overhead(settings, blocks) for _ in range(effort.rounds)])
    figures = [_compare_with_bare(ending, each) for ending, each in found.items()]
    figures += [_compare_with_unsplit(ending, each) for ending, each in found.items()]
    return Outcome([*figures, _make_overhead_figure(overhead)], [_make_table(found)])


def _compare_with_bare(ending: str, rates: dict[str, Series]) -> Figure:
    return make_figure(
        f"engine_vs_bare{ending}",
        rates[ENGINE].over(rates[BARE]),
        f"{SERVERS[ending][1]}; events of {SIZE} bytes, {BATCH} in a request, {CONCURRENCY} "
        "requests at a time: the engine with the output http / urllib3 in a loop, with "
        "ready-made bodies",
        unit="×",
        at_least=0.8,
    )


def _compare_with_unsplit(ending: str, rates: dict[str, Series]) -> Figure:
    return make_figure(
        f"pipelined_vs_not{ending}",
        rates[ENGINE].over(rates[UNSPLIT]),
        f"{SERVERS[ending][1]}; the same: bodies made by other threads / by each sender itself",
        unit="×",
    )


def _make_overhead_figure(overhead: Series) -> Figure:
    return make_figure(
        "engine_overhead_us",
        overhead,
        f"the engine with an output that does nothing: time per batch of {BATCH}",
        unit="µs",
        at_most=500,
    )


def _make_table(found: dict[str, dict[str, Series]]) -> Table:
    return Table(
        "Posting batches to an HTTP server",
        "events/s",
        [words for _, words in SERVERS.values()],
        {
            name: [Cell.of(rates[name]) for rates in found.values()]
            for name in (BARE, ENGINE, UNSPLIT)
        },
        f"Events of {SIZE} bytes in blocks in memory, without Spark and without a queue.",
    )


def _measure_overhead(settings: DeliverySettings, blocks: Sequence[Block]) -> float:
    batches = sum(-(-block.num_rows // BATCH) for block in blocks)
    nowhere = DiscardOutput(OutputSettings(type="discard"))
    return measure_delivery(nowhere, settings, blocks) / batches * 1e6
