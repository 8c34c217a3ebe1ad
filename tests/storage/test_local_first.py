"""Restoring from local copies: they are preferred when they are right, and never trusted when they are not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from counting_store import CountingStore
from s3_proxy import run_proxy
from seaweed import BUCKET, S3Server

from tidegate.storage.checkpoints.metadata import NativeFile, NativeState, StateHandle, StateKind, SubtaskState
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.local_copies import LocalCopies, LocalFirstStore, PrivateFolder
from tidegate.storage.state.snapshot import FrozenTable
from tidegate.storage.state.state_file import read_state, write_state

JOB = JobId("job-12345678")
UID = OperatorUid("totals")
VERTEX, SUBTASK = VertexId("totals"), SubtaskIndex(0)
CHECKPOINT = CheckpointId(3)
PATH = f"{JOB}/chk-3/totals-0"
NATIVE_PATH = f"{JOB}/shared/chk-3/totals-0=totals/000012.sst"
NATIVE = bytes(range(256)) * 100
ROWS = pa.record_batch({"k": list(range(50_000))})


def checkpoint(primary: Store, folder: Path) -> SubtaskState:
    """A state file and a file of a backend, written to the primary storage and to the node's disk."""
    copies = LocalCopies(PrivateFolder(str(folder)), JOB, VERTEX, SUBTASK, size_bytes_max=10_000_000)
    store = copies.store_for(primary, CHECKPOINT)
    handle = write_state(store, PATH, [(UID, FrozenTable("n", StateKind.LIST, lambda: ROWS))])
    store.write(NATIVE_PATH, [NATIVE])
    file = NativeFile("000012.sst", NATIVE_PATH, len(NATIVE), checksum_of(NATIVE))
    native = NativeState(UID, "rocksdb", (0, 128), b"", (file,))
    return SubtaskState(VERTEX, SUBTASK, handle, native=(native,))


def local_name(folder: Path, path: str) -> Path:
    """Where the copy of a file is."""
    return folder / JOB / "totals-0" / "chk-3" / path


def restored(store: LocalFirstStore, state: SubtaskState) -> tuple[pa.RecordBatch, bytes]:
    """What a restore reads."""
    assert state.handle is not None
    (table,) = read_state(store, state.handle, UID)
    return table.rows, store.read(NATIVE_PATH)


@pytest.fixture
def primary(tmp_path: Path) -> CountingStore:
    """The storage that counts."""
    return CountingStore(str(tmp_path / "primary"))


def test_copies_that_are_right_are_all_that_is_read(tmp_path: Path, primary: CountingStore) -> None:
    """State is restored without a request to the primary storage."""
    state = checkpoint(primary, tmp_path / "node")
    store = LocalFirstStore(primary, PrivateFolder(str(tmp_path / "node")), JOB, [state])

    assert restored(store, state) == (ROWS, NATIVE)
    assert store.local_file(NATIVE_PATH) == str(local_name(tmp_path / "node", NATIVE_PATH))
    assert primary.reads == []


def test_a_restore_from_copies_does_not_touch_s3(tmp_path: Path, s3_server: S3Server) -> None:
    """Over the wire: not one request for state arrives while the copies are right; without them they do."""
    with run_proxy(s3_server) as proxy:
        url = f"s3://{BUCKET}/{tmp_path.name}/ckpt"
        primary = open_store(url, **(s3_server.options | {"endpoint_url": proxy.url}))
        state = checkpoint(primary, tmp_path / "node")
        proxy.forget()
        store = LocalFirstStore(primary, PrivateFolder(str(tmp_path / "node")), JOB, [state])

        assert restored(store, state) == (ROWS, NATIVE)
        assert proxy.requests() == []
        elsewhere = LocalFirstStore(primary, PrivateFolder(str(tmp_path / "another node")), JOB, [state])
        assert restored(elsewhere, state) == (ROWS, NATIVE)
        assert {request.path.rpartition("/ckpt/")[2] for request in proxy.requests("GET")} == {PATH, NATIVE_PATH}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _empty_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_flip, _truncate, _extend, _empty_folder])
