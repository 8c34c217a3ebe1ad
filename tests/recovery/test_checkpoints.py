"""Checkpoints are found, verified to the last bit, and read back at any parallelism."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints_on_disk import MAX_PARALLELISM, UID, complete, flip_bit

from tidegate import recovery
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.errors import ConfigurationError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import JobId, OperatorUid
from tidegate.storage.state.key_groups import key_group_range

_JOB = "demo-1a2b3c4d"


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSystemStore]:
    """An empty checkpoint root."""
    opened = open_store(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")
    yield opened
    opened.delete_tree("")


def _listed(summaries: list[recovery.CheckpointSummary]) -> list[tuple[str, int]]:
    return [(s.job_id, s.checkpoint_id) for s in summaries]


def test_lists_completed_checkpoints_oldest_first(store: FileSystemStore) -> None:
    """Those of all jobs, by the time of their trigger; not void ones, not ones without metadata, not other folders."""
    complete(store, "b-1", 2, at_ms=300)
    complete(store, "a-1", 10, at_ms=200)
    complete(store, "a-1", 9, at_ms=100)
    complete(store, "a-1", 11, at_ms=400, void=True)
    store.write("a-1/chk-12/counts-0", [b"unfinished"])
    store.write("a-1/events/000000000000", [b"x"])
    store.write("stray", [b"x"])

    found = recovery.list_checkpoints(store.url)

    assert _listed(found) == [("a-1", 9), ("a-1", 10), ("b-1", 2)]
    first = found[0]
    assert (first.job_name, first.triggered_at_ms, first.subtasks, first.verified) == ("a", 100, 3, None)
    assert first.size_bytes == recovery.inspect(first.path).size_bytes > 0


def test_lists_one_job_by_name_or_id(store: FileSystemStore) -> None:
    """A name gives all runs of a job, an id gives one run."""
    for job in ("a-1", "a-2", "b-1"):
        complete(store, job, 1)

    assert _listed(recovery.list_checkpoints(store.url, job="a")) == [("a-1", 1), ("a-2", 1)]
    assert _listed(recovery.list_checkpoints(store.url, job="a-2")) == [("a-2", 1)]
    assert recovery.list_checkpoints(store.url, job="c") == []


def test_nothing_is_there_before_the_first_job(store: FileSystemStore) -> None:
    """A root that does not exist has no checkpoints and no latest one."""
    assert recovery.list_checkpoints(store.url + "/missing") == []
    assert recovery.latest(store.url + "/missing") is None


def test_damaged_metadata_is_listed_with_its_reason(store: FileSystemStore) -> None:
    """A checkpoint whose metadata cannot be read keeps its place and says why it is no use."""
    for number in (1, 2, 3):
        complete(store, _JOB, number, at_ms=number * 100)
    flip_bit(store, f"{_JOB}/chk-2/_metadata", 40)

    found = recovery.list_checkpoints(store.url, job="demo")

    assert [(s.checkpoint_id, s.verified) for s in found] == [(1, None), (2, False), (3, None)]
    assert "chk-2/_metadata is damaged" in (found[1].reason or "")


def test_the_latest_is_the_newest_that_verifies(store: FileSystemStore, caplog: pytest.LogCaptureFixture) -> None:
    """Damaged metadata, damaged state and lost state are passed over, newest first, each with a warning."""
    for number in (1, 2, 3, 4, 5):
        complete(store, _JOB, number, at_ms=number * 100)
    flip_bit(store, f"{_JOB}/chk-5/_metadata", 40)
    flip_bit(store, f"{_JOB}/chk-4/counts-1", 200)
    store.delete(f"{_JOB}/chk-3/counts-0")

    with caplog.at_level(logging.WARNING):
        found = recovery.latest(store.url, job="demo")

    assert found is not None
    assert (found.checkpoint_id, found.verified) == (2, True)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    for number, warning, reason in zip((5, 4, 3), warnings, ("damaged", "damaged", "no file"), strict=True):
        assert f"chk-{number} is damaged and skipped" in warning
        assert reason in warning


def test_the_latest_of_one_job_is_not_anothers(store: FileSystemStore) -> None:
    """A newer checkpoint of another job is none of ours."""
    complete(store, "a-1", 1, at_ms=100)
    complete(store, "b-1", 1, at_ms=200)

    found = recovery.latest(store.url, job="a")
    assert found is not None
    assert found.job_id == "a-1"


def test_a_successor_comes_before_the_job_that_it_was_restored_from(store: FileSystemStore) -> None:
    """Whatever the older job completes later; of a line of jobs the last comes first, then the one before it."""
    complete(store, "demo-a", 1, at_ms=100)
    complete(store, "demo-b", 1, at_ms=200, restored_from=f"{store.url}/demo-a/chk-1")
    complete(store, "demo-c", 1, at_ms=300, restored_from=f"{store.url}/demo-b/chk-1")
    complete(store, "demo-b", 2, at_ms=400)
    complete(store, "demo-a", 2, at_ms=500)

    for job, number in (("demo-c", 1), ("demo-b", 2), ("demo-b", 1), ("demo-a", 2)):
        found = recovery.latest(store.url, job="demo")
        assert found is not None
        assert (found.job_id, found.checkpoint_id) == (job, number)
        store.delete(f"{job}/chk-{number}/counts-0")


def test_a_fresh_job_is_newer_than_a_line_of_older_ones(store: FileSystemStore) -> None:
    """It was restored from none of them; its time decides."""
    complete(store, "demo-a", 1, at_ms=100)
    complete(store, "demo-b", 1, at_ms=200, restored_from=f"{store.url}/demo-a/chk-1")
    complete(store, "demo-z", 1, at_ms=300)

    found = recovery.latest(store.url, job="demo")

    assert found is not None
    assert found.job_id == "demo-z"


def test_a_whole_checkpoint_verifies(store: FileSystemStore) -> None:
    """All files are read, and counted with their bytes."""
    metadata = complete(store, _JOB, 7)
    paths = [f"{_JOB}/chk-7/{name}" for name in store.list(f"{_JOB}/chk-7")]

    report = recovery.verify(f"{store.url}/{_JOB}/chk-7/")

    assert (report.ok, report.problems, report.files) == (True, (), 3)
    assert report.bytes == sum(len(store.read(path)) for path in paths) > metadata.size_bytes


def test_a_flipped_bit_in_any_file_is_found() -> None:
    """At every tenth byte of every file of a checkpoint with inlined and with written state; never as an exception."""
    store = open_store("memory://verify-every-file")
    complete(store, _JOB, 1)
    complete(store, _JOB, 2, inline_bytes_max=10**6)
    for number in (1, 2):
        path = f"{store.url}/{_JOB}/chk-{number}"
        assert recovery.verify(path).ok
        for name in store.list(f"{_JOB}/chk-{number}"):
            file = f"{_JOB}/chk-{number}/{name}"
            whole = store.read(file)
            for position in range(0, len(whole), 10):
                flip_bit(store, file, position)
                report = recovery.verify(path)
                assert not report.ok
                assert "damaged" in report.problems[0]
                store.write(file, [whole])
        assert recovery.verify(path).ok


def test_every_problem_is_reported(store: FileSystemStore) -> None:
    """One damaged subtask does not hide another, and each is named."""
    complete(store, _JOB, 1)
    flip_bit(store, f"{_JOB}/chk-1/counts-0", 100)
    store.delete(f"{_JOB}/chk-1/counts-1")

    problems = recovery.verify(f"{store.url}/{_JOB}/chk-1").problems

    assert len(problems) == 2
    assert problems[0].startswith("counts subtask 0: ")
    assert problems[1].startswith("counts subtask 1: ")


@pytest.mark.parametrize(("number", "problem"), [(1, "was given up"), (2, "no file")])
def test_what_never_completed_does_not_verify(store: FileSystemStore, number: int, problem: str) -> None:
    """A void checkpoint and one that does not exist are reported as such."""
    complete(store, _JOB, 1, void=True)

    report = recovery.verify(f"{store.url}/{_JOB}/chk-{number}")

    assert not report.ok
    assert problem in report.problems[0]


def test_inspect_gives_the_metadata(store: FileSystemStore) -> None:
    """The metadata as it was written; errors are clear where there is none, it is damaged, or the path is wrong."""
    metadata = complete(store, _JOB, 1)

    assert recovery.inspect(f"{store.url}/{_JOB}/chk-1/_metadata").metadata == metadata
    with pytest.raises(NotFoundError):
        recovery.inspect(f"{store.url}/{_JOB}/chk-2")
    with pytest.raises(ConfigurationError):
        recovery.inspect(f"{store.url}/{_JOB}")
    flip_bit(store, f"{_JOB}/chk-1/_metadata", 0)
    with pytest.raises(CorruptionError):
        recovery.inspect(f"{store.url}/{_JOB}/chk-1")


@pytest.mark.parametrize("then", [1, 2, 3, 8])
@pytest.mark.parametrize("now", [1, 2, 5, 8])
def test_state_is_restored_once_at_any_parallelism(store: FileSystemStore, then: int, now: int) -> None:
    """The new subtasks' tables hold each stored row once, in the subtask that owns its key group."""
    metadata = complete(store, _JOB, 1, parallelism=then)

    groups: list[int] = []
    for subtask in range(now):
        owned = key_group_range(subtask, MAX_PARALLELISM, now)
        for table in recovery.load_operator_state(store, metadata, UID, owned):
            found = table.rows.column("group").to_pylist()
            assert set(found) <= set(owned)
            groups += found

    assert sorted(groups) == sorted(2 * list(range(MAX_PARALLELISM)))


def test_all_state_of_one_operator(store: FileSystemStore) -> None:
    """Without key groups every subtask's whole table comes, in their order; a stranger's uid gives none."""
    metadata = complete(store, _JOB, 1, parallelism=2)
    shuffled = replace(metadata, subtasks=metadata.subtasks[::-1])

    tables = recovery.load_operator_state(store, shuffled, UID)

    assert [table.rows.column("group").to_pylist()[0] for table in tables] == [0, 4]
    assert recovery.load_operator_state(store, metadata, OperatorUid("stranger")) == []


def test_damaged_state_is_not_restored(store: FileSystemStore) -> None:
    """A section that does not match its checksum raises; no row of it is returned."""
    metadata = complete(store, _JOB, 1)
    section = (metadata.subtasks[1].handle or pytest.fail("no handle")).sections[0]
    flip_bit(store, f"{CheckpointLayout(JobId(_JOB)).checkpoint_dir(metadata.checkpoint_id)}/counts-0", section.offset)

    with pytest.raises(CorruptionError, match="state 'n' of 'counts'"):
        recovery.load_operator_state(store, metadata, UID)
