"""The session that turnlane makes for itself."""

from __future__ import annotations

from pyspark.sql import SparkSession

from turnlane.spark.session import set_to


def test_workers_import_pyspark_from_where_it_is_installed(spark: SparkSession) -> None:
    """From the zip that Spark has of it, each of them would need nearly a second for that."""

    def place(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    (found,) = spark.sparkContext.parallelize([1], 1).map(place).collect()
    assert ".zip" not in found


def test_workers_are_born_with_what_they_need(spark: SparkSession) -> None:
    """Each of them would need a second to import it."""

    def place(_: int) -> list[str]:
        import sys

        main = sys.modules["__main__"].__spec__
        return [main.name if main else "", *(name for name in sys.modules if "source" in name)]

    main, *found = spark.sparkContext.parallelize([1], 1).map(place).collect()[0]
    assert main == "turnlane.spark.daemon"
    assert "turnlane.spark.source" in found


def test_settings_are_for_what_is_begun_meanwhile(spark: SparkSession) -> None:
    unset, known = "spark.sql.test.unset", "spark.sql.shuffle.partitions"
    before = spark.conf.get(known)
    with set_to(spark, {unset: "a", known: "7"}):
        assert (spark.conf.get(unset), spark.conf.get(known)) == ("a", "7")
    assert spark.conf.get(unset, None) is None
    assert spark.conf.get(known) == before
