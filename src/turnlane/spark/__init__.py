"""turnlane on Spark: the data sources and the lanes. The only package that imports pyspark."""

from turnlane.plugins import require_extra

with require_extra("spark", "Spark"):
    import pyspark  # noqa: F401 - only whether it is there
