"""``turnlane run`` and ``turnlane pipeline``: the pipeline, with a node of its own or without."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnlane.cli.console import (
    ConfigFile,
    Endpoint,
    ExitCode,
    Form,
    Level,
    LogFormat,
    LogLevel,
    log_to_stderr,
    reported,
)
from turnlane.cli.node_process import NodeProcess
from turnlane.cli.process import Signals, notify
from turnlane.cli.serve import faults_printed, leave, leave_if_stuck, loaded, piped, written
from turnlane.cli.spark_session import find_modules_beside, modules_beside, need_spark, session
from turnlane.cli.supervise import (
    NodeFailed,
    Opening,
    Operation,
    Report,
    Stamp,
    reporter,
    stamp,
)
from turnlane.cli.targets import default_endpoint
from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.spark.session import Session

Json = Annotated[bool, typer.Option("--json", help="Tell what happens in lines of JSON.")]
Reload = Annotated[
    bool, typer.Option(help="Take the configuration anew whenever the file changes.")
]
Master = Annotated[
    str | None, typer.Option(help="Where Spark runs; default: what CONFIG says, or local[*].")
]


@reported
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

    The node is a process of its own. SIGHUP, or a change of the file, has the pipeline's part of
    the configuration taken anew; one with mistakes is rejected, and the running one goes on.
    """
    seen = stamp(config)
    text = written(config)
    settings = loaded(config, text)
    piped(settings)
    _check_for_run(settings)
    need_spark()
    log_to_stderr(log_level, log_format)
    options = [f"--log-level={log_level}", f"--log-format={log_format}"]
    with NodeProcess(config, text, options) as node:
        node.start()
        _operate(
            config,
            settings,
            _session(config, settings, master, log_level),
            reporter(as_json=as_json),
            seen=seen,
            node=node,
            on_cluster=_on_cluster(settings, master),
            reload=reload,
        )


@reported
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

    Queues that the nodes lack are made there; that takes a token with the right to.
    """
    seen = stamp(config)
    settings = loaded(config)
    piped(settings)
    _check_for_pipeline(settings, endpoint)
    need_spark()
    log_to_stderr(log_level, log_format)
    _operate(
        config,
        settings,
        _session(config, settings, master, log_level),
        reporter(as_json=as_json),
        seen=seen,
        endpoint=endpoint,
        on_cluster=_on_cluster(settings, master),
        reload=reload,
    )


def _session(
    path: Path, settings: Config, master: str | None, level: LogLevel
) -> Callable[[], Session]:
    token = settings.nodes.token_env
    return lambda: session(
        settings.spark,
        master=master,
        level=level,
        modules=modules_beside(path),
        variables=[] if token is None else [token],
    )


def _on_cluster(settings: Config, master: str | None) -> bool:
    return not (master or settings.spark.master).startswith("local")


def _operate(
    path: Path,
    settings: Config,
    make: Callable[[], Session],
    report: Report,
    *,
    seen: Stamp | None,
    node: NodeProcess | None = None,
    endpoint: str | None = None,
    on_cluster: bool,
    reload: bool,
) -> None:
    find_modules_beside(path)
    report("spark", "starting Spark")
    opening = Opening(make)
    operation = Operation(
        path,
        settings,
        opening,
        report=report,
        seen=seen,
        node=node,
        endpoint=endpoint,
        on_cluster=on_cluster,
        reloads=reload,
    )
    with Signals(hangup=True) as signals:
        try:
            with faults_printed():
                operation.run(signals)
        except NodeFailed as failed:
            assert node is not None
            node.close()
            with contextlib.suppress(Exception):
                signals.wait_or(operation.stop)
            leave(failed.code)  # the node has said itself why
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong before is what counts
                operation.stop()
            raise
        notify("STOPPING=1")
        if not signals.wait_or(operation.stop):
            report("stopping", "stopping without waiting; once more to end at once")
            if node is not None:
                signals.wait_or(node.close)
            leave(ExitCode.FAILED)
        report("stopped", "stopped")
    sys.stdout.flush()
    if node is not None:
        node.close()
    leave_if_stuck(0)


def _check_for_pipeline(settings: Config, endpoint: str | None) -> None:
    """That the nodes may be reached, before Spark is started for it."""
    from turnlane.client.address import NodeUrl

    with faults_printed(settings):
        settings.nodes.token()
    if endpoint is not None or settings.nodes.endpoint is None:
        NodeUrl.parse(endpoint or default_endpoint(settings))


def _check_for_run(settings: Config) -> None:
    """What a node may be without, and its own pipeline not."""
    from turnlane.service import check

    check(settings)
    with faults_printed(settings):
        if not settings.node.flight.enabled:
            raise ConfigError("node.flight.enabled", "must be true: the pipeline reads over Flight")
        if settings.nodes.token() is None and settings.node.tokens:
            message = "need one for the pipeline: name it in nodes.token_env or nodes.token_file"
            raise ConfigError("node.tokens", message)
