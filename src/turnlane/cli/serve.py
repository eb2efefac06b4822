"""``turnlane serve`` and ``turnlane validate``: run a node, or only look at its configuration."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

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
    reported,
)
from turnlane.cli.process import Signals, notify
from turnlane.cli.spark_session import find_modules_beside, need_spark, session
from turnlane.errors import ConfigError, TurnlaneError
from turnlane.runtime import remove_scratch_directories

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.outputs.api import OutputSettings
    from turnlane.pipeline.settings import PipelineSettings
    from turnlane.service import Service

# ── connect ──
# ``turnlane validate --connect``: whether the destinations of a configuration can be reached.


def check_outputs(config: Config) -> int:
    """Try all outputs at once, without delivering anything; how many there are.

    Those that fail are printed with their place in the file and the reason, and the command ends.
    """
    outputs = list(_outputs(config))
    with ThreadPoolExecutor(max(1, len(outputs))) as pool:
        problems = list(pool.map(_problem, (settings for _, settings in outputs)))
    failed = False
    for (place, _), problem in zip(outputs, problems, strict=True):
        if problem is not None:
            failed = True
            typer.echo(str(config.locate(ConfigError(place, problem))), err=True)
    if failed:
        raise typer.Exit(ExitCode.FAILED)
    return len(outputs)


def _outputs(config: Config) -> Iterator[tuple[str, OutputSettings]]:
    """The outputs of all actions, each with its place in the configuration."""
    for number, action in enumerate(config.actions):
        yield f"actions[{number}].output", action.output
        failover = action.delivery.failover
        if failover is not None:
            yield f"actions[{number}].delivery.failover.output", failover.output


def _problem(settings: OutputSettings) -> str | None:
    """Why an output's destination cannot be used now."""
    from turnlane.outputs import api

    try:
        with api.load(settings.type)(settings) as output:
            output.check()
    except TurnlaneError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - an output of somebody's own may raise anything
        return f"{type(error).__name__}: {error}"
    return None


# What a node needs is imported where it is used: other commands start without it.

_LOOK_SECONDS: Final = 0.2
"""How often to see whether inputs that come to an end have."""

MAIN: str = "main"
"""The queue that there is without a configuration."""


