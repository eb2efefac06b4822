"""``turnlane serve`` and ``turnlane validate``: run a node, or only check its configuration.

The modules of a node are imported where they are used: other commands start without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from turnlane.cli import console
from turnlane.cli.console import (
    ConfigFile,
    ExitCode,
    Form,
    Level,
    LogFormat,
    LogLevel,
    OptionalConfig,
    log_to_stderr,
    report_errors,
)
from turnlane.cli.process import Signals, exit_if_stuck, exit_now, notify_systemd
from turnlane.cli.spark_session import require_spark, start_session
from turnlane.cli.targets import get_pipeline, load_config, print_config_errors
from turnlane.errors import ConfigError, TurnlaneError

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.outputs.api import OutputSettings
    from turnlane.service import Service

_POLL_SECONDS: Final = 0.2
"""The time between two checks whether all finite inputs have ended."""

MAIN: Final = "main"
"""The only queue without a configuration and without ``--queue``."""


@report_errors
def serve(
    config: OptionalConfig = None,
    *,
    data: Annotated[
        Path | None, typer.Option(help="Without a CONFIG: the data directory, made if needed.")
    ] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", help="With --data: a queue to have; again for more. [main]"),
    ] = None,
    listen_flight: Annotated[
        str | None, typer.Option(help="With --data: where Flight listens. [127.0.0.1:8815]")
    ] = None,
    listen_http: Annotated[
        str | None, typer.Option(help="With --data: where HTTP listens. [127.0.0.1:8088]")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write this file, in JSON, once everything listens.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON once everything listens.")
    ] = False,
    text_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    again: Annotated[bool, typer.Option("--again", hidden=True)] = False,
    log_level: Level = LogLevel.INFO,
    log_format: Form = LogFormat.TEXT,
) -> None:
    """Run a node: its queues, Flight, HTTP and inputs, until SIGTERM or SIGINT.

    A node that only reads the standard input ends at its end.

    The first signal stops in order, within the configured time; a second one stops at once; a third
    ends the process immediately.
    """
    from turnlane.service import Service

    flags = {"flight": listen_flight, "http": listen_http}
    text = None if text_fd is None else _read_passed_text(text_fd)
    settings = _make_settings(config, data, queues or [], flags, text)
    log_to_stderr(log_level, log_format)
    _raise_file_limit()
    with Signals() as signals:
        service = Service(settings).start()
        try:
            if not again:  # else the pipeline runs, and may have other actions since a reload
                service.warn_of_unread_queues()
            _announce(service, ready_file, as_json=as_json)
            why = _wait_for_reason_to_stop(service, signals)
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)
            reports = text_fd is None  # otherwise `turnlane run` reports that it stops
            if reports:
                console.warn(f"{why}: stopping; signal again to stop at once")
            _stop_in_order(service, signals, reports=reports)
        finally:
            service.stop(0.0)


@report_errors
def validate(
    config: ConfigFile,
    *,
    show: Annotated[
        bool, typer.Option("--show", help="Print the settings in JSON, defaults included.")
    ] = False,
    with_spark: Annotated[
        bool, typer.Option("--spark", help="Let Spark check filters, SQL and transforms too.")
    ] = False,
    connect: Annotated[
        bool, typer.Option("--connect", help="Try to reach the destination of every output too.")
    ] = False,
) -> None:
    """Check a configuration: every issue with file, line and column. Exit code 78 if any.

    With --connect, destinations that cannot be used are listed too; then the exit code is 1.
    """
    from turnlane.config import find_warnings, get_visible_settings
    from turnlane.service import check

    settings = load_config(config)
    check(settings)
    with print_config_errors(settings):
        settings.nodes.token()
        _check_installed(settings)
    if with_spark:
        _check_with_spark(settings)
    answered = check_outputs(settings) if connect else None
    for warning in find_warnings(settings):
        console.warn(f"warning: {warning}")
    if show:
        console.say(json.dumps(get_visible_settings(settings), indent=2, ensure_ascii=False))
    else:
        console.say(f"{config}: ok, {', '.join(_format_counts(settings, answered))}")


def _format_counts(settings: Config, answered: int | None) -> Iterator[str]:
    pipeline = settings.pipeline()
    dead = () if pipeline is None else pipeline.dead_letter_queues
    queues = set(settings.knobs()) - (set(dead) - set(settings.queues))
    parts = [(len(queues), "queue"), (len(settings.inputs), "input")]
    if settings.actions:
        parts.append((len(settings.actions), "action"))
    if answered is not None:
        parts.append((answered, "reachable output"))
    for count, noun in parts:
        yield console.format_count(count, noun)


def _check_installed(settings: Config) -> None:
    """Check that the drivers of databases and the modules of transforms can be imported.

    Without Spark only a warning is printed: ``turnlane serve`` does not need it.
    """
    from turnlane.config import find_missing_drivers
    from turnlane.validation import ConfigIssue, ConfigIssues, get_message

    issues = list(find_missing_drivers(settings))
    transforms = {"transform": settings.transform} | {
        f"actions[{at}].transform": action.transform for at, action in enumerate(settings.actions)
    }
    try:
        if settings.actions:
            from turnlane.spark.transforms import find_transform
    except ImportError as error:
        console.warn(f"warning: turnlane run cannot run the actions here: {error}")
        transforms = {}
    for knob, name in transforms.items():
        try:
            if name is not None:
                find_transform(name)
        except ConfigError as error:
            issues.append(ConfigIssue(knob, get_message(error)))
    if issues:
        raise ConfigIssues(issues)


def _check_with_spark(settings: Config) -> None:
    pipeline = get_pipeline(settings)
    require_spark()
    from turnlane.spark.pipeline import Pipeline

    spark = start_session(pipeline.spark, master="local[1]")
    try:
        with print_config_errors(settings):
            Pipeline(pipeline, {}, spark, settings.checkpoints()).check()
    finally:
        spark.stop()


# ── destinations ─────────────────────────────────────────────────────────────────────────────────


def check_outputs(config: Config) -> int:
    """Try to reach all destinations at once, without delivering anything; return their number.

    Failures are printed with their positions in the file, and the command ends.
    """
    outputs: dict[str, OutputSettings] = {}
    for number, action in enumerate(config.actions):
        outputs[f"actions[{number}].output"] = action.output
        failover = action.delivery.failover
        if failover is not None:
            outputs[f"actions[{number}].delivery.failover.output"] = failover.output
    with ThreadPoolExecutor(max(1, len(outputs))) as pool:
        messages = list(pool.map(_check_output, outputs.values()))
    for knob, message in zip(outputs, messages, strict=True):
        if message is not None:
            typer.echo(str(config.locate(ConfigError(knob, message))), err=True)
    if any(messages):
        raise typer.Exit(ExitCode.FAILED)
    return len(outputs)


def _check_output(settings: OutputSettings) -> str | None:
    """Return why the destination of an output cannot be used now."""
    from turnlane.outputs import api

    try:
        with api.load(settings.type)(settings) as output:
            output.check()
    except TurnlaneError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a user's own output may raise anything
        return f"{type(error).__name__}: {error}"
    return None


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def _make_settings(
    config: Path | None,
    data: Path | None,
    queues: list[str],
    listen: Mapping[str, str | None],
    text: str | None = None,
) -> Config:
    from pydantic import ValidationError

    from turnlane.config import Config
    from turnlane.validation import convert_validation_error

    if (config is None) == (data is None):
        raise typer.BadParameter("give a CONFIG, or --data DIR")
    if config is not None:
        if queues or any(listen.values()):
            raise typer.BadParameter("--queue and --listen-… are for --data; write them in CONFIG")
        return load_config(config, text)
    planes = {name: {"listen": place} for name, place in listen.items() if place is not None}
    wanted: dict[str, Any] = {
        "node": {"data": data, **planes},
        "queues": dict.fromkeys(queues or [MAIN]),
    }
    try:
        return Config.model_validate(wanted)
    except ValidationError as error:
        raise convert_validation_error(error) from None


def _read_passed_text(descriptor: int) -> str:
    """Read the configuration that ``turnlane run`` passes on; the file may have changed since."""
    with open(descriptor, "rb") as file:
        file.seek(0)  # the previous node has read it to its end
        return file.read().decode()


# ── running ──────────────────────────────────────────────────────────────────────────────────────


def _raise_file_limit() -> None:
    """Allow as many connections and files as the hard limit of the system."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _wait_for_reason_to_stop(service: Service, signals: Signals) -> str:
    """Wait for a signal or for the end of all inputs; return its name."""
    while service.finishes:
        caught = signals.poll(_POLL_SECONDS)
        if caught is not None:
            return caught.name
        if service.finished:
            return "end of input"
    return signals.wait().name


def _announce(service: Service, ready_file: Path | None, *, as_json: bool) -> None:
    for each in service.listening():
        where = "" if each.where is None else f" on {each.where}"
        queue = "" if each.queue is None else f" into queue {each.queue}"
        console.warn(f"{each.what}{where}{queue}")
    about = {"pid": os.getpid(), **service.as_dict()}
    if ready_file is not None:
        partial = ready_file.with_name(f"{ready_file.name}.part")
        partial.write_text(json.dumps(about) + "\n", encoding="utf-8")
        partial.replace(ready_file)
    if as_json:
        console.say_json(about)
        sys.stdout.flush()
    console.warn("ready")
    notify_systemd("READY=1")


def _stop_in_order(service: Service, signals: Signals, *, reports: bool) -> None:
    notify_systemd("STOPPING=1")
    if signals.wait_or(service.stop):
        if reports:
            console.warn("stopped")
        exit_if_stuck(0)
    else:
        console.warn("stopping without waiting; signal again to end immediately")
        signals.wait_or(service.hard_stop)  # one more signal ends the process
        console.warn("stopped; clients without an answer will send again")
        exit_now(ExitCode.FAILED)
