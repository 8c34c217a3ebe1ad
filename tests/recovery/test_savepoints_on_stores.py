"""A savepoint holds all that it needs, wherever it is, and is there only when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from any_permit import ANY_PERMIT, any_permit
from stores import opened_like

from tidegate.recovery.checkpoints import verify
from tidegate.recovery.deletion import delete
from tidegate.recovery.savepoints import clear_folder, discard_savepoint, write_savepoint
from tidegate.recovery.state_processor.relocation import relocate
from tidegate.storage.checkpoints.layout import METADATA_NAME, CheckpointLayout
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    OperatorInfo,
    SnapshotKind,
    StateKind,
    SubtaskState,
    create_metadata,
    encode_metadata,
    read_metadata,
)
from tidegate.storage.errors import AlreadyExistsError, CorruptionError, NotFoundError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.in_flight import ChannelEnd, InFlightRows, read_in_flight, write_in_flight
from tidegate.storage.state.snapshot import FrozenTable
from tidegate.storage.state.state_file import read_state, verify_state, write_state

JOB, SEVEN = JobId("demo-1a2b3c4d"), CheckpointId(7)
LAYOUT = CheckpointLayout(JOB)
UID, VERTEX, EDGE = OperatorUid("count"), VertexId("count"), "source->count#0"
ROWS = 2_000_000
"""So many that a file is copied in more than one part."""


def numbers(start: int, rows: int) -> pa.RecordBatch:
    """One column of numbers."""
    return pa.record_batch({"x": pa.array(range(start, start + rows), pa.int64())})


def checkpoint(store: FileSystemStore, rows: int = 1000) -> CheckpointMetadata:
    """A checkpoint with state in files and inlined, in-flight rows, a subtask without state, and a shared file."""

    def state(subtask: int, path: str | None, rows: int) -> SubtaskState:
        frozen = FrozenTable("n", StateKind.LIST, lambda: numbers(subtask, rows))
        handle = write_state(store, path or "unused", [(UID, frozen)], inline_bytes_max=0 if path else 100_000)
        return SubtaskState(VERTEX, SubtaskIndex(subtask), handle)

    first = state(0, LAYOUT.state_file(SEVEN, VERTEX, SubtaskIndex(0)), rows)
    held = InFlightRows(ChannelEnd(EDGE, "input", SubtaskIndex(0), SubtaskIndex(0)), (numbers(5, 10),))
    in_flight = write_in_flight(store, LAYOUT.channels_file(SEVEN, VERTEX, SubtaskIndex(0)), [held], inline_bytes_max=0)
    subtasks = (
        replace(first, in_flight=in_flight),
        state(1, None, 10),
        SubtaskState(VERTEX, SubtaskIndex(2), None),
        state(3, f"{LAYOUT.shared_dir()}/count-0", 10),
    )
    metadata = CheckpointMetadata(
        version=METADATA_VERSION,
        job_id=JOB,
        job_name="demo",
        checkpoint_id=SEVEN,
        attempt=AttemptNumber(1),
        triggered_at_ms=5,
        operators=(OperatorInfo(UID, "count", VERTEX, 4, 8),),
        subtasks=subtasks,
        kind=SnapshotKind.SAVEPOINT,
        hooks=(("hook", b"data"),),
    )
    create_metadata(store, metadata)
    return metadata


def check_whole(url: str, rows: int = 1000) -> None:
    """Everything of `checkpoint` can be read from a savepoint at a url, and there is nothing else in it."""
    store = open_store(url)
    found = read_metadata(store, JOB, SEVEN, savepoint=True)
    handles = [handle for s in found.subtasks for handle in (s.handle, s.in_flight) if handle is not None]
    for handle in handles:
        verify_state(store, handle)
    states = [read_state(store, s.handle, UID)[0].rows for s in found.subtasks if s.handle is not None]
    assert [numbers(0, rows), numbers(1, 10), numbers(3, 10)] == states
    assert found.subtasks[0].in_flight is not None
    (held,) = read_in_flight(store, found.subtasks[0].in_flight, EDGE)
    assert [numbers(5, 10)] == list(held.batches)
    assert (found.kind, found.hooks) == (SnapshotKind.SAVEPOINT, (("hook", b"data"),))
    files = {handle.path for handle in handles if handle.path is not None}
    assert files == {"count-0", "count-0-channels", "shared/count-0"}
    assert store.list("") == ["_metadata", "count-0", "count-0-channels", "shared"]


def test_a_savepoint_is_relocated_from_any_store_to_any_other(store: FileSystemStore, tmp_path: Path) -> None:
    """Whole each time, with nothing but what it had; the old one stays."""

    def opened(url: str) -> FileSystemStore:
        return opened_like(store, url) if url.startswith(store.url) else open_store(url)

    path = write_savepoint(opened, store.url, f"{store.url}/sp", checkpoint(store), ANY_PERMIT)

    moved = relocate(path, str(tmp_path / "here"), open_store=opened)
    back = relocate(moved, f"{store.url}/back", open_store=opened)

    check_whole(moved)
    for url in (path, back):
        assert verify(url, open_store=opened).ok
    found = [read_metadata(opened(url), JOB, SEVEN, savepoint=True) for url in (moved, back)]
    assert [(metadata.origin_root, metadata.carried) for metadata in found] == [(None, ()), (None, ())]


def test_a_savepoint_on_every_store(store: FileSystemStore) -> None:
    """Written beside the checkpoints, and found complete under its name; what is repeated stays."""
    metadata = checkpoint(store)
    opened = partial(opened_like, store)

    path = write_savepoint(opened, store.url, f"{store.url}/sp/", metadata, ANY_PERMIT)

    assert path == f"{store.url}/sp/savepoint-demo-1a2b3c4d-7"
    found = read_metadata(opened(path), JOB, SEVEN, savepoint=True)
    assert found.origin_root == store.url
    for subtask in found.subtasks:
        for handle in (subtask.handle, subtask.in_flight):
            if handle is not None:
                verify_state(opened(path), handle)
    assert path == write_savepoint(opened, store.url, f"{store.url}/sp", metadata, ANY_PERMIT)

    discard_savepoint(opened, f"{store.url}/sp", JOB, any_permit(7))
    discard_savepoint(opened, f"{store.url}/sp", JOB, any_permit(7))
    with pytest.raises(NotFoundError):
        read_metadata(opened(path), JOB, SEVEN, savepoint=True)
    assert read_metadata(store, JOB, SEVEN) == metadata


@pytest.mark.slow
def test_a_savepoint_outlives_its_job_and_can_be_moved(tmp_path: Path) -> None:
    """Nothing in it depends on where it was written or on the checkpoint; large files are copied in parts."""
    store = open_store(str(tmp_path / "checkpoints"))
    metadata = checkpoint(store, ROWS)
    path = write_savepoint(open_store, store.url, str(tmp_path / "savepoints"), metadata, ANY_PERMIT)
    check_whole(path, ROWS)

    shutil.rmtree(tmp_path / "checkpoints")
    assert path == write_savepoint(open_store, store.url, str(tmp_path / "savepoints"), metadata, ANY_PERMIT)
    moved = shutil.move(path, tmp_path / "elsewhere" / Path(path).name)

    assert not Path(path).exists()
    check_whole(str(moved), ROWS)


def test_a_folder_under_another_name_is_not_taken_for_it(tmp_path: Path) -> None:
    """The name says which savepoint it is; a wrong one is found out."""
    store = open_store(str(tmp_path / "checkpoints"))
    path = write_savepoint(open_store, store.url, str(tmp_path), checkpoint(store), ANY_PERMIT)

    with pytest.raises(CorruptionError, match="is the metadata of checkpoint 7"):
        read_metadata(open_store(path), JOB, CheckpointId(8), savepoint=True)


class Failing(FileSystemStore):
    """Fails one operation, once it has happened or before."""

    def __init__(self, url: str, fails: Callable[[str, str], bool], applied: bool) -> None:
        super().__init__(url)
        self._fails, self._applied = fails, applied

    def write(self, path: str, chunks: object) -> int:
        if not self._fails("write", path):
            return super().write(path, chunks)  # type: ignore[arg-type]
        if self._applied:
            super().write(path, chunks)  # type: ignore[arg-type]
        raise StorageError("lost")

    def create(self, path: str, data: object) -> None:
        if not self._fails("create", path):
            return super().create(path, data)  # type: ignore[arg-type]
        if self._applied:
            super().create(path, data)  # type: ignore[arg-type]
        raise StorageError("lost")


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(
    "failing",
    [("write", "count-0"), ("write", "count-0-channels"), ("write", "shared/count-0"), ("create", "_metadata")],
)
def test_an_interrupted_call_can_be_repeated(tmp_path: Path, failing: tuple[str, str], applied: bool) -> None:
    """Whatever was there of it, the savepoint is whole afterwards, and was not to be seen before `_metadata`."""
    store = open_store(str(tmp_path / "checkpoints"))
    metadata = checkpoint(store)
    target = str(tmp_path / "savepoints")
    flaky = lambda url: Failing(url, lambda *operation: operation == failing, applied)  # noqa: E731

    with pytest.raises(StorageError, match="lost"):
        write_savepoint(flaky, store.url, target, metadata, ANY_PERMIT)

    complete = Path(target, "savepoint-demo-1a2b3c4d-7", "_metadata").exists()
    assert complete == (applied and failing[0] == "create")
    check_whole(write_savepoint(open_store, store.url, target, metadata, ANY_PERMIT))


def test_a_file_that_is_damaged_is_not_copied(tmp_path: Path) -> None:
    """What is not whole does not become a savepoint: its files do not appear, `_metadata` neither."""
    store = open_store(str(tmp_path / "checkpoints"))
    metadata = checkpoint(store)
    path = LAYOUT.state_file(SEVEN, VERTEX, SubtaskIndex(0))
    content = bytearray(store.read(path))
    content[len(content) // 2] ^= 1
    store.write(path, [content])

    with pytest.raises(CorruptionError, match=r"chk-7/count-0 is damaged: its checksum is"):
        write_savepoint(open_store, store.url, str(tmp_path / "savepoints"), metadata, ANY_PERMIT)

    assert open_store(str(tmp_path / "savepoints")).list("savepoint-demo-1a2b3c4d-7") == []


def test_another_savepoint_of_the_name_is_not_replaced(tmp_path: Path) -> None:
    """Two jobs cannot have one id; if they have, the savepoint that was first stays."""
    store = open_store(str(tmp_path / "checkpoints"))
    metadata = checkpoint(store)
    path = write_savepoint(open_store, store.url, str(tmp_path), metadata, ANY_PERMIT)

    with pytest.raises(AlreadyExistsError, match="another savepoint of this name"):
        write_savepoint(open_store, store.url, str(tmp_path), replace(metadata, triggered_at_ms=6), ANY_PERMIT)

    check_whole(path)


def test_what_a_deletion_has_left_of_one_is_not_written_over(tmp_path: Path) -> None:
    """Nor what cannot be read. Nothing is copied, and the error says what to do, which helps."""
    store = open_store(str(tmp_path / "checkpoints"))
    metadata = checkpoint(store)
    write = partial(write_savepoint, open_store, store.url, str(tmp_path), metadata, ANY_PERMIT)
    folder = open_store(write())
    marked = replace(read_metadata(folder, metadata.job_id, SEVEN, savepoint=True), deleted=True)
    clear_folder(folder)
    for content, text in (
        (encode_metadata(marked), "has the rest .* `tidegate checkpoints delete "),
        (b"torn", "cannot be read: .*; choose another folder, or delete this one"),
    ):
        folder.write(METADATA_NAME, [content])
        with pytest.raises(AlreadyExistsError, match=text):
            write()
        assert folder.list("") == [METADATA_NAME]
    folder.write(METADATA_NAME, [encode_metadata(marked)])
    assert delete(folder.url) > 0
    check_whole(write())
