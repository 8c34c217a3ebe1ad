"""Jobs on the local runtime give what polars gives for the same data, and tables show what is committed."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path
from random import Random

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import (
    finish,
    local,
    numbers,
    rows,
)

import tidegate as tg

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
