"""What becomes of metrics-governor's keys and flags."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from turnlane.config import loads
from turnlane.errors import ConfigError
from turnlane.migrate.draft import Draft, Verdict
from turnlane.migrate.metrics_governor import (
    FLAGS,
    KEYS,
    convert_settings,
    read_entries,
    read_flags,
)

ALL_KEYS = """
exporter:
  endpoint: http://collector:4318
  protocol: http
  timeout: 45s
  queue:
    type: disk
    enabled: true
    path: ./queue
    max_bytes: 1.5Gi
    full_behavior: drop_oldest
    chunk_size: 512Mi
    meta_sync_interval: 250ms
    stale_flush_interval: 1m30s
    write_buffer_size: 262144
    compression: snappy
    always_queue: true
    workers: 16
    retry_interval: 5s
    max_retry_delay: 10m
    backoff: {enabled: true, multiplier: 1.5}
    circuit_breaker: {enabled: true, threshold: 7, reset_timeout: 45s}
    pipeline_split: {enabled: true, preparer_count: 0, sender_count: 12, channel_size: 256}
    adaptive_workers: {enabled: true, min_workers: 2, max_workers: 24}
memory: {queue_percent: 0.10, limit_ratio: 0.85}
receiver:
  http: {address: "127.0.0.1:4318"}
