"""The session that turnlane makes for itself."""

from __future__ import annotations

from pyspark.sql import SparkSession


def test_workers_import_pyspark_from_where_it_is_installed(spark: SparkSession) -> None:
    """From the zip that Spark has of it, each of them would need nearly a second for that."""

    def place(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    (found,) = spark.sparkContext.parallelize([1], 1).map(place).collect()
    assert ".zip" not in found
