"""The actions of the Flight plane: small requests, each answered with one JSON object."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import pyarrow as pa

from turnlane.errors import LaneTaken, NotSupported, RetryLater
from turnlane.intervals import count_offsets
from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.node.breakers import BreakerRequest
from turnlane.node.commit_record import Commit, SettleRange
from turnlane.node.commits import get_free_capacity
from turnlane.node.flight import messages
from turnlane.node.flight.read import AbortableWait
from turnlane.node.lanes import LanePlan
from turnlane.node.node import Node
from turnlane.serving.auth import Authority, Right

log = get_logger(__name__)

EMPTY_SECONDS: Final = 0.5
PLAN_SECONDS: Final = 3.0
"""How long a lane waits for an earlier commit: when it asks for unsettled events (it then also
waits as long for room), and when it plans a batch."""

Answer = dict[str, Any]


class Caller(NamedTuple):
    """The client of a call, with its rights."""

    authority: Authority
    bearer: str | None
    is_abandoned: Callable[[], bool]

    def check(self, right: Right, queue: str | None) -> None:
        """Raise ``NotAllowed`` unless the caller has the right."""
        self.authority.check(self.bearer, right, queue)

    def qualify_name(self, name: str) -> str:
        """Return the name of a writer or producer, made unique among all tokens."""
        return self.authority.qualify_name(self.bearer, name)

    def has_right(self, right: Right, queue: str) -> bool:
        """Whether the caller has the right."""
        return self.authority.allows(self.bearer, right, queue)

    def is_over(self, right: Right, queue: str) -> bool:
        """Whether the client has left, the node is stopping, or the right is lost."""
        return self.is_abandoned() or not self.has_right(right, queue)


class Actions:
    """The requests of clients, except the streams of blocks."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def answer(self, kind: str, body: pa.Buffer | None, caller: Caller) -> Answer:
        """Run an action. Raises ``NotSupported``, ``NotAllowed`` and the errors of the action."""
        action = ACTIONS.get(kind)
        if action is None:
            known = ", ".join(ACTIONS)
            raise NotSupported(f"there is no action {kind[:80]!r}; there are: {known}")
        command: Any = messages.parse_command(action.command, body)
        if action.right is None:
            caller.authority.identify(caller.bearer)
        else:
            caller.check(action.right, command.queue)
        return action.do(self, command, caller)

    def ping(self, _: messages.Command, _caller: Caller) -> Answer:
        """Return the instance of the node, and the number of its queues."""
        return {"instance": self._node.instance, "queues": len(self._node.queues())}

    def queues(self, _: messages.Command, caller: Caller) -> Answer:
        """Return the queues that the caller may use, with their settings."""
        return {
            name: queue.settings.model_dump(mode="json", exclude_unset=True, exclude={"path"})
            for name, queue in self._node.queues().items()
            if any(caller.has_right(right, name) for right in Right)
        }

    def stats(self, command: messages.OptionalQueueCommand, caller: Caller) -> Answer:
        """Return ledger, gauges and counters of a queue, or of all that the caller may read."""
        if command.queue is not None:
            caller.check(Right.READ, command.queue)
            return {command.queue: self._node.queue(command.queue).stats().as_dict()}
        queues = self._node.queues().items()
        return {
            name: queue.stats().as_dict()
            for name, queue in queues
            if caller.has_right(Right.READ, name)
        }

    def create(self, command: messages.CreateCommand, _: Caller) -> Answer:
        """Create a queue."""
        known = command.queue in self._node.queues()
        create = self._node.create_for_action if command.by_pipeline else self._node.create
        create(command.queue, **command.knobs)
        return {"created": not known}

    def drop(self, command: messages.QueueCommand, _: Caller) -> Answer:
        """Delete a queue with all its events."""
        self._node.drop(command.queue)
        return {}

    def wait(self, command: messages.WaitCommand, caller: Caller) -> Answer:
        """Wait until the end of a queue is beyond an offset."""
        queue = self._node.queue(command.queue)
        for seconds in AbortableWait(command.timeout, caller.is_abandoned).slices():
            if queue.wait_beyond(command.beyond, seconds) > command.beyond:
                break
        return {"end": queue.end, "low": queue.low, "queue_id": queue.queue_id}

    def unsettled(self, command: messages.UnsettledCommand, caller: Caller) -> Answer:
        """Return unsettled offsets of a queue; wait until there are some."""
        queue = self._node.queue(command.queue)
        for seconds in AbortableWait(command.timeout, caller.is_abandoned).slices():
            end = queue.end  # before the check, so that the wait below notices every later event
            if queue.stats().ledger.pending:
                break
            queue.wait_beyond(end, seconds)
        room = command.events
        if command.lane is not None:
            self._node.commits.wait_for_publishing_commits(queue)
            # Not longer than requested: other nodes may have events for the lane.
            seconds = min(EMPTY_SECONDS, command.timeout)
            room = min(room, self._wait_for_room(command, caller, seconds))
            if not (room and self._node.commits.wait_for_settling_commits(queue, seconds)):
                return {"spans": [], "pending": 0, "end": queue.end, "low": queue.low, "kept": 0}
        newest = command.newest * room // command.events
        found = queue.find_unsettled(room, newest, command.first)
        known = None if command.lane is None else self._node.lanes.find(command.lane)
        kept = 0 if known is None else known.kept
        return {**found._asdict(), "low": queue.low, "kept": kept}

    def _wait_for_room(
        self, command: messages.UnsettledCommand, caller: Caller, seconds: float
    ) -> int:
        """Return how many events a lane can commit; wait ``seconds`` for room if there is none.

        A batch that does not fit would be sent to the other outputs of the lane again and again.
        """
        for name in command.into:
            caller.check(Right.PUBLISH, name)
        room = self._get_room(command)
        if not room:
            time.sleep(seconds)
            room = self._get_room(command)
        return room

    def _get_room(self, command: messages.UnsettledCommand) -> int:
        rooms = (get_free_capacity(self._node.queue(name)) for name in command.into)
        return min((each for each in rooms if each is not None), default=command.events)

    def full(self, command: messages.FullCommand, caller: Caller) -> Answer:
        """Return the queues that have no room for a commit."""
        for name in command.queues:
            caller.check(Right.PUBLISH, name)
        queues = self._node.queues()
        known = [name for name in command.queues if name in queues]
        return {"queues": [name for name in known if get_free_capacity(queues[name]) == 0]}

    def settle(self, command: messages.SettleSpanCommand, _: Caller) -> Answer:
        """Settle offsets that were read, if the queue has the expected id."""
        queue = self._node.queue(command.queue)
        is_meant = command.queue_id in (None, queue.queue_id)
        if is_meant:
            queue.settle(command.first, command.end)
        return {"settled": is_meant}

    def done(self, command: messages.LeaseCommand, caller: Caller) -> Answer:
        """Settle a batch as delivered."""
        self._node.leases.done(self._check_lease(command, caller))
        return {}

    def dead(self, command: messages.LeaseCommand, caller: Caller) -> Answer:
        """Settle a batch as undeliverable."""
        self._node.leases.dead(self._check_lease(command, caller))
        return {}

    def release(self, command: messages.LeaseCommand, caller: Caller) -> Answer:
        """Release a batch, so that another consumer gets it."""
        self._node.leases.release(self._check_lease(command, caller))
        return {}

    def extend(self, command: messages.ExtendCommand, caller: Caller) -> Answer:
        """Extend the lease of a batch."""
        self._node.leases.extend(self._check_lease(command, caller), command.seconds)
        return {}

    def _check_lease(self, command: messages.LeaseCommand, caller: Caller) -> str:
        caller.check(Right.READ, self._node.leases.find(command.lease).queue)
        return command.lease

    def commit(self, command: messages.CommitCommand, caller: Caller) -> Answer:
        """Publish stages and settle ranges atomically."""
        self._check_stages(command.stages, caller)
        ranges = [SettleRange(span.queue, span.first, span.end) for span in command.ranges]
        planned = self._find_plan(command)
        if planned is not None:
            ranges += planned.get_settle_ranges(command.kept, command.dead)
            caller.check(Right.READ, planned.queue)
        for queue in {span.queue for span in ranges}:
            caller.check(Right.READ, queue)
        writer = None if command.writer is None else caller.qualify_name(command.writer)
        commit = Commit(command.stages, ranges, writer, command.epoch, command.exact)
        committed = self._node.commits.commit(commit, lambda: self._find_plan(command))
        if planned is not None:
            self._node.lanes.mark_committed(str(command.lane), command.run, command.kept)
        return {"committed": committed}

    def _find_plan(self, command: messages.CommitCommand) -> LanePlan | None:
        """Return the plan whose offsets the commit of a lane settles. Raises ``LaneTaken``."""
        if command.lane is None:
            return None
        lanes = self._node.lanes
        planned = lanes.get_plan(command.lane, command.run)
        if command.batch is not None and command.batch != planned.batch:
            if command.stages:
                raise LaneTaken(
                    f"lane {command.lane!r} has planned batch {planned.batch} here, "
                    f"not batch {command.batch}"
                )
            return None  # the lane has read no events of this node for this batch
        queue = self._node.queues().get(planned.queue)
        if queue is not None and queue.queue_id != planned.queue_id:
            return None  # the queue was dropped since: its present events were not read
        # A commit with existing stages is not a repeat: their events were read on other nodes.
        is_new = any(map(self._node.staging.find_contents, command.stages))
        known = lanes.find(command.lane)
        return None if is_new and known is not None and known.committed else planned

    def plan(self, command: messages.PlanCommand, caller: Caller) -> Answer:
        """Store the offsets that a lane reads now, for its commit."""
        replaced = self._node.lanes.find(command.lane)
        if replaced is not None:
            caller.check(Right.READ, replaced.planned.queue)
        queue = self._node.queue(command.queue)
        # End the earlier runs first: none of them can begin a commit after this.
        nothing = LanePlan(command.queue, (), command.batch, queue.queue_id)
        self._node.lanes.plan(command.lane, command.run, nothing)
        # A commit in progress, for example of a killed driver, settles the events that it read.
        if not self._node.commits.wait_for_settling_commits(queue, PLAN_SECONDS):
            raise RetryLater(f"an earlier commit of events of {command.queue!r} is still running")
        # The client's list of unsettled offsets may be out of date by now.
        spans = queue.filter_unsettled(command.spans)
        self._node.lanes.plan(command.lane, command.run, nothing._replace(spans=spans))
        return {"spans": spans}

    def planned(self, command: messages.LaneRunCommand, caller: Caller) -> Answer:
        """Return the number of the batch that a run of a lane works on."""
        planned = self._node.lanes.get_plan(command.lane, command.run)
        caller.check(Right.READ, planned.queue)
        return {"batch": planned.batch}

    def stalled(self, command: messages.QueueCommand, caller: Caller) -> Answer:
        """Count that the lane of a queue has stalled, for the metrics."""
        del caller
        self._node.lanes.count_stall(self._node.queue(command.queue).name)
        return {}

    def purge(self, command: messages.PurgeCommand, caller: Caller) -> Answer:
        """Throw events away, after an entry in the audit log."""
        queue = self._node.queue(command.queue)
        spans = queue.filter_unsettled(command.spans)
        events = count_offsets(spans)
        if events:
            by = caller.authority.identify(caller.bearer)
            about = {"queue": command.queue, "events": events, "why": command.why, "spans": spans}
            self._node.audit.record("purge", by=by, **about)
            for span in spans:
                queue.settle(*span, Outcome.DEAD)
        return {"events": events}

    # ── breakers ─────────────────────────────────────────────────────────────────────────────────

    def permit(self, command: messages.PermitCommand, caller: Caller) -> Answer:
        """Return what a task of an action may send now."""
        request = self._build_request(command, caller)
        permit = self._node.breakers.permit(request)
        return {**asdict(permit), "share": self._node.breakers.share(request)}

    def report(self, command: messages.ReportCommand, caller: Caller) -> Answer:
        """Take the results of a task's sends into account."""
        request = self._build_request(command, caller)
        self._node.breakers.report(request, command.report)
        if command.ended:
            self._node.breakers.leave(request)
            return {}
        return {"share": self._node.breakers.share(request)}

    def claim(self, command: messages.ClaimCommand, caller: Caller) -> Answer:
        """Return how long a task has to wait before it sends the claimed events."""
        request = self._build_request(command, caller)
        wait = self._node.breakers.claim(request, command.count, command.within)
        return {"wait": wait, "share": self._node.breakers.share(request)}

    def _build_request(self, command: messages.PermitCommand, caller: Caller) -> BreakerRequest:
        known = self._node.breakers.all().get(command.action)
        if known is not None:
            caller.check(Right.READ, known.queue)
        return BreakerRequest(*(getattr(command, name) for name in BreakerRequest._fields))

    def breakers(self, command: messages.BreakersCommand, caller: Caller) -> Answer:
        """Return the breakers of the actions whose queues the caller may read."""
        return {
            action: breaker.as_dict()
            for action, breaker in self._node.breakers.all().items()
            if caller.has_right(Right.READ, breaker.queue)
            and (command.actions is None or action in command.actions)
        }

    def reset_breaker(self, command: messages.BreakerCommand, caller: Caller) -> Answer:
        """Close a breaker, because a person says that its destination works again."""
        breaker = self._node.breakers.of(command.action)
        caller.check(Right.ADMIN, breaker.queue)
        breaker.destination.reset()
        log.info("breaker.reset", action=command.action)
        return breaker.as_dict()

    # ── staging ──────────────────────────────────────────────────────────────────────────────────

    def abort(self, command: messages.AbortCommand, caller: Caller) -> Answer:
        """Discard stages."""
        self._check_stages(command.stages, caller)
        self._node.commits.abort(command.stages)
        return {}

    def _check_stages(self, stages: list[str], caller: Caller) -> None:
        """Check the right to publish to the queues of the stages.

        Stages that do not exist need no right: the commit refuses them unless it is a repeat.
        """
        known = filter(None, map(self._node.staging.find_contents, stages))
        for queue in (each.queue for each in known):
            caller.check(Right.PUBLISH, queue)

    def epoch(self, command: messages.WriterCommand, caller: Caller) -> Answer:
        """Return the last epoch that a writer has committed."""
        return {"epoch": self._node.commits.get_epoch(caller.qualify_name(command.writer))}