"""


def convert(text: str, flags: str | None = None) -> tuple[dict[str, Any], Draft]:
    """Return the settings as turnlane reads them, and the draft with its findings."""
    entries = read_entries(text, "config.yaml")
    if flags is not None:
        entries |= read_flags(flags, "--flags")
    draft = convert_settings(entries, "config.yaml")
    made = draft.render()
    loads(made)
    return YAML(typ="safe").load(made), draft


def convert_queue(text: str) -> tuple[dict[str, Any], Draft]:
    made, draft = convert(f"exporter: {{queue: {{{text}}}}}")
    return dict(made["actions"][0]), draft


def findings_of(draft: Draft, verdict: Verdict = Verdict.MISSING) -> list[str]:
    return [each.origin.setting for each in draft.findings if each.verdict is verdict]


def test_values_keep_their_meaning() -> None:
    made, draft = convert(ALL_KEYS)
    (action,) = made["actions"]
    assert made["node"] == {"data": "./queue-turnlane", "memory_limit": "85%"}
    assert made["inputs"] == [{"type": "otlp", "listen": "127.0.0.1:4318", "queue": "main"}]
    assert action["queue"] == {
        "kind": "disk",
        "max_bytes": "1536Mi",
        "full_behavior": "drop_oldest",
        "chunk_size": "512Mi",
        "sync_interval": "250ms",
        "stale_flush": "1m30s",
        "write_buffer": "256Ki",
        "compression": "snappy",
        "memory_percent": "10%",
    }
    assert action["lane"] == {"workers": 16}
    assert action["delivery"] == {
        "mode": "queue",
        "max_in_flight": 16,
        "backoff": "5s",
        "max_backoff": "10m",
        "backoff_multiplier": 1.5,
        "breaker_failures": 7,
        "breaker_reset": "45s",
        "pipelined": True,
        "preparers": 0,
        "senders": 12,
        "channel_size": 256,
        "concurrency": "adaptive",
        "min_concurrency": 2,
        "max_concurrency": 24,
    }
    assert action["output"] == {"type": "otlp", "url": "http://collector:4318", "timeout": "45s"}
    assert findings_of(draft) == []
    assert findings_of(draft, Verdict.DIFFERENT) == ["exporter.queue.path"]


def test_comments_name_the_origin_of_each_value() -> None:
    _, draft = convert(ALL_KEYS, "-queue-chunk-size 128Mi")
    made = draft.render()
    assert "max_bytes: 1536Mi  # line 10: exporter.queue.max_bytes = 1.5Gi" in made
    assert "chunk_size: 128Mi  # -queue-chunk-size = 128Mi" in made
    assert "memory_limit: 85%  # line 25: memory.limit_ratio = 0.85" in made


@pytest.mark.parametrize(
    ("text", "section", "expected"),
    [
        ("backoff: {enabled: false, multiplier: 3}", "delivery", {"backoff_multiplier": 1.0}),
        ("circuit_breaker: {enabled: false, threshold: 3}", "delivery", {"breaker_failures": 0}),
        ("always_queue: false", "delivery", {"mode": "try_direct"}),
        ("workers: 0", "lane", {"workers": 0}),
        ("type: memory, max_bytes: 256Mi", "queue", {"kind": "memory", "max_bytes": "256Mi"}),
        ("adaptive_enabled: true", "queue", {"kind": "memory", "size": "auto"}),
        ("workers: 4, global_send_limit: 9", "delivery", {"max_in_flight": 9}),
        ("max_concurrent_sends: 4", "delivery", {"max_concurrency": 4}),
        ("pipeline_split: {enabled: false}", "delivery", {"pipelined": False}),
        ("retry_interval: 1h", "delivery", {"backoff": "1h", "max_backoff": "1h"}),
    ],
)
def test_switches_and_special_numbers_are_converted(
    text: str, section: str, expected: dict[str, Any]
) -> None:
    action, _ = convert_queue(text)
    assert action[section] == expected


def test_target_utilization_sizes_the_queue_by_itself() -> None:
    action, draft = convert_queue("type: disk, target_utilization: 0.6")
    assert action["queue"] == {"kind": "disk", "size": "auto", "target_utilization": "60%"}
    assert draft.findings == []


def test_target_utilization_beside_max_bytes_is_listed() -> None:
    action, draft = convert_queue("type: disk, max_bytes: 1Gi, target_utilization: 0.6")
    assert action["queue"] == {"kind": "disk", "max_bytes": "1Gi"}
    assert findings_of(draft, Verdict.UNUSED) == ["exporter.queue.target_utilization"]


def test_queue_that_is_switched_off_gives_a_direct_action() -> None:
    action, draft = convert_queue("enabled: false, type: disk")
    assert "queue" not in action
    assert "exporter.queue.enabled" in findings_of(draft, Verdict.DIFFERENT)


def test_counts_of_batches_are_listed() -> None:
    _, draft = convert_queue("max_size: 10000, inmemory_blocks: 2048")
    expected = ["exporter.queue.max_size", "exporter.queue.inmemory_blocks"]
    assert findings_of(draft) == expected


def test_settings_without_effect_are_listed_as_such() -> None:
    _, draft = convert_queue(
        "type: memory, chunk_size: 1Mi, pipeline_split: {channel_size: 5}, "
        "adaptive_workers: {max_workers: 5}, circuit_breaker: {enabled: false, threshold: 5}"
    )
    assert sorted(findings_of(draft, Verdict.UNUSED)) == [
        "exporter.queue.adaptive_workers.max_workers",
        "exporter.queue.chunk_size",
        "exporter.queue.circuit_breaker.threshold",
        "exporter.queue.pipeline_split.channel_size",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "max_bytes: 256MBx",
        "meta_sync_interval: soon, type: disk",
        "full_behavior: explode",
        "backoff: {multiplier: 0.5}",
        "workers: many",
        "circuit_breaker: {enabled: perhaps}",
        "compression: lzma, type: disk",
        "type: tape",
    ],
)
def test_wrong_value_is_listed_and_the_rest_is_converted(text: str) -> None:
    _, draft = convert_queue(text)
    (key,) = findings_of(draft)
    assert key.removeprefix("exporter.queue.") in text.replace(": {", ".")


def test_other_sections_are_listed_one_by_one_without_secrets() -> None:
    _, draft = convert("""
