"""Jobs that write files: each row is in one file, whatever is restarted, and the files are read by other programs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fastavro
import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local

import tidegate as tg

FORMATS: list[Any] = ["avro", "parquet", "csv", "json"]


def rows_in(folder: Path, format: str) -> list[int]:
    """The column `x` of all files, sorted, as another library reads it."""
    found: list[int] = []
    for path in sorted(folder.iterdir()):
        assert path.suffix == f".{format}"
        if format == "avro":
            with path.open("rb") as file:
                rows: Any = fastavro.reader(file)
                found += [row["x"] for row in rows]
            continue
        readers: dict[str, Any] = {"parquet": pl.read_parquet, "csv": pl.read_csv, "json": pl.read_ndjson}
        found += readers[format](path)["x"].to_list()
    return sorted(found)


@pytest.mark.parametrize("format", FORMATS)
def test_each_row_is_in_one_file(tmp_path: Path, format: Any) -> None:
    """A task fails after a checkpoint, and its rows come again."""
    failed = threading.Event()

    def dies(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 700 in batch.column("x").to_pylist() and not failed.is_set():
            failed.set()
            raise ValueError("on purpose")
        return batch

    with local(2, rows_max=50) as env:
        rows = env.from_batches(pa.table({"x": range(1_000)}), splits=5)
        checked = rows.map_batches(dies, schema=pa.schema([("x", pa.int64())]))
        checked.to_files(tmp_path / "out", format=format, target_file_size=500, uid="files")
        restart = tg.RestartStrategy.fixed_delay(3, 0)
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="10ms"), restart=restart)
        assert job.wait("4min") == "finished"
    assert failed.is_set()
    assert rows_in(tmp_path / "out", format) == list(range(1_000))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_savepoint_and_another_parallelism(tmp_path: Path, before: int, after: int) -> None:
    """Rows before the savepoint are in files, and rows after it come from the restored job. Nothing is twice."""
    source = GatedSource(300, 400, gates=(150,))
    path: str | None = None
    for parallelism in (before, after):
        with local(parallelism) as env:
            env.from_source(source, uid="rows").select("x").to_files(tmp_path / "out", format="avro", uid="files")
            checkpoints = config(tmp_path / "c", interval="20ms")
            job = env.execute("job", checkpoints=checkpoints, restart=NO_RESTART, restore=path)
            if path is None:
                source.await_gate(150)
                path = job.savepoint(str(tmp_path / "savepoints"))
                job.cancel()
                source.open_all()
                assert job.wait("4min") == "cancelled"
            else:
                assert job.wait("4min") == "finished"
    assert rows_in(tmp_path / "out", "avro") == sorted([*range(300), *range(400)])


def test_streams_that_are_no_files_are_refused(tmp_path: Path) -> None:
    """In the call, with what to do."""
    with local(1) as env:
        rows = env.from_rows([{"k": "a", "x": 1}])
        changes = rows.key_by("k").aggregate(n=tg.count(), emit="changes")
        unsigned = rows.with_columns(u=pl.col("x").cast(pl.UInt64))
        cases: list[tuple[tg.Stream, dict[str, Any], str]] = [
            (changes, {}, "cannot retract rows"),
            (unsigned, {"format": "avro"}, "'u' is uint64, which Avro does not have"),
            (rows, {"format": "xml"}, "give 'parquet', 'avro', 'csv' or 'json'"),
            (rows, {"target_file_size": 0}, "target_file_size must be greater than 0"),
            (rows, {"compression": "zip"}, "give one of zstd"),
        ]
        for stream, settings, text in cases:
            with pytest.raises(tg.ConfigurationError, match=text):
                stream.to_files(tmp_path / "out", **settings)
