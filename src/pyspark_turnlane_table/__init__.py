"""Makes ``format("turnlane_table")`` known to Spark, which looks for ``pyspark_<format>`` by name.

It is imported at every look-up: there is nothing here but the name.
"""

from turnlane.spark.table_source import TurnlaneTableSource as DefaultSource

__all__ = ["DefaultSource"]
