"""Jobs on the local runtime give what polars gives for the same data, and tables show what is committed."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterable
from pathlib import Path
from random import Random

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, WAIT_S, GatedSource, WatchedStore, config, finish, local, numbers, opening, rows

import tidegate as tg
from tidegate import recovery
from tidegate.actors.runtimes.local import LocalRuntime

AGGREGATES = {"n": tg.count(), "values": tg.count("x"), "total": tg.sum("x"), "low": tg.min("x"), "high": tg.max("y")}
REFERENCE = (
    pl.len().cast(pl.Int64).alias("n"),
    pl.col("x").count().cast(pl.Int64).alias("values"),
    pl.when(pl.col("x").count() > 0).then(pl.col("x").sum()).alias("total"),
    pl.col("x").min().alias("low"),
    pl.col("y").max().alias("high"),
)


def key_table(kind: str, rows_count: int = 700) -> tuple[pa.Table, tuple[str, ...]]:
    """Data keyed by the kind of columns, and the names of these columns."""
    random = Random(kind)
    table = numbers(rows_count)
    day = dt.date(2013, 1, 1)
    columns = {
        "int": {"key": pa.array([random.randrange(-4, 30) for _ in range(rows_count)], pa.int32())},
        "float": {"key": pa.array([random.choice([0.0, 1.5, -2.25, 1e300]) for _ in range(rows_count)])},
        "string": {"key": pa.array([random.choice(["", "a", "ä", "a longer key"]) for _ in range(rows_count)])},
        "composite": {
            "a": pa.array([random.choice(["x", "y"]) for _ in range(rows_count)]),
            "b": pa.array([day + dt.timedelta(random.randrange(5)) for _ in range(rows_count)]),
        },
        "nullable": {
            "a": pa.array([random.choice(["x", None, ""]) for _ in range(rows_count)]),
            "b": pa.array([random.choice([None, 0, 1]) for _ in range(rows_count)], pa.int64()),
        },
    }[kind]
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table, tuple(columns)


def reference(table: pa.Table, keys: tuple[str, ...]) -> pl.DataFrame:
    """What a batch computation gives."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame.group_by(keys).agg(REFERENCE)


# --- keyed aggregates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int", "float", "string", "composite", "nullable"])
def test_keyed_aggregates_equal_a_batch_computation(tmp_path: Path, kind: str) -> None:
    """Final values, and the newest of the running ones in an upsert table, for every kind of key."""
    table, keys = key_table(kind)
    with local() as env:
        keyed = env.from_batches(table, splits=3).key_by(*keys)
        final = keyed.aggregate(emit="final", name="final", **AGGREGATES).collect()
        running = keyed.aggregate(emit="update", name="running", **AGGREGATES).to_table(
            str(tmp_path / "running"), mode="upsert", keys=keys
        )
        finish(env, tmp_path / "checkpoints")

    expected = rows(reference(table, keys))
    assert rows(final.to_arrow()) == expected
    assert rows(running.to_arrow()) == expected


def test_a_mean_is_exact_for_integers(tmp_path: Path) -> None:
    """Two aggregations in a row, a mean among them."""
    table = numbers(400)
    with local() as env:
        means = env.from_batches(table).key_by("k").aggregate(emit="final", m=tg.mean("x"), n=tg.count())
        found = means.key_by("n").aggregate(emit="final", name="again", ms=tg.sum("m")).collect()
        finish(env, tmp_path)

    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    first = frame.group_by("k").agg(pl.col("x").mean().alias("m"), pl.len().cast(pl.Int64).alias("n"))
    assert rows(found.to_arrow()) == rows(first.group_by("n").agg(pl.col("m").sum().alias("ms")))


@pytest.mark.parametrize(("made_by", "written_by"), [(2, 1), (2, 3), (1, 2)])
def test_an_upsert_table_keeps_the_newest_row_at_any_parallelism(tmp_path: Path, made_by: int, written_by: int) -> None:
    """Rows of one key must meet in one sink, or an old running value could win over a newer one."""
    table = numbers(2_000, keys=20)
    with local() as env:
        running = env.from_batches(table).key_by("k").aggregate(n=tg.count(), parallelism=made_by)
        out = running.to_table(str(tmp_path / "out"), mode="upsert", keys=["k"], parallelism=written_by)
        finish(env, tmp_path / "checkpoints")

    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    assert rows(out.to_arrow()) == rows(frame.group_by("k").agg(pl.len().cast(pl.Int64).alias("n")))


# --- stateless operators and partitionings ------------------------------------------------------------------------


def expand(row: dict[str, int]) -> Iterable[dict[str, int]]:
    """No, one or two copies of a row."""
    return ({"x": row["x"], "copy": i} for i in range(row["x"] % 3))


