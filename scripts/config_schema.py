"""Write docs/config.schema.json, the JSON Schema of a configuration, from the settings themselves.

Run ``python -m scripts.config_schema`` after changing a setting; a test fails until that is done.
"""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

from turnlane.config import json_schema

FILE = Path(__file__).parents[1] / "docs/config.schema.json"


def text() -> str:
    """The file's contents: with turnlane's own inputs and outputs, whatever else is installed."""
    schema = json_schema(_own("turnlane.inputs"), _own("turnlane.outputs"))
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _own(group: str) -> list[str]:
    points = entry_points(group=group)
    return sorted(
        point.name for point in points if point.dist is not None and point.dist.name == "turnlane"
    )


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
