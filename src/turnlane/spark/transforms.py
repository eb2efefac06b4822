"""What transforms, which are the user's functions, and SQL make of events.

The forms of an event on its way through a pipeline:

1. as the main queue stores it;
2. parsed and transformed (:func:`parse_and_transform`): the form that filters and direct outputs
   see;
3. as an action's queue stores it (:func:`select_queue_columns`), without columns that a queue
   cannot store or that only filters read;
4. read from that queue, with the columns restored (:func:`restore_from_queue`);
5. after the action's own transform and SQL (:func:`apply_action`).

The module also inspects Spark's plans, because only a plan shows whether a query needs state: a
transform may aggregate without any SQL.

The user's modules are imported once, and again after a reload. A reload of the pipeline must use
the new code, but only if the new pipeline starts: a lane of the old pipeline that is started again
has to find the code that it had. The state is global, like ``sys.modules``.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import StructType

from turnlane.delivery.settings import DIRECT, PAYLOAD
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import Format
from turnlane.pipeline.settings import EVENTS_VIEW, ActionSettings, PipelineSettings
from turnlane.spark.lane_shape import find_filter_columns
from turnlane.spark.parsing import add_json_data, parse_events
from turnlane.spark.row_codec import get_read_schema, list_read_columns


def make_no_events(spark: SparkSession) -> DataFrame:
    """Make a table without events, with the columns of events."""
    return spark.createDataFrame([], get_read_schema(include_headers=True))


def make_stream(spark: SparkSession, schema: StructType) -> DataFrame:
    """Make a stream with these columns that is never started, for Spark to plan with."""
    columns = [F.lit(None).cast(field.dataType).alias(field.name) for field in schema.fields]
    return spark.readStream.format("rate").load().select(*columns)


# ── the main lane ──


def parse_and_transform(source: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Return events as actions see them."""
    return apply_transform(parse_events(source, settings.parse), settings)


