"""What a table shows after claims: of jobs that overwrite, that are restored, and that fall back."""

from __future__ import annotations

import pytest
from table_logs import A, B, C, X, Y, commit, file_of, shown_at, table_at

from tidegate.storage.errors import TableError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.table_log import TableLog


def test_rows_that_are_there_need_a_word(memory_store: FileSystemStore) -> None:
    """A new job on a table with rows is told what it can do, and each of these does what it says."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "x")

    with pytest.raises(
        TableError, match=r'shows 1 rows already; give if_exists="overwrite" .* if_exists="append"'
    ) as caught:
        TableLog(memory_store).claim(B)
    assert memory_store.url in str(caught.value)
    TableLog(memory_store).claim(B, if_exists="append")
    assert shown_at(memory_store) == ["x"]
    TableLog(memory_store).claim(C, if_exists="overwrite")
    assert shown_at(memory_store) == ["x"]
    commit(TableLog(memory_store), C, 1, "c1")
    assert shown_at(memory_store) == ["c1"]


def test_an_overwriting_job_without_rows_replaces_as_well(memory_store: FileSystemStore) -> None:
    """Its first completed checkpoint has nothing: the table shows nothing then, and one entry says so."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "x")
    log.claim(B, if_exists="overwrite")
    for number in (1, 1, 2):
        commit(log, B, number)

    assert shown_at(memory_store) == []
    assert log.rows() == 0
    assert len(log.entries()) == 5


def test_rows_that_a_claim_was_to_replace_stay_when_its_job_fails_at_once(memory_store: FileSystemStore) -> None:
    """Without a completed checkpoint nothing has changed for readers, nor for the next job."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "x")
    log.claim(B, if_exists="overwrite")

    with pytest.raises(TableError, match="shows 1 rows already"):
        log.claim(C)
    log.claim(C, if_exists="append")
    commit(log, C, 1, "c1")
    assert shown_at(memory_store) == ["x", "c1"]


def test_a_job_restored_before_the_first_commit_overwrites_in_the_stead_of_its_origin(
    memory_store: FileSystemStore,
) -> None:
    """What was to be overwritten is, with the first commit of the line; what others added since is not."""
    log = table_at(memory_store)
    log.claim(X)
    commit(log, X, 1, "x1")
    log.claim(A, if_exists="overwrite")
    log.claim(Y, if_exists="append")
    commit(log, Y, 1, "y1")
    log.claim(B, (A, CheckpointId(1)))
    assert shown_at(memory_store) == ["x1", "y1"]

    commit(log, B, 1, "b1")
    assert shown_at(memory_store) == ["y1", "b1"]


def test_rows_of_others_stay_when_a_job_is_restored(memory_store: FileSystemStore) -> None:
    """A runs, B appends, A is restored from an older checkpoint: B's rows stay, those of A are there once."""
    log = table_at(memory_store)
    log.claim(A)
    for number in (1, 2, 3):
        commit(log, A, number, f"a{number}")
    log.claim(B, if_exists="append")
    commit(log, B, 1, "b1")

    log.claim(C, (A, CheckpointId(1)))
    assert shown_at(memory_store) == ["a1", "a2", "a3", "b1"]
    commit(log, C, 1, "a2+a3 again")
    assert shown_at(memory_store) == ["a1", "b1", "a2+a3 again"]


def test_what_a_checkpoint_covers_comes_back_after_an_overwrite(memory_store: FileSystemStore) -> None:
    """A restored job continues its own rows, and leaves those of the job that had overwritten them."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1")
    log.claim(B, if_exists="overwrite")
    commit(log, B, 1, "b1")
    log.claim(C, (A, CheckpointId(1)))
    commit(log, C, 1, "c1")

    assert shown_at(memory_store) == ["a1", "b1", "c1"]


def test_files_that_nobody_had_committed_come_with_the_first_commit(memory_store: FileSystemStore) -> None:
    """They count as covered by every checkpoint of the job that took them over, and are shown once."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1")
    assert log.uncommitted(A, CheckpointId(3), [CheckpointId(n) for n in (1, 2, 3)]) == (2, 3)
    assert log.uncommitted(B, CheckpointId(3), [CheckpointId(3)]) is None

    for job in (B, C):  # B fails at once
        log.claim(job, (A, CheckpointId(2)), uncommitted=(file_of("a2", 5),))
        assert shown_at(memory_store) == ["a1"]
    commit(log, C, 1)
    assert shown_at(memory_store) == ["a1", "a2"]
    assert log.rows() == 6
    commit(log, C, 2, "c2")

    log.claim(X, (C, CheckpointId(1)))
    commit(log, X, 1, "x1")
    assert shown_at(memory_store) == ["a1", "a2", "x1"]


