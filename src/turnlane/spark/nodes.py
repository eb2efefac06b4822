"""The nodes of an endpoint, as Spark's processes use them: numbered, asked all at once.

Driver, tasks and sinks run in Python processes of their own, which Spark uses again and again. So
connections live as long as the process: :meth:`Nodes.from_options` returns the same object for the
same endpoint.

A node that does not answer must not stop the others. Calls to several nodes run in threads, a pool
for each node (:meth:`Nodes.ask_all`). A node that has not answered in time is left out, is not
asked the same again, and is not waited for until it has answered. Only if no node answers, a call
raises ``TransportDown``.

:class:`LaneNodes` plans the batches of a lane and commits them: a node settles exactly the events
that the batch had of it. :class:`BreakerClient` reads breakers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.client.address import NodeUrl
from turnlane.client.destination import Doing, RemoteDestinationState
from turnlane.client.node_client import Credentials, QueueEnds, RemoteNode, Spans, UnsettledSpans
from turnlane.errors import LaneTaken, NoSuchQueue, TransportDown, WriterAhead
from turnlane.events import Block
from turnlane.intervals import Span
from turnlane.key_hash import find_nodes
from turnlane.logs import get_logger
from turnlane.spark.batch_planning import PendingSpans, Positions
from turnlane.spark.options import SourceOptions
from turnlane.spark.steps import BreakerStates, LaneStep

log = get_logger(__name__)

Answer = TypeVar("Answer")

GRACE_SECONDS: Final = 2.0
"""How much longer than the requested timeout a node may take before the others go on without it."""
MAX_OPEN_CALLS: Final = 8
"""The threads for calls to one node."""
PLAN_SECONDS: Final = 5.0
"""How long a node may take to plan or to settle a batch; then the batch goes on without it."""
COMMIT_SECONDS: Final = 60.0
"""How long the commit of a batch may take on one of several nodes."""
SINGLE_COMMIT_SECONDS: Final = 300.0
"""The same if there is only one node: nothing can go on without it."""


class Nodes:
    """All nodes of an endpoint, by their numbers. Safe to use from several threads.

    Methods raise the errors of the nodes, and ``TransportDown``.
    """

    def __init__(self, endpoint: str, credentials: Credentials) -> None:
        url = NodeUrl.parse(endpoint)
        self._nodes = [
            RemoteNode(place, location, credentials)
            for place, location in zip(url.places, url.locations(), strict=True)
        ]
        self._pools = [ThreadPoolExecutor(MAX_OPEN_CALLS, "turnlane-ask") for _ in self._nodes]
        self._open_calls: dict[tuple[int, str], Future[Any]] = {}
        """By node and topic, calls without an answer: a node that hangs is not asked again."""
        self._late: dict[int, Future[Any]] = {}
        """By node, a call that was not answered in time: until it is, no caller waits for it."""
        self._away: set[int] = set()
        """Nodes whose absence was logged."""

    @classmethod
    def from_options(cls, options: SourceOptions) -> Nodes:
        """Return the nodes that options name; the same object for the same options."""
        credentials = Credentials(
            options.read_token(), options.tls_ca, options.tls_cert, options.tls_key
        )
        return _get_nodes(options.endpoint, credentials)

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self._nodes)

    def __getitem__(self, number: int) -> RemoteNode:
        return self._nodes[number]

    # ── calls to several nodes ──

    def ask_all(
        self, topic: str, calls: Mapping[int, Callable[[], Answer]], timeout: float
    ) -> dict[int, Answer]:
        """Call several nodes at once; leaves out nodes that do not answer in time.

        A node that has not answered an earlier call with the same ``topic`` is not called again:
        its answer, when it arrives, is to the earlier call. Raises ``TransportDown`` if no node
        answers.
        """
        asked = {
            node: self._open_calls.get((node, topic)) or self.submit(node, call)
            for node, call in calls.items()
        }
        self._open_calls |= {(node, topic): answer for node, answer in asked.items()}
        try:
            return self.collect(asked, timeout)
        finally:
            for node, answer in asked.items():
                if answer.done():
                    self._open_calls.pop((node, topic), None)

    def submit(self, node: int, call: Callable[[], Answer]) -> Future[Answer]:
        """Call a node, also if it has not answered earlier calls. Does not wait."""
        return self._pools[node].submit(call)

    def collect(self, asked: Mapping[int, Future[Answer]], timeout: float) -> dict[int, Answer]:
        """Return the answers that arrive in time; leaves out nodes that are away.

        Raises ``TransportDown`` if all nodes are away, and any other error of a node.
        """
        awaited = [answer for node, answer in asked.items() if not self._is_hanging(node)]
        wait(awaited or asked.values(), None if self.count == 1 else timeout + GRACE_SECONDS)
        found: dict[int, Answer] = {}
        failure = TransportDown("no node answers")
        for node, answer in asked.items():
            if not answer.done():
                self._late.setdefault(node, answer)
                self._log_away(node, "it does not answer")
                continue
            try:
                found[node] = answer.result()
            except TransportDown as error:
                self._log_away(node, failure := error)
            else:
                self._log_back(node)
        if asked and not found:
            raise failure
        return found

    def _is_hanging(self, node: int) -> bool:
        late = self._late.get(node)
        if late is None or not late.done():
            return late is not None
        self._late.pop(node, None)  # Another lane may have removed it.
        return False

    def _log_away(self, node: int, error: object) -> None:
        if node not in self._away:
            self._away.add(node)
            log.warning("node.away", node=node, error=error, hint="other nodes are used without it")

    def _log_back(self, node: int) -> None:
        if node in self._away:
            self._away.discard(node)  # Another lane may have removed it.
            log.warning("node.back", node=node)

    # ── reading ──

    def get_extents(self, queue: str) -> dict[int, QueueEnds]:
        """Return how far the queue goes on every node."""
        return {number: node.wait(queue, -1, 0.0) for number, node in enumerate(self._nodes)}

    def wait_for_events(
        self, queue: str, beyond: Positions, timeout: float
    ) -> dict[int, QueueEnds]:
        """Wait until a node has events beyond a position; leaves out nodes that are away.

        If one node has events already, the others are not waited for: they are asked again next
        time.
        """
        extents = self._ask_extents(queue, beyond, 0.0)
        if any(extent.end > beyond[node] for node, extent in extents.items()) or not timeout:
            return extents
        return self._ask_extents(queue, beyond, timeout)

    def _ask_extents(self, queue: str, beyond: Positions, timeout: float) -> dict[int, QueueEnds]:
        calls = {
            node: partial(self._nodes[node].wait, queue, offset, timeout)
            for node, offset in beyond.items()
            if node < self.count
        }
        return self.ask_all(f"wait {queue}", calls, timeout)

    def estimate_event_bytes(self, queue: str) -> float:
        """Return the average size of an event in the queue, at least 1: the largest of all nodes.

        Leaves out nodes that are away.
        """
        calls = {n: partial(node.stats, queue) for n, node in enumerate(self._nodes)}
        found = self.ask_all(f"stats {queue}", calls, 0.0).values()
        stats = [each[queue] for each in found]
        sizes: list[float] = [each["bytes"] / max(1, each["size"]) for each in stats]
        return max(1.0, *sizes)

    def read(
        self, node: int, queue: str, first: int, end: int, columns: Collection[str] | None = None
    ) -> Iterator[tuple[int, Block]]:
        """Yield the blocks of a range with their first offsets; by default with all columns.

        Settled events may be among them: a query that does not skip them needs all offsets, and
        the blocks of a lane stay large.
        """
        return self._nodes[node].read(queue, first, end, columns, settled=True)

    def find_unsettled(self, node: int, queue: str, first: int, end: int) -> list[Span]:
        """Return the spans of a range that are not settled: one call, unless they are many."""
        spans: list[Span] = []
        while first < end:
            found = self._nodes[node].unsettled(queue, end - first, first=first).spans
            if not found:
                break
            spans += [(start, min(stop, end)) for start, stop in found if start < end]
            first = found[-1][1]
        return spans

    def find_offset_at(self, node: int, queue: str, milliseconds: int) -> int:
        """Return the offset of the first event of a time or later, on one node.

        A binary search, which assumes that events arrived in the order of their timestamps. If
        events in front of the result cannot be read, they may be as late: then the result is the
        first of them.
        """
        remote, microseconds = self._nodes[node], milliseconds * 1000
        ends = remote.wait(queue, -1, 0.0)
        low, high = ends.low, ends.end
        while low < high:
            middle = (low + high) // 2
            # Settled events leave holes: then the next event says where to search.
            found = _find_timestamp(remote, queue, middle, middle + 1)
            found = found or _find_timestamp(remote, queue, middle + 1, high)
            if found is None or found[1] >= microseconds:
                high = middle
            else:
                low = found[0] + 1
        return low

    def settle(
        self, node: int, queue: str, first: int, end: int, queue_id: str | None = None
    ) -> None:
        """Settle the offsets ``first`` to ``end - 1``.

        Does nothing if the queue has another id or ends before ``end``: then the offsets were read
        from an earlier queue of the same name.
        """
        if self._nodes[node].wait(queue, -1, 0.0).end >= end:
            self._nodes[node].settle(queue, first, end, queue_id)

    # ── writing ──

    def commit(
        self, node: int, stages: Sequence[str], *, writer: str | None = None, epoch: int = 0
    ) -> None:
        """Publish stages. Does nothing if the writer has committed this epoch already.

        Raises ``WriterAhead`` if the writer has committed a later epoch.
        """
        if self._nodes[node].commit(stages, writer=writer, epoch=epoch) or writer is None:
            return
        last = self._nodes[node].epoch(writer)
        if last is not None and last > epoch:
            raise WriterAhead.of(writer, last, epoch)

    def abort(self, node: int, stages: Sequence[str]) -> None:
        """Remove stages. A node that cannot be reached removes them by itself later."""
        try:
            self._nodes[node].abort(stages)
        except TransportDown as error:
            log.warning("stages.abort_failed", node=node, stages=len(stages), error=error)


@cache
def _get_nodes(endpoint: str, credentials: Credentials) -> Nodes:
    return Nodes(endpoint, credentials)


def _find_timestamp(remote: RemoteNode, queue: str, first: int, end: int) -> tuple[int, int] | None:
    """Return the offset and the timestamp of the first event of a range that can be read."""
    for offset, block in remote.read(queue, first, end, {"timestamp"}, settled=True):
        timestamps = block.column("timestamp").cast(pa.int64())
        return offset, int(np.asarray(timestamps)[0])
    return None


def split_by_node(rows: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
    """Split rows by the node of their events."""
    return _split(rows, np.asarray(rows.column("partition")))


def split_by_content(rows: pa.RecordBatch, nodes: int) -> list[tuple[int, pa.RecordBatch]]:
    """Split rows by key, as every producer does, or by value if there is no key.

    So a batch that is written again goes to the same nodes, which recognise it.
    """
    numbers = find_nodes(rows.column("value"), nodes)
    if "key" in rows.schema.names:
        by_key = find_nodes(rows.column("key"), nodes)
        numbers = np.where(by_key < 0, numbers, by_key)
    return _split(rows, np.maximum(numbers, 0))


def _split(
    rows: pa.RecordBatch, numbers: npt.NDArray[np.integer]
) -> list[tuple[int, pa.RecordBatch]]:
    found = np.unique(numbers)
    if len(found) == 1:
        return [(int(found[0]), rows)]
    return [(int(each), rows.take(np.flatnonzero(numbers == each))) for each in found]


# ── lanes ──


class LaneNodes:
    """All nodes, for one run of a lane: its reader plans batches, and its sink commits them."""

    def __init__(self, nodes: Nodes, lane: str, run: str) -> None:
        self._nodes = nodes
        self._lane = lane
        self._run = run

    def find_pending(
        self, queue: str, events: int, newest: int, timeout: float, into: Sequence[str] = ()
    ) -> dict[int, UnsettledSpans]:
        """Return the pending events of every node that answers; waits until there are some.

        Only as many as fit into the queues ``into``.
        """

        def ask(timeout: float) -> dict[int, UnsettledSpans]:
            knobs: dict[str, Any] = {
                "newest": newest,
                "timeout": timeout,
                "lane": self._lane,
                "into": into,
            }
            numbers = range(self._nodes.count)
            calls = {n: partial(self._nodes[n].unsettled, queue, events, **knobs) for n in numbers}
            return self._nodes.ask_all(f"lane {self._lane}", calls, timeout)

        if self._nodes.count > 1:  # A node without events must not delay the others.
            found = ask(0.0)
            if any(each.pending for each in found.values()):
                return found
        return ask(timeout)

    def plan_batch(self, queue: str, batch: PendingSpans, number: int) -> dict[int, list[Span]]:
        """Send the plan of a batch to the nodes; returns the events of the nodes that answered.

        A node that does not answer is left out, but it may have received the plan. It must not
        settle events by the commit of a batch that does not have them. So the nodes that have
        answered get the plan a second time with a higher number, and the commit goes to nodes with
        that number. ``number`` differs for every batch.
        """

        def plan(spans_by_node: PendingSpans, number: int) -> dict[int, list[Span]]:
            run = self._lane, self._run, queue
            asked = {
                node: self._nodes.submit(node, partial(self._nodes[node].plan, *run, spans, number))
                for node, spans in spans_by_node.items()
            }
            return self._nodes.collect(asked, PLAN_SECONDS)

        if self._nodes.count == 1:
            spans = batch.get(0, ())
            return {0: self._nodes[0].plan(self._lane, self._run, queue, spans, number)}
        planned = plan(batch, 2 * number)
        plan(planned, 2 * number + 1)
        return planned

    def commit(
        self, stages: Mapping[int, list[str]], kept: Mapping[int, Spans], dead: Mapping[int, Spans]
    ) -> None:
        """Publish stages and settle the planned events except ``kept``, at once on each node.

        Also on a node without stages, because its cursor has to move. If it does not receive the
        commit, its events come again.
        """

        def commit(node: int, *, batch: int | None, timeout: float) -> bool:
            return self._nodes[node].commit(
                stages.get(node, ()),
                lane=self._lane,
                run=self._run,
                kept=kept.get(node, ()),
                dead=dead.get(node, ()),
                batch=batch,
                timeout=timeout,
            )

        if self._nodes.count == 1:
            commit(0, batch=None, timeout=SINGLE_COMMIT_SECONDS)
        else:
            self._commit_on_all(stages.keys(), commit)

    def _commit_on_all(self, with_stages: AbstractSet[int], commit: Callable[..., bool]) -> None:
        """Commit on nodes with stages, which must answer, and on nodes that know the batch."""
        planned = self._get_planned_numbers()
        batch = max(planned.values())
        if batch < 0:
            if with_stages:
                raise TransportDown(
                    f"lane {self._lane!r}: no node that answers has planned this batch"
                )
            return  # Spark's first batch is empty if there are no events: no node has planned it.
        members = {node for node, number in planned.items() if number == batch} | with_stages
        asked = {
            node: self._nodes.submit(
                node, partial(commit, node, batch=batch, timeout=COMMIT_SECONDS)
            )
            for node in members
        }
        try:  # Give nodes without stages time to settle.
            without_stages = {n: each for n, each in asked.items() if n not in with_stages}
            self._nodes.collect(without_stages, PLAN_SECONDS)
        except (TransportDown, LaneTaken) as error:
            log.warning("lane.commit_incomplete", lane=self._lane, error=error)
        for node in with_stages:
            asked[node].result()

    def _get_planned_numbers(self) -> dict[int, int]:
        """Return the number of the batch that each node has planned last; -1 for none."""
        calls = {node: partial(self._get_planned, node) for node in range(self._nodes.count)}
        return self._nodes.ask_all(f"batch {self._lane}", calls, PLAN_SECONDS)

    def _get_planned(self, node: int) -> int:
        """Return the number of a batch that the node has planned twice: see ``plan_batch``."""
        try:
            number = self._nodes[node].planned(self._lane, self._run)
        except LaneTaken:
            return -1
        return number if number % 2 else -1


class BreakerClient:
    """The breakers of actions. The first node that answers keeps them."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def get_states(self, actions: Sequence[str]) -> BreakerStates:
        """Return the states of the breakers of these actions."""
        if not actions:
            return {}
        topic = f"breakers {' '.join(actions)}"
        return self._ask_first(topic, lambda node: node.breakers(actions))

    def open_destination(self, action: str, step: LaneStep, doing: Doing) -> RemoteDestinationState:
        """Open a task's connection to the state of an action's destination.

        ``action`` may be the name of the step's second output.
        """
        queue = step.source_queue
        return RemoteDestinationState(
            self._ask_first("ping", _ping),
            action,
            queue,
            step.delivery,
            doing,
            workers=step.workers,
            find_settled=partial(self._find_settled, queue),
        )

    def _find_settled(self, queue: str) -> dict[str, list[Span]]:
        """Return the first settled events of a queue, on all nodes that answer."""
        nodes = range(self._nodes.count)
        calls = {node: partial(_get_low, self._nodes[node], queue) for node in nodes}
        lows = self._nodes.ask_all(f"settled {queue}", calls, 0.0)
        return {f"{queue}/{node}": [(0, low)] for node, low in lows.items()}

    def _ask_first(self, topic: str, call: Callable[[RemoteNode], Answer]) -> Answer:
        """Return the answer of the first node that gives one."""
        nodes = range(self._nodes.count)
        calls = {node: partial(call, self._nodes[node]) for node in nodes}
        found = self._nodes.ask_all(topic, calls, 0.0)
        return found[min(found)]


def _get_low(node: RemoteNode, queue: str) -> int:
    """Return the first unsettled offset of a queue; 0 if the node does not have the queue yet."""
    try:
        return node.wait(queue, -1, 0.0).low
    except NoSuchQueue:
        return 0


def _ping(node: RemoteNode) -> RemoteNode:
    node.ping()
    return node