def test_row_and_batch_functions(tmp_path: Path) -> None:
    """Every operator over rows and over columns, one after the other."""
    data = pa.table({"x": pa.array(range(300), pa.int64())})
    schema = pa.schema([("x", pa.int64()), ("copy", pa.int64())])
    with local() as env:
        found = (
            env.from_batches(data)
            .filter(lambda row: row["x"] % 7 != 0)
            .filter(pl.col("x") < 250)
            .flat_map(expand, schema=schema)
            .map(lambda row: {**row, "copy": -row["copy"]}, schema=schema)
            .with_columns((pl.col("x") * 2).alias("double"), pl.col("copy").cast(pl.String))
            .map_batches(
                lambda batch: batch.slice(0),
                schema=schema.append(pa.field("double", pa.int64())).set(1, pa.field("copy", pa.string())),
            )
            .select("double", pl.col("copy"))
            .collect()
        )
        finish(env, tmp_path)

    expected = [(2 * x, str(-copy)) for x in range(250) if x % 7 != 0 for copy in range(x % 3)]
    assert found.to_arrow().schema.names == ["double", "copy"]
    assert rows(found.to_arrow()) == sorted(expected, key=repr)


def test_union_takes_all_rows_of_all_streams(tmp_path: Path) -> None:
    """Streams of the same columns become one; a stream united with itself counts twice."""
    first, second = numbers(100, seed=1), numbers(50, seed=2)
    with local() as env:
        a, b = env.from_batches(first), env.from_batches(second, splits=3, parallelism=3)
        both = a.union(b).collect(name="both")
        per_key = a.union(a).key_by("k").aggregate(emit="final", n=tg.count()).collect(name="per key")
        finish(env, tmp_path)

    assert rows(both.to_arrow()) == rows(pa.concat_tables([first, second]))
    counts = pl.Series(first["k"].to_pylist()).value_counts()
    assert rows(per_key.to_arrow()) == sorted(((k, 2 * n) for k, n in counts.rows()), key=repr)


def test_rebalance_and_broadcast(tmp_path: Path) -> None:
    """Rebalanced, every row is processed once; broadcast, once by every subtask."""
    data = pa.table({"x": list(range(200))})
    with local(parallelism=3) as env:
        source = env.from_batches(data)
        once = source.rebalance().filter(pl.lit(True)).collect(name="once")
        thrice = source.broadcast().filter(pl.lit(True)).collect(name="thrice")
        finish(env, tmp_path)

    assert sorted(once.to_arrow()["x"].to_pylist()) == list(range(200))
    assert sorted(thrice.to_arrow()["x"].to_pylist()) == sorted(list(range(200)) * 3)


def test_an_empty_input_gives_empty_results(tmp_path: Path) -> None:
    """A bounded job over no rows finishes, with tables of the right columns."""
    with local() as env:
        stream = env.from_batches(numbers(0))
        all_rows = stream.collect()
        per_key = stream.key_by("k").aggregate(emit="final", n=tg.count()).to_table(str(tmp_path / "out"))
        finish(env, tmp_path / "checkpoints")

    assert (all_rows.to_arrow().num_rows, all_rows.to_arrow().schema.names) == (0, ["k", "x", "y"])
    assert per_key.to_arrow().schema == pa.schema([("k", pa.int64()), ("n", pa.int64())])


def test_storage_in_memory(tmp_path: Path) -> None:
    """Checkpoints and tables may rest in the memory of the process."""
    with local() as env:
        out = env.from_batches(numbers(100)).to_table("memory://test-local-jobs/table")
        job = finish(env, "memory://test-local-jobs/checkpoints")

    assert rows(out.to_arrow()) == rows(numbers(100))
    assert [c.job_name for c in job.checkpoints()] == ["test job"]
    assert list(tmp_path.iterdir()) == []


def test_little_credit_is_enough(tmp_path: Path) -> None:
    """Batches larger than the whole credit pass, and back-pressure never becomes a standstill."""
    limits = tg.DataPlaneOptions(source_rows_max=100).limits
    tiny = type(limits)(credit_bytes=10, queue_bytes_max=10, frame_bytes_min=1, frame_bytes_max=10)
    table = numbers(1_500)
    with tg.StreamEnvironment.local(2, options=tg.DataPlaneOptions(limits=tiny, source_rows_max=100)) as env:
        out = env.from_batches(table).key_by("k").aggregate(emit="final", **AGGREGATES).collect()
        finish(env, tmp_path)

    assert rows(out.to_arrow()) == rows(reference(table, ("k",)))


# --- tables -------------------------------------------------------------------------------------------------------


