"""docs/queues.md and the settings say the same."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scripts.knob_table import PAGE, with_table
from turnlane.queues.settings import ON_DISK, Kind, QueueSettings

COMPANIONS: dict[str, dict[str, Any]] = {
    "discard_mark": {"discard_severity": 5},
    "discard_severity": {"discard_mark": 1000},
    "target_utilization": {"size": "auto"},
}


def test_table_in_the_docs_equals_the_settings() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run: python -m scripts.knob_table"


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_a_section(kind: Kind) -> None:
    assert f"\n### {kind}\n" in PAGE.read_text()


def test_docs_page_names_only_existing_knobs() -> None:
    text, _, _ = PAGE.read_text().partition("## Errors")
    written = set(re.findall(r"`(\w+): ", text)) | set(re.findall(r"(?m)^(\w+): ", text))
    assert written
    assert written <= set(QueueSettings.model_fields)


@pytest.mark.parametrize("knob", QueueSettings.model_fields)
def test_every_example_is_valid_for_every_kind_it_belongs_to(knob: str) -> None:
    example = (QueueSettings.model_fields[knob].examples or [None])[0]
    for kind in [Kind(example)] if knob == "kind" else QueueSettings.kinds_of(knob):
        needed: dict[str, Any] = {"kind": kind}
        if kind in ON_DISK:
            needed |= {"path": "/orders", "size": 50_000}
        QueueSettings.of(**{**needed, **COMPANIONS.get(knob, {}), knob: example})
