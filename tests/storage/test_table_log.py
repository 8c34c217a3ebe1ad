"""What a table shows is the fold of its log, whoever commits to it and whatever answers are lost."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
import pytest
from faulty_store import FaultyStore
from table_logs import INFO, SCHEMA, A, B, commit, file_of, shown_at, table_at

from tidegate.storage.errors import CorruptionError, FencedError, StorageError, TableError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId
from tidegate.storage.tables.log.tail import entry_path
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog


def test_shows_committed_files_in_order(store: FileSystemStore) -> None:
    """On every store, another reader sees the files of the commits, in the order of the commits."""
    log = table_at(store)
    log.claim(A)
    commit(log, A, 1, "x", "y")
    commit(log, A, 3, "a")

    snapshot = TableLog(store).snapshot()
    assert [file.path for file in snapshot.files] == [f"data/{name}.parquet" for name in ("x", "y", "a")]
    assert (snapshot.info, snapshot.seq, snapshot.rows) == (INFO, 3, 3)


def test_there_is_no_table_before_it_is_created(memory_store: FileSystemStore) -> None:
    """Reading or claiming what is no table says so."""
    log = TableLog(memory_store)

    for use in (log.snapshot, lambda: log.claim(A)):
        with pytest.raises(TableError, match="there is no table"):
            use()
    assert log.entries() == ()


def test_creating_twice_is_one_table(memory_store: FileSystemStore) -> None:
    """A second job that describes the same table finds it; metadata of the schema makes no difference."""
    table_at(memory_store)
    TableLog(memory_store).create(TableInfo.of(SCHEMA.with_metadata({"made": "elsewhere"}), "append"))

    assert len(TableLog(memory_store).entries()) == 1


@pytest.mark.parametrize(
    ("info", "named"),
    [
        (TableInfo.of(SCHEMA, "upsert", ("k",)), "mode 'append', the job writes with 'upsert'"),
        (
            TableInfo.of(pa.schema([("k", pa.string()), ("v", pa.int32())]), "append"),
            "'v' is int64 .* int32 in the job",
        ),
        (TableInfo.of(pa.schema([("k", pa.string())]), "append"), "only the table has a column 'v'"),
        (TableInfo.of(SCHEMA.append(pa.field("w", pa.int8())), "append"), "only the job has a column 'w'"),
        (TableInfo.of(pa.schema(reversed(list(SCHEMA))), "append"), "in order"),
        (
            TableInfo.of(SCHEMA.set(0, pa.field("k", pa.string(), nullable=False)), "append"),
            "string not null in the job",
        ),
    ],
)
def test_another_description_is_refused_by_its_difference(
    memory_store: FileSystemStore, info: TableInfo, named: str
) -> None:
    """A job that would write something else into the table is told what differs."""
    table_at(memory_store)

    with pytest.raises(TableError, match=named):
        TableLog(memory_store).create(info)


@pytest.mark.parametrize(
    ("mode", "keys", "schema"),
    [
        ("append", ("k",), SCHEMA),
        ("upsert", (), SCHEMA),
        ("upsert", ("missing",), SCHEMA),
        ("append", (), pa.schema([("x", pa.int8()), ("x", pa.int8())])),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    mode: Literal["append", "upsert"], keys: tuple[str, ...], schema: pa.Schema
) -> None:
    """Keys belong to upsert tables and to their columns, and columns are told apart by name."""
    with pytest.raises(TableError):
        TableInfo.of(schema, mode, keys)


def test_commits_once(memory_store: FileSystemStore) -> None:
    """A repeated commit changes nothing, also from another process."""
    log = table_at(memory_store)
    log.claim(A)
    for committer in (log, log, TableLog(memory_store)):
        commit(committer, A, 1, "x")

    assert shown_at(memory_store) == ["x"]


def test_one_checkpoint_has_one_content(memory_store: FileSystemStore) -> None:
    """Committing other files for a committed checkpoint would lose or double rows, and is refused."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "x")

    with pytest.raises(TableError, match="other files"):
        commit(log, A, 1, "y")


