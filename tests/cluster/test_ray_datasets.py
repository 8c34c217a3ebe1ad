"""Datasets of Ray Data in and out: exactly their rows, durable once the job is submitted, or refused by name."""

from __future__ import annotations

import datetime as dt
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import ray
import ray.data
from ray import cloudpickle
from ray_jobs import Gated
from source_contract import check_source
from waiting import until

import tidegate as tg
from tidegate.connectors import ray_data as table_dataset
from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.ray_data import RayDataError, RayDatasetSource
from tidegate.connectors.source import is_unbounded
from tidegate.spark_bridge import ParquetSource
from tidegate.storage.errors import AlreadyExistsError, NotFoundError

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("raydp_session")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """No progress bars."""
    ray.data.DataContext.get_current().enable_progress_bars = False


def staged(ds: ray.data.Dataset, folder: Path, schema: pa.Schema | None = None) -> ParquetSource:
    """A dataset as a source that can be read."""
    source = RayDatasetSource(ds, schema).stage(str(folder))
    assert isinstance(source, ParquetSource)
    return source


def test_blocks_become_a_source_that_keeps_the_contract(tmp_path: Path) -> None:
    """Values of all kinds, nulls, and the order of blocks and of rows in them; another process opens it again."""
    day = dt.date(2024, 2, 29)
    rows = [
        {
            "id": i,
            "text": None if i % 3 == 0 else f"t{i}",
            "real": i / 3,
            "at": dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=i),
            "day": day,
            "tags": ["a", None][: i % 3],
            "point": {"x": i, "y": None},
            "kind": "ab"[i % 2],
        }
        for i in range(40)
    ]
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            ("text", pa.string()),
            ("real", pa.float64()),
            ("at", pa.timestamp("ns", "UTC")),
            ("day", pa.date32()),
            ("tags", pa.list_(pa.string())),
            ("point", pa.struct([("x", pa.int32()), ("y", pa.float32())])),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
        ]
    )
    table = pa.Table.from_pylist(rows, schema)
    ds = ray.data.from_arrow([table.slice(at, 10) for at in range(0, 40, 10)])
    source = staged(ds, tmp_path / "s")
    assert not is_unbounded(source)
    assert source.schema.equals(schema)
    assert [split.rows for split in source.splits()] == [10, 10, 10, 10]
    assert check_source(source) == table.to_pylist()
    reopened = RayDatasetSource(ds).reopen(str(tmp_path / "s"))
    assert check_source(reopened) == table.to_pylist()
    with pytest.raises(AlreadyExistsError):
        RayDatasetSource(ds).stage(str(tmp_path / "s"))
    with pytest.raises(NotFoundError):
        RayDatasetSource(ds).reopen(str(tmp_path / "t"))
    assert ds.context.execution_options.preserve_order is False, "the user's context is as it was"


def test_pandas_blocks_lazy_datasets_and_empty_ones(tmp_path: Path) -> None:
    """Text of pandas gets its Arrow type, a lazy dataset is computed, and no rows are a source without splits."""
    frame = pd.DataFrame({"n": [1, 2], "s": ["x", None]})
    source = staged(ray.data.from_pandas(frame), tmp_path / "pandas")
    assert source.schema.equals(pa.schema([("n", pa.int64()), ("s", pa.string())]))
    assert check_source(source) == [{"n": 1, "s": "x"}, {"n": 2, "s": None}]

    lazy = ray.data.range(100, override_num_blocks=5).filter(lambda row: row["id"] % 2 == 0)
    assert [row["id"] for row in check_source(staged(lazy, tmp_path / "lazy"))] == list(range(0, 100, 2))

    nothing = staged(ray.data.range(5).filter(lambda row: False), tmp_path / "nothing")
    assert nothing.schema.names == ["id"]
    assert list(nothing.splits()) == []
    with pytest.raises(tg.ConfigurationError, match="no rows and no columns; give schema="):
        RayDatasetSource(ray.data.from_items([]))
    given = staged(ray.data.from_items([]), tmp_path / "given", pa.schema([("n", pa.int64())]))
    assert list(given.splits()) == []


