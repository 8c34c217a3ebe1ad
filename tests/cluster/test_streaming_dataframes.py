"""Streaming DataFrames with Spark itself: queries that go on from Spark's checkpoint, and those that fail."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from waiting import until

import tidegate as tg
from tidegate.spark_bridge import RayDPSession
from tidegate.storage.errors import JobFailedError


def put(folder: Path, name: str, lines: Iterable[str]) -> None:
    """A new file, which appears whole."""
    folder.mkdir(exist_ok=True)
    hidden = folder / f".{name}"
    hidden.write_text("".join(f"{line}\n" for line in lines))
    os.replace(hidden, folder / name)


def numbers(values: Iterable[int]) -> list[str]:
    """Rows with a value."""
    return [f'{{"x": {value}}}' for value in values]


def execute(env: tg.StreamEnvironment, rows: DataFrame, folder: Path) -> tuple[tg.Job, tg.OutputTable]:
    """A job that goes on where one before it was."""
    out = env.from_dataframe(rows, uid="rows", trigger="50ms").to_table(str(folder / "out"), uid="table")
    config = tg.CheckpointConfig(interval="100ms", storage=str(folder / "checkpoints"))
    return env.execute("files", checkpoints=config, restart=tg.RestartStrategy.none(), restore="latest"), out


def until_there(job: tg.Job, out: tg.OutputTable, expected: list[int]) -> None:
    """These rows, each once."""

    def values() -> list[int]:
        return sorted(out.to_arrow().column("x").to_pylist())

    until(
        "all rows",
        lambda: job.status() == "failed" or len(values()) >= len(expected),
        lambda: (values(), job.progress()),
    )
    assert values() == expected, job.progress()


def test_files_reach_the_table_once_over_restarts(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Job and query are ended, and both go on where they were, with files that came before, in between and after."""
    spark, files = raydp_session.spark, tmp_path / "in"
    put(files, "a.json", numbers(range(10)))
    rows = spark.readStream.schema("x long").json(str(files))
    with tg.StreamEnvironment.local(2) as env:
        job, out = execute(env, rows, tmp_path)
        until_there(job, out, list(range(10)))
        job.cancel()
        assert job.wait("4min") == "cancelled"
        put(files, "b.json", numbers(range(10, 20)))
        job, out = execute(env, rows, tmp_path)
        until_there(job, out, list(range(20)))
        put(files, "c.json", numbers(range(20, 30)))
        until_there(job, out, list(range(30)))
    assert spark.streams.active == []


def test_a_query_that_fails_ends_its_job_with_the_cause(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """What Spark says is wrong is in the error of the job."""
    put(tmp_path / "in", "a.json", ["no json at all"])
    rows = raydp_session.spark.readStream.schema("x long").option("mode", "FAILFAST").json(str(tmp_path / "in"))
    with tg.StreamEnvironment.local(1) as env:
        job, _ = execute(env, rows, tmp_path)
        with pytest.raises(JobFailedError, match=r"Spark query of source 'rows' has failed: .*Unrecognized token 'no'"):
            job.wait("4min")


def test_lines_of_a_socket_reach_the_table_once(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Spark's socket source, which repeats nothing by itself: what was in a batch is read again from the log."""
    with socket.create_server(("127.0.0.1", 0)) as server, tg.StreamEnvironment.local(2) as env:
        server.settimeout(240)
        host, port = server.getsockname()
        lines = raydp_session.spark.readStream.format("socket").option("host", host).option("port", port).load()
        job, out = execute(env, lines.select(F.col("value").cast("long").alias("x")), tmp_path)
        connection, _ = server.accept()
        with connection:
            for number in range(3):
                connection.sendall(f"{number}\n".encode())
                until_there(job, out, list(range(number + 1)))
        job.cancel()
        assert job.wait("4min") == "cancelled"


def test_spark_names_a_source_that_it_lacks(raydp_session: RayDPSession) -> None:
    """Kafka is a package of its own. Before tidegate has a DataFrame, in the words that the page has."""
    words = "Failed to find data source: kafka. Please deploy the application as per the deployment section of"
    with pytest.raises(AnalysisException) as raised:
        raydp_session.spark.readStream.format("kafka").option("subscribe", "a").load()
    assert words in str(raised.value)
    assert words in (Path(__file__).parents[2] / "docs" / "streaming-dataframes.md").read_text()
