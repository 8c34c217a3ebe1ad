"""Files of a DataFrame's plan as a source, without Spark: the plan is made here."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_contract import check_source
from waiting import until

import tidegate as tg
from tidegate.connectors import pushed_filters
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.spark_bridge.dataframes import files_in_place
from tidegate.spark_bridge.dataframes.files_in_place import (
    FilesInPlace,
    FilesOfPlan,
    FoundFile,
    NeedsSparkError,
    RowCondition,
    compared,
    place_files,
    placed_files,
)
from tidegate.storage.files.file_system_store import open_store

PARTITIONS = pa.schema([("part", pa.int32())])
RELATION = pa.schema([("n", pa.int64()), ("text", pa.string()), *PARTITIONS])
RENAMED = pa.schema([("word", pa.string()), ("number", pa.int64()), ("part", pa.int32())])


def plan(folder: Path, condition: RowCondition | None = None) -> FilesOfPlan:
    """Two folders with a file of ten rows each, in row groups of four; the second file has no column `text`."""
    files = []
    for part in range(2):
        path = folder / f"part={part}" / "a b%.parquet"
        path.parent.mkdir(parents=True)
        rows = pa.table({"n": range(part * 10, part * 10 + 10), "text": [str(n % 3) for n in range(10)]})
        pq.write_table(rows if part == 0 else rows.drop_columns("text"), str(path), row_group_size=4)
        files.append(FoundFile(f"file:{path}", path.stat().st_size, part))
    folders = tuple(pa.record_batch([pa.array([part], pa.int32())], schema=PARTITIONS) for part in range(2))
    return FilesOfPlan(RENAMED, ("text", "n", "part"), RELATION, PARTITIONS, condition, tuple(files), folders)


def test_rows_come_under_the_names_of_the_dataframe(tmp_path: Path) -> None:
    """With the values of folders, and nulls for a column that a file lacks; as the job had them written down."""
    source = place_files(plan(tmp_path / "in"), str(tmp_path / "job"))
    rows = [{"word": str(n % 3) if n < 10 else None, "number": n, "part": n // 10} for n in range(20)]
    assert check_source(source) == rows
    assert placed_files(open_store(str(tmp_path / "job"))) == source
    assert check_source(source.projected(["part"])) == [{"part": row["part"]} for row in rows]


def test_a_large_file_is_several_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole row groups; together they have its rows, once."""
    monkeypatch.setattr(files_in_place, "SPLIT_ROWS", 5)
    source = place_files(plan(tmp_path / "in"), str(tmp_path / "job"))
    assert [split.rows for split in source.splits()] == [8, 2, 8, 2]
    assert [row["number"] for row in check_source(source)] == list(range(20))


def test_filters_leave_out_rows_row_groups_and_folders(tmp_path: Path) -> None:
    """Rows come if the DataFrame's filter is true; what cannot have any is not read."""
    both = RowCondition("and", (compared("=", "part", pa.array([0], pa.int32())), compared(">", "n", pa.array([5]))))
    source = place_files(plan(tmp_path / "in", both), str(tmp_path / "job"))
    assert [split.split_id for split in source.splits()] == ["part=0/a b%.parquet"]
    assert [row["number"] for row in check_source(source)] == [6, 7, 8, 9]
    reader, (split,) = source.reader(), source.splits()
    assert reader.read(split, 0, 100).skipped == 4
    wanted = pushed_filters.rows_kept(pl.col("number") < 8, None)
    assert isinstance(wanted, tuple)
    narrowed = source.filtered(wanted)
    assert isinstance(narrowed, FilesInPlace)
    last = narrowed.reader().read(split, 8, 100)
    assert (last.skipped, last.at_end) == (2, True)