def test_blocks_are_cast_only_where_no_value_changes(tmp_path: Path) -> None:
    """Ints fit into floats, nulls into anything. Text, fractions, decimals for floats and other columns do not."""
    ints = pa.table({"a": pa.array([1], pa.int32()), "b": pa.nulls(1)})
    reals = pa.table({"b": ["x"], "a": [0.5]})
    wide = pa.schema([("a", pa.float64()), ("b", pa.string())])
    mixed = ray.data.from_arrow([reals, ints])
    assert check_source(staged(mixed, tmp_path / "wide", wide)) == [{"a": 0.5, "b": "x"}, {"a": 1.0, "b": None}]
    narrow = pa.schema([("a", pa.int64()), ("b", pa.string())])
    for number, (table, said) in enumerate(
        [
            (reals, "column 'a' is int64 in the dataset and double in one of its blocks"),
            (pa.table({"a": ["1"], "b": ["x"]}), "column 'a' is int64 in the dataset and string"),
            (pa.table({"a": [1], "c": ["x"]}), r"a block of the dataset has columns \(a: int64, c: string\), and not"),
        ]
    ):
        folder = tmp_path / f"narrow{number}"
        with pytest.raises(tg.ConfigurationError, match=said):
            staged(ray.data.from_arrow([ints, table]), folder, narrow)
        assert [path for path in folder.rglob("*") if path.is_file()] == []
    exact = ray.data.from_arrow(pa.table({"a": [[Decimal("0.1234567890123456789")]]}))
    with pytest.raises(tg.ConfigurationError, match=r"'a' is list<\w+: double> in the dataset and list<\w+: dec"):
        staged(exact, tmp_path / "decimals", pa.schema([("a", pa.list_(pa.float64()))]))


def test_columns_that_streams_lack_are_refused_by_name(tmp_path: Path) -> None:
    """Tensors, pickled objects, columns without a type, and what is no dataset; the advice for tensors works."""
    vectors = ray.data.from_items([{"v": np.arange(2.0)}, {"v": np.arange(2.0)}])
    with pytest.raises(tg.ConfigurationError, match=r"ArrowTensorType.*which 'v' is; make lists of it: ds.map\("):
        RayDatasetSource(vectors)
    lists = vectors.map(lambda row: {**row, "v": row["v"].tolist()})
    assert check_source(staged(lists, tmp_path / "lists")) == [{"v": [0.0, 1.0]}] * 2
    with pytest.raises(tg.ConfigurationError, match="which 'v' is"):
        RayDatasetSource(ray.data.from_items([{"v": np.zeros(2)}, {"v": np.zeros(3)}]))
    with pytest.raises(tg.ConfigurationError, match="which 'o' is; it has pickled Python objects"):
        RayDatasetSource(ray.data.from_items([{"o": object()}]))
    with pytest.raises(tg.ConfigurationError, match="column 'n' has only nulls in the first block"):
        RayDatasetSource(ray.data.from_arrow(pa.table({"n": pa.nulls(2)})))
    with pytest.raises(tg.ConfigurationError, match=r"takes a ray.data.Dataset, and not a list"):
        RayDatasetSource([1])  # type: ignore[arg-type]
    with pytest.raises(tg.ConfigurationError, match="do not see this one's memory"):
        RayDatasetSource(ray.data.range(1)).stage("memory://datasets/s")
    careless = ray.data.range(3).map(lambda row: row)
    source = RayDatasetSource(careless)
    careless.context.max_errored_blocks = 1
    with pytest.raises(tg.ConfigurationError, match="max_errored_blocks is 1"):
        source.stage(str(tmp_path / "careless"))
    with pytest.raises(tg.ConfigurationError, match="max_errored_blocks is 1"):
        RayDatasetSource(careless)


def test_a_failing_dataset_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The error has the reason of the user's function; one that does not end is given up."""

    def fail(row: dict[str, object]) -> dict[str, object]:
        if row["id"] == 3:
            raise ValueError("row three is bad")
        return row

    folder = tmp_path / "s"
    with pytest.raises(RayDataError, match=r"could not compute the dataset.*row three is bad"):
        RayDatasetSource(ray.data.range(4, override_num_blocks=4).map(fail), pa.schema([("id", pa.int64())])).stage(
            str(folder)
        )
    assert [path for path in folder.rglob("*") if path.is_file()] == []

    gate = tmp_path / "gate"

    def wait(row: dict[str, object]) -> dict[str, object]:
        until("the end of the test", gate.exists)
        return row

    slow = ray.data.range(1).map(wait)
    slow.context.execution_no_progress_timeout_s = 0.5
    source = RayDatasetSource(slow, pa.schema([("id", pa.int64())]))
    try:
        with pytest.raises(RayDataError, match=r"could not compute the dataset: Dataset execution made no progress"):
            source.stage(str(tmp_path / "slow"))
    finally:
        gate.touch()


