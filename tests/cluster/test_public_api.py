"""The public way, on Ray and Spark: a DataFrame in, a table out, and a job restored from the checkpoint of another."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from ray_jobs import Gated
from waiting import until

import tidegate as tg
from tidegate import recovery
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.connectors.memory_source import MemorySource
from tidegate.spark_bridge import RayDPSession

ROWS = 40_000


@pytest.fixture
def env(raydp_session: RayDPSession) -> Iterator[tg.StreamEnvironment]:
    """An environment over the session of all tests, which it does not stop."""
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    options = tg.DataPlaneOptions(source_rows_max=500)
    with tg.StreamEnvironment(runtime, parallelism=2, options=options) as environment:
        yield environment


@pytest.fixture
def rows(raydp_session: RayDPSession) -> DataFrame:
    """Rows whose sums are exact, over a string and an int key, with nulls in one of them."""
    numbers = raydp_session.spark.range(ROWS).repartition(4)
    name = F.when(F.col("id") % 7 == 0, None).otherwise(F.concat(F.lit("key-"), (F.col("id") % 97).cast("string")))
    return numbers.select(name.alias("name"), (F.col("id") % 3).alias("part"), (F.col("id") % 1_000).alias("value"))


def totals(env: tg.StreamEnvironment, rows: DataFrame, url: Path, gate: Path | None = None) -> tg.OutputTable:
    """Running aggregates of the rows in an upsert table; with a gate the job does not end before the file is there."""
    stream = env.from_dataframe(rows, uid="rows")
    if gate is not None:
        assert stream.schema is not None
        nothing = Gated(MemorySource(stream.schema.empty_table(), 1), gate)
        stream = stream.union(env.from_source(nothing, uid="nothing", parallelism=1))
    running = stream.key_by("name", "part").aggregate(
        n=tg.count(), total=tg.sum("value"), mean=tg.mean("value"), uid="totals"
    )
    return running.to_table(str(url), mode="upsert", keys=["name", "part"], uid="table")


def batch_totals(rows: DataFrame) -> list[tuple[object, ...]]:
    """What Spark's own aggregation gives."""
    spark_totals = rows.groupBy("name", "part").agg(
        F.count("*").alias("n"), F.sum("value").alias("total"), F.mean("value").alias("mean")
    )
    return in_order(spark_totals)


def in_order(frame: DataFrame) -> list[tuple[object, ...]]:
    """All rows, sorted by a key that tolerates nulls."""
    return sorted((tuple(row) for row in frame.collect()), key=lambda row: (str(row[0]), row[1]))


def until_checkpoint(job: tg.Job) -> None:
    """Return when a checkpoint of the job is complete."""
    until("a checkpoint", lambda: job.progress().completed_checkpoints > 0, job.progress)


def test_a_dataframe_is_aggregated_as_spark_would(
    env: tg.StreamEnvironment, rows: DataFrame, raydp_session: RayDPSession, tmp_path: Path
) -> None:
    """Every row counts once, and the table reads as a DataFrame of the same rows as Spark's batch."""
    out = totals(env, rows, tmp_path / "table")
    job = env.execute("batch", checkpoints=tg.CheckpointConfig(interval="200ms", storage=str(tmp_path / "checkpoints")))
    assert job.wait("5min") == "finished"
    assert in_order(out.read(raydp_session.spark)) == batch_totals(rows)


def test_a_cancelled_job_is_gone_on_with(
    env: tg.StreamEnvironment, rows: DataFrame, raydp_session: RayDPSession, tmp_path: Path
) -> None:
    """restore="latest" reads on in what was staged, with the state and the table of the checkpoint."""
    checkpoints = tg.CheckpointConfig(interval="100ms", storage=str(tmp_path / "checkpoints"))
    gate = tmp_path / "gate"
    env.parallelism = 1
    totals(env, rows, tmp_path / "table", gate)
    first = env.execute("in two parts", checkpoints=checkpoints)
    until_checkpoint(first)
    first.cancel()
    assert first.wait("4min") == "cancelled"
    newest = recovery.latest(str(tmp_path / "checkpoints"), job="in two parts")
    assert newest is not None
    assert newest.job_id == first.job_id

    gate.touch()
    out = totals(env, rows, tmp_path / "table", gate)
    second = env.execute("in two parts", checkpoints=checkpoints, restore="latest")
    assert second.wait("5min") == "finished"
    assert in_order(out.read(raydp_session.spark)) == batch_totals(rows)
    staged = [path.parent.parent.name for path in (tmp_path / "checkpoints").glob("*/taskowned/source-rows")]
    assert staged == [first.job_id], "the second job reads what was staged for the first"


def test_more_subtasks_than_slots_are_refused_before_anything_is_claimed(
    env: tg.StreamEnvironment, rows: DataFrame, tmp_path: Path
) -> None:
    """The error says what there is; no table was made and nothing staged."""
    env.parallelism = 5
    totals(env, rows, tmp_path / "table")
    with pytest.raises(tg.ConfigurationError, match="parallelism 5, and there are 4 task slots"):
        env.execute("too wide", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints")))
    assert not (tmp_path / "table").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_the_first_rows_of_a_dataframe_are_shown(
    env: tg.StreamEnvironment,
    rows: DataFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a job on Ray, of which neither an actor nor a file is left. The program can be executed afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stream = env.from_dataframe(rows, uid="rows").select("value")
    stream.show(2)
    lines = capsys.readouterr().out.splitlines()
    assert (lines[1], len(lines), lines[-1]) == ("| value |", 7, "only the first 2 rows")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    def left() -> list[str]:
        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        return [name for name in names if name.startswith("show-")]

    until("the end of its actors", lambda: left() == [], left)
    table = stream.to_table(str(tmp_path / "out"), uid="table")
    env.execute("shown", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))).wait("4min")
    assert table.rows_committed() == ROWS
