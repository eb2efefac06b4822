"""A running pipeline, with a node of its own or without: looked after, and stopped in order."""

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
from turnlane.cli.node_process import NodeProcess, ends_for_good
from turnlane.cli.process import Signals, notify
from turnlane.cli.spark_session import SparkMissing
from turnlane.cli.targets import default_endpoint
from turnlane.errors import ConfigError, Never, RetryLater, TurnlaneError
from turnlane.runtime import start_thread

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.config.settings import NodesSettings
    from turnlane.spark.lane import LaneStatus
    from turnlane.spark.pipeline import PipelinePlan, PipelineRunner
    from turnlane.spark.session import Session

LOOK_SECONDS: Final = 0.25
"""How often everything is looked after."""
AGAIN_SECONDS: Final = 1.0
"""How long after a failed attempt to start the lanes the next one is made."""
SPARK_SECONDS: Final = 30.0
"""How long a stop waits for a Spark that is still starting: left alone, it would leave files."""
LOCKED_SECONDS: Final = 10.0
"""How much longer than a stop may take a directory may be held by the node of an earlier run."""

Report = Callable[..., None]
Stamp = tuple[int, int, int]


class NodeFailed(Never):
    """The node of this run does not start."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the node does not start, exit code {code}")
        self.code = code


class Operation:
    """Used by the main thread, except :meth:`start_lanes` and :meth:`stop`."""

    def __init__(
        self,
        path: Path,
        config: Config,
        opened: Opening,
        *,
        report: Report,
        seen: Stamp | None,
        node: NodeProcess | None = None,
        endpoint: str | None = None,
        on_cluster: bool = False,
        reloads: bool = True,
    ) -> None:
        """``endpoint`` names the nodes and overrides the configuration, also after a reload.

        ``seen`` is the file's stamp from before it was read: what changes after that is news.
        """
        self.config = config
        self._begun_with = config
        """The configuration of the node and of Spark; the lanes may have a newer one."""
        self._made = config.knobs()
        """The queues of the start and of every reload: each keeps the knobs it was made with."""
        self._checkpoints = config.checkpoints().absolute()
        """Those of the start: elsewhere, lanes would have no state and sinks another beginning."""
        self._path = path
        self._opening = opened
        self._report = report
        self._node = node
        self._endpoint = endpoint
        self._on_cluster = on_cluster
        self._reloads = reloads
        self._seen = seen
        self._runner: PipelineRunner | None = None
        self._again_at = 0.0
        self._begun = time.monotonic()
        self._was_ready = False
        self._pending = False
        """Whether the file has to be read again."""
        self._stopping = False

    # ── looking after it ─────────────────────────────────────────────────────────────────────────

    def run(self, signals: Signals) -> None:
        """Go on until a signal ends it; returns after an orderly stop.

        Raises ``ConfigError`` with its places if the pipeline cannot run as it is configured, and
        ``NodeFailed``.
        """
        while (caught := signals.look(LOOK_SECONDS)) is None:
            self._look_after_node()
            self._opening.check()
            work = self._due(signals)
            if work is not None and not signals.wait_or(work):
                break
        name = "signal" if caught is None else caught.name
        self._report("stopping", f"{name}: stopping; once more to wait for nobody")

    def _due(self, signals: Signals) -> Callable[[], None] | None:
        """The next thing to do with the lanes, if there is one."""
        running, plan = self._running, self._plan(self.config)
        # A reload may have stopped them and wait for their end: not they are wanted then.
        gave_way = running is None and self._pending
        is_time = time.monotonic() >= self._again_at
        if plan is not None and plan != running and is_time and not gave_way:
            return partial(self._start_lanes, plan)
        if running is not None:
            self._tell_changes()
        wanted = (running is not None or gave_way) and self._is_changed(signals)
        return self._reload if wanted else None

    @property
    def _running(self) -> PipelinePlan | None:
        return None if self._runner is None else self._runner.plan

    def _look_after_node(self) -> None:
        node = self._node
        if node is None:
            return
        code = node.look()
        if code is not None:
            self._node_died(code)
        if node.start_again():
            self._report("node", "node: starting again", state="starting", starts=node.starts)
        if node.ready is not None and not self._was_ready:
            self._was_ready = True
            self._report("node", None, state="ready", **node.ready)

    def _node_died(self, code: int) -> None:
        held = code == ExitCode.TEMPORARY and time.monotonic() < self._begun + self._patience
        never_ran = self._running is None and not self._was_ready
        if ends_for_good(code) or (never_ran and not held):
            raise NodeFailed(code)
        self._was_ready = False
        message = f"node: ended with exit code {code}; starting it again"
        self._report("node", message, state="died", code=code)

    @property
    def _patience(self) -> float:
        return self._begun_with.node.shutdown_timeout + LOCKED_SECONDS

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def _plan(self, config: Config) -> PipelinePlan | None:
        """What a configuration wants to run; ``None`` as long as the node's address is unknown."""
        from turnlane.spark.pipeline import PipelinePlan

        pipeline = config.pipeline()
        assert pipeline is not None
        if self._node is not None and self._node.ready is None:
            return None
        return PipelinePlan(pipeline, config.knobs(), self._access(config), self._checkpoints)

    def _access(self, config: Config) -> dict[str, str]:
        """How the nodes are reached: with the token of the start, if executors have no other."""
        start, nodes = self._begun_with.nodes, config.nodes
        if self._on_cluster and is_of_another_variable(start, nodes):
            kept = {"token_env": start.token_env, "token_file": start.token_file}
            nodes = nodes.model_copy(update=kept)
        return {**nodes.access(), "endpoint": self._where(config)}

    def _where(self, config: Config) -> str:
        given = self._endpoint or config.nodes.endpoint
        if given is not None:
            return given
        if self._node is None:
            return default_endpoint(config)
        assert self._node.ready is not None
        return str(self._node.ready["flight"])

    def _start_lanes(self, plan: PipelinePlan) -> None:
        from turnlane.config.settings import convert_option_error
        from turnlane.spark.pipeline import PipelineRunner

        session = self._opening.session()
        if self._stopping:  # meanwhile
            return
        if self._runner is None:
            self._runner = PipelineRunner(session)
        try:
            self._runner.start(plan)
        except RetryLater as error:
            self._again_at = time.monotonic() + AGAIN_SECONDS
            self._report("waiting", f"lanes wait: {error}", reason=str(error))
        except ConfigError as error:
            raise self.config.locate(convert_option_error(error)) from None
        else:
            names = list(plan.settings.lane_names())
            message = f"lanes: 1 + {len(names) - 1}: {', '.join(names)}"
            self._report("lanes", message, count=len(names), names=names)
            notify("READY=1")

    def _tell_changes(self) -> None:
        assert self._runner is not None
        for each in self._runner.list_changes():
            self._report("lane", _said(each), **_about(each))

    # ── reloading ────────────────────────────────────────────────────────────────────────────────

    def _is_changed(self, signals: Signals) -> bool:
        """Whether the file has to be read again: it has changed, or SIGHUP asked for it."""
        now = stamp(self._path)
        if signals.hung_up or (self._reloads and now is not None and now != self._seen):
            signals.hung_up = False
            self._seen = now
            self._pending = True
        return self._pending and time.monotonic() >= self._again_at

    def _reload(self) -> None:
        """Replace the pipeline with the pipeline in the file, or leave everything unchanged."""
        from turnlane.config import load
        from turnlane.service import check

        self._pending = False
        try:
            config = load(self._path)
            if self._node is not None:  # secrets and certificates of nodes elsewhere are there
                check(config)
            self._take(config)
        except RetryLater as error:
            self._pending = True
            self._again_at = time.monotonic() + AGAIN_SECONDS
            self._report("waiting", f"the reload waits: {error}", reason=str(error))
        except TurnlaneError as error:
            faults = str(error).splitlines()
            message = "the changed configuration is rejected, the running one stays"
            text = "\n  ".join([f"{message}:", *faults])
            self._report("reload", text, accepted=False, faults=faults)

    def _take(self, config: Config) -> None:
        from turnlane.config.settings import convert_option_error
        from turnlane.spark.transforms import find_changed_modules, reload_changed_modules

        assert self._runner is not None
        if config.pipeline() is None:
            raise config.locate(ConfigError("actions", "there are none any more"))
        plan = self._plan(config)
        if plan is None:
            raise RetryLater("the node is not ready")
        try:
            config.nodes.token()
            if plan != self._running or find_changed_modules():
                with reload_changed_modules():
                    self._runner.start(plan)
        except ConfigError as error:
            raise config.locate(convert_option_error(error)) from None
        late = list(
            needs_restart(self._begun_with, config, self._made, on_cluster=self._on_cluster)
        )
        self._made = {**config.knobs(), **self._made}
        gone = [name for name in self.config.knobs() if name not in config.knobs()]
        self.config = config
        names = list(plan.settings.lane_names())
        message = f"configuration reloaded; lanes: 1 + {len(names) - 1}: {', '.join(names)}"
        self._report("reload", message, accepted=True, names=names, needs_restart=late)
        if late:
            self._report("notice", f"taken only by a restart: {', '.join(late)}", sections=late)
        if gone:
            message = f"queues without use now, kept with what is in them: {', '.join(gone)}"
            self._report("notice", message, queues=gone)

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """Stop the lanes, then the node, then Spark; each also if those before it failed."""
        self._stopping = True
        with contextlib.ExitStack() as last:
            last.callback(self._opening.stop)
            if self._node is not None:
                last.callback(self._node.stop, self._patience)
            if self._runner is not None:
                left = self._runner.stop()
                message = f"not stopped in time: {', '.join(left)}" if left else "stopped"
                self._report("lanes", f"lanes {message}", count=len(left), names=left)


