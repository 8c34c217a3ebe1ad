"""Sources read the columns that the program uses, and all of them where nobody can know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tidegate.api.streams.stream import Stream

NAMES = ("a", "b", "c", "d", "at")
DATA = pa.table({name: pa.array([1, 2, 3], pa.int64()) for name in NAMES})
Build = Callable[[Stream], object]


def _two(rows: Stream) -> None:
    """Two readers of one stream."""
    rows.select("a").collect()
    rows.filter(pl.col("b") > 1).select("c").collect()


USED: list[tuple[str, str, Build]] = [
    ("a select", "ab", lambda rows: rows.select("a", pl.col("b") + 1).collect()),
    ("a filter before it", "ac", lambda rows: rows.filter(pl.col("c") > 1).select("a").collect()),
    ("a computed column", "bd", lambda rows: rows.with_columns(pl.col("d").alias("x")).select("x", "b").collect()),
    ("a replaced column", "b", lambda rows: rows.with_columns(pl.col("b").alias("a")).select("a").collect()),
    ("an aggregate", "ab", lambda rows: rows.key_by("a").aggregate(n=tg.count(), t=tg.sum("b")).collect()),
    ("a count alone", "a", lambda rows: rows.key_by("a").aggregate(n=tg.count()).collect()),
    ("another parallelism", "ad", lambda rows: rows.rebalance().select("a", "d", parallelism=2).collect()),
    ("two readers", "abc", _two),
    ("no column at all", "a", lambda rows: rows.select(pl.lit(1).alias("one")).collect()),
    ("all that there is", "abcd@", lambda rows: rows.collect()),
    (
        "a function of the user",
        "abcd@",
        lambda rows: rows.map_batches(lambda batch: batch, schema=DATA.schema).collect(),
    ),
    ("a function before a select", "abcd@", lambda rows: rows.filter(lambda row: True).select("a").collect()),
    ("a pattern", "abcd@", lambda rows: rows.select(pl.col("^[ab]$")).collect()),
    ("a type", "abcd@", lambda rows: rows.select(pl.selectors.integer()).collect()),
    ("every column", "abcd@", lambda rows: rows.select(pl.all() + 1).collect()),
]


@pytest.fixture
def files(tmp_path: Path) -> str:
    """A Parquet file."""
    pq.write_table(DATA, tmp_path / "rows.parquet")
    return str(tmp_path / "*.parquet")


def columns_read(env: tg.StreamEnvironment, folder: Path) -> list[str]:
    """The columns that the source of the job reads."""
    submission = env.plan("job", checkpoints=tg.CheckpointConfig(storage=str(folder / "checkpoints")))
    (source,) = (vertex.source for vertex in submission.context.graph.vertices if vertex.source is not None)
    return list(source.source.schema.names)


@pytest.mark.parametrize(("wanted", "build"), [pytest.param(used, build, id=name) for name, used, build in USED])
def test_a_source_reads_what_is_used(files: str, tmp_path: Path, wanted: str, build: Build) -> None:
    """What steps read goes back to it, as far as the steps say."""
    with tg.StreamEnvironment.local() as env:
        build(env.from_files(files))
        assert columns_read(env, tmp_path) == ["at" if name == "@" else name for name in wanted]


def test_event_time_needs_its_column(files: str, tmp_path: Path) -> None:
    """Although nothing else reads it."""
    with tg.StreamEnvironment.local() as env:
        env.from_files(files, timestamp="at").select("b").collect()
        assert columns_read(env, tmp_path) == ["b", "at"]


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_the_rows_are_those_of_a_source_that_reads_all(tmp_path: Path, kind: str) -> None:
    """Of every format, also where no column is used but rows are counted."""
    frame = pl.DataFrame({"a": ["x", "y", "x"], "b": [1, 2, 3], "c": [0.5, 1.5, 2.5]})
    path = tmp_path / f"rows.{kind}"
    if kind == "json":
        frame.write_ndjson(path)
    else:
        getattr(frame, f"write_{kind}")(path)
    with tg.StreamEnvironment.local(2) as env:
        rows = env.from_files(str(path))
        kept = rows.filter(pl.col("c") > 1).select("a").collect()
        totals = rows.key_by("a").aggregate(t=tg.sum("b"), emit="final").collect()
        env.execute("job", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))).wait("4min")
    with tg.StreamEnvironment.local(2) as env:
        ones = env.from_files(str(path)).select(pl.lit(1).alias("one")).collect()
        env.execute("ones", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))).wait("4min")
    assert sorted(kept.to_arrow()["a"].to_pylist()) == ["x", "y"]
    assert sorted((row["a"], row["t"]) for row in totals.to_arrow().to_pylist()) == [("x", 4), ("y", 2)]
    assert ones.to_arrow().num_rows == 3
