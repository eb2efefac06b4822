"""docs/modules.md lists the modules as they are."""

from __future__ import annotations

from scripts.module_index import PAGE, build_page


def test_module_index_equals_the_docstrings() -> None:
    assert PAGE.read_text() == build_page(), "run: python -m scripts.module_index"
