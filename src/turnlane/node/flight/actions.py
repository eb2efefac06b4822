"""The Flight plane's actions: small questions and orders, answered with one JSON object each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import pyarrow as pa

from turnlane.errors import LaneTaken, NotSupported, RetryLater
from turnlane.intervals import count_of
from turnlane.ledger import Outcome
from turnlane.node.breakers import Asker
from turnlane.node.commit_record import Commit, Range
from turnlane.node.commits import room_of
from turnlane.node.flight.commands import (
    AbortStages,
    AskPermit,
    ClaimRate,
    Command,
    CommitStages,
    Create,
    Extend,
    GiveReport,
    Nothing,
    OfBreaker,
    OfBreakers,
    OfLease,
    OfQueue,
    OfQueues,
    OfRoom,
    OfRun,
    OfWriter,
    Plan,
    Purge,
    SettleSpan,
    Unsettled,
    WaitBeyond,
    parsed,
)
from turnlane.node.flight.read import Patience
from turnlane.node.lanes import Planned
from turnlane.node.node import Node
from turnlane.serving.auth import Authority, Right

log = logging.getLogger(__name__)

EMPTY_SECONDS: Final = 0.5
PLAN_SECONDS: Final = 3.0
"""How long a lane that asks what waits, and one that plans a batch, wait at most for an earlier
commit; the first waits as long for room."""

Answer = dict[str, Any]


class Caller(NamedTuple):
    """Who asks, and whether the answer would still reach anybody."""

    authority: Authority
    bearer: str | None
    in_vain: Callable[[], bool]

    def check(self, right: Right, queue: str | None) -> None:
        """Raise ``NotAllowed`` unless the caller has the right."""
        self.authority.check(self.bearer, right, queue)

    def own(self, name: str) -> str:
        """The name of a writer or a producer, apart from those of other tokens."""
        return self.authority.own(self.bearer, name)

    def may(self, right: Right, queue: str) -> bool:
        """Whether the caller has the right."""
        return self.authority.allows(self.bearer, right, queue)

    def has_left(self, right: Right, queue: str) -> bool:
        """Whether nobody wants more of an answer, or nobody with the right to it."""
        return self.in_vain() or not self.may(right, queue)


class Actions:
    """What a client may ask of a node beside moving blocks."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def answer(self, kind: str, body: pa.Buffer | None, caller: Caller) -> Answer:
        """Do what is asked."""
        action = ACTIONS.get(kind)
        if action is None:
            known = ", ".join(ACTIONS)
            raise NotSupported(f"there is no action {kind[:80]!r}; there are: {known}")
        command: Any = parsed(action.command, body)
        if action.right is None:
            caller.authority.identify(caller.bearer)
        else:
            caller.check(action.right, command.queue)
        return action.do(self, command, caller)

    def ping(self, _: Nothing, _caller: Caller) -> Answer:
        """Say who you are."""
        return {"instance": self._node.instance, "queues": len(self._node.queues())}

    def queues(self, _: Nothing, caller: Caller) -> Answer:
        """The queues that the caller may use, with their settings."""
        return {
            name: queue.settings.model_dump(mode="json", exclude_unset=True, exclude={"path"})
            for name, queue in self._node.queues().items()
            if any(caller.may(right, name) for right in Right)
        }

    def stats(self, command: OfQueues, caller: Caller) -> Answer:
        """Ledger, gauges and counters of a queue, or of all that the caller may read."""
        if command.queue is not None:
            caller.check(Right.READ, command.queue)
            return {command.queue: self._node.queue(command.queue).stats().as_dict()}
        queues = self._node.queues().items()
        return {
            name: queue.stats().as_dict() for name, queue in queues if caller.may(Right.READ, name)
        }

    def create(self, command: Create, _: Caller) -> Answer:
        """Make a queue."""
        known = command.queue in self._node.queues()
        create = self._node.create_for_action if command.by_pipeline else self._node.create
        create(command.queue, **command.knobs)
        return {"created": not known}

    def drop(self, command: OfQueue, _: Caller) -> Answer:
        """Delete a queue with everything in it."""
        self._node.drop(command.queue)
        return {}

    def wait(self, command: WaitBeyond, caller: Caller) -> Answer:
        """Wait until a queue's end is beyond an offset."""
        queue = self._node.queue(command.queue)
        for seconds in Patience(command.timeout, caller.in_vain).slices():
            if queue.wait_beyond(command.beyond, seconds) > command.beyond:
                break
        return {"end": queue.end, "low": queue.low, "queue_id": queue.queue_id}

    def unsettled(self, command: Unsettled, caller: Caller) -> Answer:
        """Offsets that are not settled, waiting until there are some."""
        queue = self._node.queue(command.queue)
        for seconds in Patience(command.timeout, caller.in_vain).slices():
            end = queue.end  # before looking: what comes meanwhile is not waited past
            if queue.stats().ledger.pending:
                break
            queue.wait_beyond(end, seconds)
        room = command.events
        if command.lane is not None:
            self._node.commits.await_filled(queue)
            # No longer than asked for: other nodes may have something meanwhile.
            seconds = min(EMPTY_SECONDS, command.timeout)
            room = min(room, self._room(command, caller, seconds))
            if not (room and self._node.commits.await_emptied(queue, seconds)):
                return {"spans": [], "pending": 0, "end": queue.end, "low": queue.low, "kept": 0}
        newest = command.newest * room // command.events
        found = queue.find_unsettled(room, newest, command.first)
        kept = 0 if command.lane is None else self._node.lanes.kept(command.lane)
        return {**found._asdict(), "low": queue.low, "kept": kept}

    def _room(self, command: Unsettled, caller: Caller, seconds: float) -> int:
        """How many events a lane can commit; waits so long for room.

        A batch that no queue takes would be sent to other outputs for nothing, again and again.
        """
        for name in command.into:
            caller.check(Right.PUBLISH, name)
        room = self._room_now(command)
        if not room:
            time.sleep(seconds)
            room = self._room_now(command)
        return room

    def _room_now(self, command: Unsettled) -> int:
        rooms = (room_of(self._node.queue(name)) for name in command.into)
        return min((each for each in rooms if each is not None), default=command.events)

    def full(self, command: OfRoom, caller: Caller) -> Answer:
        """Which of these queues have no room for what a lane commits."""
        queues = self._node.queues()
        mine = [name for name in command.queues if caller.may(Right.PUBLISH, name)]
        return {"queues": [name for name in mine if name in queues and room_of(queues[name]) == 0]}

    def settle(self, command: SettleSpan, _: Caller) -> Answer:
        """Settle offsets that were read, unless it was from another queue of that name."""
        queue = self._node.queue(command.queue)
        is_meant = command.queue_id in (None, queue.queue_id)
        if is_meant:
            queue.settle(command.first, command.end)
        return {"settled": is_meant}

    def done(self, command: OfLease, caller: Caller) -> Answer:
        """Settle a batch as delivered."""
        self._node.leases.done(self._held(command, caller))
        return {}

    def dead(self, command: OfLease, caller: Caller) -> Answer:
        """Settle a batch as undeliverable."""
        self._node.leases.dead(self._held(command, caller))
        return {}

    def release(self, command: OfLease, caller: Caller) -> Answer:
        """Give a batch back."""
        self._node.leases.release(self._held(command, caller))
        return {}

    def extend(self, command: Extend, caller: Caller) -> Answer:
        """Keep a batch for longer."""
        self._node.leases.extend(self._held(command, caller), command.seconds)
        return {}

    def _held(self, command: OfLease, caller: Caller) -> str:
        caller.check(Right.READ, self._node.leases.find(command.lease).queue)
        return command.lease

    def commit(self, command: CommitStages, caller: Caller) -> Answer:
        """Publish stages and settle ranges in one step."""
        self._check_stages(command.stages, caller)
        ranges = [Range(span.queue, span.first, span.end) for span in command.ranges]
        planned = self._planned(command)
        if planned is not None:
            ranges += planned.settled_by(command.kept, command.dead)
            caller.check(Right.READ, planned.queue)
        for queue in {span.queue for span in ranges}:
            caller.check(Right.READ, queue)
        writer = None if command.writer is None else caller.own(command.writer)
        commit = Commit(command.stages, ranges, writer, command.epoch, command.exact)
        committed = self._node.commits.commit(commit, lambda: self._planned(command))
        if planned is not None:
            self._node.lanes.committed(str(command.lane), command.run, command.kept)
        return {"committed": committed}

    def _planned(self, command: CommitStages) -> Planned | None:
        """What the commit of a lane settles, beside its own ranges."""
        if command.lane is None:
            return None
        lanes = self._node.lanes
        planned = lanes.planned(command.lane, command.run)
        if command.batch is not None and command.batch != planned.batch:
            if command.stages:
                raise LaneTaken(f"lane {command.lane!r} has planned another batch here")
            return None  # nothing of this batch was planned here
        queue = self._node.queues().get(planned.queue)
        if queue is not None and queue.queue_id != planned.queue_id:
            return None  # what was read is no more, and nothing of what is there was read
        # With stages that are still there it is no repeat: what they hold was read elsewhere.
        is_new = any(map(self._node.staging.look, command.stages))
        return None if is_new and lanes.is_committed(command.lane) else planned

    def plan(self, command: Plan, caller: Caller) -> Answer:
        """Note what a lane reads now, for its commit."""
        taken_from = self._node.lanes.queue_of(command.lane)
        if taken_from is not None:
            caller.check(Right.READ, taken_from)
        queue = self._node.queue(command.queue)
        # First of all earlier runs are over: from now on none of them begins a commit.
        nothing = Planned(command.queue, (), command.batch, queue.queue_id)
        self._node.lanes.plan(command.lane, command.run, nothing)
        # One that is under way, of a driver that was killed, say, will have settled what it read.
        if not self._node.commits.await_emptied(queue, PLAN_SECONDS):
            raise RetryLater(f"an earlier commit of events of {command.queue!r} is not through yet")
        # Whoever asked what is not settled may have had the answer late.
        spans = queue.filter_unsettled(command.spans)
        self._node.lanes.plan(command.lane, command.run, nothing._replace(spans=spans))
        return {"spans": spans}

    def planned(self, command: OfRun, caller: Caller) -> Answer:
        """Which of its batches a run of a lane works on."""
        planned = self._node.lanes.planned(command.lane, command.run)
        caller.check(Right.READ, planned.queue)
        return {"batch": planned.batch}

    def purge(self, command: Purge, caller: Caller) -> Answer:
        """Settle events as given up, once it is written down who wanted that."""
        queue = self._node.queue(command.queue)
        spans = queue.filter_unsettled(command.spans)
        events = count_of(spans)
        if events:
            by = caller.authority.identify(caller.bearer)
            about = {"queue": command.queue, "events": events, "why": command.why, "spans": spans}
            self._node.audit.note("purge", by=by, **about)
            for span in spans:
                queue.settle(*span, Outcome.DEAD)
        return {"events": events}

    # ── breakers ─────────────────────────────────────────────────────────────────────────────────

    def permit(self, command: AskPermit, caller: Caller) -> Answer:
        """What an action may send now."""
        asker = self._asker(command, caller)
        permit = self._node.breakers.permit(asker)
        return {**asdict(permit), "share": self._node.breakers.share(asker)}

    def report(self, command: GiveReport, caller: Caller) -> Answer:
        """Take note of how an action's sends went."""
        asker = self._asker(command, caller)
        self._node.breakers.report(asker, command.report)
        if command.ended:
            self._node.breakers.leave(asker)
            return {}
        return {"share": self._node.breakers.share(asker)}

    def claim(self, command: ClaimRate, caller: Caller) -> Answer:
        """How long a task has to wait before it sends so many events."""
        asker = self._asker(command, caller)
        wait = self._node.breakers.claim(asker, command.count, command.within)
        return {"wait": wait, "share": self._node.breakers.share(asker)}

    def _asker(self, command: AskPermit, caller: Caller) -> Asker:
        known = self._node.breakers.all().get(command.action)
        if known is not None:
            caller.check(Right.READ, known.queue)
        return Asker(
            command.action,
            command.queue,
            command.task,
            command.settings,
            command.preparing,
            command.sending,
            command.probe,
            command.workers,
        )

    def breakers(self, command: OfBreakers, caller: Caller) -> Answer:
        """How the breakers are of those actions whose queues the caller may read."""
        return {
            action: breaker.as_dict()
            for action, breaker in self._node.breakers.all().items()
            if caller.may(Right.READ, breaker.queue)
            and (command.actions is None or action in command.actions)
        }

    def reset_breaker(self, command: OfBreaker, caller: Caller) -> Answer:
        """Close a breaker: its destination is said to be back."""
        breaker = self._node.breakers.of(command.action)
        caller.check(Right.ADMIN, breaker.queue)
        breaker.gate.reset()
        log.info("breaker %s was reset", command.action)
        return breaker.as_dict()

    # ── staging ──────────────────────────────────────────────────────────────────────────────────

    def abort(self, command: AbortStages, caller: Caller) -> Answer:
        """Give stages up."""
        self._check_stages(command.stages, caller)
        self._node.commits.abort(command.stages)
        return {}

    def _check_stages(self, stages: list[str], caller: Caller) -> None:
        """Stages that are gone belong to nobody: a commit refuses them, unless it is a repeat."""
        known = filter(None, map(self._node.staging.look, stages))
        for queue in (each.queue for each in known):
            caller.check(Right.PUBLISH, queue)

    def epoch(self, command: OfWriter, caller: Caller) -> Answer:
        """The last epoch that a writer has committed."""
        return {"epoch": self._node.commits.epoch_of(caller.own(command.writer))}


