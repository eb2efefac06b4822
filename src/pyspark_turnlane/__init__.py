"""Makes ``format("turnlane")`` known to Spark, which looks for ``pyspark_<format>`` by name.

It is imported at every look-up: there is nothing here but the name.
"""

from turnlane.spark.source import TurnlaneSource as DefaultSource

__all__ = ["DefaultSource"]
