"""Adaptive concurrency compared with fixed numbers, on servers whose capacity changes.

A server processes a number of requests at a time: first 4, then 16, then 2. One kind of server lets
further requests wait; for it, every number that is large enough is good. The other kind thrashes:
with twice as many requests it takes four times as long, so every number but the right one costs a
lot. Each contestant delivers without a break while the capacity changes. The result is the number
of events that the server gets on each plateau, counted after a time to settle. A fixed number has
nothing to find out, but requests from before the change have to end for it, too.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

from benchmarks.delivery_engine import create_http_output, make_blocks
from benchmarks.effort import Effort
from benchmarks.http_server import AT_ONCE, HttpServer
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from turnlane.delivery.destination import LocalDestinationState
from turnlane.delivery.engine import Engine
from turnlane.delivery.settings import DeliverySettings
from turnlane.events import Block

PLATEAUS = (4, 16, 2)
SERVICE_SECONDS = 0.03
BATCH = 10
FIXED = (1, 2, 4, 8, 16, 32)
FIXED_QUICK = (1, 4, 16)
"""Includes the best and the worst number of every plateau."""
ADAPTIVE: Literal["adaptive"] = "adaptive"
KINDS = {"": (1.0, "lets the rest wait"), "_thrashing": (2.0, "thrashes")}
"""By the suffix of their figures: the exponent of the slowdown, and a description."""

Rates = tuple[float, ...]
"""Events per second on each plateau."""


class Stretch(NamedTuple):
    """The seconds of a plateau: first to settle, then counted."""

    settling: float
    counted: float


def measure_rates(
    server: HttpServer, concurrency: Literal["adaptive"] | int, stretch: Stretch, thrash: float
) -> Rates:
    """Deliver over all plateaus; returns events per second on each."""
    settings = DeliverySettings(concurrency=concurrency, batch_events=BATCH, max_time=3600)
    over = threading.Event()
    output = create_http_output(server.url)
    with output, Engine(output, settings, LocalDestinationState(settings)) as engine:
        lane = threading.Thread(target=lambda: list(engine.run(_yield_endlessly(over))))
        server.control(slots=PLATEAUS[0], seconds=SERVICE_SECONDS, thrash=thrash)
        lane.start()
        found = tuple(_measure_plateau(server, slots, stretch) for slots in PLATEAUS)
        over.set()
        engine.stop()
        lane.join()
    return found


def _measure_plateau(server: HttpServer, slots: int, stretch: Stretch) -> float:
    server.control(slots=slots)
    time.sleep(stretch.settling)
    server.control(slots=slots)
    started = time.monotonic()
    time.sleep(stretch.counted)
    # At least one event: a very short run may have none, and the result is a divisor.
    return max(1.0, float(server.counts()["events"])) / (time.monotonic() - started)


def _yield_endlessly(over: threading.Event) -> Iterator[Block]:
    (block,) = make_blocks(1000)
    while not over.is_set():
        yield block


def run(effort: Effort, server: HttpServer) -> Outcome:
    """Measure adaptive and fixed numbers on both kinds of server; a quick run uses only one."""
    outcome = Outcome()
    names: dict[str, Literal["adaptive"] | int] = {ADAPTIVE: ADAPTIVE}
    numbers = FIXED_QUICK if effort.quick else FIXED
    names |= {f"fixed: {number}": number for number in numbers}
    stretch = Stretch(effort.seconds(0.9, 4.0), effort.seconds(0.7, 4.0))
    for ending, (thrash, words) in list(KINDS.items())[: 1 if effort.quick else None]:
        found = alternate(
            {
                name: partial(measure_rates, server, each, stretch, thrash)
                for name, each in names.items()
            },
            1 if effort.quick else 3,
        )
        outcome.add(Outcome(_make_figures(found, ending, words), [_make_table(found, words)]))
    server.control(**AT_ONCE)
    return outcome


def _make_figures(found: dict[str, list[Rates]], ending: str, words: str) -> list[Figure]:
    own = found[ADAPTIVE]
    others = [each for name, each in found.items() if name != ADAPTIVE]
    against: dict[str, list[float]] = {"best": [], "worst": []}
    for turn, mine in enumerate(own):
        for name, choose in (("best", max), ("worst", min)):
            its = [choose(each[turn][at] for each in others) for at in range(len(PLATEAUS))]
            against[name].append(min(map(operator.truediv, mine, its)))
    where = (
        f"a server that takes {', '.join(map(str, PLATEAUS))} requests at a time, one after the "
        f"other, and {words}: "
    )
    return [
        make_figure(
            f"adaptive_vs_{name}{ending}",
            Series(values),
            f"{where}adaptive / the {name} fixed number, on the plateau with the lowest ratio",
            unit="×",
            at_least={"best": 0.9, "worst": 1.3}[name],
        )
        for name, values in against.items()
    ]


def _make_table(found: dict[str, list[Rates]], words: str) -> Table:
    return Table(
        f"A server whose capacity changes, and which {words}",
        "events/s",
        [f"{slots} at a time" for slots in PLATEAUS],
        {
            name: [Cell.of(Series([turn[at] for turn in turns])) for at in range(len(PLATEAUS))]
            for name, turns in found.items()
        },
        f"{BATCH} events in a request; a request takes {SERVICE_SECONDS * 1000:.0f} ms.",
    )
