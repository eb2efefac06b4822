"""``turnlane run`` and ``turnlane pipeline``: a pipeline, with or without a node of its own."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnlane.cli import console
from turnlane.cli.console import (
    ConfigFile,
    Endpoint,
    ExitCode,
    Form,
    Level,
    LogFormat,
    LogLevel,
    log_to_stderr,
    report_errors,
)
from turnlane.cli.process import NodeProcess, Signals, exit_if_stuck, exit_now, notify_systemd
from turnlane.cli.spark_session import SparkStartup, require_spark, start_session
from turnlane.cli.supervise import (
    FileStamp,
    NodeFailed,
    PipelineSupervisor,
    Report,
    get_stamp,
    make_reporter,
)
from turnlane.cli.targets import (
    get_default_endpoint,
    get_pipeline,
    list_modules_next_to,
    load_config,
    make_modules_importable,
    print_config_errors,
    read_config_text,
)
from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from turnlane.config import Config

Json = Annotated[bool, typer.Option("--json", help="Print what happens as lines of JSON.")]
Reload = Annotated[bool, typer.Option(help="Reload the configuration whenever the file changes.")]
Master = Annotated[
    str | None, typer.Option(help="Where Spark runs; default: the master of CONFIG, or local[*].")
]


@report_errors
def run(
    config: ConfigFile,
    *,
    master: Master = None,
    as_json: Json = False,
    reload: Reload = True,
    log_level: Level = LogLevel.WARNING,
    log_format: Form = LogFormat.TEXT,
) -> None:
    """Run a node and its pipeline on Spark, until SIGTERM or SIGINT.

    The node is a process of its own. SIGHUP, or a change of the file, reloads the pipeline's part
    of the configuration. An invalid configuration is rejected, and the running one stays.
    """
    stamp = get_stamp(config)
    text = read_config_text(config)
    settings = load_config(config, text)
    get_pipeline(settings)
    _check_for_run(settings)
    require_spark()
    log_to_stderr(log_level, log_format)
    options = [f"--log-level={log_level}", f"--log-format={log_format}"]
    with NodeProcess(config, text, options) as node:
        node.start()
        _supervise(
            config,
            settings,
            (master or settings.spark.master, log_level, log_format),
            make_reporter(as_json=as_json),
            stamp=stamp,
            node=node,
            reload=reload,
        )


@report_errors
def pipeline(
    config: ConfigFile,
    *,
    endpoint: Endpoint = None,
    master: Master = None,
    as_json: Json = False,
    reload: Reload = True,
    log_level: Level = LogLevel.WARNING,
    log_format: Form = LogFormat.TEXT,
) -> None:
    """Run only the pipeline, against nodes elsewhere, until SIGTERM or SIGINT.

    Missing queues are created on the nodes; the token needs the right to do that.
    """
    stamp = get_stamp(config)
    settings = load_config(config)
    get_pipeline(settings)
    _check_for_pipeline(settings, endpoint)
    require_spark()
    log_to_stderr(log_level, log_format)
    _supervise(
        config,
        settings,
        (master or settings.spark.master, log_level, log_format),
        make_reporter(as_json=as_json),
        stamp=stamp,
        endpoint=endpoint,
        reload=reload,
    )


def _supervise(
    path: Path,
    settings: Config,
    spark: tuple[str, LogLevel, LogFormat],
    report: Report,
    *,
    stamp: FileStamp | None,
    node: NodeProcess | None = None,
    endpoint: str | None = None,
    reload: bool,
) -> None:
    master, level, log_format = spark
    token = settings.nodes.token_env
    make_modules_importable(path)
    report("spark", "starting Spark")
    startup = SparkStartup(
        lambda: start_session(
            settings.spark,
            master=master,
            level=level,
            log_format=log_format,
            modules=list_modules_next_to(path),
            variables=[] if token is None else [token],
        )
    )
    supervisor = PipelineSupervisor(
        path,
        settings,
        startup,
        report=report,
        stamp=stamp,
        node=node,
        endpoint=endpoint,
        on_cluster=not master.startswith("local"),
        reloads=reload,
    )
    with Signals(hangup=True) as signals:
        try:
            with print_config_errors():
                supervisor.run(signals)
        except NodeFailed as failed:
            assert node is not None
            node.close()
            with contextlib.suppress(Exception):
                signals.wait_or(supervisor.stop)
            console.warn(f"{failed}; the reason is above")
            exit_now(failed.code)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the important one
                supervisor.stop()
            raise
        notify_systemd("STOPPING=1")
        if not signals.wait_or(supervisor.stop):
            report("stopping", "stopping without waiting; signal again to end immediately")
            if node is not None:
                signals.wait_or(node.close)
            exit_now(ExitCode.FAILED)
        report("stopped", "stopped")
    sys.stdout.flush()
    if node is not None:
        node.close()
    exit_if_stuck(0)


def _check_for_pipeline(settings: Config, endpoint: str | None) -> None:
    """Check the token and the address of the nodes before Spark starts."""
    from turnlane.client.address import NodeUrl

    with print_config_errors(settings):
        settings.nodes.token()
    if endpoint is not None or settings.nodes.endpoint is None:
        NodeUrl.parse(endpoint or get_default_endpoint(settings))


def _check_for_run(settings: Config) -> None:
    """Check what a node needs for a pipeline of its own: Flight, and a token if it has tokens."""
    from turnlane.service import check

    check(settings)
    with print_config_errors(settings):
        if not settings.node.flight.enabled:
            raise ConfigError("node.flight.enabled", "must be true: the pipeline reads over Flight")
        if settings.nodes.token() is None and settings.node.tokens:
            message = "need one for the pipeline: name it in nodes.token_env or nodes.token_file"
            raise ConfigError("node.tokens", message)
