"""Registers ``format("turnlane")``: Spark looks for a package ``pyspark_<format>``.

Spark imports it at every look-up, so it contains nothing but the name.
"""

from turnlane.spark.source import TurnlaneSource as DefaultSource

__all__ = ["DefaultSource"]
