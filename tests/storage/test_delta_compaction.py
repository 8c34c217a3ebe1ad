"""Small files of a Delta table that are put together beside its job, also where others have done so before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from table_logs import SCHEMA, A, B, C, file_of

from tidegate.storage.errors import TableError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId
from tidegate.storage.tables.delta_mirror import DeltaChange, DeltaMirror
from tidegate.storage.tables.log.vacuum import Retention
from tidegate.storage.tables.maintenance import CompactionSettings, RunningCompaction
from tidegate.storage.tables.partitions import folder_name
from tidegate.storage.tables.table_files import data_dir, read_table, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog


class Job:
    """A job that commits a row with each checkpoint."""

    def __init__(self, folder: Path, partition: str | None = None) -> None:
        """`partition`: all rows are in that of this value."""
        self.url = str(folder)
        self.store = open_store(self.url)
        self.log = TableLog(self.store)
        self._key, self._folder = ("k", "") if partition is None else (partition, f"/{folder_name('k', partition)}")
        by = () if partition is None else ("k",)
        self.log.create(TableInfo.of(SCHEMA, "append", partition_by=by, delta_id="tidegate-test"))
        self.log.claim(A)
        self.compaction = RunningCompaction(self.store, self.log, A, CompactionSettings(10**6, 3))

    def commit(self, number: int) -> None:
        """Of checkpoint n, with row n."""
        path = f"{data_dir(A, AttemptNumber(0))}{self._folder}/{number}.parquet"
        row = pa.record_batch([pa.array([self._key]), pa.array([number])], schema=SCHEMA)
        self.log.commit(A, CheckpointId(number), (write_data_file(self.store, path, [row]),))

    @property
    def delta(self) -> DeltaTable:
        """As somebody sees it who has just come."""
        return DeltaTable(self.url)

    def values(self) -> list[int]:
        """Rows that readers of Delta see."""
        found: list[int] = self.delta.to_pyarrow_table()["v"].to_pylist()
        return sorted(found)


def test_readers_of_delta_see_fewer_files_and_no_change(tmp_path: Path) -> None:
    """One transaction of its own, which says that no rows have changed; earlier versions stay."""
    job = Job(tmp_path)
    for number in (1, 2, 3):
        job.commit(number)
    before = job.delta.version()
    assert job.compaction.step()
    assert len(job.delta.file_uris()) == 1
    assert job.values() == [1, 2, 3]
    actions = [json.loads(line) for line in (tmp_path / "_delta_log" / f"{before + 1:020d}.json").open()]
    changes = [action[kind]["dataChange"] for action in actions for kind in ("add", "remove") if kind in action]
    assert changes == [False] * 4
    assert DeltaTable(job.url, version=before).to_pyarrow_table().num_rows == 3


def test_what_others_have_put_together_stays(tmp_path: Path) -> None:
    """Ours are not added to it. Later commits are; and rows that nobody can take back any more are an error."""
    job = Job(tmp_path)
    for number in (1, 2, 3):
        job.commit(number)
    job.delta.optimize.compact()
    theirs = job.delta.file_uris()
    assert job.compaction.step()
    assert job.delta.file_uris() == theirs
    assert job.values() == read_table(job.store)["v"].to_pylist() == [1, 2, 3]
    job.commit(4)
    assert job.values() == [1, 2, 3, 4]
    late = TableLog(job.store)
    late.claim(B, (A, CheckpointId(1)))
    with pytest.raises(TableError, match="have to be hidden"):
        late.commit(B, CheckpointId(1), (write_data_file(job.store, "data/b.parquet", rows_of(5)),))


def test_a_vacuum_leaves_what_delta_shows(tmp_path: Path) -> None:
    """Also where the writer was killed before Delta had what it had committed: Delta follows first."""
    job = Job(tmp_path)
    for number in (1, 2, 3):
        job.commit(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableLog, "_follow", lambda _: None)
        assert job.compaction.step()
    assert len(job.delta.file_uris()) == 3
    deletable, _ = TableLog(job.store).vacuum(Retention(10**15))
    job.store.delete_all(deletable)
    assert len(deletable) == 3
    assert job.values() == [1, 2, 3]


def test_partitions_whose_folders_are_escaped_are_known_again(tmp_path: Path) -> None:
    """Delta escapes their names once more. What was put together goes, and so does what a restored job takes back."""
    job = Job(tmp_path, "a b/ü%")
    for number in (1, 2, 3):
        job.commit(number)
    assert job.compaction.step()
    assert len(job.delta.file_uris()) == 1
    deletable, _ = job.log.vacuum(Retention(10**15))
    job.store.delete_all(deletable)
    assert len(deletable) == 3
    job.commit(4)
    assert job.values() == [1, 2, 3, 4]
    late = TableLog(job.store)
    late.claim(B, (A, CheckpointId(3)))
    late.commit(B, CheckpointId(1), ())
    assert job.values() == [1, 2, 3]
    assert set(job.delta.to_pyarrow_table()["k"].to_pylist()) == {"a b/ü%"}
    late.check_claim(late.snapshot().info, C, None, "overwrite")


def rows_of(*values: int) -> list[pa.RecordBatch]:
    """Rows of a file."""
    return [pa.record_batch([pa.array(["k"] * len(values)), pa.array(values)], schema=SCHEMA)]


def test_a_cut_begins_again_where_the_log_went_on_while_delta_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many commits meanwhile that the log was truncated: the cut must not fill the hole behind them."""
    store, clock = open_store(str(tmp_path)), [1]
    job, cutter = (TableLog(store, entries_per_snapshot=4, now_ms=lambda: clock[0]) for _ in range(2))
    job.create(TableInfo.of(SCHEMA, "append", delta_id="tidegate-test"))
    job.claim(A)

    def commit(numbers: Iterable[int]) -> None:
        for number in numbers:
            clock[0] += 1_000
            job.commit(A, CheckpointId(number), (file_of(f"a{number}"),))

    commit(range(1, 20))
    job.take_compacting(A, "n")
    assert job.compact(A, "n", {entry.seq for entry in job.shown_entries()[1]}, 1, (file_of("large", 19),))
    commit([20])
    retention = Retention(clock[0], checkpoints=(CheckpointId(20),))
    cutter.vacuum(retention)
    show, waiting = DeltaMirror.show, [range(21, 41)]

    def slow(self: DeltaMirror, change_since: Callable[[int | None], DeltaChange | None]) -> None:
        if waiting:
            commit(waiting.pop())
        show(self, change_since)

    monkeypatch.setattr(DeltaMirror, "show", slow)
    other = TableLog(store, entries_per_snapshot=4, now_ms=lambda: clock[0])
    assert other.cut(retention, lambda paths: ())
    fold = TableLog(store).state()
    assert fold is not None
    assert fold.cut is not None
    assert fold.cut.commit < fold.seq - 20
    assert [file.rows for file in TableLog(store).snapshot().files] == [19, *[1] * 21]