limits: {dry_run: true}
exporter: {auth: {bearer_token: hunter2}, queue: {drain_timeout: 30s}}
stats: {labels: [service, env]}
""")
    assert findings_of(draft) == [
        "limits.dry_run",
        "exporter.auth.bearer_token",
        "exporter.queue.drain_timeout",
        "stats.labels",
    ]
    assert all("hunter2" not in str(each) for each in draft.findings)


def test_receiver_on_all_addresses_stays_reachable_and_is_listed() -> None:
    made, draft = convert('receiver: {grpc: {address: ":4317"}}')
    assert made["inputs"][0]["listen"] == "*:4317"
    assert made["inputs"][0]["insecure"] is True
    assert findings_of(draft, Verdict.DIFFERENT) == ["receiver.grpc.address"]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ('receiver: {http: {address: ":4318"}, tls: {enabled: true}}', None),
        ('receiver: {http: {address: ":4318"}, auth: {enabled: true}}', None),
        ('receiver: {http: {address: ":4318"}}', "-receiver-auth-enabled=true"),
    ],
)
def test_protected_receiver_is_not_opened_without_protection(text: str, flags: str | None) -> None:
    made, draft = convert(text, flags)
    assert made["inputs"] == [{"type": "otlp", "listen": "127.0.0.1:4318", "queue": "main"}]
    assert "receiver.http.address" in findings_of(draft, Verdict.DIFFERENT)


def test_encrypted_export_stays_encrypted() -> None:
    for tls in ("insecure: false", "tls: {enabled: true}"):
        made, _ = convert(f"exporter: {{endpoint: 'otel:4318', protocol: http, {tls}}}")
        assert made["actions"][0]["output"]["url"] == "https://otel:4318"


def test_grpc_endpoint_becomes_http_and_is_listed() -> None:
    made, draft = convert("exporter: {endpoint: otel:4317, insecure: false}")
    assert made["actions"][0]["output"]["url"] == "https://otel:4318"
    assert "exporter.endpoint" in findings_of(draft, Verdict.DIFFERENT)


# ── flags ────────────────────────────────────────────────────────────────────────────────────────

ALL_FLAGS = """
metrics-governor \\
  -queue-enabled true -queue-type disk -queue-path ./queue -queue-max-bytes=2Gi \\
  --queue-full-behavior block -queue-always-queue -queue-workers 0 \\
  -queue-chunk-size 512Mi -queue-meta-sync 1s -queue-stale-flush 30s \\
  -queue-write-buffer-size 256Ki -queue-compression none \\
  -queue-retry-interval 5s -queue-max-retry-delay 5m -queue-backoff-enabled \\
  -queue-backoff-multiplier 2.0 -queue-circuit-breaker-enabled true \\
  -queue-circuit-breaker-threshold 5 -queue-circuit-breaker-reset-timeout 30s \\
  -queue-memory-percent 0.10 -memory-limit-ratio 0.85
"""


def test_file_with_flags_gives_the_same_as_yaml() -> None:
    made, draft = convert(ALL_FLAGS)
    (action,) = made["actions"]
    assert action["queue"]["max_bytes"] == "2Gi"
    assert action["queue"]["full_behavior"] == "block"
    assert action["lane"] == {"workers": 0}
    assert action["delivery"]["backoff"] == "5s"
    assert made["node"]["memory_limit"] == "85%"
    assert findings_of(draft) == []
    assert findings_of(draft, Verdict.DIFFERENT) == ["-queue-path", "-queue-full-behavior"]


def test_flags_win_over_the_file() -> None:
    made, _ = convert("exporter: {queue: {max_bytes: 1Gi}}", "-queue-max-bytes 3Gi")
    assert made["actions"][0]["queue"]["max_bytes"] == "3Gi"


def test_unknown_flag_is_listed() -> None:
    _, draft = convert("{}", "-limits-dry-run -queue-max-size 7")
    assert sorted(findings_of(draft)) == ["-limits-dry-run", "-queue-max-size"]


def test_every_flag_has_a_key_with_a_rule() -> None:
    assert set(FLAGS.values()) <= set(KEYS)


@pytest.mark.parametrize("text", ["-queue-path", "-queue-path 'x", "-a b c", "- x"])
def test_flags_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_flags(text, "--flags")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just text", "{a: 1, a: 2}"])
def test_file_that_is_neither_yaml_nor_flags_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_entries(text, "config.yaml")


VALUES = st.one_of(
    st.text(max_size=12),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.sampled_from(["1s", "0s", "5Mi", "disk", "memory", "true", "0.5", "${X}", "-1", "block"]),
    st.lists(st.integers(), max_size=2),
)


@given(st.dictionaries(st.sampled_from([*KEYS]), VALUES))
def test_any_values_give_yaml_that_turnlane_accepts(values: dict[str, Any]) -> None:
    flags = {key: flag for flag, key in FLAGS.items()}
    entries = {
        key: read_flags(f"-{flags.get(key, key)}=x", "fuzz").popitem()[1]._replace(value=value)
        for key, value in values.items()
    }
    loads(convert_settings(entries, "fuzz").render())


@given(st.text(max_size=100))
def test_any_text_is_converted_or_refused(text: str) -> None:
    try:
        draft = convert_settings(read_entries(text, "fuzz"), "fuzz")
    except ConfigError:
        return
    loads(draft.render())