def apply_transform(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Return events after the transform of the pipeline, if it has one."""
    return events if settings.transform is None else call_transform(settings.transform, events)


def select_queue_columns(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Return events with the columns that the queues of actions store."""
    if find_filter_columns(settings) is None:
        return drop_variants(events)
    stored = {*list_read_columns(), DIRECT, PAYLOAD}
    return events.select(*(name for name in events.columns if name in stored))


def drop_variants(events: DataFrame) -> DataFrame:
    """Return events without variant columns, which queues cannot store.

    The value from which they were made is kept.
    """
    variants = [
        field.name for field in events.schema.fields if field.dataType.typeName() == "variant"
    ]
    return events.drop(*variants)


def get_queue_schema(spark: SparkSession, settings: PipelineSettings) -> StructType:
    """Return the columns of the actions' queues."""
    events = parse_and_transform(make_no_events(spark), settings)
    return select_queue_columns(events, settings).schema


# ── the lane of an action ──


def restore_from_queue(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Return events of an action's queue with the columns that the queue cannot store."""
    is_json = settings.parse is not None and settings.parse.format == Format.JSON
    return add_json_data(events) if is_json else events


def apply_action(
    action: ActionSettings, events: DataFrame, read_queue: Callable[[str], DataFrame]
) -> DataFrame:
    """Apply an action's transform and SQL to events; ``read_queue`` reads a queue that it joins.

    SQL leaves temporary views in the session of the events.
    """
    if action.transform is not None:
        events = call_transform(action.transform, events)
    if action.sql is None:
        return events
    _add_watermark(action, events).createOrReplaceTempView(EVENTS_VIEW)
    for name in action.with_queues:
        _add_watermark(action, read_queue(name)).createOrReplaceTempView(f"`{name}`")
    return events.sparkSession.sql(use_try_casts(action.sql))


def _add_watermark(action: ActionSettings, events: DataFrame) -> DataFrame:
    """Tell Spark how late events may be, so that it can remove state."""
    if action.watermark is None:
        return events
    return events.withWatermark("timestamp", f"{action.watermark} seconds")


def call_transform(name: str, events: DataFrame) -> DataFrame:
    """Call the function ``module:function`` with events. Raises ``ConfigError``."""
    result = find_transform(name)(events)
    if not isinstance(result, DataFrame):
        raise ConfigError(
            "transform", f"{name} must return a DataFrame, not {type(result).__name__}"
        )
    return result


def find_transform(name: str) -> Callable[[DataFrame], object]:
    """Import the function ``module:function``. Raises ``ConfigError``."""
    module, _, function = name.partition(":")
    try:
        found: Callable[[DataFrame], object] = getattr(import_user_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError("transform", f"{name}: {error}") from error
    except Exception as error:  # a module may raise anything when it is imported
        raise ConfigError("transform", f"{name}: {type(error).__name__}: {error}") from error
    return found


# ── the user's modules ──


_FileVersion = tuple[int, int]
"""The time of the last change and the size of a file: they show whether it has changed."""

_versions: dict[str, _FileVersion | None] = {}
"""The modules imported here, with the versions of their files."""


def import_user_module(name: str) -> ModuleType:
    """Return the module as it was imported first, or after a reload. Raises its own errors."""
    module = importlib.import_module(name)
    _versions.setdefault(name, _get_version(module))
    return module


def get_user_version(transform: str | None) -> object:
    """Return a value that changes with the code of ``module:function``, which is imported here."""
    return None if transform is None else _versions.get(transform.partition(":")[0])


def get_user_files() -> set[str]:
    """Return the files of the modules imported here."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _versions)
    return {file for file in files if file is not None}


def find_changed_modules() -> list[str]:
    """Return the modules whose files have changed since they were imported."""
    return [
        name
        for name, version in list(_versions.items())
        if name in sys.modules and _get_version(sys.modules[name]) != version
    ]


@contextmanager
def reload_changed_modules() -> Iterator[None]:
    """Have changed modules imported again by the next call of :func:`import_user_module`.

    If the body raises, the modules are restored: the lanes that continue need their old code.
    """
    before = {}
    for name in find_changed_modules():
        # Spark's Python processes live on and may have imported the old module: functions of the
        # new one are sent to them by value, not by name.
        cloudpickle.register_pickle_by_value(sys.modules[name])  # type: ignore[no-untyped-call]
        before[name] = sys.modules.pop(name), _versions.pop(name)
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        for name, (module, version) in before.items():
            sys.modules[name], _versions[name] = module, version
        raise


def _get_version(module: ModuleType) -> _FileVersion | None:
    """Return ``None`` if the module has no file, or the file is gone."""
    file = getattr(module, "__file__", None)
    try:
        found = None if file is None else Path(file).stat()
    except OSError:
        found = None
    return None if found is None else (found.st_mtime_ns, found.st_size)


# ── SQL ──
# `data:http.status::int` reads a value from JSON. Spark's cast of such a value fails if the value
# does not fit, with any settings: one event whose status is no number would stop the lane,
# again at each restart. So casts of values in JSON are rewritten to `try_cast`, which returns null.

_WORD: Final = r"(?:[A-Za-z_]\w*|`[^`]+`)"
_STEP: Final = rf"(?:\.\s*{_WORD}|\[\s*(?:\d+|'[^'\\]*'|\"[^\"\\]*\")\s*\])"
_PATH: Final = rf"{_WORD}(?:\s*\.\s*{_WORD})*\s*:\s*(?:{_WORD}|\[[^\]]*\]){_STEP}*"
_TYPE: Final = (
    r"(?:(?:array|map|struct)\s*<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>"
    r"|\w+(?:\s*\(\s*\d+\s*(?:,\s*\d+\s*)?\))?)"
)
_TOKEN: Final = re.compile(
    rf"""
      (?P<literal>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|--[^\n]*|/\*.*?\*/)
    | \bcast\s*\(\s*(?P<inner>{_PATH})\s+as\b
    | (?P<path>(?<![\w`.:]){_PATH})\s*::\s*(?P<type>{_TYPE})
    | `[^`]*`
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def use_try_casts(sql: str) -> str:
    """Rewrite a query or condition so that casts of values in JSON return null if they fail."""
    return _TOKEN.sub(_rewrite_token, sql)


def _rewrite_token(found: re.Match[str]) -> str:
    if found["inner"] is not None:
        return f"try_cast({found['inner']} AS"
    if found["path"] is not None:
        return f"try_cast({found['path']} AS {found['type']})"
    return found[0]


# ── plans ──

_STATEFUL: Final = {
    "Aggregate": "an aggregation",
    "Deduplicate": "removing duplicates",
    "DeduplicateWithinWatermark": "removing duplicates",
    "Distinct": "removing duplicates",
    "FlatMapGroupsInPandasWithState": "a function with state",
    "FlatMapGroupsWithState": "a function with state",
    "GlobalLimit": "a limit",
    "TransformWithState": "a function with state",
    "TransformWithStateInPandas": "a function with state",
    "TransformWithStateInPySpark": "a function with state",
}
"""The nodes of a streaming plan that keep state from batch to batch, with words for people. A join
of two streams keeps state, too."""
_REPARTITION: Final = frozenset({"RebalancePartitions", "Repartition", "RepartitionByExpression"})
"""The nodes of a plan that move rows from one task to another."""


def find_stateful_operation(rows: DataFrame) -> str | None:
    """Return an operation for which Spark keeps state, in words; ``None`` if there is none."""
    for node in _walk(_get_plan(rows)):
        if not node.isStreaming():
            continue
        name = node.nodeName()
        if name in _STATEFUL:
            return _STATEFUL[name]
        if name == "Join" and all(side.isStreaming() for side in _list_children(node)):
            return "a join of streams"
    return None


def has_repartition(rows: DataFrame) -> bool:
    """Whether the plan moves rows from one task to another."""
    return any(node.nodeName() in _REPARTITION for node in _walk(_get_plan(rows)))


def is_deterministic(rows: DataFrame) -> bool:
    """Whether equal rows have equal results. ``rand() < 0.1`` is not deterministic."""
    return bool(_get_plan(rows).deterministic())


def check_streaming_plan(rows: DataFrame, mode: str) -> None:
    """Check that Spark can run a plan as a stream, in an output mode. Raises Spark's errors."""
    jvm: Any = rows.sparkSession._jvm  # noqa: SLF001 - pyspark checks only when a query starts
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(_get_plan(rows), getattr(modes, mode.capitalize())())


def _get_plan(rows: DataFrame) -> Any:  # noqa: ANN401 - of Java
    return rows._jdf.queryExecution().analyzed()  # noqa: SLF001 - pyspark can only print it


def _walk(plan: Any) -> Iterator[Any]:  # noqa: ANN401 - of Java
    yield plan
    for child in _list_children(plan):
        yield from _walk(child)


def _list_children(plan: Any) -> list[Any]:  # noqa: ANN401 - of Java
    children = plan.children()
    return [children.apply(at) for at in range(children.size())]
