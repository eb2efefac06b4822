"""Registers ``format("turnlane_table")``: Spark looks for a package ``pyspark_<format>``.

Spark imports it at every look-up, so it contains nothing but the name.
"""

from turnlane.spark.table_source import TurnlaneTableSource as DefaultSource

__all__ = ["DefaultSource"]
