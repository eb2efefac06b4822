"""The nodes behind a query, by number: the same in the driver, in tasks and in sinks.

Spark runs each of these in a Python process of its own and uses the processes again, so the
connections are kept for as long as the process lives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.client.address import Url
from turnlane.client.destination import Doing, RemoteGate
from turnlane.client.node_client import Credentials, Ends, RemoteNode, Spans, Unsettled
from turnlane.errors import LaneTaken, TransportDown, WriterAhead
from turnlane.events import Block
from turnlane.intervals import Span
from turnlane.key_hash import nodes_of
from turnlane.spark.batch_planning import Extent, Positions, Waiting
from turnlane.spark.options import SourceOptions
from turnlane.spark.steps import Breakers, Step

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

GRACE_SECONDS: Final = 2.0
"""How much longer than it was asked to wait a node may take before the others go on without it."""
MOST_QUESTIONS: Final = 8
"""So many may be open to one node; one that hangs has no part in those to the others."""


class Nodes:
    """All nodes of an endpoint. Raises what they raise, and ``TransportDown``."""

    def __init__(self, endpoint: str, credentials: Credentials) -> None:
        url = Url.parse(endpoint)
        self._nodes = [
            RemoteNode(place, location, credentials)
            for place, location in zip(url.places, url.locations(), strict=True)
        ]
        self._asking = [ThreadPoolExecutor(MOST_QUESTIONS, "turnlane-ask") for _ in self._nodes]
        self._asked: dict[tuple[int, str], Future[Any]] = {}
        """Questions that are not answered yet: a node that hangs is not asked again meanwhile."""
        self._late: dict[int, Future[Any]] = {}
        """By node, a question not answered in time: nobody waits for others until it is."""
        self._away: set[int] = set()

    @classmethod
    def of(cls, options: SourceOptions) -> Nodes:
        """The nodes that options name; the same object for the same options."""
        credentials = Credentials(
            options.secret(), options.tls_ca, options.tls_cert, options.tls_key
        )
        return _nodes(options.endpoint, credentials)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._nodes)

    def __getitem__(self, number: int) -> RemoteNode:
        return self._nodes[number]

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def extents(self, queue: str) -> dict[int, Extent]:
        """How far the queue goes, on every node."""
        ends = [node.wait(queue, -1, 0.0) for node in self._nodes]
        return {number: _extent(each) for number, each in enumerate(ends)}

    def wait(self, queue: str, beyond: Positions, timeout: float) -> dict[int, Extent]:
        """Wait until a node has more than it had; those that are away are left out.

        One that answers at once does not keep the others waiting: they are asked again next time.
        Raises ``TransportDown`` if all are away.
        """
        extents = self._extents(queue, beyond, 0.0)
        if any(extent.end > beyond[node] for node, extent in extents.items()) or not timeout:
            return extents
        return self._extents(queue, beyond, timeout)

    def _extents(self, queue: str, beyond: Positions, timeout: float) -> dict[int, Extent]:
        questions = {
            node: partial(self._nodes[node].wait, queue, offset, timeout)
            for node, offset in beyond.items()
            if node < self.count
        }
        ends = self.answers(f"wait {queue}", questions, timeout)
        return {node: _extent(each) for node, each in ends.items()}

    def answers(
        self, about: str, questions: Mapping[int, Callable[[], Answer]], timeout: float
    ) -> dict[int, Answer]:
        """Ask several nodes at once; those that are away are left out.

        A node that has not answered the last question ``about`` something is not asked again: its
        answer, once it comes, is to the question of then. Raises ``TransportDown`` if all are away.
        """
        asked = {
            node: self._asked.get((node, about)) or self.ask(node, question)
            for node, question in questions.items()
        }
        self._asked |= {(node, about): answer for node, answer in asked.items()}
        try:
            return self.heard(asked, timeout)
        finally:
            for node, answer in asked.items():
                if answer.done():
                    self._asked.pop((node, about), None)

    def ask(self, node: int, question: Callable[[], Answer]) -> Future[Answer]:
        """Ask a node something, whatever it was asked before. Does not wait."""
        return self._asking[node].submit(question)

    def heard(self, asked: Mapping[int, Future[Answer]], timeout: float) -> dict[int, Answer]:
        """What nodes answer in time; those that are away are left out.

        Raises ``TransportDown`` if all are away, and what else a node raises.
        """
        awaited = [answer for node, answer in asked.items() if not self._hangs(node)]
        wait(awaited or asked.values(), None if self.count == 1 else timeout + GRACE_SECONDS)
        found: dict[int, Answer] = {}
        trouble = TransportDown("no node answers")
        for node, answer in asked.items():
            if not answer.done():
                self._late.setdefault(node, answer)
                self._is_away(node, "it does not answer")
                continue
            try:
                found[node] = answer.result()
            except TransportDown as error:
                self._is_away(node, trouble := error)
            else:
                self._is_back(node)
        if asked and not found:
            raise trouble
        return found

    def _hangs(self, node: int) -> bool:
        late = self._late.get(node)
        if late is None or not late.done():
            return late is not None
        self._late.pop(node, None)  # another lane may have seen it, too
        return False

    def _is_away(self, node: int, why: object) -> None:
        if node not in self._away:
            self._away.add(node)
            log.warning("going on without node %d: %s", node, why)

    def _is_back(self, node: int) -> None:
        if node in self._away:
            self._away.discard(node)  # another lane may have seen it, too
            log.warning("node %d is back", node)

    def bytes_per_event(self, queue: str) -> float:
        """The average size of an event that waits, at least 1, where it is largest.

        Nodes that are away are left out.
        """
        questions = {n: partial(node.stats, queue) for n, node in enumerate(self._nodes)}
        found = self.answers(f"stats {queue}", questions, 0.0).values()
        stats = [each[queue] for each in found]
        sizes: list[float] = [each["bytes"] / max(1, each["size"]) for each in stats]
        return max(1.0, *sizes)

    def read(
        self, node: int, queue: str, first: int, end: int, columns: Collection[str] | None = None
    ) -> Iterator[tuple[int, Block]]:
        """Blocks of a range, with their first offsets; of these columns, by default of all."""
        return self._nodes[node].read(queue, first, end, columns)

    def unsettled(self, node: int, queue: str, first: int, end: int) -> list[Span]:
        """What of a range is not settled; one question, unless that lies widely scattered."""
        spans: list[Span] = []
        while first < end:
            found = self._nodes[node].unsettled(queue, end - first, first=first).spans
            if not found:
                break
            spans += [(start, min(stop, end)) for start, stop in found if start < end]
            first = found[-1][1]
        return spans

    def offset_at(self, node: int, queue: str, milliseconds: int) -> int:
        """On a node, the offset of the first event of a time or later.

        By bisection, for which events are taken to have come in the order of their timestamps. What
        cannot be read in front of it may be of that time, too: then it is the first of that.
        """
        remote, microseconds = self._nodes[node], milliseconds * 1000
        ends = remote.wait(queue, -1, 0.0)
        low, high = ends.low, ends.end
        while low < high:
            middle = (low + high) // 2
            found = _stamped(remote, queue, middle, middle + 1)
            # In a hole, such as events that were settled leave, the next one says where to look.
            found = found or _stamped(remote, queue, middle + 1, high)
            if found is None or found[1] >= microseconds:
                high = middle
            else:
                low = found[0] + 1
        return low

    def settle(
        self, node: int, queue: str, first: int, end: int, queue_id: str | None = None
    ) -> None:
        """The offsets ``first`` to ``end - 1`` are done with.

        Not if the queue has another id, or does not go as far: then they were read from another
        one of its name.
        """
        if self._nodes[node].wait(queue, -1, 0.0).end >= end:
            self._nodes[node].settle(queue, first, end, queue_id)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, node: int, stages: Sequence[str], *, writer: str | None = None, epoch: int = 0
    ) -> None:
        """Publish stages; a repeat of a writer's epoch does nothing. Raises ``WriterAhead``."""
        if self._nodes[node].commit(stages, writer=writer, epoch=epoch) or writer is None:
            return
        last = self._nodes[node].epoch(writer)
        if last is not None and last > epoch:
            raise WriterAhead.of(writer, last, epoch)

    def abort(self, node: int, stages: Sequence[str]) -> None:
        """Give stages up. One that cannot be reached gives them up by itself, in time."""
        try:
            self._nodes[node].abort(stages)
        except TransportDown as error:
            log.warning("node %d keeps %d stages for now: %s", node, len(stages), error)


