"""The SparkSession of a program whose configuration says that Ray is to run in Spark's executors."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from tidegate.spark_bridge.session.java import ensure_java


def spark_session(app_name: str, configs: Mapping[str, str]) -> SparkSession:
    """The session of this process; else a new one with these settings, on the master that they or `spark-submit` name.

    It is the program's, and ends with its process.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    ensure_java()
    builder = SparkSession.builder.appName(app_name)
    for key, value in configs.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
