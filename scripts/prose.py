"""Count stilted phrases in docstrings, comments and Markdown, for each 10,000 words.

Usage: scripts/prose.py [--list] [--limit RATE] [DIR...]   (default: src docs tests)

An aid for editing, not a target. `--list` prints the places, `--limit` fails above a rate.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PATTERNS = {
    "what is/was ... as a noun": r"\b[Ww]hat (is|was|were|has|had|comes|goes|there)\b",
    "somebody/nobody": r"\b(somebody|nobody|anybody|everybody)\b",
    "one that/those that": r"\b(one that|those that|those who|ones that)\b",
    "whoever/whatever": r"\b(whoever|whatever|whichever|wherever)\b",
    "meanwhile/anew/for ever": (
        r"\b(meanwhile|likewise|anew|thereby|in vain|for ever|for want of|but for)\b"
    ),
    "so many/so long": r"\bso (many|much|long|far|often|few)\b",
    "is to be": (r"\b(is|are|was|were) to (be|have|go|come|take|do|wait|end|begin|stop|say|see)\b"),
    "have X done": (
        r"\b[Hh]ave (an?|the|it|what|some|all|every|somebody|events|one|nobody|who)"
        r" \w+ (be|to|\w+ed)\b"
    ),
    "that of/those of": r"\b(that of|those of|the one of)\b",
    "from X on": r"\bfrom (here|now|there|then|which|it|the \w+|that) on\b",
}


def read_python_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings and comments with their numbers."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else []:
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                for at, line in enumerate(item.value.value.splitlines()):
                    yield item.lineno + at, line
    for at, line in enumerate(source.splitlines(), 1):
        found = re.search(r"(?:^|\s)#\s(.*)", line)
        if found and "noqa" not in line and "type: ignore" not in line:
            yield at, found.group(1)


def read_markdown_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines outside of code blocks with their numbers."""
    is_code = False
    for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield at, line


READERS = {".py": read_python_prose, ".md": read_markdown_prose}


def measure(root: Path, *, with_places: bool) -> float:
    """Print how many phrases were found below `root`; return the rate."""
    words = 0
    hits = dict.fromkeys(PATTERNS, 0)
    for path in sorted(root.rglob("*")):
        reader = READERS.get(path.suffix)
        if reader is None:
            continue
        for at, line in reader(path):
            words += len(re.findall(r"[A-Za-z']+", line))
            for name, pattern in PATTERNS.items():
                count = len(re.findall(pattern, line))
                hits[name] += count
                if count and with_places:
                    print(f"{path}:{at}: {line.strip()[:110]}")
    rate = 10_000 * sum(hits.values()) / max(1, words)
    print(f"{root}: {rate:.1f} stilted phrases per 10,000 words ({sum(hits.values())} in {words})")
    return rate


def main() -> int:
    """Measure every directory; fail if one is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "directories", nargs="*", type=Path, default=[Path("src"), Path("docs"), Path("tests")]
    )
    parser.add_argument("--list", action="store_true", dest="with_places", help="print the places")
    parser.add_argument("--limit", type=float, help="the highest rate that is accepted")
    options = parser.parse_args()
    rates = [measure(each, with_places=options.with_places) for each in options.directories]
    return int(options.limit is not None and max(rates) >= options.limit)


if __name__ == "__main__":
    sys.exit(main())
