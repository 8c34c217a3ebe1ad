"""State in layers and in files of a backend is read, verified, copied and deleted like everything of a checkpoint."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from any_permit import ANY_PERMIT
from checkpoints_on_disk import MAX_PARALLELISM, UID, complete, flip_bit
from command_line import CommandRunner
from layers_on_disk import applied, complete_layer

from tidegate import recovery
from tidegate.cli.main import app
from tidegate.recovery.savepoints import write_savepoint
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.errors import CodecError, ConfigurationError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import JobId
from tidegate.storage.state.key_groups import key_group_range

JOB = "demo-1a2b3c4d"
LAYOUT = CheckpointLayout(JobId(JOB))
EXPECTED = [
    dict.fromkeys(range(100), 0),
    {key: key * 10 for key in range(50)} | dict.fromkeys(range(60, 100), 0),
    {key: key * 10 for key in range(50)} | {55: 7} | dict.fromkeys(range(60, 99), 0),
]


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """A checkpoint root."""
    return open_store(str(tmp_path / "checkpoints"))


@pytest.fixture
def three(store: FileSystemStore) -> list[CheckpointMetadata]:
    """Three checkpoints, each built on the one before it; the layers of the third are inlined."""
    first = complete_layer(store, JOB, 1, EXPECTED[0])
    second = complete_layer(store, JOB, 2, {key: key * 10 for key in range(50)}, range(50, 60), first)
    third = complete_layer(store, JOB, 3, {55: 7}, [99], second, inline_bytes_max=10**6)
    return [first, second, third]


def path_of(store: FileSystemStore, number: int) -> str:
    """What users call a checkpoint."""
    return f"{store.url}/{JOB}/chk-{number}"


def files_of(store: FileSystemStore, folder: str = JOB) -> list[str]:
    """Every file under a folder."""
    found = []
    for name in store.list(folder):
        path = f"{folder}/{name}"
        found += [path] if store.exists(path) else files_of(store, path)
    return found


@pytest.mark.parametrize("now", [1, 2, 3, 8])
def test_layers_are_applied_one_on_the_other(store: FileSystemStore, three: list[CheckpointMetadata], now: int) -> None:
    """At any parallelism every key has what it had at that checkpoint, in the subtask that owns it."""
    for metadata, expected in zip(three, EXPECTED, strict=True):
        found: dict[int, int] = {}
        for subtask in range(now):
            owned = key_group_range(subtask, MAX_PARALLELISM, now)
            mine = applied(recovery.load_operator_state(store, metadata, UID, owned))
            assert {key % MAX_PARALLELISM for key in mine} <= set(owned)
            found |= mine
        assert expected == found
        assert expected == applied(recovery.load_operator_state(store, metadata, UID))


def test_sizes_count_every_file(store: FileSystemStore, three: list[CheckpointMetadata]) -> None:
    """Those of layers below and of backends too, as users are told."""
    _, second, third = three
    report = recovery.verify(path_of(store, 2))

    files = {path for subtask in second.subtasks for path in subtask.paths}
    assert len(files) == 2 + 4 + 4
    assert (report.ok, report.files) == (True, len(files) + 1)
    assert report.bytes == sum(len(store.read(path)) for path in (*files, LAYOUT.metadata(second.checkpoint_id)))
    assert second.size_bytes == sum(len(store.read(path)) for path in files)
    assert [s.size_bytes for s in recovery.list_checkpoints(store.url)] == [m.size_bytes for m in three]
    inlined = [subtask.layers[-1] for subtask in third.subtasks if subtask.layers]
    assert [(handle.path, handle.size_bytes > 0) for handle in inlined] == [(None, True)] * 2


def test_a_flipped_bit_in_any_file_is_found(store: FileSystemStore, three: list[CheckpointMetadata]) -> None:
    """In every file of the job; it spoils just the checkpoints that refer to the file."""
    for file in files_of(store):
        whole = store.read(file)
        for position in (0, len(whole) // 3, len(whole) // 2, len(whole) - 1):
            flip_bit(store, file, position)
            for metadata in three:
                refers = {LAYOUT.metadata(metadata.checkpoint_id)} | {p for s in metadata.subtasks for p in s.paths}
                report = recovery.verify(path_of(store, metadata.checkpoint_id))
                assert report.ok == (file not in refers)
                assert report.ok or f"{file} is damaged" in report.problems[0]
            store.write(file, [whole])


def test_damage_to_a_layer_or_a_native_file_is_passed_over(
    store: FileSystemStore, three: list[CheckpointMetadata]
) -> None:
    """A restore goes back to the newest checkpoint that does not need the file."""
    for lost in (1, 2):
        latest = recovery.latest(store.url)
        assert latest is not None
        assert latest.checkpoint_id == 4 - lost
        store.delete(three[3 - lost].subtasks[-1].native[0].files[-1].path)


def test_files_of_an_unknown_backend_are_not_left_out(store: FileSystemStore, three: list[CheckpointMetadata]) -> None:
    """State that cannot be read is an error: nothing is restored without it."""
    with pytest.raises((CodecError, CorruptionError), match="rocks"):
        recovery.load_operator_state(store, three[0], three[0].subtasks[-1].native[0].uid)


def test_a_savepoint_has_all_layers(store: FileSystemStore, three: list[CheckpointMetadata], tmp_path: Path) -> None:
    """Self-contained: it is whole and reads the same when the job's folder is gone; and damage in it is found."""
    path = write_savepoint(open_store, store.url, str(tmp_path / "savepoints"), three[1], ANY_PERMIT)
    shutil.rmtree(tmp_path / "checkpoints")
    copy = open_store(path)

    report = recovery.verify(path)

    assert (report.ok, report.files) == (True, 11)
    assert EXPECTED[1] == applied(recovery.load_operator_state(copy, recovery.inspect(path).metadata, UID))
    assert len(files_of(copy, "shared")) == 8
    for file in files_of(copy, "shared"):
        whole = copy.read(file)
        flip_bit(copy, file, len(whole) // 2)
        assert f"{file} is damaged" in recovery.verify(path).problems[0]
        copy.write(file, [whole])


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2)])
def test_shared_files_stay_while_they_are_needed(
    store: FileSystemStore, three: list[CheckpointMetadata], order: tuple[int, ...]
) -> None:
    """Whatever the order of deleting: the others stay whole, what nobody refers to is gone, at last everything is."""
    left = {metadata.checkpoint_id: metadata for metadata in three}
    for number in order:
        before = files_of(store)

        deleted = recovery.delete(path_of(store, number))

        del left[three[number - 1].checkpoint_id]
        needed = {LAYOUT.metadata(checkpoint_id) for checkpoint_id in left}
        needed |= {path for metadata in left.values() for subtask in metadata.subtasks for path in subtask.paths}
        assert needed == set(files_of(store))
        assert deleted == len(before) - len(needed)
        assert all(recovery.verify(path_of(store, checkpoint_id)).ok for checkpoint_id in left)
        with pytest.raises(NotFoundError):
            recovery.delete(path_of(store, number))