class Opening:
    """Opens a Spark session on a thread of its own, since that takes its time."""

    def __init__(self, make: Callable[[], Session]) -> None:
        self._make = make
        self._made: Session | None = None
        self._error: Exception | None = None
        self._thread = start_thread("turnlane-spark", self._run)

    def _run(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:  # noqa: BLE001 - raised to whoever wants the session
            self._error = error

    def session(self) -> Session:
        """The session, once it is there. Raises what kept it from being made."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made

    def check(self) -> None:
        """Raise ``SparkMissing`` if Spark was there and has gone: no lane can run again."""
        if self._made is None:
            return
        from turnlane.spark.session import is_jvm_alive

        if not is_jvm_alive():
            raise SparkMissing("Spark's own process has ended; start turnlane again")

    def stop(self) -> None:
        """End the session, if there is one or comes soon."""
        self._thread.join(SPARK_SECONDS)
        if self._made is not None:
            self._made.stop()


def needs_restart(
    start: Config,
    new: Config,
    made: Mapping[str, Mapping[str, Any]],
    *,
    on_cluster: bool = False,
) -> Iterator[str]:
    """What differs from the start, or from a queue as it was made, and lanes alone cannot take."""
    for section in ("node", "inputs", "tables", "spark"):
        if getattr(start, section) != getattr(new, section):
            yield section
    if on_cluster and is_of_another_variable(start.nodes, new.nodes):
        yield "nodes.token_env"
    for name, knobs in new.knobs().items():
        if name in made and made[name] != knobs:
            yield f"queue {name}"


def is_of_another_variable(start: NodesSettings, new: NodesSettings) -> bool:
    """Whether the token is in a variable that was not handed to executors when they started."""
    return new.token_env not in (None, start.token_env)


def _said(status: LaneStatus) -> str:
    if status.suspension is not None and status.suspended is not None:
        again = f"next try in {max(1, round(status.suspension.wait))}s"
        why = status.suspended.removeprefix(f"{status.name}: ")
        return f"lane {status.name}: suspended: {why}, {again}"
    restarts = f", restarts: {status.restarts}" if status.restarts else ""
    reason = f": {status.reason}" if status.reason else ""
    return f"lane {status.name}: {status.state}{restarts}{reason}"


def _about(status: LaneStatus) -> Mapping[str, Any]:
    return {
        "name": status.name,
        "state": str(status.state),
        "restarts": status.restarts,
        "reason": status.reason,
        "suspended": status.suspended,
        "next_try": None if status.suspension is None else round(status.suspension.wait, 1),
        "rows": status.rows,
    }


def stamp(path: Path) -> Stamp | None:
    """Tells one state of a file from another; ``None`` while there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - follows links, as editors replace files
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def reporter(*, as_json: bool) -> Report:
    """Tells people what happens, a line each; or programs, in JSON."""

    def report(event: str, message: str | None, **about: Any) -> None:
        if as_json:
            console.say_json({"event": event, **about})
        elif message is not None:
            console.warn(message)

    return report
