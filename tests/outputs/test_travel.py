"""Do the settings of an output reach the tasks unchanged? They are sent as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnlane.outputs import api

SETTINGS: dict[str, dict[str, Any]] = {
    "file": {"path": "out/%Y", "rotate_size": "1Mi", "compress": "zstd", "keep": 3},
    "queue": {"endpoint": "turnlanes://a:1", "queue": "q", "tls": {"ca": "ca"}, "timeout": "5s"},
    "spark": {"format": "parquet", "path": "out", "files": 2, "partition_by": ["day"]},
    "sql": {
        "url": "mysql://root@host/db",
        "table": "t",
        "columns": {"id": "event_id"},
        "key": ["id"],
        "tls": {"verify": False},
        "exactly_once": True,
    },
    "syslog": {"address": "[::1]:514", "protocol": "udp", "columns": {"message": "payload"}},
    "table": {
        "shards": [
            {"url": "sqlite:///a.db", "range": "-80"},
            {"url": "sqlite:///b.db", "range": "80-"},
        ],
        "table": "t",
        "columns": {"fire_at": "timestamp"},
        "delay": "90s",
        "password_file": "secret",
    },
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_survive_the_way_to_a_task(kind: str) -> None:
    model = api.load(kind).settings_type
    given = model.model_validate({"type": kind, **SETTINGS[kind]})
    arrived = model.model_validate(json.loads(json.dumps(given.model_dump(mode="json"))))
    assert arrived == given