def test_all_shared_files_stay_if_another_checkpoint_cannot_be_read(
    store: FileSystemStore, three: list[CheckpointMetadata], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows then what it refers to; it may be repaired."""
    shared = files_of(store, LAYOUT.shared_dir())
    flip_bit(store, LAYOUT.metadata(three[2].checkpoint_id), 50)
    with caplog.at_level(logging.WARNING):
        assert recovery.delete(path_of(store, 1)) == 3
    recovery.delete(path_of(store, 2))

    assert shared == files_of(store, LAYOUT.shared_dir())
    assert "chk-3" in caplog.text
    with pytest.raises(CorruptionError):
        recovery.delete(path_of(store, 3))
    assert store.exists(LAYOUT.metadata(three[2].checkpoint_id))


def test_checkpoints_of_other_jobs_do_not_count(store: FileSystemStore, three: list[CheckpointMetadata]) -> None:
    """Nor are they touched; no job refers to files of another one."""
    complete(store, "other-1", 1)
    others = files_of(store, "other-1")

    for metadata in three:
        recovery.delete(path_of(store, metadata.checkpoint_id))

    assert others == files_of(store, "other-1")


def test_a_savepoint_is_deleted_as_a_whole(
    store: FileSystemStore, three: list[CheckpointMetadata], tmp_path: Path
) -> None:
    """And the checkpoint that it is a copy of stays."""
    path = write_savepoint(open_store, store.url, str(tmp_path / "savepoints"), three[1], ANY_PERMIT)

    assert recovery.delete(path) == 11

    assert recovery.list_checkpoints(str(tmp_path / "savepoints")) == []
    assert not Path(path).exists() or not any(Path(path).iterdir())
    assert recovery.verify(path_of(store, 2)).ok
    with pytest.raises(NotFoundError):
        recovery.delete(path)
    with pytest.raises(ConfigurationError):
        recovery.delete(f"{store.url}/{JOB}")


def test_the_command_line_shows_and_deletes(store: FileSystemStore, three: list[CheckpointMetadata]) -> None:
    """Layers with their numbers, removed keys as such, files of a backend; nothing is deleted without a yes."""
    path = path_of(store, 2)
    run = CommandRunner().invoke

    shown = run(app, ["checkpoints", "show", path])
    kept = run(app, ["checkpoints", "delete", path], input="n\n")
    assert recovery.verify(path).ok
    deleted = run(app, ["checkpoints", "delete", path, "--yes"])
    again = run(app, ["checkpoints", "delete", path, "--yes"])

    assert (shown.exit_code, kept.exit_code, deleted.exit_code, again.exit_code) == (0, 1, 0, 1)
    for expected in (
        "keyed, layer 0",
        "keyed, layer 1, removed keys",
        "keyed, test",
        "2 files",
        "shared/chk-1/counts-0",
    ):
        assert expected in shown.output
    assert f"{path} is deleted: 3 files" in deleted.output