def write_once(tmp_path: Path, run: int, **options: object) -> tg.OutputTable:
    """A job that writes one row to the one table."""
    data = pa.table({"x": [run]})
    with local(parallelism=1) as env:
        table = env.from_batches(data).to_table(str(tmp_path / "table"), **options)  # type: ignore[arg-type]
        finish(env, tmp_path / "checkpoints")
    return table


def test_a_table_with_rows_is_refused_extended_or_replaced(tmp_path: Path) -> None:
    """`if_exists` decides for a job that is not restored; an error leaves the table as it is."""
    table = write_once(tmp_path, 1)
    with pytest.raises(tg.TableError, match=r'shows 1 rows already; give if_exists="append"'):
        write_once(tmp_path, 2)
    assert rows(table.to_arrow()) == [(1,)]

    assert rows(write_once(tmp_path, 3, if_exists="append").to_arrow()) == [(1,), (3,)]
    assert rows(write_once(tmp_path, 4, if_exists="overwrite").to_arrow()) == [(4,)]


def test_another_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    """A job that writes other columns than the table has does not start."""
    write_once(tmp_path, 1)
    with local(parallelism=1) as env:
        env.from_batches(pa.table({"x": ["text"]})).to_table(str(tmp_path / "table"), if_exists="append")
        with pytest.raises(tg.TableError, match="column 'x' is int64 in the table, string in the job"):
            env.execute("other", checkpoints=config(tmp_path / "checkpoints"))


def test_a_running_table_shows_committed_rows_only(tmp_path: Path) -> None:
    """Rows are visible with the checkpoint that covers them, not before, and they stay visible."""
    committed = threading.Semaphore(0)
    runtime = LocalRuntime(lambda url: WatchedStore(url, before=lambda: None, after=committed.release))
    with opening(GatedSource(30, gates=[10, 20])) as source, tg.StreamEnvironment(runtime, 2) as env:
        table = env.from_source(source, parallelism=1).to_table(str(tmp_path / "table"))
        job = env.execute("gated", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        assert table.to_arrow().num_rows == 0

        job.trigger_checkpoint("60s")
        assert committed.acquire(timeout=WAIT_S)
        first = sorted(table.to_arrow()["x"].to_pylist())
        assert first == list(range(10))
        source.open_gate(10)
        source.await_gate(20)
        assert sorted(table.to_arrow()["x"].to_pylist()) == first, "no checkpoint, no rows"

        source.open_gate(20)
        assert job.wait("60s") == "finished"
        assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(30))
        assert table.rows_committed() == 30


# --- failures -----------------------------------------------------------------------------------------------------


def test_an_exception_fails_the_job_and_names_operator_and_row(tmp_path: Path) -> None:
    """Without restarts the error of the user's function reaches whoever waits, with what is needed to find it."""

    def divide(row: dict[str, int]) -> dict[str, float]:
        return {"q": 10 / row["x"]}

    with local(parallelism=1) as env:
        env.from_batches(pa.table({"x": [5, 0]})).map(
            divide, schema=pa.schema([("q", pa.float64())]), name="divide"
        ).collect()
        job = env.execute("division", checkpoints=config(tmp_path), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError) as caught:
            job.wait("60s")

    assert job.status() == "failed"
    message = str(caught.value)
    for part in ("'division' failed", "operator 'divide'", "ZeroDivisionError", "{'x': 0}", 'restore="latest"'):
        assert part in message


def test_a_failure_that_passes_is_restarted_and_leaves_no_trace(tmp_path: Path) -> None:
    """fixed_delay: the second attempt goes through, and every row is there once."""
    flag = tmp_path / "failed"

    def fails_once(row: dict[str, int]) -> dict[str, int]:
        if row["x"] == 150 and not flag.exists():
            flag.touch()
            raise ValueError("once")
        return row

    data = pa.table({"x": list(range(300))})
    with local() as env:
        out = env.from_batches(data).map(fails_once, schema=data.schema).to_table(str(tmp_path / "out"))
        job = env.execute(
            "retried",
            checkpoints=config(tmp_path / "checkpoints", interval="10ms"),
            restart=tg.RestartStrategy.fixed_delay(2, "10ms"),
        )
        assert job.wait("60s") == "finished"

    assert job.progress().restarts == 1
    assert "ValueError: once" in (job.progress().last_failure or "")
    assert sorted(out.to_arrow()["x"].to_pylist()) == list(range(300))


def test_restarts_are_used_up(tmp_path: Path) -> None:
    """A function that always fails is tried as often as allowed, and then the job fails with its error."""
    with local(parallelism=1) as env:
        env.from_batches(pa.table({"x": [1]})).filter(lambda row: row["nothing"]).collect()
        job = env.execute("hopeless", checkpoints=config(tmp_path), restart=tg.RestartStrategy.fixed_delay(2, "1ms"))
        with pytest.raises(tg.JobFailedError, match="KeyError"):
            job.wait("60s")

    assert job.progress().restarts == 2


