"""From metrics-governor's queue settings, as YAML or as flags of its command line.

Both forms are read into the same keys, and :data:`KEYS` has a rule for each of them. A rule sets
values of the draft, or adds a finding. ``docs/migrate.md`` has the same keys and flags; a test
compares them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from turnlane.config.document import Path, format_path, parse
from turnlane.errors import ConfigError
from turnlane.migrate.draft import Draft, Leaf, Origin, complete_backoff
from turnlane.units import format_duration, format_size, parse_duration, parse_size

QUEUE: Final = "exporter.queue."
ACTION: Final = "exporter"
"""The name of the action, of its queue and of its lane."""

FLAGS: Final[Mapping[str, str]] = {
    "queue-enabled": QUEUE + "enabled",
    "queue-type": QUEUE + "type",
    "queue-path": QUEUE + "path",
    "queue-max-size": QUEUE + "max_size",
    "queue-max-bytes": QUEUE + "max_bytes",
    "queue-full-behavior": QUEUE + "full_behavior",
    "queue-always-queue": QUEUE + "always_queue",
    "queue-workers": QUEUE + "workers",
    "queue-inmemory-blocks": QUEUE + "inmemory_blocks",
    "queue-chunk-size": QUEUE + "chunk_size",
    "queue-meta-sync": QUEUE + "meta_sync_interval",
    "queue-stale-flush": QUEUE + "stale_flush_interval",
    "queue-write-buffer-size": QUEUE + "write_buffer_size",
    "queue-compression": QUEUE + "compression",
    "queue-retry-interval": QUEUE + "retry_interval",
    "queue-max-retry-delay": QUEUE + "max_retry_delay",
    "queue-backoff-enabled": QUEUE + "backoff.enabled",
    "queue-backoff-multiplier": QUEUE + "backoff.multiplier",
    "queue-circuit-breaker-enabled": QUEUE + "circuit_breaker.enabled",
    "queue-circuit-breaker-threshold": QUEUE + "circuit_breaker.threshold",
    "queue-circuit-breaker-reset-timeout": QUEUE + "circuit_breaker.reset_timeout",
    "queue-memory-percent": "memory.queue_percent",
    "memory-limit-ratio": "memory.limit_ratio",
    "queue-adaptive-enabled": QUEUE + "adaptive_enabled",
    "queue-target-utilization": QUEUE + "target_utilization",
    "exporter-endpoint": "exporter.endpoint",
    "exporter-protocol": "exporter.protocol",
    "exporter-timeout": "exporter.timeout",
    "grpc-listen": "receiver.grpc.address",
    "http-listen": "receiver.http.address",
}
"""Each flag with the key that means the same. The last five are not about the queue."""

_SWITCHES: Final = {flag for flag in FLAGS if flag.endswith(("-enabled", "-always-queue"))}
"""Flags that may stand without a value."""
_SECRET: Final = re.compile("token|password|secret|headers|username", re.IGNORECASE)
_TRUTH: Final = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
_PROTECTION: Final = ("tls.enabled", "auth.enabled")
"""Switches of the receiver that protect it; without them in turnlane, it must not be public."""
_DEFAULT_URL: Final = "http://127.0.0.1:4318"


class Entry(NamedTuple):
    """One setting: its value, and where it stands."""

    value: Any
    origin: Origin


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def read_entries(text: str, file: str) -> dict[str, Entry]:
    """Return the settings of a file by their dotted keys; the file has YAML or flags.

    Raises ``ConfigError``.
    """
    lines = map(str.strip, text.replace("\\\n", " ").splitlines())
    if _has_flags(next((line for line in lines if line and not line.startswith("#")), "")):
        return read_flags(text, file)
    document = parse(text, file, os.environ)
    if not isinstance(document.data, dict):
        document.add_issue((), "this is neither metrics-governor's YAML nor a line of its flags")
    document.raise_issues()
    found = {}
    for path, value in _walk((), document.data):
        line = document.find_position(path, of_key=True).line
        name = format_path(path)
        shown = "…" if _SECRET.search(name) and value else value
        found[name] = Entry(value, Origin(line, name, shown))
    return found


def _has_flags(line: str) -> bool:
    """Whether a line is the beginning of a command line, and not of YAML."""
    words = line.split()
    if len(words) > 1 and words[0].endswith("metrics-governor"):
        words.pop(0)
    return bool(words) and re.match("--?[a-z]", words[0]) is not None


def _walk(path: Path, value: object) -> Iterator[tuple[Path, Any]]:
    """Yield every setting that is not a section, with its path."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _walk((*path, key), each)
    elif path:
        yield path, value