class _Action(NamedTuple):
    command: type[messages.Command]
    do: Callable[..., Answer]
    right: Right | None = None
    """The right on the command's queue. ``None``: any token; the action checks the rights."""


ACTIONS: Final = {
    "ping": _Action(messages.Command, Actions.ping),
    "queues": _Action(messages.Command, Actions.queues),
    "stats": _Action(messages.OptionalQueueCommand, Actions.stats),
    "create": _Action(messages.CreateCommand, Actions.create, Right.ADMIN),
    "drop": _Action(messages.QueueCommand, Actions.drop, Right.ADMIN),
    "wait": _Action(messages.WaitCommand, Actions.wait, Right.READ),
    "unsettled": _Action(messages.UnsettledCommand, Actions.unsettled, Right.READ),
    "full": _Action(messages.FullCommand, Actions.full),
    "settle": _Action(messages.SettleSpanCommand, Actions.settle, Right.READ),
    "done": _Action(messages.LeaseCommand, Actions.done),
    "dead": _Action(messages.LeaseCommand, Actions.dead),
    "release": _Action(messages.LeaseCommand, Actions.release),
    "extend": _Action(messages.ExtendCommand, Actions.extend),
    "commit": _Action(messages.CommitCommand, Actions.commit),
    "plan": _Action(messages.PlanCommand, Actions.plan, Right.READ),
    "planned": _Action(messages.LaneRunCommand, Actions.planned),
    "stalled": _Action(messages.QueueCommand, Actions.stalled, Right.READ),
    "purge": _Action(messages.PurgeCommand, Actions.purge, Right.ADMIN),
    "permit": _Action(messages.PermitCommand, Actions.permit, Right.READ),
    "report": _Action(messages.ReportCommand, Actions.report, Right.READ),
    "claim": _Action(messages.ClaimCommand, Actions.claim, Right.READ),
    "breakers": _Action(messages.BreakersCommand, Actions.breakers),
    "reset_breaker": _Action(messages.BreakerCommand, Actions.reset_breaker),
    "abort": _Action(messages.AbortCommand, Actions.abort),
    "epoch": _Action(messages.WriterCommand, Actions.epoch),
}