def test_nothing_to_commit_makes_no_entry_but_is_fenced(memory_store: FileSystemStore) -> None:
    """A checkpoint without files costs no entry; a job that lost the table learns it all the same."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1)
    assert len(log.entries()) == 2

    TableLog(memory_store).claim(B)
    with pytest.raises(FencedError):
        commit(log, A, 2)


def test_only_the_owner_commits(memory_store: FileSystemStore) -> None:
    """Nobody commits before a claim, and nobody after another job's claim, not even by claiming again."""
    log = table_at(memory_store)
    with pytest.raises(TableError, match="is not the one that job 'a-1' has claimed, because"):
        commit(log, A, 1, "x")
    log.claim(A)
    TableLog(memory_store).claim(B)

    for late in (lambda: commit(log, A, 1, "x"), lambda: log.claim(A)):
        with pytest.raises(FencedError, match="owned by 'b-1', not by 'a-1'"):
            late()
    assert shown_at(memory_store) == []


def test_a_claim_that_slips_in_fences_the_commit(memory_store: FileSystemStore) -> None:
    """Between the look at the owner and the commit another job claims: the commit must not show."""
    store = FaultyStore(memory_store.url)
    log = table_at(store)
    log.claim(A)
    store.before_create = lambda: TableLog(memory_store).claim(B)

    with pytest.raises(FencedError):
        commit(log, A, 1, "x")
    assert shown_at(memory_store) == []


def test_a_commit_that_slips_in_is_part_of_what_a_claim_finds(memory_store: FileSystemStore) -> None:
    """A job that claims an empty table, and finds rows when it gets it, is refused like any other."""
    store = FaultyStore(memory_store.url)
    owner = table_at(memory_store)
    owner.claim(A)
    store.before_create = lambda: commit(owner, A, 1, "x")

    with pytest.raises(TableError, match="shows 1 rows already"):
        TableLog(store).claim(B)
    assert shown_at(memory_store) == ["x"]


def test_a_lost_answer_may_be_repeated(memory_store: FileSystemStore) -> None:
    """Claims and commits that succeeded without our learning of it are repeated without effect."""
    store = FaultyStore(memory_store.url)
    log = table_at(store)
    for act in (lambda: log.claim(A), lambda: commit(log, A, 1, "x")):
        store.lose_next_answer = True
        with pytest.raises(StorageError):
            act()
        act()
    commit(log, A, 2, "y")

    assert shown_at(memory_store) == ["x", "y"]
    assert len(log.entries()) == 4


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_hole_in_the_log_is_damage(memory_store: FileSystemStore, missing: int) -> None:
    """A lost entry is CorruptionError, never a shorter table."""
    log = table_at(memory_store)
    log.claim(A)
    for number in (1, 2):
        commit(log, A, number, f"a{number}")
    memory_store.delete(f"_tidegate/log/{missing:012d}")

    with pytest.raises(CorruptionError, match=f"{missing:012d} is missing"):
        TableLog(memory_store).snapshot()


@pytest.mark.parametrize("unlisted", range(4))
def test_what_a_listing_leaves_out_is_no_hole(memory_store: FileSystemStore, unlisted: int) -> None:
    """A listing that is made while entries are created may show one without another: all of the table is read."""
    log = table_at(memory_store)
    log.claim(A)
    for number in (1, 2):
        commit(log, A, number, f"a{number}")
    store = FaultyStore(memory_store.url)
    store.unlisted = f"{unlisted:012d}"

    assert shown_at(store) == ["a1", "a2"]