def read_flags(text: str, name: str) -> dict[str, Entry]:
    """Return the settings of a command line by their keys: ``-flag value`` and ``-flag=value``.

    Lines may end with a backslash, and the command may come first. Raises ``ConfigError``.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(name, f"cannot be read as a command line: {error}") from None
    words = [word for word in words if word.strip()]
    if words and not words[0].startswith("-"):
        words.pop(0)
    found = {}
    while words:
        word = words.pop(0)
        flag, separator, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not flag:
            raise ConfigError(name, f"{word!r} is not a flag; write -name value or -name=value")
        if not separator:
            is_alone = not words or (words[0].startswith("-") and not words[0][1:2].isdigit())
            is_switch = flag in _SWITCHES and (is_alone or words[0].lower() not in _TRUTH)
            if is_switch or (is_alone and flag not in FLAGS):
                value = "true"
            elif is_alone:
                raise ConfigError(name, f"-{flag} has no value; write -{flag} value")
            else:
                value = words.pop(0)
        shown = "…" if _SECRET.search(flag) else value
        found[FLAGS.get(flag, f"-{flag}")] = Entry(value, Origin(None, f"-{flag}", shown))
    return found


# ── converting ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class GovernorConverter:
    """Builds the draft from the settings; :attr:`KEYS` has the rules."""

    entries: Mapping[str, Entry]
    draft: Draft
    action: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, otherwise: Any) -> Any:  # noqa: ANN401 - any value of YAML
        """Return the value of a queue key."""
        entry = self.entries.get(QUEUE + key)
        return otherwise if entry is None or entry.value is None else entry.value

    def is_on(self, key: str, *, otherwise: bool) -> bool:
        """Whether a switch of the queue is on."""
        return _TRUTH.get(str(self.get(key, otherwise)).lower(), otherwise)

    def has_switch(self, key: str, value: str) -> bool:
        """Whether a switch outside of the queue has this value, in the file or as a flag."""
        flag = "-" + key.replace(".", "-")
        found = [self.entries[name].value for name in (key, flag) if name in self.entries]
        return value in [str(each).lower() for each in found]

    @property
    def kind(self) -> str:
        """The kind of the action's queue."""
        return "disk" if str(self.get("type", "memory")).lower() == "disk" else "memory"

    @property
    def has_fixed_size(self) -> bool:
        """Whether the size of the queue is given in bytes, or as a share of the memory."""
        in_memory = self.kind == "memory" and "memory.queue_percent" in self.entries
        return in_memory or QUEUE + "max_bytes" in self.entries

    def set(self, path: str, value: object, entry: Entry) -> None:
        """Set a value of the action."""
        self.draft.set(self.action, path, value, entry.origin)


Rule = Callable[[GovernorConverter, Entry], None]


def copy_to(path: str, read: Callable[[Any], object] = lambda value: value) -> Rule:
    """Return a rule that sets the action's setting ``path`` to the same value."""

    def convert(converter: GovernorConverter, entry: Entry) -> None:
        converter.set(path, read(entry.value), entry)

    return convert


def leave_out(advice: str) -> Rule:
    """Return a rule for a setting that turnlane does not have."""
    return lambda converter, entry: converter.draft.add_missing(entry.origin, advice)


