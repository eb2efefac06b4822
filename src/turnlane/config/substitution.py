"""``${VAR}`` in a scalar: substituted after parsing, so a value can never change the structure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_REFERENCE: Final = re.compile(
    r"""\$(?:
        (?P<escaped>\$)
        | \{(?P<name>[A-Za-z_][A-Za-z0-9_]*)
            (?: :-(?P<default>[^{}]*) | :\?(?P<message>[^{}]*) )?
          \}
        | (?P<malformed>\{)
    )""",
    re.VERBOSE,
)
_HELP: Final = "write ${VAR}, ${VAR:-default} or ${VAR:?message}, and $$ for a dollar sign"


def substituted(text: str, environment: Mapping[str, str]) -> str:
    """The text with its variables filled in. Raises ``ValueError`` that says what is missing."""
    return _REFERENCE.sub(lambda match: _value(match, environment), text)


def _value(match: re.Match[str], environment: Mapping[str, str]) -> str:
    if match["escaped"]:
        return "$"
    if match["malformed"]:
        raise ValueError(f"a variable is not written so; {_HELP}")
    name, default, message = match["name"], match["default"], match["message"]
    value = environment.get(name)
    if default is not None:
        return value or default
    if message is not None and not value:
        raise ValueError(f"variable {name} is not set: {message or 'it is required'}")
    if value is None:
        raise ValueError(f"variable {name} is not set; set it, or write ${{{name}:-default}}")
    return value