def _extent(ends: Ends) -> Extent:
    return Extent(ends.low, ends.end, ends.queue_id)


@cache
def _nodes(endpoint: str, credentials: Credentials) -> Nodes:
    return Nodes(endpoint, credentials)


def _stamped(remote: RemoteNode, queue: str, first: int, end: int) -> tuple[int, int] | None:
    """The offset and the timestamp of the first event of a range that can be read."""
    for offset, block in remote.read(queue, first, end, {"timestamp"}):
        stamps = block.column("timestamp").cast(pa.int64())
        return offset, int(np.asarray(stamps)[0])
    return None


def by_partition(rows: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
    """Rows by the node that they came from."""
    return _by_number(rows, np.asarray(rows.column("partition")))


def by_content(rows: pa.RecordBatch, nodes: int) -> list[tuple[int, pa.RecordBatch]]:
    """Rows by the node that they belong to: by key, as with every producer, else by value.

    So a batch that is written again goes where it went, and is known there.
    """
    numbers = nodes_of(rows.column("value"), nodes)
    if "key" in rows.schema.names:
        keyed = nodes_of(rows.column("key"), nodes)
        numbers = np.where(keyed < 0, numbers, keyed)
    return _by_number(rows, np.maximum(numbers, 0))


def _by_number(
    rows: pa.RecordBatch, numbers: npt.NDArray[np.integer]
) -> list[tuple[int, pa.RecordBatch]]:
    found = np.unique(numbers)
    if len(found) == 1:
        return [(int(found[0]), rows)]
    return [(int(each), rows.take(np.flatnonzero(numbers == each))) for each in found]


# ── lane_nodes ──
# The nodes as a lane uses them: what waits there, what it works on, and what it has done.


BATCH_SECONDS: Final = 5.0
"""How long nodes may take over a batch, which would have to come again without their answers."""
ALONE_SECONDS: Final = 300.0
"""How long the commit of a batch may take where there is one node, for which all has to wait."""
COMMIT_SECONDS: Final = 60.0
"""The same where there are others, whose events go on without it."""


class LaneNodes:
    """All nodes, for one run of a lane. Raises what they raise, and ``TransportDown``."""

    def __init__(
        self, nodes: Nodes, lane: str, run: str, queue: str, into: Sequence[str] = ()
    ) -> None:
        self._nodes = nodes
        self._lane = lane
        self._run = run
        self._queue = queue
        self._into = into

    def waiting(self, events: int, newest: int, timeout: float) -> dict[int, Unsettled]:
        """What waits, on every node that answers; waits until there is something."""
        if self._nodes.count > 1:  # one that has nothing is not to hold up the others
            found = self._waiting(events, newest, 0.0)
            if any(each.pending for each in found.values()):
                return found
        return self._waiting(events, newest, timeout)

    def _waiting(self, events: int, newest: int, timeout: float) -> dict[int, Unsettled]:
        questions = {
            number: partial(
                self._nodes[number].unsettled,
                self._queue,
                events,
                newest=newest,
                timeout=timeout,
                lane=self._lane,
                into=self._into,
            )
            for number in range(self._nodes.count)
        }
        return self._nodes.answers(f"lane {self._lane}", questions, timeout)

    def plan(self, batch: Waiting, count: int) -> dict[int, list[tuple[int, int]]]:
        """Tell the nodes what the lane works on; returns what of it there is to do.

        One that has gone away meanwhile is left out. It may have heard of the batch all the same,
        and must not settle by its commit what nobody reads: so all that have answered are told once
        more, and by the number of that the commit knows them. ``count`` is another one for every
        batch.
        """
        if self._nodes.count == 1:
            return {0: self._plan(0, batch.get(0, ()), count)}
        planned = self._planned(batch, 2 * count)
        self._planned(planned, 2 * count + 1)
        return planned

    def _planned(self, batch: Waiting, number: int) -> dict[int, list[Span]]:
        asked = {
            node: self._nodes.ask(node, partial(self._plan, node, spans, number))
            for node, spans in batch.items()
        }
        return self._nodes.heard(asked, BATCH_SECONDS)

    def _plan(self, node: int, spans: Spans, number: int) -> list[Span]:
        return self._nodes[node].plan(self._lane, self._run, self._queue, spans, number)


class LaneCommit:
    """What a batch of a lane has come to, on all nodes."""

    def __init__(self, nodes: Nodes, lane: str, run: str) -> None:
        self._nodes = nodes
        self._lane = lane
        self._run = run

    def commit(
        self, stages: Mapping[int, list[str]], kept: Mapping[int, Spans], dead: Mapping[int, Spans]
    ) -> None:
        """Publish stages and settle what was planned, but for what is kept; on each node at once.

        Also on one that got nothing: its cursor moves all the same. If it does not hear of that,
        what it had comes again.
        """
        commit = partial(self._commit, stages, kept, dead)
        if self._nodes.count == 1:
            commit(0, batch=None, timeout=ALONE_SECONDS)
        else:
            self._commit_on_each(stages.keys(), commit)

    def _commit(
        self,
        stages: Mapping[int, list[str]],
        kept: Mapping[int, Spans],
        dead: Mapping[int, Spans],
        node: int,
        *,
        batch: int | None,
        timeout: float,
    ) -> bool:
        """The part of one node."""
        return self._nodes[node].commit(
            stages.get(node, ()),
            lane=self._lane,
            run=self._run,
            kept=kept.get(node, ()),
            dead=dead.get(node, ()),
            batch=batch,
            timeout=timeout,
        )

    def _commit_on_each(self, stages: AbstractSet[int], commit: Callable[..., bool]) -> None:
        """On those that have stages, which have to answer, and on those told of the batch."""
        heard = self._heard()
        batch = max(heard.values())
        if batch < 0:
            if stages:
                raise TransportDown(f"no node that answers knows this batch of {self._lane!r}")
            return  # Spark's first batch is empty where nothing waits: nobody was told of it
        told = {node for node, number in heard.items() if number == batch} | stages
        asked = {
            node: self._nodes.ask(node, partial(commit, node, batch=batch, timeout=COMMIT_SECONDS))
            for node in told
        }
        self._let_settle({node: each for node, each in asked.items() if node not in stages})
        for node in stages:
            asked[node].result()

    def _let_settle(self, asked: Mapping[int, Future[bool]]) -> None:
        """Give nodes without stages the time to settle."""
        try:
            self._nodes.heard(asked, BATCH_SECONDS)
        except (TransportDown, LaneTaken) as error:
            log.warning("a node did not hear of lane %s: %s", self._lane, error)

    def _heard(self) -> dict[int, int]:
        """Of which batch nodes have heard last: some only of earlier ones, or of none."""
        numbers = range(self._nodes.count)
        questions = {number: partial(self._number, number) for number in numbers}
        return self._nodes.answers(f"batch {self._lane}", questions, BATCH_SECONDS)

    def _number(self, node: int) -> int:
        """The batch that a node has been told of twice: see ``LaneNodes.plan``."""
        try:
            planned = self._nodes[node].planned(self._lane, self._run)
        except LaneTaken:
            return -1
        return planned if planned % 2 else -1


class Gates:
    """The breakers of actions, kept by the first node that answers."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def status(self, actions: Sequence[str]) -> Breakers:
        """How the breakers of these actions are."""
        if not actions:
            return {}
        about = f"breakers {' '.join(actions)}"
        return self._first(about, lambda node: node.breakers(actions))

    def gate(self, action: str, step: Step, doing: Doing) -> RemoteGate:
        """A task's way to the breaker of its action, or of that action's second output."""
        node = self._first("ping", _answering)
        return RemoteGate(node, action, step.reads, step.delivery, doing, workers=step.workers)

    def _first(self, about: str, call: Callable[[RemoteNode], Answer]) -> Answer:
        """The answer of the first node that gives one."""
        nodes = range(self._nodes.count)
        questions = {node: partial(call, self._nodes[node]) for node in nodes}
        found = self._nodes.answers(about, questions, 0.0)
        return found[min(found)]


def _answering(node: RemoteNode) -> RemoteNode:
    node.ping()
    return node


def open_for(breakers: Mapping[str, Any], action: str) -> float:
    """For how long the breaker of an action has been open, in seconds."""
    return float(breakers.get(action, {}).get("open_for") or 0.0)