# --- the handle ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_on_request_can_be_verified(tmp_path: Path) -> None:
    """trigger_checkpoint returns the path of a complete checkpoint of this job."""
    with opening(GatedSource(20, gates=[10])) as source, local() as env:
        env.from_source(source, parallelism=1).key_by("k").aggregate(n=tg.count()).collect()
        job = env.execute("asked", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        path = job.trigger_checkpoint("60s")

        report = recovery.verify(path)
        assert (report.ok, report.problems) == (True, ())
        assert [c.path for c in job.checkpoints()] == [path]
        assert job.metrics()["last_checkpoint"] == 1


def test_the_events_tell_the_story(tmp_path: Path) -> None:
    """From submission to the end, in order, readable while the job runs and after it."""
    with opening(GatedSource(20, gates=[10])) as source, local(parallelism=1) as env:
        env.from_source(source).collect()
        job = env.execute("story", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        job.trigger_checkpoint("60s")
        names = [type(event).__name__ for event in job.events()]
        assert names[:3] == ["CoordinatorStarted", "JobSubmitted", "TaskReady"]
        assert "CheckpointRequested" in names
        source.open_all()
        job.wait("60s")

    names = [type(event).__name__ for event in job.events()]
    for earlier, later in [
        ("CheckpointAcknowledged", "MetadataWritten"),
        ("MetadataWritten", "TaskReachedEndOfData"),
        ("TaskReachedEndOfData", "TaskFinished"),
    ]:
        assert names.index(earlier) < names.index(later)
    assert names.count("MetadataWritten") == 2


def test_a_cancelled_job_stops_and_keeps_what_is_committed(tmp_path: Path) -> None:
    """Status and wait() say cancelled; rows and checkpoint stay; further requests are refused."""
    with opening(GatedSource(20, gates=[10])) as source, local() as env:
        table = env.from_source(source, parallelism=1).to_table(str(tmp_path / "out"))
        job = env.execute("cancelled", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        path = job.trigger_checkpoint("60s")
        with pytest.raises(TimeoutError, match="still running"):
            job.wait("1ms")
        job.cancel()

        assert job.wait("60s") == job.status() == "cancelled"
        committed = table.to_arrow()["x"].to_pylist()
        assert sorted(committed) == list(range(len(committed)))
        assert [c.path for c in job.checkpoints()] == [path]
        with pytest.raises(tg.CheckpointError):
            job.trigger_checkpoint("60s")


def test_closing_the_environment_cancels_what_runs(tmp_path: Path) -> None:
    """No job outlives its environment, and one that has failed does not get in the way."""
    with opening(GatedSource(20, gates=[10])) as source:
        with local(parallelism=1) as env:
            env.from_batches(pa.table({"x": [1]})).filter(lambda row: row["nothing"]).collect()
            failed = env.execute("failed", checkpoints=config(tmp_path), restart=NO_RESTART)
            with pytest.raises(tg.JobFailedError):
                failed.wait("60s")
            env.from_source(source).collect()
            running = env.execute("running", checkpoints=config(tmp_path), restart=NO_RESTART)
            source.await_gate(10)

        assert (failed.status(), running.status()) == ("failed", "cancelled")


def test_one_environment_runs_several_jobs(tmp_path: Path) -> None:
    """After execute the environment is empty: the next job has its own streams."""
    with local() as env:
        first = env.from_batches(pa.table({"x": [1]})).collect()
        finish(env, tmp_path)
        second = env.from_batches(pa.table({"x": [2]})).collect()
        finish(env, tmp_path)

    assert (rows(first.to_arrow()), rows(second.to_arrow())) == ([(1,)], [(2,)])


def test_old_checkpoints_and_rubbish_are_deleted(tmp_path: Path) -> None:
    """After the job: the newest checkpoint and the event log, no other folder, and no file without a reference."""
    table = numbers(3_000)
    with local() as env:
        out = (
            env.from_batches(table)
            .key_by("k", "x")
            .aggregate(n=tg.count())
            .to_table(str(tmp_path / "out"), mode="upsert", keys=["k", "x"])
        )
        job = finish(env, tmp_path / "checkpoints", settings={"interval": "10ms", "inline_bytes": 0})

    (newest,) = job.checkpoints()
    folders = sorted(p.name for p in (tmp_path / "checkpoints" / job.job_id).iterdir())
    assert folders == sorted([newest.path.rsplit("/", 1)[1], "events"])
    referenced = {tmp_path / "out" / path for path in out.log.referenced_paths()}
    assert set((tmp_path / "out" / "data").rglob("*.parquet")) == referenced
