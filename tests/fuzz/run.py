"""Runs one fuzz target: ``python -m tests.fuzz.run TARGET [seconds]``.

Coverage guides the search: bytes that reach a new branch are kept in ``.fuzz/TARGET`` and changed
further. The first bytes that break a promise end the run with an error, and are kept in
``.fuzz/crashes``. ``--merge`` adds the kept bytes that reach something new to ``corpus/TARGET``.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import atheris

CORPUS: Final = Path(__file__).parent / "corpus"
PARSERS: Final = {
    "answers": ("outputs.elasticsearch", "outputs.http_client"),
    "bodies": ("serving.http_body",),
    "bulk": ("inputs.elasticsearch", "formats.lines"),
    "fastqueue": ("storage.fastqueue", "storage.frames"),
    "flight_commands": ("node.flight.messages", "validation"),
    "frames": ("storage.frames", "storage.segments", "storage.walk", "storage.encoder"),
    "framing": ("formats.framing", "formats.lines", "formats.syslog"),
    "http_events": ("node.http.events", "events"),
    "journal": ("storage.journal", "storage.journal_records", "intervals"),
    "lines": ("formats.lines",),
    "otlp": ("formats.otlp", "formats.otlp_columns"),
    "proxy_header": ("serving.proxy_header",),
    "statements": ("table.grammar", "table.definition", "table.schedules", "units"),
    "stored_json": ("storage.directory", "node.commit_record", "inputs.files", "node.node"),
    "syslog": ("formats.syslog_columns", "formats.syslog"),
}
"""The modules whose branches guide the search. To instrument all would take ten seconds."""


def main() -> None:
    name, *given = sys.argv[1:]
    with atheris.instrument_imports(["turnlane"], list_other_modules(PARSERS[name])):
        from tests.fuzz import targets
    logging.disable(logging.CRITICAL)  # damaged files are logged, a thousand times a second
    kept, crashes = Path(".fuzz", name), Path(".fuzz", "crashes")
    kept.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(exist_ok=True)
    options = [f"-artifact_prefix={crashes}/{name}-", "-timeout=60", "-max_len=1024"]
    if given == ["--merge"]:
        options += ["-merge=1", str(CORPUS / name), str(kept)]
    elif any(each.startswith("-") for each in given):  # a merge runs this program for its parts
        options = given
    else:
        options += [f"-max_total_time={(given or ['300'])[0]}", "-print_final_stats=1"]
        options += [str(kept), str(CORPUS / name)]
    program = f"{sys.executable} -m tests.fuzz.run {name}"
    atheris.Setup([program, *options], targets.TARGETS[name])
    atheris.Fuzz()


def list_other_modules(chosen: tuple[str, ...]) -> list[str]:
    """Return the names of all modules of turnlane that are not among these, nor in them."""
    package = find_spec("turnlane")  # An import would come before the instrumentation.
    assert package is not None
    assert package.submodule_search_locations is not None
    source = Path(package.submodule_search_locations[0])
    paths = (path.relative_to(source).with_suffix("") for path in source.rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return [
        f"turnlane.{name}"
        for name in names
        if not f"{name}.".startswith(tuple(f"{each}." for each in chosen))
    ]


if __name__ == "__main__":
    main()
