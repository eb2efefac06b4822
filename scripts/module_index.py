"""Write docs/modules.md: a line for each module, the first sentence of its docstring.

Run ``python -m scripts.module_index`` after changing one; a test fails until that is done.
"""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/turnlane"
PAGE = ROOT / "docs/modules.md"

INTRODUCTION = """\
# Modules

Every module of `src/turnlane` with the first paragraph of its docstring. The
[architecture](architecture.md) shows how they work together. This page is written by
`python -m scripts.module_index`.
"""


def build_page() -> str:
    """Return the page in Markdown: a table for each package."""
    parts = [INTRODUCTION]
    for folder, paths in groupby(_list_modules(), key=lambda path: path.parent):
        package = folder.relative_to(SOURCE).as_posix()
        title = "turnlane" if package == "." else f"{package}/"
        parts.append(f"## {title}\n\n| module | contents |\n|---|---|")
        parts[-1] += "".join(f"\n| `{path.name}` | {_read_summary(path)} |" for path in paths)
        parts[-1] += "\n"
    return "\n".join(parts)


def _list_modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"), key=lambda path: (path.parent, path.name))


def _read_summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    summary = " ".join(docstring.partition("\n\n")[0].split())
    return summary.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