def test_a_restored_job_reads_what_was_staged_for_the_first(tmp_path: Path) -> None:
    """A dataset that gives other rows when it is computed again, through a savepoint: each row counts once."""
    checkpoints = tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))
    ran, gate = tmp_path / "ran", tmp_path / "gate"
    ran.mkdir()

    def other_rows(row: dict[str, int]) -> dict[str, int]:
        computed = len(list(ran.iterdir()))
        (ran / str(computed)).touch()
        return {"k": row["id"] % 3, "n": row["id"] if computed < 20 else 1_000}

    with tg.StreamEnvironment.local() as env:

        def program() -> tg.OutputTable:
            ds = ray.data.range(20, override_num_blocks=1).map(other_rows)
            rows = env.from_ray_dataset(ds, schema={"k": int, "n": int}, uid="rows")
            nothing = MemorySource(pa.schema([("k", pa.int64()), ("n", pa.int64())]).empty_table(), 1)
            rows = rows.union(env.from_source(Gated(nothing, gate), uid="nothing"))
            totals = rows.key_by("k").aggregate(total=tg.sum("n"), uid="totals")
            return totals.to_table(tmp_path / "table", mode="upsert", keys=["k"], uid="table")

        program()
        savepoint = env.execute("dataset", checkpoints=checkpoints).stop(savepoint=tmp_path / "savepoints")
        gate.touch()
        out = program()
        again = env.execute("dataset", checkpoints=checkpoints, restore=savepoint)
        assert again.wait("5min") == "finished"
    expected = {k: sum(n for n in range(20) if n % 3 == k) for k in range(3)}
    assert dict(out.to_polars().iter_rows()) == expected
    assert len(list(ran.iterdir())) == 20, "the dataset was computed once"


def test_a_table_is_a_dataset_of_its_committed_rows(tmp_path: Path) -> None:
    """Lazy, counted without reading, pinned to its commit, and without rows that are not in the table."""
    with tg.StreamEnvironment.local(parallelism=2) as local:
        storage = tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))

        def append(first: int) -> tg.OutputTable:
            frame = pl.DataFrame({"n": range(first, first + 10), "s": ["x", None] * 5})
            table = local.from_batches(frame).to_table(tmp_path / "table", if_exists="append")
            local.execute(checkpoints=storage).wait()
            return table

        out = append(0)
        ds = out.to_ray()
        append(10)
        assert ds.schema().base_schema.equals(out.info.arrow_schema)
        assert ds.count() == 10
        assert sorted(row["n"] for row in ds.take_all()) == list(range(10))
        assert sorted(row["n"] for row in out.to_ray().take_all()) == list(range(20))
        before = out.to_ray(as_of=out.history()[0].number)
        assert before.count() <= 10
        some = next(path for path in (tmp_path / "table" / "data").rglob("*.parquet"))
        (some.parent / "part-9-000009-lost.parquet").write_bytes(some.read_bytes())
        assert out.to_ray().count() == 20
        assert ray.data.read_parquet(str(tmp_path / "table")).count() > 20, "what people try first is wrong"
        some.write_bytes(some.read_bytes()[:-1])
        with pytest.raises(Exception, match="its checksum does not match"):
            out.to_ray().take_all()


def test_upsert_tables_show_the_newest_row_of_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one task, and in many that share the keys; hidden columns and deleted rows are not shown."""
    with tg.StreamEnvironment.local(parallelism=2) as local:
        rows = pl.DataFrame({"k": [i % 7 for i in range(100)], "name": [f"n{i % 7}" for i in range(100)]})
        out = (
            local.from_batches(rows)
            .key_by("k", "name")
            .aggregate(n=tg.count())
            .to_table(tmp_path / "table", mode="upsert", keys=["k", "name"])
        )
        local.execute(checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))).wait()
        expected = sorted(out.to_arrow().to_pylist(), key=str)
        assert sorted(out.to_ray().take_all(), key=str) == expected
        monkeypatch.setattr(table_dataset, "BUCKET_BYTES", 1_000)
        shared = out.to_ray().materialize()
        assert shared.num_blocks() > 1
        assert sorted(shared.take_all(), key=str) == expected


def test_a_table_without_rows_has_columns_and_memory_is_refused(tmp_path: Path) -> None:
    """An empty table is an empty dataset; Ray's tasks cannot see rows in the memory of this process."""
    with tg.StreamEnvironment.local() as local:
        empty = pl.DataFrame({"n": [1]}).clear()
        out = local.from_batches(empty).to_table(tmp_path / "table")
        held = local.from_batches(empty).to_table("memory://datasets/held")
        local.execute(checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))).wait()
        assert out.to_ray().schema().base_schema.equals(pa.schema([("n", pa.int64())]))
        assert out.to_ray().count() == 0
        with pytest.raises(tg.ConfigurationError, match="do not see this one's memory"):
            held.to_ray()