@reported
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

    One that only reads the standard input ends when that does.

    The first signal stops in order, within the configured time; a second one waits for nobody; a
    third ends the process at once.
    """
    from turnlane.service import Service

    flags = {"flight": listen_flight, "http": listen_http}
    text = None if text_fd is None else _handed_over(text_fd)
    settings = _settings(config, data, queues or [], flags, text)
    log_to_stderr(log_level, log_format)
    _lift_file_limit()
    with Signals() as signals:
        service = Service(settings).start()
        try:
            if not again:  # else its pipeline runs, with actions that it may have taken since
                service.tell_without_action()
            _announce(service, ready_file, as_json=as_json)
            why = _reason_to_stop(service, signals)
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)
            console.warn(f"{why}: stopping; once more to wait for nobody")
            _stop_in_order(service, signals)
        finally:
            service.stop(0.0)


@reported
def validate(
    config: ConfigFile,
    *,
    show: Annotated[
        bool, typer.Option("--show", help="Print the settings in JSON, defaults included.")
    ] = False,
    with_spark: Annotated[
        bool, typer.Option("--spark", help="Have Spark check filters, SQL and transforms, too.")
    ] = False,
    connect: Annotated[
        bool, typer.Option("--connect", help="Try every output's destination, too.")
    ] = False,
) -> None:
    """Check a configuration: every fault with file, line and column. Exit code 78 if any.

    With --connect, destinations that cannot be used are listed alike; then the exit code is 1.
    """
    from turnlane.config import find_warnings, get_visible_settings
    from turnlane.service import check

    settings = loaded(config)
    check(settings)
    with faults_printed(settings):
        settings.nodes.token()
    if with_spark:
        _check_with_spark(config, settings)
    answered = check_outputs(settings) if connect else None
    for warning in find_warnings(settings):
        console.warn(f"warning: {warning}")
    if show:
        console.say(json.dumps(get_visible_settings(settings), indent=2, ensure_ascii=False))
    else:
        console.say(f"{config}: ok, {', '.join(_counted(settings, answered))}")


def _counted(settings: Config, answered: int | None) -> Iterator[str]:
    parts = [(len(settings.queues), "queue"), (len(settings.inputs), "input")]
    if settings.actions:
        parts.append((len(settings.actions), "action"))
    if answered is not None:
        parts.append((answered, "reachable output"))
    for count, noun in parts:
        yield console.counted(count, noun)


def _check_with_spark(path: Path, settings: Config) -> None:
    pipeline = piped(settings)
    need_spark()
    find_modules_beside(path)
    from turnlane.spark.pipeline import Pipeline

    spark = session(pipeline.spark, master="local[1]")
    try:
        with faults_printed(settings):
            Pipeline(pipeline, {}, spark, settings.checkpoints()).check()
    finally:
        spark.stop()


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def _settings(
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
        return loaded(config, text)
    planes = {name: {"listen": place} for name, place in listen.items() if place is not None}
    wanted: dict[str, Any] = {
        "node": {"data": data, **planes},
        "queues": dict.fromkeys(queues or [MAIN]),
    }
    try:
        return Config.model_validate(wanted)
    except ValidationError as error:
        raise convert_validation_error(error) from None


def _handed_over(descriptor: int) -> str:
    """The configuration that ``turnlane run`` has for its node; the file may be another by now."""
    with open(descriptor, "rb") as file:
        file.seek(0)  # the previous owner has read it to its end
        return file.read().decode()


def written(path: Path) -> str:
    """What a configuration says, for :func:`loaded`."""
    from turnlane.config import read_text

    with faults_printed():
        return read_text(path)


def loaded(path: Path, text: str | None = None) -> Config:
    """Load the settings; print one line for each mistake, in the form that editors read.

    With ``text`` the file is not read: that is what it said.
    """
    from turnlane.config import load, loads

    find_modules_beside(path)  # inputs and outputs may be there, too
    with faults_printed():
        return load(path) if text is None else loads(text, str(path))


def piped(config: Config) -> PipelineSettings:
    """The pipeline that a configuration has; if it has none, that is its fault."""
    pipeline = config.pipeline()
    if pipeline is None:
        with faults_printed(config):
            raise ConfigError("actions", "there are none; turnlane serve runs a node without them")
    return pipeline


@contextlib.contextmanager
def faults_printed(config: Config | None = None) -> Iterator[None]:
    """Print the mistakes in a configuration, with their places, and exit."""
    from turnlane.config import ConfigFileError

    try:
        yield
    except ConfigError as error:
        placed = error if config is None else config.locate(error)
        if not isinstance(placed, ConfigFileError):
            raise
        typer.echo(str(placed), err=True)
        raise typer.Exit(ExitCode.CONFIG) from None


# ── running ──────────────────────────────────────────────────────────────────────────────────────


def _lift_file_limit() -> None:
    """Have as many connections and files as the system allows: the soft limit is for others."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _reason_to_stop(service: Service, signals: Signals) -> str:
    """Sleep until there is one."""
    while service.finishes:
        caught = signals.look(_LOOK_SECONDS)
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
    notify("READY=1")


def _stop_in_order(service: Service, signals: Signals) -> None:
    notify("STOPPING=1")
    if signals.wait_or(service.stop):
        console.warn("stopped")
        leave_if_stuck(0)
    else:
        console.warn("stopping without waiting; once more to end at once")
        signals.wait_or(service.hard_stop)  # one more signal ends the process
        console.warn("stopped; clients that were told nothing will send again")
        leave(ExitCode.FAILED)


def leave_if_stuck(code: int) -> None:
    """A part that did not stop in time must not keep the process from ending."""
    main = threading.main_thread()
    if any(each is not main and not each.daemon for each in threading.enumerate()):
        leave(code)


def leave(code: int) -> NoReturn:
    """End the process now, threads or not."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    remove_scratch_directories()
    os._exit(code)
