"""The Flight plane's actions: small questions and orders, answered with one JSON object each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pyarrow as pa

from turnlane.errors import NotSupported
from turnlane.node.commits import Commit, Range
from turnlane.node.flight_commands import (
    AbortStages,
    Command,
    CommitStages,
    Create,
    Extend,
    Nothing,
    OfLease,
    OfQueue,
    OfQueues,
    OfWriter,
    Plan,
    Span,
    WaitBeyond,
    parsed,
)
from turnlane.node.flight_read import Patience
from turnlane.node.node import Node
from turnlane.serving.rights import Authority, Right

Answer = dict[str, Any]


class Caller(NamedTuple):
    """Who asks, and whether the answer would still reach anybody."""

    authority: Authority
    bearer: str | None
    in_vain: Callable[[], bool]

    def check(self, right: Right, queue: str | None) -> None:
        """Raise ``NotAllowed`` unless the caller has the right."""
        self.authority.check(self.bearer, right, queue)

    def own(self, writer: str) -> str:
        """A writer's name, apart from those of other tokens."""
        token = self.authority.identify(self.bearer)
        return writer if token is None else f"{token}\n{writer}"

    def may(self, right: Right, queue: str) -> bool:
        """Whether the caller has the right."""
        return self.authority.allows(self.bearer, right, queue)


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
        return action.do(self, parsed(action.command, body), caller)

    def ping(self, _: Nothing, caller: Caller) -> Answer:
        """Say who you are."""
        caller.authority.identify(caller.bearer)
        return {"instance": self._node.instance, "queues": len(self._node.queues())}

    def queues(self, _: Nothing, caller: Caller) -> Answer:
        """The queues that the caller may use, with their settings."""
        caller.authority.identify(caller.bearer)
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
        caller.authority.identify(caller.bearer)
        queues = self._node.queues().items()
        return {
            name: queue.stats().as_dict() for name, queue in queues if caller.may(Right.READ, name)
        }

    def create(self, command: Create, caller: Caller) -> Answer:
        """Make a queue."""
        caller.check(Right.ADMIN, command.queue)
        known = command.queue in self._node.queues()
        self._node.create(command.queue, **command.knobs)
        return {"created": not known}

    def drop(self, command: OfQueue, caller: Caller) -> Answer:
        """Delete a queue with everything in it."""
        caller.check(Right.ADMIN, command.queue)
        self._node.drop(command.queue)
        return {}

    def wait(self, command: WaitBeyond, caller: Caller) -> Answer:
        """Wait until a queue's end is beyond an offset."""
        caller.check(Right.READ, command.queue)
        queue = self._node.queue(command.queue)
        for seconds in Patience(command.timeout, caller.in_vain).slices():
            if queue.wait_beyond(command.beyond, seconds) > command.beyond:
                break
        return {"end": queue.end, "low": queue.low}

    def settle(self, command: Span, caller: Caller) -> Answer:
        """Settle offsets that were read."""
        caller.check(Right.READ, command.queue)
        self._node.queue(command.queue).settle(command.first, command.end)
        return {}

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
        caller.authority.identify(caller.bearer)
        caller.check(Right.READ, self._node.leases.find(command.lease).queue)
        return command.lease

    def commit(self, command: CommitStages, caller: Caller) -> Answer:
        """Publish stages and settle ranges in one step."""
        caller.authority.identify(caller.bearer)
        self._check_stages(command.stages, caller)
        ranges = [Range(span.queue, span.first, span.end) for span in command.ranges]
        planned = self._planned(command)
        if planned:
            ranges.append(planned)
        for span in ranges:
            caller.check(Right.READ, span.queue)
        writer = None if command.writer is None else caller.own(command.writer)
        commit = Commit(command.stages, ranges, writer, command.epoch)
        committed = self._node.commits.commit(commit)
        if planned:
            self._node.lanes.committed(str(command.lane), command.run)
        return {"committed": committed}

    def _planned(self, command: CommitStages) -> Range | None:
        """What the commit of a lane settles, beside its own ranges."""
        if command.lane is None:
            return None
        lanes = self._node.lanes
        planned = lanes.planned(command.lane, command.run)
        # With stages that are still there it is no repeat: what they hold was read elsewhere.
        is_new = any(map(self._node.staging.queue_of, command.stages))
        return None if is_new and lanes.is_committed(command.lane) else planned

    def plan(self, command: Plan, caller: Caller) -> Answer:
        """Note what a lane reads now, for its commit."""
        for queue in {command.queue, self._node.lanes.queue_of(command.lane) or command.queue}:
            caller.check(Right.READ, queue)
        self._node.queue(command.queue)
        self._node.lanes.plan(command.lane, command.run, command.queue, command.first, command.end)
        return {}

    def abort(self, command: AbortStages, caller: Caller) -> Answer:
        """Give stages up."""
        caller.authority.identify(caller.bearer)
        self._check_stages(command.stages, caller)
        self._node.commits.abort(command.stages)
        return {}

    def _check_stages(self, stages: list[str], caller: Caller) -> None:
        """Stages that are gone belong to nobody: a commit refuses them, unless it is a repeat."""
        for queue in filter(None, map(self._node.staging.queue_of, stages)):
            caller.check(Right.PUBLISH, queue)

    def epoch(self, command: OfWriter, caller: Caller) -> Answer:
        """The last epoch that a writer has committed."""
        return {"epoch": self._node.commits.epoch_of(caller.own(command.writer))}


class _Action(NamedTuple):
    command: type[Command]
    do: Callable[..., Answer]


ACTIONS: Final = {
    "ping": _Action(Nothing, Actions.ping),
    "queues": _Action(Nothing, Actions.queues),
    "stats": _Action(OfQueues, Actions.stats),
    "create": _Action(Create, Actions.create),
    "drop": _Action(OfQueue, Actions.drop),
    "wait": _Action(WaitBeyond, Actions.wait),
    "settle": _Action(Span, Actions.settle),
    "done": _Action(OfLease, Actions.done),
    "dead": _Action(OfLease, Actions.dead),
    "release": _Action(OfLease, Actions.release),
    "extend": _Action(Extend, Actions.extend),
    "commit": _Action(CommitStages, Actions.commit),
    "plan": _Action(Plan, Actions.plan),
    "abort": _Action(AbortStages, Actions.abort),
    "epoch": _Action(OfWriter, Actions.epoch),
}