def test_damage_in_the_log_is_found(memory_store: FileSystemStore) -> None:
    """A flipped bit or another entry's file is CorruptionError."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1")
    path = f"_tidegate/log/{1:012d}"
    whole = bytearray(memory_store.read(path))
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])

    for damaged in (flipped, whole[:-1], memory_store.read(f"_tidegate/log/{2:012d}")):
        memory_store.write(path, [damaged])
        with pytest.raises(CorruptionError):
            TableLog(memory_store).snapshot()


def vanish(store: FileSystemStore, *seqs: int) -> None:
    """Storage loses entries of the log."""
    for seq in seqs:
        store.delete(entry_path(seq))


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_log_that_has_lost_its_newest_entries_is_damage(memory_store: FileSystemStore, kept: int) -> None:
    """To the writer that has appended them, and to a new one that was told of them; nothing is appended instead."""
    log = table_at(memory_store)
    log.claim(A)
    heads = [log.commit(A, CheckpointId(number), (file_of(f"f{number}"),)) for number in (1, 2, 3)]
    assert [(head.seq, head.commit) for head in heads] == [(2, 1), (3, 2), (4, 3)]
    vanish(memory_store, *range(kept + 1, 5))

    told = TableLog(memory_store)
    told.expect(A, heads[-1])
    for writer in (log, log, told):
        with pytest.raises(TableError, match=f"has lost entries: .* entry 4, and the log ends with entry {kept}"):
            writer.commit(A, CheckpointId(4), (file_of("f4"),))
    restored = TableLog(memory_store)
    restored.expect(A, heads[-1])
    with pytest.raises(TableError, match="has lost entries"):
        restored.check_claim(INFO, B, (A, CheckpointId(3)))
    assert [entry.seq for entry in TableLog(memory_store).entries()] == list(range(kept + 1))


def test_a_log_with_another_entry_in_the_place_of_a_known_one_is_damage(memory_store: FileSystemStore) -> None:
    """As after a storage was taken back to an older state, and somebody has written since."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "x")
    vanish(memory_store, 2)
    other = TableLog(memory_store)
    commit(other, A, 1, "y")

    with pytest.raises(TableError, match="entry 2, and another entry is there now"):
        commit(log, A, 2, "z")
    assert shown_at(memory_store) == ["y"]


def test_entries_that_others_have_put_in_the_place_of_lost_commits_are_no_commits(
    memory_store: FileSystemStore,
) -> None:
    """The log is as long as it was, and a commit of the owner is not there: neither it nor a restore goes on."""
    log = table_at(memory_store)
    log.claim(A)
    heads = [log.commit(A, CheckpointId(number), (file_of(f"f{number}"),)) for number in (1, 2)]
    vanish(memory_store, 3)
    other = TableLog(memory_store)
    other.take_compacting(A, "another process")
    assert other.head(A).seq == heads[-1].seq

    told = TableLog(memory_store)
    told.expect(A, heads[-1])
    with pytest.raises(TableError, match="checkpoint 2 of 'a-1' was committed, and its commit is missing now"):
        told.commit(A, CheckpointId(3), (file_of("f3"),))
    with pytest.raises(TableError, match="its commit is missing now"):
        told.claim(A, (A, CheckpointId(1)))
    restored = TableLog(memory_store)
    with pytest.raises(TableError, match="has lost entries: checkpoint 2 of 'a-1' was committed"):
        restored.check_commits((A, CheckpointId(2)), expected=[CheckpointId(2)], retained=[])
    restored.check_commits(
        (A, CheckpointId(2)), expected=[CheckpointId(1), CheckpointId(2)], retained=[CheckpointId(2)]
    )
    assert shown_at(memory_store) == ["f1"]


def test_a_commit_that_a_job_has_left_behind_is_not_expected(memory_store: FileSystemStore) -> None:
    """The job went back to an older checkpoint: what it passed over is missing on purpose."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "f1")
    log.claim(A, (A, CheckpointId(1)), next_checkpoint_id=4)
    commit(log, A, 4, "f4")
    log.check_commits((A, CheckpointId(4)), expected=[CheckpointId(2), CheckpointId(4)], retained=[])


def test_a_writer_that_is_behind_a_truncated_log_reports_no_damage(memory_store: FileSystemStore) -> None:
    """What is not there any more is in a snapshot."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "f1")
    other = TableLog(memory_store, entries_per_snapshot=2)
    for number in range(2, 12):
        commit(other, A, number, f"f{number}")
    commit(log, A, 12, "f12")
    assert shown_at(memory_store) == [f"f{number}" for number in range(1, 13)]
