"""The delivery engine by itself, with the output ``http``, beside a bare loop of urllib3.

Both post the same events in the same batches, at the same concurrency, to the same server. The bare
loop has the bodies ready and does nothing but post them: it is the limit. The engine gets blocks,
makes the bodies and keeps account of every event. There are two servers: one that takes a while
for a request, as those do that keep what they get, and one that answers at once. The engine is also
measured without ``pipelined``: then each sender makes its own bodies, one after another.
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
from benchmarks.lines import log_lines
from benchmarks.measure import Series, alternate, undisturbed
from benchmarks.outcome import Cell, Figure, Outcome, Table, figure
from turnlane.delivery.destination import LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.settings import DeliverySettings
from turnlane.events import Block
from turnlane.outputs.api import DiscardOutput, Output, OutputSettings
from turnlane.outputs.http import BodyFormat, HttpOutput, HttpOutputSettings

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
"""By the ending of their figures' names."""


def blocks_of(events: int) -> list[Block]:
    """Events as a lane hands them to its engine."""
    payloads = pa.array(log_lines(BLOCK, SIZE), pa.binary())
    whole = [
        pa.RecordBatch.from_arrays(
            [payloads, pa.array(range(first, first + BLOCK), pa.int64())], ["payload", "offset"]
        )
        for first in range(0, events, BLOCK)
    ]
    rest = events % BLOCK
    return [*whole[:-1], whole[-1].slice(0, rest)] if rest else whole


def bodies_of(events: int) -> list[bytes]:
    """The same events in bodies of a batch each."""
    lines = log_lines(BLOCK, SIZE)
    made = [
        b"".join(b"%s\n" % line for line in lines[at : at + BATCH]) for at in range(0, BLOCK, BATCH)
    ]
    count = -(-events // BATCH)
    return [made[number % len(made)] for number in range(count)]


def bare(url: str, bodies: Sequence[bytes], concurrency: int) -> float:
    """Seconds that it takes to post these bodies, so many at a time."""
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


def http_output(url: str) -> HttpOutput:
    """The output, set up as the bare loop is."""
    return HttpOutput(HttpOutputSettings(url=url, format=BodyFormat.RAW))


def delivered(output: Output, settings: DeliverySettings, blocks: Sequence[Block]) -> float:
    """Seconds that the engine takes for these blocks."""
    with output, Engine(output, settings, LocalDestinationState(settings)) as engine:
        started = time.perf_counter()
        count = sum(outcome.delivered for outcome in engine.run(blocks))
        seconds = time.perf_counter() - started
    assert count == sum(block.num_rows for block in blocks)
    return seconds


def run(effort: Effort, server: HttpServer) -> Outcome:
    """The engine beside the bare loop, and what it costs per batch."""
    events = effort.events(100_000, 1_000_000)
    blocks, bodies = blocks_of(events), bodies_of(events)
    settings = DeliverySettings(concurrency=CONCURRENCY, batch_events=BATCH, max_time=600)
    unsplit = settings.model_copy(update={"pipelined": False})
    contestants: dict[str, Callable[[], float]] = {
        BARE: lambda: events / bare(server.url, bodies, CONCURRENCY),
        ENGINE: lambda: events / delivered(http_output(server.url), settings, blocks),
        UNSPLIT: lambda: events / delivered(http_output(server.url), unsplit, blocks),
    }
    found: dict[str, dict[str, Series]] = {}
    with undisturbed():
        for ending, (kind, _) in SERVERS.items():
            server.control(**kind)
            turns = alternate(contestants, effort.rounds)
            found[ending] = {name: Series(rates) for name, rates in turns.items()}
        overhead = Series([_overhead(settings, blocks) for _ in range(effort.rounds)])
    figures = [_beside_bare(ending, each) for ending, each in found.items()]
    figures += [_beside_unsplit(ending, each) for ending, each in found.items()]
    return Outcome([*figures, _costs(overhead)], [_table(found)])


def _beside_bare(ending: str, rates: dict[str, Series]) -> Figure:
    return figure(
        f"engine_vs_bare{ending}",
        rates[ENGINE].over(rates[BARE]),
        f"{SERVERS[ending][1]}; events of {SIZE} bytes, {BATCH} in a request, {CONCURRENCY} "
        "requests at a time: the engine with the output http / urllib3 with bodies ready-made, in "
        "a loop",
        unit="×",
        at_least=0.8,
    )


def _beside_unsplit(ending: str, rates: dict[str, Series]) -> Figure:
    return figure(
        f"pipelined_vs_not{ending}",
        rates[ENGINE].over(rates[UNSPLIT]),
        f"{SERVERS[ending][1]}; the same: preparing apart from sending / each sender by itself",
        unit="×",
    )


def _costs(overhead: Series) -> Figure:
    return figure(
        "engine_overhead_us",
        overhead,
        f"the engine with an output that does nothing: time per batch of {BATCH}",
        unit="µs",
        at_most=500,
    )


def _table(found: dict[str, dict[str, Series]]) -> Table:
    return Table(
        "Posting batches to an HTTP server",
        "events/s",
        [words for _, words in SERVERS.values()],
        {
            name: [Cell.of(rates[name]) for rates in found.values()]
            for name in (BARE, ENGINE, UNSPLIT)
        },
        f"Events of {SIZE} bytes; without Spark and without a queue: blocks in memory.",
    )


def _overhead(settings: DeliverySettings, blocks: Sequence[Block]) -> float:
    batches = sum(-(-block.num_rows // BATCH) for block in blocks)
    nowhere = DiscardOutput(OutputSettings(type="discard"))
    return delivered(nowhere, settings, blocks) / batches * 1e6