def read_duration(value: object) -> str:
    """Return a duration of Go, such as ``1m30s``; a plain number is nanoseconds there."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value:
        return format_duration(value / 1e9)
    text = re.sub(r"([0-9.]+)µs", r"\1us", str(value))
    return format_duration(parse_duration(text))


def read_size(value: object) -> str:
    """Return a size such as ``512Mi``."""
    return format_size(parse_size(value))


def read_percent(value: object) -> str:
    """Return a share such as ``0.10`` as ``10%``."""
    share = float(str(value))
    return f"{share * 100:.6g}%"


def read_count(value: object) -> int:
    """Return a whole number."""
    return int(str(value))


def on_disk(path: str, read: Callable[[Any], object]) -> Rule:
    """Return a rule for a setting that only a queue on disk has."""

    def convert(converter: GovernorConverter, entry: Entry) -> None:
        if converter.kind == "disk":
            converter.set(path, read(entry.value), entry)
        else:
            converter.draft.add_unused(entry.origin, "the queue is in memory")

    return convert


def _convert_type(converter: GovernorConverter, entry: Entry) -> None:
    kind = str(entry.value).lower()
    if kind not in {"memory", "disk"}:
        raise ValueError(f"{entry.value!r} is not a type; metrics-governor has memory and disk")
    converter.set("queue.kind", kind, entry)


def _convert_enabled(converter: GovernorConverter, entry: Entry) -> None:
    if not _read_switch(entry.value):
        for leaf in ("queue", "lane"):
            converter.action.pop(leaf, None)
        converter.draft.add_different(
            entry.origin,
            "the action has no queue: the main lane delivers, and events that cannot be delivered "
            "wait in the main queue",
        )


def _convert_path(converter: GovernorConverter, entry: Entry) -> None:
    data = f"{str(entry.value).rstrip('/')}-turnlane"
    converter.draft.set(converter.draft.settings, "node.data", data, entry.origin)
    converter.draft.add_different(
        entry.origin,
        f"turnlane keeps its files in {data}; take over waiting events, while neither program "
        f"runs, with: turnlane queue import {entry.value} {data}/queues/{ACTION}",
    )


def _convert_full_behavior(converter: GovernorConverter, entry: Entry) -> None:
    converter.set("queue.full_behavior", str(entry.value), entry)
    if entry.value == "block":
        advice = "turnlane waits without a limit and drops nothing; metrics-governor waits 30 s"
        converter.draft.add_different(entry.origin, advice)


def _convert_always_queue(converter: GovernorConverter, entry: Entry) -> None:
    mode = "queue" if _read_switch(entry.value) else "try_direct"
    converter.set("delivery.mode", mode, entry)


def _convert_workers(converter: GovernorConverter, entry: Entry) -> None:
    workers = read_count(entry.value)
    converter.set("lane.workers", workers, entry)
    if workers > 0:
        converter.set("delivery.max_in_flight", workers, entry)


def _convert_backoff_switch(converter: GovernorConverter, entry: Entry) -> None:
    if not _read_switch(entry.value):
        converter.set("delivery.backoff_multiplier", 1.0, entry)


def _convert_multiplier(converter: GovernorConverter, entry: Entry) -> None:
    if converter.is_on("backoff.enabled", otherwise=True):
        converter.set("delivery.backoff_multiplier", float(str(entry.value)), entry)
    else:
        converter.draft.add_unused(entry.origin, "backoff.enabled is false")


def _convert_breaker_switch(converter: GovernorConverter, entry: Entry) -> None:
    if not _read_switch(entry.value):
        converter.set("delivery.breaker_failures", 0, entry)


def _convert_threshold(converter: GovernorConverter, entry: Entry) -> None:
    if converter.is_on("circuit_breaker.enabled", otherwise=True):
        converter.set("delivery.breaker_failures", read_count(entry.value), entry)
    else:
        converter.draft.add_unused(entry.origin, "circuit_breaker.enabled is false")


def in_split(path: str, default: str) -> Rule:
    """Return a rule for a number of the pipeline split, where 0 is the default."""

    def convert(converter: GovernorConverter, entry: Entry) -> None:
        count = read_count(entry.value)
        if not converter.is_on("pipeline_split.enabled", otherwise=False):
            converter.draft.add_unused(entry.origin, "pipeline_split.enabled is false")
        elif count or path == "delivery.preparers":
            converter.set(path, count, entry)
        else:
            converter.draft.add_different(entry.origin, f"0 is the default; in turnlane: {default}")

    return convert


def in_adaptive(path: str) -> Rule:
    """Return a rule for a bound of the adaptive workers, where 0 is the default."""

    def convert(converter: GovernorConverter, entry: Entry) -> None:
        count = read_count(entry.value)
        if not converter.is_on("adaptive_workers.enabled", otherwise=False):
            converter.draft.add_unused(entry.origin, "adaptive_workers.enabled is false")
        elif count:
            converter.set(path, count, entry)
        else:
            advice = "0 is the default; in turnlane max_concurrency is 32 for each task"
            converter.draft.add_different(entry.origin, advice)

    return convert


def _convert_adaptive_switch(converter: GovernorConverter, entry: Entry) -> None:
    if _read_switch(entry.value):
        converter.set("delivery.concurrency", "adaptive", entry)
    else:
        converter.draft.add_different(
            entry.origin,
            "turnlane adapts the number of sends by itself; for a fixed number set "
            f"actions.{ACTION}.delivery.concurrency",
        )


def _convert_send_limit(converter: GovernorConverter, entry: Entry) -> None:
    count = read_count(entry.value)
    if count:
        converter.set("delivery.max_in_flight", count, entry)
    else:
        advice = "0 is the default; in turnlane max_in_flight is 64"
        converter.draft.add_different(entry.origin, advice)


def _convert_adaptive_size(converter: GovernorConverter, entry: Entry) -> None:
    if not _read_switch(entry.value):
        return
    if converter.has_fixed_size:
        converter.draft.add_different(
            entry.origin,
            "max_bytes or queue_percent decides the size; to let turnlane compute it from what is "
            "available, write size: auto instead",
        )
    else:
        converter.set("queue.size", "auto", entry)


def _convert_utilization(converter: GovernorConverter, entry: Entry) -> None:
    if converter.has_fixed_size or not converter.is_on("adaptive_enabled", otherwise=True):
        converter.draft.add_unused(entry.origin, "the size of the queue is fixed")
    else:
        if "size" not in converter.action["queue"]:
            converter.set("queue.size", "auto", entry)
        converter.set("queue.target_utilization", read_percent(entry.value), entry)


def _convert_memory_share(converter: GovernorConverter, entry: Entry) -> None:
    if converter.kind == "memory" and QUEUE + "max_bytes" in converter.entries:
        advice = "max_bytes decides; write memory_percent instead of it, not both"
        converter.draft.add_missing(entry.origin, advice)
    else:
        converter.set("queue.memory_percent", read_percent(entry.value), entry)


def _convert_limit_ratio(converter: GovernorConverter, entry: Entry) -> None:
    draft = converter.draft
    draft.set(draft.settings, "node.memory_limit", read_percent(entry.value), entry.origin)


def _convert_endpoint(converter: GovernorConverter, entry: Entry) -> None:
    endpoint = str(entry.value)
    protocol = converter.entries.get("exporter.protocol")
    if "://" not in endpoint:
        has_tls = converter.has_switch("exporter.tls.enabled", "true")
        has_tls = has_tls or converter.has_switch("exporter.insecure", "false")
        endpoint = f"{'https' if has_tls else 'http'}://{endpoint}"
    if protocol is None or str(protocol.value).lower() != "http":
        endpoint = re.sub(r":4317(?=/|$)", ":4318", endpoint)
        converter.draft.add_different(
            entry.origin,
            "turnlane sends OTLP over HTTP, not gRPC: check that the collector has an HTTP "
            f"receiver at {endpoint}",
        )
    converter.set("output.url", endpoint, entry)


def _convert_protocol(converter: GovernorConverter, entry: Entry) -> None:
    if str(entry.value).lower() != "http" and "exporter.endpoint" not in converter.entries:
        advice = "turnlane sends OTLP over HTTP: set the url of the output"
        converter.draft.add_missing(entry.origin, advice)


def listen(kind: str) -> Rule:
    """Return a rule for the address of a receiver."""

    def convert(converter: GovernorConverter, entry: Entry) -> None:
        host, _, port = str(entry.value).rpartition(":")
        is_public = host in {"", "0.0.0.0", "[::]"}  # noqa: S104 - of the other program
        address = f"*:{port}" if is_public else str(entry.value)
        is_open = not host.startswith(("127.", "localhost", "[::1]"))
        if is_open and any(converter.has_switch(f"receiver.{key}", "true") for key in _PROTECTION):
            advice = f"only this machine reaches it: add tls and tokens, then listen on {address}"
            converter.draft.add_different(entry.origin, advice)
            address, is_open = f"127.0.0.1:{port}", False
        made: dict[str, Any] = {"type": Leaf(kind), "listen": Leaf(address, entry.origin)}
        made["queue"] = Leaf("main")
        if is_open:
            made["insecure"] = Leaf(value=True, comment="add tls and tokens, and remove this")
            converter.draft.add_different(
                entry.origin,
                "every client that reaches the address may send, as before: add tls and tokens, "
                "and remove insecure",
            )
        inputs = converter.draft.settings["inputs"] or []
        converter.draft.settings["inputs"] = [*inputs, made]

    return convert


def _read_switch(value: object) -> bool:
    text = str(value).lower()
    if text not in _TRUTH:
        raise ValueError(f"must be true or false, not {value!r}")
    return _TRUTH[text]


KEYS: Final[Mapping[str, Rule]] = {
    QUEUE + "type": _convert_type,
    QUEUE + "path": _convert_path,
    QUEUE + "max_size": leave_out(
        "it counts batches, and turnlane counts events: max_bytes bounds the queue; to bound it by "
        f"number as well, set actions.{ACTION}.queue.size to batches × events of a batch"
    ),
    QUEUE + "max_bytes": copy_to("queue.max_bytes", read_size),
    QUEUE + "full_behavior": _convert_full_behavior,
    QUEUE + "adaptive_enabled": _convert_adaptive_size,
    QUEUE + "target_utilization": _convert_utilization,
    QUEUE + "inmemory_blocks": leave_out(
        "it counts batches: set queue.memory_bytes to blocks × bytes of a batch (default 64Mi)"
    ),
    QUEUE + "chunk_size": on_disk("queue.chunk_size", read_size),
    QUEUE + "meta_sync_interval": on_disk("queue.sync_interval", read_duration),
    QUEUE + "stale_flush_interval": on_disk("queue.stale_flush", read_duration),
    QUEUE + "write_buffer_size": on_disk("queue.write_buffer", read_size),
    QUEUE + "compression": on_disk("queue.compression", str),
    QUEUE + "always_queue": _convert_always_queue,
    QUEUE + "workers": _convert_workers,
    QUEUE + "retry_interval": copy_to("delivery.backoff", read_duration),
    QUEUE + "max_retry_delay": copy_to("delivery.max_backoff", read_duration),
    QUEUE + "backoff.enabled": _convert_backoff_switch,
    QUEUE + "backoff.multiplier": _convert_multiplier,
    QUEUE + "circuit_breaker.enabled": _convert_breaker_switch,
    QUEUE + "circuit_breaker.threshold": _convert_threshold,
    QUEUE + "circuit_breaker.reset_timeout": copy_to("delivery.breaker_reset", read_duration),
    QUEUE + "pipeline_split.enabled": copy_to("delivery.pipelined", _read_switch),
    QUEUE + "pipeline_split.preparer_count": in_split("delivery.preparers", "one for each core"),
    QUEUE + "pipeline_split.sender_count": in_split("delivery.senders", "as many as concurrency"),
    QUEUE + "pipeline_split.channel_size": in_split("delivery.channel_size", "two more than sends"),
    QUEUE + "adaptive_workers.enabled": _convert_adaptive_switch,
    QUEUE + "adaptive_workers.min_workers": in_adaptive("delivery.min_concurrency"),
    QUEUE + "adaptive_workers.max_workers": in_adaptive("delivery.max_concurrency"),
    QUEUE + "max_concurrent_sends": copy_to("delivery.max_concurrency", read_count),
    QUEUE + "global_send_limit": _convert_send_limit,
    # After all others: it may remove the queue that they have filled.
    QUEUE + "enabled": _convert_enabled,
    "memory.queue_percent": _convert_memory_share,
    "memory.limit_ratio": _convert_limit_ratio,
    "exporter.endpoint": _convert_endpoint,
    "exporter.protocol": _convert_protocol,
    "exporter.timeout": copy_to("output.timeout", read_duration),
    "receiver.grpc.address": listen("otlp_grpc"),
    "receiver.http.address": listen("otlp"),
}
"""The keys that have a rule, in the order in which the rules run."""

_OTHER_SECTIONS: Final = {
    "limits": "turnlane has no cardinality limits: keep metrics-governor in front for them",
    "stats": "turnlane serves its metrics at /metrics of node.http",
    "buffer": "set batch_events, batch_bytes and batch_age of delivery",
    "telemetry": "turnlane serves its metrics at /metrics of node.http",
    "receiver": "see the settings of the inputs otlp and otlp_grpc: tls, tokens, limits",
    "exporter": "see the settings of the output otlp: tls, auth, headers, compression",
    "performance": "not needed: nothing to do",
}


def convert_settings(entries: Mapping[str, Entry], file: str) -> Draft:
    """Return the draft of a configuration."""
    draft = Draft(f"From metrics-governor: {file}")
    draft.settings["node"]["data"] = Leaf("./data")
    converter = GovernorConverter(entries, draft)
    converter.action |= {"name": Leaf(ACTION), "queue": {"kind": Leaf(converter.kind)}}
    converter.action |= {"lane": {}, "delivery": {}}
    converter.action["output"] = {
        "type": Leaf("otlp"),
        "url": Leaf(_DEFAULT_URL, comment="the collector: no exporter.endpoint was given"),
    }
    for key, rule in KEYS.items():
        if key not in entries:
            continue
        entry = entries[key]
        try:
            if entry.value is not None:
                rule(converter, entry)
        except ValueError as error:
            draft.add_missing(entry.origin, f"it cannot be converted: {error}")
    for key, entry in entries.items():
        if key not in KEYS:
            section = key.partition(".")[0]
            advice = _OTHER_SECTIONS.get(section, "turnlane has no such setting")
            draft.add_missing(entry.origin, advice)
    complete_backoff(converter.action["delivery"])
    draft.settings["actions"] = [converter.action]
    return draft