class _Action(NamedTuple):
    command: type[Command]
    do: Callable[..., Answer]
    right: Right | None = None
    """Needed on the command's queue. Without it a token will do, and the action looks closer."""


ACTIONS: Final = {
    "ping": _Action(Nothing, Actions.ping),
    "queues": _Action(Nothing, Actions.queues),
    "stats": _Action(OfQueues, Actions.stats),
    "create": _Action(Create, Actions.create, Right.ADMIN),
    "drop": _Action(OfQueue, Actions.drop, Right.ADMIN),
    "wait": _Action(WaitBeyond, Actions.wait, Right.READ),
    "unsettled": _Action(Unsettled, Actions.unsettled, Right.READ),
    "full": _Action(OfRoom, Actions.full),
    "settle": _Action(SettleSpan, Actions.settle, Right.READ),
    "done": _Action(OfLease, Actions.done),
    "dead": _Action(OfLease, Actions.dead),
    "release": _Action(OfLease, Actions.release),
    "extend": _Action(Extend, Actions.extend),
    "commit": _Action(CommitStages, Actions.commit),
    "plan": _Action(Plan, Actions.plan, Right.READ),
    "planned": _Action(OfRun, Actions.planned),
    "purge": _Action(Purge, Actions.purge, Right.ADMIN),
    "permit": _Action(AskPermit, Actions.permit, Right.READ),
    "report": _Action(GiveReport, Actions.report, Right.READ),
    "claim": _Action(ClaimRate, Actions.claim, Right.READ),
    "breakers": _Action(OfBreakers, Actions.breakers),
    "reset_breaker": _Action(OfBreaker, Actions.reset_breaker),
    "abort": _Action(AbortStages, Actions.abort),
    "epoch": _Action(OfWriter, Actions.epoch),
}
