"""turnlane on Spark: the data sources and the lanes. The only package that imports pyspark."""
