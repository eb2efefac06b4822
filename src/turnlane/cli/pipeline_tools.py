"""``turnlane test``, ``graph`` and ``init``: try, draw and begin a pipeline."""

from __future__ import annotations

import logging
import shutil
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnlane.cli import console
from turnlane.cli.console import ConfigFile, ExitCode, report_errors
from turnlane.cli.spark_session import SparkMissing, require_spark, start_session
from turnlane.cli.targets import get_pipeline, load_config, print_config_errors
from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.inputs.api import InputSettings
    from turnlane.pipeline.cases import Case
    from turnlane.pipeline.graph import Topology
    from turnlane.pipeline.settings import ActionSettings, PipelineSettings
    from turnlane.spark.session import Session


@report_errors
def try_cases(
    config: ConfigFile,
    cases: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[CASES]…", help="Files with cases; default: the cases of CONFIG."),
    ] = None,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each case.")
    ] = False,
) -> None:
    """Try cases: events in, expected rows of each action out. Exit code 1 if one fails."""
    settings = load_config(config)
    pipeline = get_pipeline(settings)
    wanted = _select_cases(settings, cases or [])
    require_spark()
    logging.getLogger("py4j").setLevel(logging.ERROR)
    failed = _try_all(settings, pipeline, wanted, as_json=as_json)
    if not as_json:
        console.say(f"{console.format_count(len(wanted), 'case')}, {failed} failed")
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _select_cases(settings: Config, files: list[Path]) -> list[Case]:
    from turnlane.config import load_cases

    with print_config_errors():
        wanted = [case for file in files for case in load_cases(file, settings)]
        wanted = wanted if files else list(settings.tests)
        if not wanted:
            raise settings.locate(ConfigError("tests", "there are no cases to try"))
    return wanted


def _try_all(
    settings: Config, pipeline: PipelineSettings, cases: list[Case], *, as_json: bool
) -> int:
    """Try all cases; return how many failed."""
    from turnlane.spark.pipeline import Pipeline

    spark = start_session(pipeline.spark, master="local[2]")
    failed = 0
    try:
        with print_config_errors(settings):
            Pipeline(pipeline, {}, spark, Path()).check()
        for case in cases:
            found = _find_differences(spark, pipeline, case)
            failed += bool(found)
            _print_result(case, found, as_json=as_json)
    finally:
        spark.stop()
    return failed


def _find_differences(spark: Session, pipeline: PipelineSettings, case: Case) -> list[str]:
    """Return the differences from the case, or the reason why it could not run."""
    from turnlane.pipeline.cases import find_differences
    from turnlane.spark.checks import CaseTrial
    from turnlane.spark.errors import describe_failure
    from turnlane.spark.session import is_jvm_alive

    try:
        return list(
            find_differences(case, dict(CaseTrial(spark, pipeline, case).collect_results()))
        )
    except Exception as error:
        if not is_jvm_alive():
            raise SparkMissing("Spark's own process has ended") from error
        return [describe_failure(error)]


def _print_result(case: Case, found: list[str], *, as_json: bool) -> None:
    if as_json:
        console.say_json({"case": case.name, "passed": not found, "differences": found})
        return
    console.say(f"{'FAILED' if found else 'ok    '} {case.name}")
    for line in found:
        console.say(f"       {line}")


# ── turnlane graph ───────────────────────────────────────────────────────────────────────────────


@report_errors
def graph(
    config: ConfigFile,
    *,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an SVG picture instead; - is stdout.")
    ] = None,
) -> None:
    """Draw the topology: inputs, main queue, actions with their filters, queues, outputs."""
    from turnlane.pipeline.graph import render_svg, render_text

    topology = build_topology(load_config(config))
    if svg is None:
        for line in render_text(topology, shutil.get_terminal_size((100, 24)).columns):
            console.say(line)
    elif str(svg) == "-":
        typer.echo(render_svg(topology), nl=False)
    else:
        svg.write_text(render_svg(topology), encoding="utf-8")
        console.warn(f"drawn in {svg}")


def build_topology(config: Config) -> Topology:
    """Return the topology to draw. Raises ``ConfigError`` without a pipeline."""
    from turnlane.config import get_visible_settings
    from turnlane.pipeline.graph import InputSummary, Topology

    pipeline = config.pipeline()
    if pipeline is None:
        raise config.locate(ConfigError("actions", "there are none, so there is nothing to draw"))
    inputs = tuple(
        InputSummary(each.label, _describe_place(each), each.queue) for each in config.inputs
    )
    kinds = {name: str(knobs.get("kind", "disk")) for name, knobs in config.knobs().items()}
    actions = tuple(map(_hide_secrets, pipeline.actions, get_visible_settings(config)["actions"]))
    return Topology(inputs, pipeline.model_copy(update={"actions": actions}), kinds)


def _hide_secrets(action: ActionSettings, shown: dict[str, Any]) -> ActionSettings:
    """Return an action without secrets and variables, like ``turnlane validate --show``."""
    from turnlane.pipeline.graph import LOCATION_SETTINGS

    places = {name: shown["output"][name] for name in LOCATION_SETTINGS if name in shown["output"]}
    output = action.output.model_copy(update=places)
    return action.model_copy(update={"filter": shown["filter"], "output": output})


def _describe_place(settings: InputSettings) -> str:
    """Return the addresses and paths of an input."""
    from turnlane.serving.address import Address

    found = []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        listen = getattr(value, "listen", None)
        if isinstance(value, Address):
            found.append(str(value) if name == "listen" else f"{name} {value}")
        elif isinstance(listen, Address):
            found.append(f"{name} {listen}")
        elif name in {"path", "paths"} and value:
            paths = value if isinstance(value, list | tuple) else [value]
            found.append(", ".join(map(str, paths)))
    return ", ".join(found)


# ── turnlane init ────────────────────────────────────────────────────────────────────────────────


@report_errors
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("turnlane.yaml"),
) -> None:
    """Write a commented example of a pipeline's configuration. An existing file stays."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(read_example())
    except FileExistsError:
        console.warn(f"{path} exists; choose another name, or remove it")
        raise typer.Exit(ExitCode.FAILED) from None
    console.say(f"{path} written; next: turnlane validate {path}, turnlane run {path}")


def read_example() -> str:
    """Return the text of the example."""
    return resources.files("turnlane.config").joinpath("example.yaml").read_text(encoding="utf-8")
