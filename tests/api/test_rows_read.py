"""Sources leave out rows that the program's filters drop, where nothing can tell the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from programs import nodes_of

import tidegate as tg
from tidegate import recovery
from tidegate.api.streams.stream import Stream
from tidegate.connectors.files.source import FilesSource

DATA = pa.table({"a": range(1_000), "b": range(1_000)})
Build = Callable[[Stream], object]


def _two(first: pl.Expr, second: pl.Expr) -> Build:
    """Two readers of one stream."""

    def build(rows: Stream) -> None:
        rows.filter(first).collect()
        rows.filter(second).collect()

    return build


TESTS: list[tuple[str, list[list[str]] | None, Build]] = [
    ("a filter", [["a >"]], lambda rows: rows.filter(pl.col("a") > 1).collect()),
    ("of both", [["a >", "b is_null"]], lambda rows: rows.filter((pl.col("a") > 1) & pl.col("b").is_null()).collect()),
    ("two in a row", [["a >", "b <"]], lambda rows: rows.filter(pl.col("a") > 1).filter(pl.col("b") < 9).collect()),
    (
        "the first alone is understood",
        [["a >"]],
        lambda rows: rows.filter(pl.col("a") > 1).filter(pl.col("b") + 1 < 9).collect(),
    ),
    ("the first is not", None, lambda rows: rows.filter(pl.col("b") + 1 < 9).filter(pl.col("a") > 1).collect()),
    (
        "behind new names",
        [["a >"]],
        lambda rows: rows.select(pl.col("a").alias("b"), "b_").filter(pl.col("b") > 1).collect(),
    ),
    (
        "behind a computed column",
        None,
        lambda rows: rows.select((pl.col("a") + 1).alias("b")).filter(pl.col("b") > 1).collect(),
    ),
    ("behind a function", None, lambda rows: rows.map(lambda row: row, schema=DATA.schema).filter(pl.col("a") > 1)),
    ("behind event time", None, lambda rows: rows.assign_timestamps("a").filter(pl.col("a") > 1).collect()),
    ("before it", [["a >"]], lambda rows: rows.filter(pl.col("a") > 1).assign_timestamps("a").collect()),
    ("in other subtasks", [["a >"]], lambda rows: rows.rebalance().filter(pl.col("a") > 1, parallelism=2).collect()),
    ("two readers", [["a >"], ["b <"]], _two(pl.col("a") > 1, pl.col("b") < 9)),
    ("one of which needs all", None, _two(pl.col("a") > 1, pl.col("a") + 1 > 1)),
    ("no filter", None, lambda rows: rows.collect()),
]


@pytest.fixture
def files(tmp_path: Path) -> str:
    """A file of ten row groups."""
    (tmp_path / "in").mkdir()
    pq.write_table(DATA.append_column("b_", DATA["b"]), tmp_path / "in" / "rows.parquet", row_group_size=100)
    return str(tmp_path / "in" / "*.parquet")


@pytest.mark.parametrize(("wanted", "build"), [pytest.param(rows, build, id=name) for name, rows, build in TESTS])
def test_filters_go_back_to_the_source(
    files: str, tmp_path: Path, wanted: list[list[str]] | None, build: Build
) -> None:
    """As far as every step on the way is a filter, or only copies columns."""
    with tg.StreamEnvironment.local() as env:
        build(env.from_files(files))
        plan = env.plan("job", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints")))
    (source,) = (vertex.source.source for vertex in plan.context.graph.vertices if vertex.source is not None)
    assert isinstance(source, FilesSource)
    found = source.rows
    shown = None if found is None else [[f"{test.column} {test.test}" for test in tests] for tests in found]
    assert (None if shown is None else sorted(shown)) == wanted


def test_what_cannot_be_read_decides_what_else_is(files: str) -> None:
    """So files that may be left out in part are read as they are."""
    source = nodes_of(tg.StreamEnvironment.local().from_files(files, bad_rows="skip"))[0].source
    assert isinstance(source, FilesSource)
    assert source.filtered(()) is source


def test_a_job_reads_fewer_rows_and_ends_with_the_same(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of ten row groups; the position is that of a job which has read all."""
    decoded = []
    read = pq.ParquetFile.iter_batches

    def counted(file: pq.ParquetFile, **options: Any) -> Iterator[pa.RecordBatch]:
        decoded.extend(options["row_groups"])
        return read(file, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    with tg.StreamEnvironment.local(2) as env:
        rows = env.from_files(files, uid="rows").select("a", "b").filter(pl.col("a").is_between(150, 249)).collect()
        job = env.execute("job", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints")))
        job.wait("4min")
        assert sorted(rows.to_arrow()["a"].to_pylist()) == [*range(150, 250)]
        assert decoded == [1, 2]
        (position,) = recovery.read_state(job.checkpoints()[-1].path, uid="rows").to_pylist()
        assert (position["next_offset"], position["at_end"]) == (1_000, True)