def test_a_fallback_hides_and_shows_in_one_step(memory_store: FileSystemStore) -> None:
    """Rows beyond the checkpoint stay until they are processed again, and their late commit changes nothing."""
    log = table_at(memory_store)
    log.claim(A, home="root")
    for number in (1, 2):
        commit(log, A, number, f"a{number}")
    for _ in range(2):
        log.claim(A, (A, CheckpointId(1)), next_checkpoint_id=4)
    assert len(log.entries()) == 5
    owner = log.owner()
    assert owner is not None
    assert (owner.job_id, owner.home) == (A, "root")

    for number in (1, 2, 3):
        commit(log, A, number, f"a{number}")  # by a coordinator that does not know of the fallback
        assert shown_at(memory_store) == ["a1", "a2"]
    commit(log, A, 4, "a2+a3 again")
    assert shown_at(memory_store) == ["a1", "a2+a3 again"]
    assert log.uncommitted(A, CheckpointId(5), [CheckpointId(n) for n in range(1, 6)]) == (5,)
    assert log.uncommitted(A, CheckpointId(3), [CheckpointId(n) for n in range(1, 4)]) == (3,)


def test_a_fallback_to_a_checkpoint_that_is_not_committed_yet(memory_store: FileSystemStore) -> None:
    """The commit of the checkpoint itself is on its way, and comes; that of the damaged one after it does not."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1")
    log.claim(A, (A, CheckpointId(2)), next_checkpoint_id=4)
    assert log.uncommitted(A, CheckpointId(2), [CheckpointId(1), CheckpointId(2)]) == (2,)
    for number in (2, 3):
        commit(log, A, number, f"a{number}")
    assert shown_at(memory_store) == ["a1", "a2"]
    commit(log, A, 4, "a4")

    for number, expected in ((2, ["a1", "a2", "r"]), (4, ["a1", "a2", "a4", "r"])):
        job = JobId(f"restored-{number}")
        log.claim(job, (A, CheckpointId(number)))
        commit(log, job, 1, "r")
        assert shown_at(memory_store) == expected


def test_a_fallback_to_where_the_job_was_started_from(memory_store: FileSystemStore) -> None:
    """All checkpoints of its own are damaged: it goes on from that of the job before it."""
    log = table_at(memory_store)
    log.claim(A)
    for number in (1, 2):
        commit(log, A, number, f"a{number}")
    log.claim(B, (A, CheckpointId(1)))
    log.claim(B, (A, CheckpointId(1)))
    commit(log, B, 1, "b1")
    for _ in range(2):
        log.claim(B, (A, CheckpointId(1)))
    assert shown_at(memory_store) == ["a1", "b1"]

    commit(log, B, 2, "b2")
    assert shown_at(memory_store) == ["a1", "b2"]


def test_a_restored_job_starts_from_its_checkpoint(memory_store: FileSystemStore) -> None:
    """Rows committed after the checkpoint are hidden with its first commit; a later restore shows them again."""
    log = table_at(memory_store)
    log.claim(A)
    for number in (1, 2, 4):
        commit(log, A, number, f"a{number}")

    TableLog(memory_store).claim(B, (A, CheckpointId(3)))
    assert shown_at(memory_store) == ["a1", "a2", "a4"]
    commit(TableLog(memory_store), B, 1, "b1")
    assert shown_at(memory_store) == ["a1", "a2", "b1"]

    TableLog(memory_store).claim(C, (A, CheckpointId(4)))
    assert shown_at(memory_store) == ["a1", "a2", "b1"]
    commit(TableLog(memory_store), C, 1)
    assert shown_at(memory_store) == ["a1", "a2", "a4"]
    assert TableLog(memory_store).referenced_paths() == {f"data/{n}.parquet" for n in ("a1", "a2", "a4", "b1")}


def test_restored_from_before_the_first_commit(memory_store: FileSystemStore) -> None:
    """A checkpoint older than any commit of its job covers what the job found when it claimed."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1")
    log.claim(B, if_exists="append")
    commit(log, B, 5, "b5")

    log.claim(C, (B, CheckpointId(4)))
    commit(log, C, 1)

    assert shown_at(memory_store) == ["a1"]


def test_a_job_that_did_not_know_the_table_covers_nothing_of_it(memory_store: FileSystemStore) -> None:
    """Restoring from a job without this sink says nothing about the table's rows: `if_exists` decides."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1")

    with pytest.raises(TableError, match="if_exists"):
        log.claim(C, (B, CheckpointId(1)))


def test_an_owner_falls_back_to_its_own_checkpoint(memory_store: FileSystemStore) -> None:
    """After a fallback the rows beyond the checkpoint are hidden, and each checkpoint covers what it saw."""
    log = table_at(memory_store)
    log.claim(A)
    for number in (1, 2, 3):
        commit(log, A, number, f"a{number}")
    for _ in range(2):
        log.claim(A, (A, CheckpointId(1)))
    assert len(log.entries()) == 6
    commit(log, A, 3, "a3")
    assert shown_at(memory_store) == ["a1", "a2", "a3"]
    commit(log, A, 5, "a5")
    assert shown_at(memory_store) == ["a1", "a5"]

    for number, expected in ((2, ["a1", "a2"]), (4, ["a1"]), (5, ["a1", "a5"])):
        job = JobId(f"restored-{number}")
        log.claim(job, (A, CheckpointId(number)))
        commit(log, job, 1)
        assert shown_at(memory_store) == expected
