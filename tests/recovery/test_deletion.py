"""Nothing of a job that lives is deleted, unless who asks for it says that it is dead. What is deleted goes whole."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from any_permit import ANY_PERMIT
from checkpoints_on_disk import complete
from command_line import CommandRunner
from dying_store import DiedError, deaths
from typer.testing import Result

from tidegate import recovery
from tidegate.cli.main import app
from tidegate.recovery.savepoints import write_savepoint
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.lease import Lease, write_lease
from tidegate.storage.checkpoints.metadata import StateHandle, SubtaskState, create_metadata
from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, NotFoundError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.process_id import ProcessId

_JOB = "demo-1a2b3c4d"
_ELSEWHERE = ProcessId("far-away", "another place", 77, "5")
_IN_2096_MS = 4_000_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """A root with checkpoints 1 and 2 of one job, and checkpoint 1 of another."""
    opened = open_store(str(tmp_path / "checkpoints"))
    for job, number in ((_JOB, 1), (_JOB, 2), ("other-1a2b3c4d", 1)):
        complete(opened, job, number)
    return opened


def _renewed(store: FileSystemStore, at_ms: int = _IN_2096_MS) -> Lease:
    """The job's lease, renewed on another machine, whose clock may go before that of this one."""
    lease = Lease(JobId(_JOB), "demo", _ELSEWHERE, "", at_ms, 30_000)
    write_lease(store, lease)
    return lease


def _run(*arguments: str) -> Result:
    return CommandRunner().invoke(app, ["checkpoints", "delete", "--yes", *arguments])


def test_a_checkpoint_of_a_living_job_is_not_deleted(store: FileSystemStore) -> None:
    """The error says whose it is, who holds the lease, until when, and what to do; every file stays."""
    _renewed(store)
    before = store.walk("")

    with pytest.raises(ConfigurationError) as refusal:
        recovery.delete(f"{store.url}/{_JOB}/chk-1")

    assert before == store.walk("")
    for expected in (
        f"job {_JOB} may be running",
        "process 77 on far-away",
        "2096-10-02 07:07:20 UTC",
        "stop or cancel it",
        "force",
    ):
        assert expected in str(refusal.value)


def test_a_lease_of_thousands_of_years_is_told_as_any(store: FileSystemStore) -> None:
    """No calendar reaches as far as a setting may."""
    lease = _renewed(store)
    write_lease(store, replace(lease, lease_ms=10**17))

    with pytest.raises(ConfigurationError, match="counts until 9999-12-31"):
        recovery.delete(f"{store.url}/{_JOB}/chk-1")


def test_the_command_refuses_as_well(store: FileSystemStore) -> None:
    """One sentence and exit code 2; --force is for who knows better."""
    _renewed(store)
    path = f"{store.url}/{_JOB}/chk-1"

    refused = _run(path)
    assert (refused.exit_code, refused.output.startswith("Error: ")) == (2, True)
    assert f"job {_JOB} may be running" in refused.output
    assert recovery.verify(path).ok

    assert _run("--force", path).exit_code == 0
    assert not recovery.verify(path).ok


def test_a_lease_that_cannot_be_read_protects(store: FileSystemStore) -> None:
    """Nobody can tell then whether the job lives."""
    store.write(f"{_JOB}/lease", [b"nonsense"])

    with pytest.raises(ConfigurationError, match="may be running, because its lease is damaged"):
        recovery.delete(f"{store.url}/{_JOB}/chk-1")
    assert recovery.delete(f"{store.url}/{_JOB}/chk-1", force=True) == 3


def test_a_checkpoint_of_a_dead_job_is_deleted(store: FileSystemStore) -> None:
    """Its lease has ended, or has expired."""
    lease = _renewed(store)
    write_lease(store, lease.ended_at(lease.renewed_at_ms))
    assert recovery.delete(f"{store.url}/{_JOB}/chk-1") == 3

    _renewed(store, at_ms=0)
    assert recovery.delete(f"{store.url}/{_JOB}/chk-2") == 3


def test_others_are_deleted_while_a_job_lives(store: FileSystemStore, tmp_path: Path) -> None:
    """Checkpoints of other jobs, and its own savepoints: those are the user's."""
    metadata = recovery.inspect(f"{store.url}/{_JOB}/chk-1").metadata
    elsewhere, here = (
        write_savepoint(open_store, store.url, to, metadata, ANY_PERMIT) for to in (str(tmp_path), store.url)
    )
    _renewed(store)

    for path in (elsewhere, here, f"{store.url}/other-1a2b3c4d/chk-1"):
        assert recovery.delete(path) == 3
        assert not recovery.verify(path).ok
    assert recovery.verify(f"{store.url}/{_JOB}/chk-1").ok


