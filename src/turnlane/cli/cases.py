"""``turnlane test``: small cases, events in and rows out, on real Spark."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnlane.cli import output
from turnlane.cli.failure import ExitCode, reported
from turnlane.cli.options import ConfigFile
from turnlane.cli.serve import faults_printed, loaded, piped
from turnlane.cli.spark import SparkMissing, find_modules_beside, need_spark, session
from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.pipeline.cases import Case
    from turnlane.pipeline.settings import PipelineSettings
    from turnlane.spark.process import Session


@reported
def try_cases(
    config: ConfigFile,
    cases: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[CASES]…", help="Files with cases; default: those of CONFIG."),
    ] = None,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each case.")
    ] = False,
) -> None:
    """Try cases: events in, and what each action is expected to get. Exit code 1 if one fails."""
    settings = loaded(config)
    pipeline = piped(settings)
    wanted = _cases(settings, cases or [])
    need_spark()
    find_modules_beside(config)
    logging.getLogger("py4j").setLevel(logging.ERROR)
    failed = _tried(settings, pipeline, wanted, as_json=as_json)
    if not as_json:
        output.say(f"{output.counted(len(wanted), 'case')}, {failed} failed")
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _cases(settings: Config, files: list[Path]) -> list[Case]:
    from turnlane.config import load_cases

    with faults_printed():
        wanted = [case for file in files for case in load_cases(file, settings)]
        wanted = wanted if files else list(settings.tests)
        if not wanted:
            raise settings.placed(ConfigError("tests", "there are no cases to try"))
    return wanted


def _tried(
    settings: Config, pipeline: PipelineSettings, cases: list[Case], *, as_json: bool
) -> int:
    """Try all of them; how many failed."""
    from turnlane.spark.pipeline import Pipeline

    spark = session(pipeline.spark, master="local[2]")
    failed = 0
    try:
        with faults_printed(settings):
            Pipeline(pipeline, {}, spark, Path()).check()
        for case in cases:
            found = _found(spark, pipeline, case)
            failed += bool(found)
            _tell(case, found, as_json=as_json)
    finally:
        spark.stop()
    return failed


def _found(spark: Session, pipeline: PipelineSettings, case: Case) -> list[str]:
    """What is not as the case expects; if it cannot be tried to its end, why."""
    from turnlane.pipeline.cases import differences
    from turnlane.spark.cases import Trial
    from turnlane.spark.process import is_alive
    from turnlane.spark.reasons import reason_of

    try:
        return list(differences(case, dict(Trial(spark, pipeline, case).results())))
    except Exception as error:
        if not is_alive():
            raise SparkMissing("Spark's own process has ended") from error
        return [reason_of(error)]


def _tell(case: Case, found: list[str], *, as_json: bool) -> None:
    if as_json:
        output.say_json({"case": case.name, "passed": not found, "differences": found})
        return
    output.say(f"{'FAILED' if found else 'ok    '} {case.name}")
    for line in found:
        output.say(f"       {line}")