@pytest.mark.parametrize("path", [PATH, NATIVE_PATH])
def test_a_damaged_copy_is_passed_over(
    tmp_path: Path,
    primary: CountingStore,
    damage: Callable[[Path], None],
    path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is wrong with it: the restore reads that file from the primary storage, once says why, and is right."""
    state = checkpoint(primary, tmp_path / "node")
    damage(local_name(tmp_path / "node", path))
    store = LocalFirstStore(primary, PrivateFolder(str(tmp_path / "node")), JOB, [state])

    with caplog.at_level(logging.INFO, logger="tidegate"):
        assert restored(store, state) == (ROWS, NATIVE)
        assert restored(store, state) == (ROWS, NATIVE)
    assert {path} == set(primary.reads)
    assert [path in record.getMessage() for record in caplog.records] == [True]
    assert store.local_file(path) is None


@pytest.mark.parametrize("planted", ["link", "folder", "owner"])
def test_what_others_may_have_planted_is_no_copy(
    tmp_path: Path, primary: CountingStore, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checksum can be met by who knows how, and state may hold pickles: only what this user has put there is read."""
    node = tmp_path / "node"
    state = checkpoint(primary, node)
    if planted == "link":
        for path in (PATH, NATIVE_PATH):
            copy = local_name(node, path)
            copy.rename(tmp_path / copy.name)
            copy.symlink_to(tmp_path / copy.name)
    elif planted == "folder":
        node.chmod(0o770)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    store = LocalFirstStore(primary, PrivateFolder(str(node)), JOB, [state])

    assert restored(store, state) == (ROWS, NATIVE)
    assert {PATH, NATIVE_PATH} == set(primary.reads)
    assert store.local_file(NATIVE_PATH) is None


def test_a_copy_that_vanishes_is_passed_over(
    tmp_path: Path, primary: CountingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that was verified and then deleted, or cut, does not fail the restore."""
    state = checkpoint(primary, tmp_path / "node")
    store = LocalFirstStore(primary, PrivateFolder(str(tmp_path / "node")), JOB, [state])
    assert restored(store, state) == (ROWS, NATIVE)
    local_name(tmp_path / "node", PATH).unlink()
    _truncate(local_name(tmp_path / "node", NATIVE_PATH))

    with caplog.at_level(logging.WARNING):
        assert restored(store, state) == (ROWS, NATIVE)
    assert {PATH, NATIVE_PATH} == set(primary.reads)
    assert len(caplog.records) == 2


def test_a_range_of_a_copy_is_that_range(tmp_path: Path, primary: CountingStore) -> None:
    """Ranges beyond the end are as short as in the primary storage, and are no reason to leave the copy."""
    state = checkpoint(primary, tmp_path / "node")
    store = LocalFirstStore(primary, PrivateFolder(str(tmp_path / "node")), JOB, [state])
    size = len(NATIVE)

    ranges = [(0, None), (5, 10), (size - 3, 10), (size, 5), (size + 9, None), (3, 0)]
    found = [store.read(NATIVE_PATH, offset, length) for offset, length in ranges]

    expected = [NATIVE[offset : None if length is None else offset + length] for offset, length in ranges]
    assert (found, primary.reads) == (expected, [])


def test_the_copy_of_another_file_is_not_taken(tmp_path: Path, primary: CountingStore) -> None:
    """A copy of the right name and another content, from a rival attempt say, is passed over."""
    state = checkpoint(primary, tmp_path / "node")
    assert state.handle is not None
    rows = pa.record_batch({"k": list(range(50_000, 0, -1))})
    rival = open_store(str(tmp_path / "rival"))
    handle = write_state(rival, PATH, [(UID, FrozenTable("n", StateKind.LIST, lambda: rows))])
    assert isinstance(handle, StateHandle)
    assert handle.size_bytes == state.handle.size_bytes
    local_name(tmp_path / "node", PATH).write_bytes(rival.read(PATH))

    store = LocalFirstStore(primary, PrivateFolder(str(tmp_path / "node")), JOB, [state])

    assert restored(store, state) == (ROWS, NATIVE)
    assert PATH in primary.reads


def test_what_is_no_state_of_the_checkpoint_is_the_primarys(tmp_path: Path, primary: CountingStore) -> None:
    """Writes, creates, listings and files that the checkpoint does not name go to the primary storage."""
    state = checkpoint(primary, tmp_path / "node")
    store = LocalFirstStore(primary, PrivateFolder(str(tmp_path / "node")), JOB, [state])
    store.write("f", [b"x"])
    store.create("g", b"y")

    assert isinstance(store, LocalFirstStore)
    assert (store.read("f"), store.exists("g"), store.url) == (b"x", True, primary.url)
    assert store.list("") == ["f", "g", JOB]
    store.delete("f")
    store.delete_tree(JOB)
    assert FileSystemStore(primary.url).list("") == ["g"]