@pytest.mark.parametrize("kind", ["checkpoint", "savepoint"])
def test_wherever_a_deletion_dies_nothing_is_found_half_deleted(tmp_path: Path, kind: str) -> None:
    """At any operation on storage: it is whole or not there, what is beside it is whole, and the next one finishes it.

    What is left then is what one that nothing has interrupted leaves.
    """
    store = _with_shared_files(tmp_path / "calm")
    recovery.delete(_to_be_deleted(store, kind), force=True)
    left = [file.path for file in store.walk("")]
    died, gone, resumed = 0, 0, 0
    for number, death in enumerate(deaths()):
        store = _with_shared_files(tmp_path / str(number))
        path = _to_be_deleted(store, kind)
        with contextlib.suppress(DiedError):
            recovery.delete(path, force=True, open_store=death.open_store)
        died += death.came
        found = {at.path for at in recovery.list_checkpoints(store.url)}
        assert all(recovery.verify(at).ok for at in found)
        assert found >= {f"{store.url}/{_JOB}/chk-1", f"{store.url}/{_JOB}/chk-3"}
        gone += path not in found
        try:
            recovery.delete(path, force=True)
            resumed += path not in found
        except NotFoundError as error:
            assert "there is no" in str(error)  # noqa: PT017 (either may be: it was done, or almost)
        assert [file.path for file in store.walk("")] == left
        shutil.rmtree(tmp_path / str(number))
    assert died > gone > resumed > 3


def test_two_deletions_that_were_interrupted_do_not_keep_what_they_share(tmp_path: Path) -> None:
    """Each would need the other's files else, for ever."""
    store = _with_shared_files(tmp_path / "checkpoints")
    shared = {path for path in _files(store) if "/shared/" in path}
    for number in (2, 3):
        with pytest.raises(DiedError):
            recovery.delete(f"{store.url}/{_JOB}/chk-{number}", force=True, open_store=_dies_after_its_mark)
    assert {path for path in _files(store) if "/shared/" in path} == shared
    for number in (2, 3):
        recovery.delete(f"{store.url}/{_JOB}/chk-{number}", force=True)
    assert recovery.verify(f"{store.url}/{_JOB}/chk-1").ok
    needed = recovery.inspect(f"{store.url}/{_JOB}/chk-1").metadata
    assert {path for path in _files(store) if "/shared/" in path} == {
        path for subtask in needed.subtasks for path in subtask.shared_paths
    }


def test_what_is_half_deleted_is_not_there(store: FileSystemStore) -> None:
    """Nobody restores, reads or copies it, and whoever tries is told why; its place is not free yet."""
    metadata = recovery.inspect(f"{store.url}/{_JOB}/chk-1").metadata
    path = write_savepoint(open_store, store.url, store.url, metadata, ANY_PERMIT)
    with pytest.raises(DiedError):
        recovery.delete(path, open_store=_dies_after_its_mark)
    assert path not in {at.path for at in recovery.list_checkpoints(store.url)}
    assert "the deletion of this checkpoint was interrupted" in recovery.verify(path).problems[0]
    with pytest.raises(NotFoundError, match="delete it again"):
        recovery.inspect(path)
    with pytest.raises(AlreadyExistsError):
        write_savepoint(open_store, store.url, store.url, metadata, ANY_PERMIT)
    assert recovery.delete(path) == 3
    assert recovery.verify(write_savepoint(open_store, store.url, store.url, metadata, ANY_PERMIT)).ok


class _DyingAfterWrite(FileSystemStore):
    def delete_all(self, paths: Iterable[str]) -> None:
        """Die before the first deletion."""
        raise DiedError("the process died here")


def _dies_after_its_mark(url: str) -> FileSystemStore:
    return _DyingAfterWrite(url)


def _files(store: FileSystemStore) -> set[str]:
    return {file.path for file in store.walk("")}


def _to_be_deleted(store: FileSystemStore, kind: str) -> str:
    return _savepoint_of(store) if kind == "savepoint" else f"{store.url}/{_JOB}/chk-2"


def _with_shared_files(folder: Path) -> FileSystemStore:
    """A root with three checkpoints of a job; each shares a file with the one before it, and has one alone."""
    store = open_store(str(folder))
    layout = CheckpointLayout(JobId(_JOB))
    for number in map(CheckpointId, (1, 2, 3)):
        metadata = complete(store, _JOB, number)
        first, state, *others = metadata.subtasks
        layers = tuple(_shared(store, state, max(1, layer)) for layer in (number - 1, number, number + 10))
        store.delete(layout.metadata(number))
        create_metadata(store, replace(metadata, subtasks=(first, replace(state, layers=layers), *others)))
    return store


def _shared(store: FileSystemStore, state: SubtaskState, number: int) -> StateHandle:
    """A file of the state of a subtask, under a name that checkpoints share."""
    assert state.handle is not None
    assert state.handle.path is not None
    path = CheckpointLayout(JobId(_JOB)).layer_file(CheckpointId(number), state.vertex, state.subtask)
    store.write(path, [store.read(state.handle.path)])
    return replace(state.handle, path=path)


def _savepoint_of(store: FileSystemStore) -> str:
    metadata = recovery.inspect(f"{store.url}/{_JOB}/chk-2").metadata
    return write_savepoint(open_store, store.url, store.url, metadata, ANY_PERMIT)