def test_a_file_that_is_another_one_by_now_is_for_spark(tmp_path: Path) -> None:
    """Its size is not what Spark has listed, or it is no Parquet file; nothing is written down."""
    found = plan(tmp_path / "in")
    path = Path(found.files[1].path.removeprefix("file:"))
    for data, words in (
        (path.read_bytes() + b"more", "has changed since"),
        (b"x" * path.stat().st_size, "cannot be read"),
    ):
        path.write_bytes(data)
        with pytest.raises(NeedsSparkError, match=words):
            place_files(found, str(tmp_path / "job"))
    assert placed_files(open_store(str(tmp_path / "job"))) is None


@pytest.mark.parametrize("change", ["rewritten", "gone"])
def test_a_file_that_changes_ends_the_job(tmp_path: Path, change: str) -> None:
    """At once, with its name and what to do; the table has no row of another file."""
    source = place_files(plan(tmp_path / "in"), str(tmp_path / "job"))
    path = tmp_path / "in" / "part=1" / "a b%.parquet"
    before = path.read_bytes()
    pq.write_table(pa.table({"n": range(1_000, 1_010)}), path, row_group_size=4)
    path.write_bytes(path.read_bytes().ljust(len(before))) if change == "rewritten" else path.unlink()
    with tg.StreamEnvironment.local(1) as env:
        out = env.from_source(source, uid="in").to_table(tmp_path / "out", uid="out")
        checkpoints = tg.CheckpointConfig(interval="10ms", storage=str(tmp_path / "checkpoints"))
        restart = tg.RestartStrategy.fixed_delay(attempts=10, delay="0ms")
        job = env.execute("placed", checkpoints=checkpoints, restart=restart)
        words = "was changed after" if change == "rewritten" else "was deleted"
        with pytest.raises(tg.JobFailedError, match=rf"part=1/a b%\.parquet {words}.*stage=True"):
            job.wait()
        assert job.progress().restarts == 0
        assert set(out.to_arrow()["number"].to_pylist()) <= set(range(10))


class Held(FilesInPlace):
    """Gives nothing of the second file until it is let go."""

    asked, gate = threading.Event(), threading.Event()

    def reader(self) -> SourceReader:
        """A reader that waits."""
        return HeldReader(FilesInPlace.reader(self))


@dataclass
class HeldReader:
    """See `Held`."""

    behind: SourceReader

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Rows of the first file, and then nothing at first."""
        if split.split_id.startswith("part=1"):
            Held.asked.set()
            if not Held.gate.is_set():
                return ReadResult(None, offset, at_end=False)
        return self.behind.read(split, offset, rows_max)

    def close(self) -> None:
        """Of the one behind."""
        self.behind.close()


def test_a_restored_job_is_refused_if_a_file_that_it_has_to_read_has_changed(tmp_path: Path) -> None:
    """When it is submitted. A file that was read is not needed any more, whatever has become of it."""
    source = Held(place_files(plan(tmp_path / "in"), str(tmp_path / "job")).manifest, RENAMED)
    first, second = (tmp_path / "in" / f"part={part}" / "a b%.parquet" for part in range(2))
    checkpoints = tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))

    def execute(restore: str | None = None) -> tuple[tg.Job, tg.OutputTable]:
        env = tg.StreamEnvironment.local(1)
        out = env.from_source(source, uid="in").to_table(tmp_path / "out", uid="out")
        return env.execute("placed", checkpoints=checkpoints, restore=restore), out

    job, _ = execute()
    until("a read", Held.asked.is_set)
    saved = job.stop(savepoint=str(tmp_path / "saved"))
    job.wait()
    first.unlink()
    before = second.read_bytes()
    second.write_bytes(before + b"more")
    with pytest.raises(tg.ConfigurationError, match=r"'in' cannot continue from .*part=1/a b%\.parquet was changed"):
        execute(saved)
    changed_at = source.manifest.splits[1].file.modified_at_ms * 10**6
    second.write_bytes(before)
    os.utime(second, ns=(changed_at, changed_at))
    Held.gate.set()
    job, out = execute(saved)
    job.wait()
    assert sorted(out.to_arrow()["number"].to_pylist()) == list(range(20))
