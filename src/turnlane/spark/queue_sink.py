"""Queues as the sinks of queries that remember things: each batch is written once.

Rows of such queries cannot be told by offsets. A batch has a number, which its checkpoint keeps,
and the node there takes none twice.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from turnlane.outputs.queue import QueueOutputSettings
from turnlane.pipeline.settings import ActionSettings
from turnlane.spark import shape
from turnlane.spark.hollows import filled


def writes_once(action: ActionSettings) -> bool:
    """Whether an action's rows can go into a queue by whole batches.

    Spark's sinks for Python take no updates, and know of no second output.
    """
    return (
        isinstance(action.output, QueueOutputSettings)
        and action.output_mode != "update"
        and action.delivery.failover is None
    )


def to_queue(rows: DataFrame, output: QueueOutputSettings) -> DataStreamWriter:
    """A query into a queue, not started yet."""
    access = {
        "endpoint": output.endpoint,
        "queue": output.queue,
        "tokenEnv": output.token_env,
        "tokenFile": output.token_file,
        "tlsCa": output.tls.ca,
        "tlsCert": output.tls.cert,
        "tlsKey": output.tls.key,
    }
    options = {name: str(value) for name, value in access.items() if value is not None}
    return filled(shape.storable(rows)).writeStream.format("turnlane").options(**options)
