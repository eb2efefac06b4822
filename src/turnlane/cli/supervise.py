"""Supervises a running pipeline, with or without a node of its own: start, reload, stop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from turnlane.cli import console
from turnlane.cli.console import ExitCode
from turnlane.cli.process import NodeProcess, Signals, notify_systemd
from turnlane.cli.spark_session import SparkStartup
from turnlane.cli.targets import get_default_endpoint
from turnlane.errors import ConfigError, Never, RetryLater, TurnlaneError

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.config.settings import NodesSettings
    from turnlane.spark.lane import LaneStatus
    from turnlane.spark.pipeline import PipelinePlan, PipelineRunner

POLL_SECONDS: Final = 0.25
"""The time between two checks of the node, of Spark and of the file."""
RETRY_SECONDS: Final = 1.0
"""The time between two attempts to start the lanes."""
LOCKED_SECONDS: Final = 10.0
"""How much longer than its ``shutdown_timeout`` the node of an earlier run may hold the data
directory."""

Report = Callable[..., None]
"""``report(event, message, **fields)``: prints the message for people, or JSON for programs."""
FileStamp = tuple[int, int, int]


class NodeFailed(Never):
    """The node of this run does not start."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the node does not start, exit code {code}")
        self.code = code


class PipelineSupervisor:
    """Runs a pipeline until a signal comes.

    The main thread uses it, except for the work that :meth:`Signals.wait_or` runs on a thread while
    the main thread waits: a start of the lanes, a reload, a stop.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        spark: SparkStartup,
        *,
        report: Report,
        stamp: FileStamp | None,
        node: NodeProcess | None = None,
        endpoint: str | None = None,
        on_cluster: bool = False,
        reloads: bool = True,
    ) -> None:
        """``endpoint`` names the nodes and overrides the configuration, also after a reload.

        ``stamp`` was taken before the file was read: a later change causes a reload.
        """
        self.config = config
        self._first_config = config
        """The configuration of the node and of Spark; the lanes may have a newer one."""
        self._created_queues = config.knobs()
        """All queues since the start, with the knobs that they were created with."""
        self._checkpoints = config.checkpoints().absolute()
        """They stay where they were at the start: elsewhere, lanes would lose their state."""
        self._path = path
        self._spark = spark
        self._report = report
        self._node = node
        self._endpoint = endpoint
        self._on_cluster = on_cluster
        self._reloads = reloads
        self._stamp = self._last_stamp = stamp
        self._runner: PipelineRunner | None = None
        self._spark_starts = spark.starts
        """The start of Spark whose end was not reported yet."""
        self._retry_at = 0.0
        self._started = time.monotonic()
        self._is_ready = self._has_been_ready = False
        """Whether the node is ready, and whether it has been ready once."""
        self._reload_pending = False
        self._stopping = False

    # ── the main loop ────────────────────────────────────────────────────────────────────────────

    def run(self, signals: Signals) -> None:
        """Supervise the pipeline until a signal comes; the caller then calls :meth:`stop`.

        Raises ``ConfigError`` with positions if the pipeline cannot run as it is configured, and
        ``NodeFailed``.
        """
        while signals.poll(POLL_SECONDS) is None:
            self._check_node()
            if self._spark.has_died():
                work: Callable[[], None] | None = self._restart_spark
            else:
                work = self._find_due_work(signals)
            try:
                if work is not None and not signals.wait_or(work):
                    break
            except Exception:
                if not self._spark.has_died():
                    raise
        assert signals.last is not None
        self._report("stopping", f"{signals.last.name}: stopping; signal again to stop at once")

    def _find_due_work(self, signals: Signals) -> Callable[[], None] | None:
        """Return the next thing to do with the lanes, if there is one."""
        running, plan = self._running, self._plan(self.config)
        # A reload may have stopped the lanes and wait for their end: then it starts the new ones.
        is_reloading = running is None and self._reload_pending
        is_time = time.monotonic() >= self._retry_at
        if plan is not None and plan != running and is_time and not is_reloading:
            return partial(self._start_lanes, plan)
        if running is not None:
            self._report_changes()
        can_reload = running is not None or is_reloading
        return self._reload if can_reload and self._is_reload_due(signals) else None

    @property
    def _running(self) -> PipelinePlan | None:
        return None if self._runner is None else self._runner.plan

    def _check_node(self) -> None:
        node = self._node
        if node is None:
            return
        code = node.poll()
        if code is not None:
            self._handle_node_death(code)
        if node.restart_if_due():
            self._report("node", None, state="starting", starts=node.starts)
        if node.ready is not None and not self._is_ready:
            self._is_ready = self._has_been_ready = True
            self._report("node", None, state="ready", **node.ready)

    def _handle_node_death(self, code: int) -> None:
        may_be_locked = time.monotonic() < self._started + self._stop_timeout
        held = code == ExitCode.TEMPORARY and may_be_locked
        # Every start has the same configuration. If it has worked before, the reason is outside of
        # it, such as a certificate, and can go away.
        if not self._has_been_ready and not held:
            raise NodeFailed(code)
        self._is_ready = False
        message = f"node: ended with exit code {code}; starting it again"
        self._report("node", message, state="died", code=code)

    @property
    def _stop_timeout(self) -> float:
        return self._first_config.node.shutdown_timeout + LOCKED_SECONDS

    def _restart_spark(self) -> None:
        """Forget the lanes of a Spark that has died, and start another when it is time."""
        if self._spark_starts == self._spark.starts:
            self._spark_starts += 1
            message = "spark: its process has ended; starting it again"
            self._report("spark", message, state="died", starts=self._spark.starts)
        if self._runner is not None:
            self._runner.abandon()
            self._runner = None
        if self._spark.restart_if_due():
            message = "spark: starting again"
            self._report("spark", message, state="starting", starts=self._spark.starts)

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def _plan(self, config: Config) -> PipelinePlan | None:
        """Return the plan of a configuration; ``None`` while the node's address is unknown."""
        from turnlane.spark.pipeline import PipelinePlan

        pipeline = config.pipeline()
        assert pipeline is not None
        if self._node is not None and self._node.ready is None:
            return None
        return PipelinePlan(pipeline, config.knobs(), self._get_access(config), self._checkpoints)

    def _get_access(self, config: Config) -> dict[str, str]:
        """Return how to reach the nodes: with the first token, if executors have no other."""
        start, nodes = self._first_config.nodes, config.nodes
        if self._on_cluster and has_other_token_variable(start, nodes):
            kept = {"token_env": start.token_env, "token_file": start.token_file}
            nodes = nodes.model_copy(update=kept)
        return {**nodes.access(), "endpoint": self._get_endpoint(config)}

    def _get_endpoint(self, config: Config) -> str:
        given = self._endpoint or config.nodes.endpoint
        if given is not None:
            return given
        if self._node is None:
            return get_default_endpoint(config)
        assert self._node.ready is not None
        return str(self._node.ready["flight"])

    def _start_lanes(self, plan: PipelinePlan) -> None:
        from turnlane.config.settings import convert_option_error
        from turnlane.spark.pipeline import PipelineRunner

        session = self._spark.session()
        if self._stopping:  # since this work was started
            return
        if self._runner is None:
            self._runner = PipelineRunner(session)
        try:
            self._runner.start(plan)
        except RetryLater as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._report("waiting", f"lanes wait: {error}", reason=str(error))
        except ConfigError as error:
            raise self.config.locate(convert_option_error(error)) from None
        else:
            names = list(plan.settings.lane_names())
            message = f"lanes: 1 + {len(names) - 1}: {', '.join(names)}"
            self._report("lanes", message, count=len(names), names=names)
            notify_systemd("READY=1")

    def _report_changes(self) -> None:
        assert self._runner is not None
        for each in self._runner.list_changes():
            self._report("lane", format_lane_status(each), **get_lane_fields(each))

    # ── reloading ────────────────────────────────────────────────────────────────────────────────

    def _is_reload_due(self, signals: Signals) -> bool:
        """Whether the file has to be read again: it has changed, or SIGHUP asked for it."""
        now, before = get_stamp(self._path), self._last_stamp
        self._last_stamp = now
        # An editor may have written only a part of it: it is read once it stays the same.
        has_changed = now is not None and now != self._stamp and now == before
        if signals.hung_up or (self._reloads and has_changed):
            signals.hung_up = False
            self._reload_pending = True
        return self._reload_pending and time.monotonic() >= self._retry_at

    def _reload(self) -> None:
        """Replace the pipeline with the pipeline in the file, or leave everything unchanged."""
        from turnlane.config import load
        from turnlane.service import check

        self._reload_pending = False
        self._stamp = get_stamp(self._path)
        try:
            config = load(self._path)
            if self._node is not None:  # secrets and certificates of nodes elsewhere are there
                check(config)
            self._apply(config)
        except RetryLater as error:
            self._reload_pending = True
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._report("waiting", f"the reload waits: {error}", reason=str(error))
        except TurnlaneError as error:
            issues = str(error).splitlines()
            message = "the changed configuration is rejected, the running one stays"
            text = "\n  ".join([f"{message}:", *issues])
            self._report("reload", text, accepted=False, faults=issues)

    def _apply(self, config: Config) -> None:
        from turnlane.config.settings import convert_option_error
        from turnlane.spark.pipeline import LanesStillRunning
        from turnlane.spark.transforms import find_changed_modules, reload_changed_modules

        assert self._runner is not None
        if config.pipeline() is None:
            raise config.locate(
                ConfigError(
                    "actions", "there are no actions any more; a pipeline needs at least one"
                )
            )
        plan = self._plan(config)
        if plan is None:
            raise RetryLater("the node is not ready")
        started: list[str] = []
        waiting: LanesStillRunning | None = None
        try:
            config.nodes.token()
            if plan != self._running or find_changed_modules():
                with reload_changed_modules():
                    try:
                        started = self._runner.start(plan)
                    except LanesStillRunning as error:  # Other lanes run the new code by now.
                        waiting = error
            if waiting is not None:
                raise waiting
        except ConfigError as error:
            raise config.locate(convert_option_error(error)) from None
        late = list(
            list_restart_sections(
                self._first_config, config, self._created_queues, on_cluster=self._on_cluster
            )
        )
        self._created_queues = {**config.knobs(), **self._created_queues}
        gone = [name for name in self.config.knobs() if name not in config.knobs()]
        self.config = config
        names = list(plan.settings.lane_names())
        message = (
            f"configuration reloaded; lanes: 1 + {len(names) - 1}: {', '.join(names)}; "
            f"started again: {', '.join(started) or 'none'}"
        )
        self._report(
            "reload", message, accepted=True, names=names, started=started, needs_restart=late
        )
        if late:
            self._report(
                "notice", f"takes effect after a restart: {', '.join(late)}", sections=late
            )
        if gone:
            message = (
                f"queues that are not used any more, kept with their events: {', '.join(gone)}"
            )
            self._report("notice", message, queues=gone)

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Stop the lanes, then the node, then Spark; each even if the one before failed."""
        self._stopping = True
        with contextlib.ExitStack() as last:
            last.callback(self._spark.stop)
            if self._node is not None:
                last.callback(self._node.stop, self._stop_timeout)
            if self._runner is not None:
                left = self._runner.stop()
                message = f"not stopped in time: {', '.join(left)}" if left else "stopped"
                self._report("lanes", f"lanes {message}", count=len(left), names=left)


def list_restart_sections(
    start: Config,
    new: Config,
    created: Mapping[str, Mapping[str, Any]],
    *,
    on_cluster: bool = False,
) -> Iterator[str]:
    """Return changed settings that only a restart applies: sections, and queues that exist."""
    for section in ("node", "inputs", "tables", "spark"):
        if getattr(start, section) != getattr(new, section):
            yield section
    if on_cluster and has_other_token_variable(start.nodes, new.nodes):
        yield "nodes.token_env"
    for name, knobs in new.knobs().items():
        if name in created and created[name] != knobs:
            yield f"queue {name}"


def has_other_token_variable(start: NodesSettings, new: NodesSettings) -> bool:
    """Whether the token is in a variable that executors did not get when they started."""
    return new.token_env not in (None, start.token_env)


def format_lane_status(status: LaneStatus) -> str:
    """Return the state of a lane as a line for people."""
    if status.suspension is not None and status.suspended is not None:
        again = f"next try in {max(1, round(status.suspension.wait))}s"
        why = status.suspended.removeprefix(f"{status.name}: ")
        return f"lane {status.name}: suspended: {why}, {again}"
    restarts = f", restarts: {status.restarts}" if status.restarts else ""
    if status.reason:
        return f"lane {status.name}: {status.state}{restarts}: {status.reason}"
    stalled = f", stalled: {status.stalled}" if status.stalled else ""
    collecting = f", {status.collecting}" if status.collecting else ""
    return f"lane {status.name}: {status.state}{restarts}{stalled}{collecting}"


def get_lane_fields(status: LaneStatus) -> Mapping[str, Any]:
    """Return the state of a lane for JSON."""
    return {
        "name": status.name,
        "state": str(status.state),
        "restarts": status.restarts,
        "reason": status.reason,
        "suspended": status.suspended,
        "next_try": None if status.suspension is None else round(status.suspension.wait, 1),
        "collecting": None if status.collecting is None else status.collecting._asdict(),
        "stalled": status.stalled,
        "rows": status.rows,
    }


def get_stamp(path: Path) -> FileStamp | None:
    """Return a value that changes with the file; ``None`` if there is no file."""
    try:
        found = os.stat(path)  # noqa: PTH116 - follows links, as editors replace files
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def make_reporter(*, as_json: bool) -> Report:
    """Return a function that prints events: JSON for programs, else a line for people."""

    def report(event: str, message: str | None, **about: Any) -> None:
        if as_json:
            console.say_json({"event": event, **about})
        elif message is not None:
            console.warn(message)

    return report
