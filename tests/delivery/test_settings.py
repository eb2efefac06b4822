"""Are wrong settings refused with a helpful message?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from turnlane.delivery.settings import DeliverySettings

PAGE = Path(__file__).parents[2] / "docs/delivery.md"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"concurrency": 0}, "at least 1"),
        ({"concurrency": "many"}, "adaptive"),
        ({"min_concurrency": 9, "max_concurrency": 3}, "is more than max_concurrency"),
        ({"backoff": "10m"}, "is more than max_backoff"),
        ({"jitter": 2}, "jitter"),
        ({"backoff": 0, "breaker_failures": 0}, "again without a pause"),
        ({"breaker_failures": 0, "failover": {"output": {}}}, "waits for the breaker to open"),
        ({"backoff_multiplier": 0.5}, "backoff_multiplier"),
        ({"senders": 0}, "senders"),
        ({"channel_size": 0}, "channel_size"),
        ({"ordering": "random"}, "strict"),
        ({"batch_size": 10}, "batch_size"),
        ({"max_time": 0}, "max_time"),
        ({"rate_limit": 0.1}, "is too short for rate_limit"),
    ],
)
def test_impossible_settings_are_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DeliverySettings(**knobs)


def test_durations_and_sizes_with_units_are_parsed() -> None:
    settings = DeliverySettings.model_validate(
        {"backoff": "500ms", "batch_bytes": "2Mi", "failover": {"output": {"type": "file"}}}
    )
    assert (settings.backoff, settings.batch_bytes) == (0.5, 2 << 20)
    assert settings.failover is not None
    assert settings.failover.after == 60


def test_documentation_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"(?m)^\| `(\w+)` \| (\S.*?) \| ", PAGE.read_text()))
    assert rows.keys() == DeliverySettings.model_fields.keys()
    for name, written in rows.items():
        default = getattr(DeliverySettings(), name)
        if written == "none":
            assert default is None
        elif name != "dead_letters":
            read = {"false": False, "true": True}.get(written.strip("`"), written.strip("`"))
            assert getattr(DeliverySettings.model_validate({name: read}), name) == default
