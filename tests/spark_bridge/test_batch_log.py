"""The batch log: each batch once, whole, in lanes whose order follows from the commits."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_logs import QUERY, SCHEMA, append, new_log, stage_rows
from hypothesis import given
from hypothesis import strategies as st

from tidegate.connectors.staged_parquet import StagedFile
from tidegate.spark_bridge.streams.batch_log import BatchLog, LogBatch, LogHeader, batch_after, data_folder
from tidegate.storage.errors import AlreadyExistsError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store


@given(
    lanes=st.integers(1, 5),
    batches=st.lists(st.lists(st.integers(1, 9), max_size=8), max_size=8),
    first=st.integers(0, 6),
)
def test_lanes_share_out_all_files_and_their_rows_follow_each_other(
    lanes: int, batches: list[list[int]], first: int
) -> None:
    """Every file is in one lane; in each lane rows are numbered from 0 on without a gap."""
    previous: LogBatch | None = None
    next_row = [0] * lanes
    for batch_id, sizes in enumerate(batches, start=first):
        files = tuple(StagedFile(f"{batch_id}-{n}", rows, 1, "") for n, rows in enumerate(sizes))
        batch = batch_after(previous, batch_id, QUERY, files, lanes)
        seen = []
        for lane in range(lanes):
            assert batch.start_of(lane) == next_row[lane]
            for start, file in batch.in_lane(lane):
                assert start == next_row[lane]
                next_row[lane] += file.rows
                seen.append(file)
            assert batch.ends[lane] == next_row[lane]
        assert sorted(seen, key=lambda file: file.path) == sorted(files, key=lambda file: file.path)
        previous = batch


def test_a_log_keeps_what_it_was_told(local_store: FileSystemStore) -> None:
    """Header and commits are read as they were written, by whoever opens the log."""
    header = LogHeader("log", SCHEMA, 3, "s3a://bucket/spark")
    BatchLog(local_store).create(header)
    batches = [
        append(BatchLog(local_store), [1, 2], [3]),
        append(BatchLog(local_store)),
        append(BatchLog(local_store), [4]),
    ]
    found = BatchLog(open_store(local_store.url))
    assert found.header() == header
    assert found.batch_ids() == [0, 1, 2]
    assert [found.read(batch_id) for batch_id in found.batch_ids()] == batches


def test_a_batch_is_committed_once(local_store: FileSystemStore) -> None:
    """The second commit of a batch changes nothing, nor does the second log in a folder."""
    log = new_log(local_store.url)
    batch = append(log, [1])
    with pytest.raises(AlreadyExistsError):
        log.commit(batch_after(None, 0, "another", (), 2))
    with pytest.raises(AlreadyExistsError):
        log.create(LogHeader("other", SCHEMA, 9))
    assert log.read(0) == batch
    assert log.header().lanes == 2


def test_no_log_is_an_error_that_names_the_place(local_store: FileSystemStore) -> None:
    """Of a folder without a header."""
    with pytest.raises(
        NotFoundError, match=f"no log of a streaming DataFrame exists at .*{Path(local_store.url).name}"
    ):
        BatchLog(local_store).header()


@pytest.mark.parametrize("path", ["_log", "batches/000000000000"])
def test_damage_is_found(local_store: FileSystemStore, path: str) -> None:
    """A flipped bit in the header or in a commit, and one file in the place of another."""
    log = new_log(local_store.url)
    append(log, [1])
    data = bytearray(local_store.read(path))
    other = local_store.read("_log" if path != "_log" else "batches/000000000000")
    data[-1] ^= 1
    for wrong in (bytes(data), other):
        local_store.write(path, (wrong,))
        with pytest.raises(CorruptionError, match=path):
            log.header() if path == "_log" else log.read(0)


def test_a_deleted_batch_takes_its_files_along(local_store: FileSystemStore) -> None:
    """And no other one's."""
    log = new_log(local_store.url)
    first, second = append(log, [1], [2]), append(log, [3])
    log.delete([first])
    assert log.batch_ids() == [1]
    assert [name.partition("-")[0] for name in local_store.list("data")] == ["000000000001"]
    assert all(local_store.exists(file.path) for file in second.files)


def test_leftovers_of_batches_that_are_over_go(local_store: FileSystemStore) -> None:
    """Files of attempts that lost, and of deletions that were cut short; what is written now stays."""
    log = new_log(local_store.url)
    batches = [append(log, [n]) for n in range(3)]
    local_store.delete("batches/000000000000")
    lost, now = data_folder(2, "lost"), data_folder(3, "now")
    for folder in (lost, now):
        stage_rows(local_store, folder, [[7]])
    assert log.delete_leftovers(batches[1:]) == 2
    left = local_store.list("data")
    assert now.partition("/")[2] in left
    assert len(left) == 3
    assert all(local_store.exists(file.path) for batch in batches[1:] for file in batch.files)
