"""SQL in which the short way into JSON, ``data:http.status::int``, is null where it does not fit.

Spark's own cast of such a value fails instead, whatever its settings: one event in which the status
is no number would stop the lane, and stop it again whenever it is tried again. Pure.
"""

from __future__ import annotations

import re
from typing import Final

_WORD: Final = r"(?:[A-Za-z_]\w*|`[^`]+`)"
_STEP: Final = rf"(?:\.\s*{_WORD}|\[\s*(?:\d+|'[^'\\]*'|\"[^\"\\]*\")\s*\])"
_WAY: Final = rf"{_WORD}(?:\s*\.\s*{_WORD})*\s*:\s*(?:{_WORD}|\[[^\]]*\]){_STEP}*"
_TYPE: Final = (
    r"(?:(?:array|map|struct)\s*<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>"
    r"|\w+(?:\s*\(\s*\d+\s*(?:,\s*\d+\s*)?\))?)"
)
_TOKEN: Final = re.compile(
    rf"""
      (?P<literal>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|--[^\n]*|/\*.*?\*/)
    | \bcast\s*\(\s*(?P<inner>{_WAY})\s+as\b
    | (?P<way>(?<![\w`.:]){_WAY})\s*::\s*(?P<type>{_TYPE})
    | `[^`]*`
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def tolerant(sql: str) -> str:
    """The same query or condition, with casts of values in JSON that give null if they fail."""
    return _TOKEN.sub(_rewritten, sql)


def _rewritten(found: re.Match[str]) -> str:
    if found["inner"] is not None:
        return f"try_cast({found['inner']} AS"
    if found["way"] is not None:
        return f"try_cast({found['way']} AS {found['type']})"
    return found[0]
