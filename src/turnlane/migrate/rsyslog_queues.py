"""Queue and action parameters of rsyslog: one rule for each.

A rule sets knobs of the queue, or settings of the lane and the delivery beside it, or adds a
finding. ``docs/migrate.md`` has the same parameters; a test compares them with :data:`QUEUE_RULES`
and :data:`ACTION_RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from turnlane.migrate.draft import Draft, Leaf, Origin
from turnlane.migrate.rsyslog_filters import SEVERITY_NAMES
from turnlane.migrate.rsyslog_syntax import Parameter
from turnlane.units import format_duration, format_size

Parameters = dict[str, Parameter]
"""The parameters of an object by their names in lower case."""

# ── values ───────────────────────────────────────────────────────────────────────────────────────

_SUFFIXES: Final = {
    **{letter: 1024**power for power, letter in enumerate("kmgtpe", start=1)},
    **{letter: 1000**power for power, letter in enumerate("KMGTPE", start=1)},
}


def read_number(text: str) -> int:
    """Return a whole number. Raises ``ValueError``."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text.strip()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def read_amount(text: str) -> int:
    """Return a number with a letter: ``k`` is 1024 and ``K`` is 1000. Raises ``ValueError``."""
    match = re.fullmatch(r"([0-9]{1,18})([kmgtpeKMGTPE]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    factor: int = _SUFFIXES.get(match[2], 1)
    return int(match[1]) * factor


def read_size(text: str) -> str:
    """Return a size in turnlane's form."""
    return format_size(read_amount(text))


def read_milliseconds(text: str) -> str:
    """Return a duration from milliseconds."""
    return format_duration(read_number(text) / 1000)


def read_seconds(text: str) -> str:
    """Return a duration from seconds."""
    return format_duration(read_number(text))


def read_switch(text: str) -> bool:
    """Return whether a switch is on. Raises ``ValueError``."""
    if text.strip().lower() not in {"on", "off", "yes", "no"}:
        raise ValueError(f"{text!r} is neither on nor off")
    return text.strip().lower() in {"on", "yes"}


# ── queues ───────────────────────────────────────────────────────────────────────────────────────

_KINDS: Final = {
    "direct": "direct",
    "fixedarray": "memory",
    "linkedlist": "memory",
    "disk": "disk",
    "segmenteddisk": "disk",
}
_OF_SIZE: Final = frozenset(
    {
        "highwatermark",
        "lowwatermark",
        "fulldelaymark",
        "lightdelaymark",
        "discardmark",
        "discardseverity",
    }
)
"""Parameters whose meaning depends on the size of the queue."""


@dataclass
class QueueDraft:
    """The queue of an action, or the main queue, and the settings beside it."""

    draft: Draft
    parameters: Parameters
    """All parameters of the queue, without the prefix ``queue.``."""
    queue: dict[str, Any]
    lane: dict[str, Any]
    delivery: dict[str, Any] | None
    """None for the main queue."""

    @property
    def kind(self) -> str:
        """The kind of queue in turnlane."""
        default = "direct" if self.delivery is not None else "fixedarray"
        written = self.parameters.get("type")
        kind = _KINDS.get((written.value if written else default).lower(), "memory")
        is_assisted = kind == "memory" and "filename" in self.parameters
        return "disk_assisted" if is_assisted else kind


QueueRule = Callable[[QueueDraft, Parameter], None]


def get_origin(parameter: Parameter) -> Origin:
    """Return where a parameter stands."""
    return Origin(parameter.line, parameter.written, parameter.value)


def to_queue(knob: str, read: Callable[[str], object], *kinds: str) -> QueueRule:
    """Return a rule that sets a knob of the queue, if it has one of these kinds."""

    def convert(queue: QueueDraft, parameter: Parameter) -> None:
        if kinds and queue.kind not in kinds:
            advice = f"a {queue.kind} queue has no {knob}"
            queue.draft.add_missing(get_origin(parameter), advice)
        else:
            queue.draft.set(queue.queue, knob, read(parameter.value), get_origin(parameter))

    return convert


def to_lane(setting: str, read: Callable[[str], object]) -> QueueRule:
    """Return a rule that sets the lane that reads the queue."""
    return lambda queue, parameter: queue.draft.set(
        queue.lane, setting, read(parameter.value), get_origin(parameter)
    )


def leave_out(advice: str) -> QueueRule:
    """Return a rule for a parameter that turnlane does not have."""
    return lambda queue, parameter: queue.draft.add_missing(get_origin(parameter), advice)


def change(advice: str) -> QueueRule:
    """Return a rule for a parameter that is not needed, or means something else."""
    return lambda queue, parameter: queue.draft.add_different(get_origin(parameter), advice)


def _convert_type(queue: QueueDraft, parameter: Parameter) -> None:
    if parameter.value.lower() not in _KINDS:
        raise ValueError(f"rsyslog has no queue of the type {parameter.value!r}")
    comment = get_origin(parameter).describe()
    if "filename" in queue.parameters:
        comment += f", {get_origin(queue.parameters['filename'])}"
    queue.queue["kind"] = Leaf(queue.kind, get_origin(parameter), comment)


def _convert_filename(queue: QueueDraft, parameter: Parameter) -> None:
    if "type" not in queue.parameters:
        queue.queue["kind"] = Leaf(queue.kind, get_origin(parameter))


def _convert_mark(knob: str) -> QueueRule:
    def convert(queue: QueueDraft, parameter: Parameter) -> None:
        number = read_number(parameter.value)
        value = number if number > 0 else None
        if value is None and knob not in {"light_delay_mark", "full_delay_mark"}:
            raise ValueError("must be at least 1")
        if knob.endswith("watermark") and queue.kind != "disk_assisted":
            queue.draft.add_unused(get_origin(parameter), "the queue has no file name")
        else:
            queue.draft.set(queue.queue, knob, value, get_origin(parameter))

    return convert


def _convert_discard_mark(queue: QueueDraft, parameter: Parameter) -> None:
    severity = queue.parameters.get("discardseverity")
    if severity is None or severity.value.strip() == "8":
        queue.draft.add_unused(get_origin(parameter), "queue.discardSeverity is not set")
    else:
        mark = read_number(parameter.value)
        queue.draft.set(queue.queue, "discard_mark", mark, get_origin(parameter))


def _convert_discard_severity(queue: QueueDraft, parameter: Parameter) -> None:
    value = parameter.value.strip().lower()
    number = SEVERITY_NAMES[value] if value in SEVERITY_NAMES else read_number(value)
    if number >= 8:  # below every severity
        queue.draft.add_unused(get_origin(parameter), "8 drops nothing")
        return
    queue.draft.set(queue.queue, "discard_severity", number, get_origin(parameter))
    if "discardmark" not in queue.parameters:
        queue.queue["discard_mark"] = Leaf("98%", comment="rsyslog's default")


def _convert_batch_size(queue: QueueDraft, parameter: Parameter) -> None:
    if queue.delivery is None:
        advice = "the main lane takes batches of its own size; lane.max_events bounds them"
        queue.draft.add_missing(get_origin(parameter), advice)
    else:
        size = read_number(parameter.value)
        queue.draft.set(queue.delivery, "batch_events", size, get_origin(parameter))


def _convert_enqueue_timeout(queue: QueueDraft, parameter: Parameter) -> None:
    if read_number(parameter.value) == 0:
        queue.draft.set(queue.queue, "full_behavior", "drop_newest", get_origin(parameter))
    else:
        queue.draft.add_different(
            get_origin(parameter),
            "a full queue makes publishers wait without a limit and drops nothing; "
            "full_behavior: drop_newest drops at once",
        )


def _convert_sync(queue: QueueDraft, parameter: Parameter) -> None:
    if queue.kind not in {"disk", "disk_assisted"}:
        queue.draft.add_unused(get_origin(parameter), "the queue has no files")
    elif read_switch(parameter.value):
        queue.draft.set(queue.queue, "durability", "always", get_origin(parameter))
    else:
        advice = "turnlane syncs once a second; durability: never leaves it to the system"
        queue.draft.add_different(get_origin(parameter), advice)


def _convert_disk_space(queue: QueueDraft, parameter: Parameter) -> None:
    limit = read_amount(parameter.value)
    if queue.kind == "disk" and limit:
        text = format_size(limit)
        queue.draft.set(queue.queue, "max_bytes", text, get_origin(parameter))
    elif queue.kind == "disk":
        advice = "0 is no limit; turnlane's default is max_bytes: 10Gi"
        queue.draft.add_different(get_origin(parameter), advice)
    else:
        queue.draft.add_missing(
            get_origin(parameter),
            f"the files of a {queue.kind} queue have no limit; use kind: disk with max_bytes, or "
            "a quota of the file system",
        )


def _convert_window(queue: QueueDraft, parameter: Parameter) -> None:
    begin, end = queue.parameters.get("dequeuetimebegin"), queue.parameters.get("dequeuetimeend")
    last = 25 if end is None else read_number(end.value)
    if last >= 25:  # rsyslog's value for off
        queue.draft.add_unused(get_origin(parameter), "queue.dequeueTimeEnd is not set")
    elif parameter is end:
        first = 0 if begin is None else read_number(begin.value)
        window = f"{first:02}:00-{last:02}:00"
        comment = get_origin(parameter).describe()
        if begin is not None:
            comment = f"{get_origin(begin).describe()}, {get_origin(parameter)}"
        queue.queue["dequeue_window"] = Leaf(window, get_origin(parameter), comment)


def _convert_sampling(queue: QueueDraft, parameter: Parameter) -> None:
    if read_number(parameter.value) <= 1:
        queue.draft.add_unused(get_origin(parameter), "0 and 1 keep every message")
    else:
        to_queue("sampling_interval", read_number)(queue, parameter)


def _convert_corruption(queue: QueueDraft, parameter: Parameter) -> None:
    if parameter.value.lower() == "safe":
        advice = "turnlane always does this: unreadable data goes to quarantine"
        queue.draft.add_different(get_origin(parameter), advice)
    else:
        advice = "turnlane always keeps unreadable data in quarantine and goes on"
        queue.draft.add_missing(get_origin(parameter), advice)


QUEUE_RULES: Final[Mapping[str, QueueRule]] = {
    "type": _convert_type,
    "filename": _convert_filename,
    "spooldirectory": leave_out("all queues are below node.data"),
    "size": to_queue("size", read_amount),
    "highwatermark": _convert_mark("high_watermark"),
    "lowwatermark": _convert_mark("low_watermark"),
    "fulldelaymark": _convert_mark("full_delay_mark"),
    "lightdelaymark": _convert_mark("light_delay_mark"),
    "discardmark": _convert_discard_mark,
    "discardseverity": _convert_discard_severity,
    "dequeuebatchsize": _convert_batch_size,
    "mindequeuebatchsize": to_lane("min_events", read_number),
    "mindequeuebatchsize.timeout": to_lane("max_age", read_milliseconds),
    "workerthreads": to_lane("workers", read_number),
    "workerthreadminimummessages": to_lane("worker_minimum_events", read_number),
    "timeoutenqueue": _convert_enqueue_timeout,
    "timeoutshutdown": to_queue("shutdown_timeout", read_milliseconds),
    "timeoutactioncompletion": leave_out(
        "a batch under way comes again after the next start; node.shutdown_timeout bounds a stop"
    ),
    "timeoutworkerthreadshutdown": to_queue("idle_timeout", read_milliseconds),
    "saveonshutdown": to_queue("save_on_shutdown", read_switch, "disk_assisted"),
    "checkpointinterval": change("not needed: turnlane records its position with every change"),
    "syncqueuefiles": _convert_sync,
    "maxfilesize": to_queue("chunk_size", read_size, "disk", "disk_assisted"),
    "maxdiskspace": _convert_disk_space,
    "dequeueslowdown": leave_out(
        "it is a pause after each batch: set rate_limit of delivery, in events per second"
    ),
    "dequeuetimebegin": _convert_window,
    "dequeuetimeend": _convert_window,
    "samplinginterval": _convert_sampling,
    "takeflowctlfrommsg": leave_out("set flow of each input"),
    "cry.provider": leave_out("queues are not encrypted: encrypt the file system of node.data"),
    "oncorruption": _convert_corruption,
    "diskqueuetype": change("not needed: turnlane has one format of files"),
    "diskqueueautoupgrade": change("not needed: turnlane has one format of files"),
    "diskqueueidletimeout": change("not needed: empty files are removed at once"),
}
"""The queue parameters, without ``queue.``; the rules run in this order."""


def convert_queue(queue: QueueDraft) -> None:
    """Convert the parameters of a queue."""
    if queue.delivery is not None and queue.kind == "direct":
        for parameter in queue.parameters.values():
            if parameter.name.removeprefix("queue.") != "type":
                queue.draft.add_unused(get_origin(parameter), "queue.type is Direct")
        return
    if queue.parameters:
        queue.queue["kind"] = Leaf(queue.kind, comment="rsyslog's default")
    for name, rule in QUEUE_RULES.items():
        if name in queue.parameters:
            apply_rule(rule, queue, queue.parameters[name])
    for name, parameter in queue.parameters.items():
        if name not in QUEUE_RULES:
            queue.draft.add_missing(get_origin(parameter), "turnlane has no such setting")
    if not _OF_SIZE.isdisjoint(queue.parameters) and "size" not in queue.parameters:
        size = 50_000 if queue.delivery is None else 1000
        queue.queue["size"] = Leaf(size, comment="rsyslog's default, for the marks")


def apply_rule(rule: QueueRule, queue: QueueDraft, parameter: Parameter) -> None:
    """Apply a rule; a value that it cannot read is a finding."""
    try:
        rule(queue, parameter)
    except ValueError as error:
        queue.draft.add_missing(get_origin(parameter), f"it cannot be converted: {error}")


def set_value(
    draft: Draft,
    place: dict[str, Any],
    setting: str,
    read: Callable[[str], object],
    parameter: Parameter,
) -> None:
    """Set a setting of the draft; a value that cannot be read is a finding."""
    try:
        draft.set(place, setting, read(parameter.value), get_origin(parameter))
    except ValueError as error:
        draft.add_missing(get_origin(parameter), f"it cannot be converted: {error}")


# ── actions ──────────────────────────────────────────────────────────────────────────────────────


def _convert_retries(queue: QueueDraft, parameter: Parameter) -> None:
    if read_number(parameter.value) != -1:
        queue.draft.add_different(
            get_origin(parameter),
            "turnlane keeps events until they are delivered, as rsyslog does with -1; an event "
            "that can never be delivered becomes a dead letter",
        )


def to_delivery(setting: str, read: Callable[[str], object]) -> QueueRule:
    """Return a rule that sets a setting of the delivery."""

    def convert(queue: QueueDraft, parameter: Parameter) -> None:
        assert queue.delivery is not None
        queue.draft.set(queue.delivery, setting, read(parameter.value), get_origin(parameter))

    return convert


ACTION_RULES: Final[Mapping[str, QueueRule]] = {
    "action.resumeretrycount": _convert_retries,
    "action.resumeinterval": to_delivery("backoff", read_seconds),
    "action.resumeintervalmax": to_delivery("max_backoff", read_seconds),
    "action.execonlywhenpreviousissuspended": to_delivery("only_when_suspended", read_switch),
    "action.execonlyeverynthtime": leave_out("give the action a filter, such as rand() < 0.1"),
    "action.execonlyeverynthtimetimeout": leave_out("give the action a filter"),
    "action.execonlyonceeveryinterval": leave_out("count with sql over windows, and send that"),
    "action.errorfile": change("events that cannot be delivered are dead letters: turnlane dlq"),
    "action.errorfile.maxsize": leave_out(
        "bound the queue of dead letters: queues: {NAME.dead: …}"
    ),
    "action.writeallmarkmessages": leave_out("turnlane has no mark messages"),
    "action.repeatedmsgcontainsoriginalmsg": leave_out("turnlane does not join repeated messages"),
    "action.reportsuspension": change("turnlane always logs it: lane … suspended"),
    "action.reportsuspensioncontinuation": change("turnlane always logs it"),
    "action.externalstate.file": leave_out("use turnlane breaker list"),
    "action.ratelimit.name": leave_out("set rate_limit of delivery"),
    "action.copymsg": change("not needed: every action has its own copy"),
}
"""The action parameters that do not depend on the type of the action."""
