"""turnlane on Spark: the data source, the lanes. The only folder that imports pyspark."""
