"""Files of a state backend in checkpoints: only new ones are written, all are verified, and no local folder stays."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tidegate.storage.checkpoints.metadata import NativeFile, NativeState
from tidegate.storage.errors import CorruptionError, NotFoundError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Buffer
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.backend_files import DESCRIPTION_NAME, fetch_native, write_native

UID = OperatorUid("op")


@dataclass
class Frozen:
    """Files in a folder, as a backend would freeze them; tables are those of the base of the same name."""

    folder: str
    uid: OperatorUid = UID
    backend: str = "test"
    key_groups: tuple[int, int] = (0, 8)
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    gone: tuple[str, ...] = ()

    def files(self) -> Mapping[str, tuple[int, int] | None]:
        return {name: self.groups.get(name) for name in (*os.listdir(self.folder), *self.gone)}

    def stored(self, base: NativeState) -> Mapping[str, NativeFile]:
        return {file.name: file for file in base.files if file.name.endswith(".sst")}

    def description(self) -> bytes:
        return b"described"

    def release(self) -> None:
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else ():
            os.unlink(os.path.join(self.folder, name))
        if os.path.isdir(self.folder):
            os.rmdir(self.folder)


@pytest.fixture
def frozen(tmp_path: Path) -> Callable[..., Frozen]:
    """Makes a frozen folder with files of some contents."""

    def make(**contents: bytes) -> Frozen:
        folder = tmp_path / "frozen"
        folder.mkdir()
        for name, content in contents.items():
            (folder / name.replace("_", ".")).write_bytes(content)
        return Frozen(str(folder))

    return make


class BreakingStore(FileSystemStore):
    """Fails when the second file is written."""

    writes = 0

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        self.writes += 1
        if self.writes == 2:
            next(iter(chunks))
            raise StorageError("the connection broke")
        return super().write(path, chunks)


def test_what_is_written_comes_back(store: FileSystemStore, frozen: Callable[..., Frozen], tmp_path: Path) -> None:
    """All files have the bytes that they had, in a folder that held something else; the frozen folder is gone."""
    snapshot = frozen(a_sst=b"x" * 10_000_000, b_sst=b"", CURRENT=b"1")
    native = write_native(store, "job/shared/chk-1/v-0=op", snapshot, None)
    assert (native.uid, native.backend, native.key_groups, native.description) == (UID, "test", (0, 8), b"described")
    assert not os.path.exists(snapshot.folder)
    target = tmp_path / "restored"
    target.mkdir()
    (target / "old.sst").write_bytes(b"of another attempt")
    fetch_native(store, native, str(target))
    assert {"a.sst", "b.sst", "CURRENT", DESCRIPTION_NAME} == set(os.listdir(target))
    assert (target / "a.sst").read_bytes() == b"x" * 10_000_000
    assert (target / "b.sst").read_bytes() == b""


def test_only_new_files_are_written(local_store: FileSystemStore, frozen: Callable[..., Frozen]) -> None:
    """A table that the base has is referred to with its key groups of now; one of another size is written again, and so
    is everything that is no table."""
    base = write_native(local_store, "chk-1", frozen(a_sst=b"aaa", b_sst=b"bbb", CURRENT=b"1"), None)
    second = frozen(a_sst=b"aaa", b_sst=b"bbbb", c_sst=b"c", CURRENT=b"1")
    second.groups = {"a.sst": (2, 3)}
    native = write_native(local_store, "chk-2", second, base)
    assert sorted(file.path for file in native.files) == ["chk-1/a.sst", "chk-2/CURRENT", "chk-2/b.sst", "chk-2/c.sst"]
    assert [file.key_groups for file in native.files if file.name == "a.sst"] == [(2, 3)]
    assert local_store.list("chk-2") == ["CURRENT", "b.sst", "c.sst"]
    assert native.size_bytes == 3 + 4 + 1 + 1


def test_a_failure_in_the_middle_leaves_no_local_folder(
    local_store: FileSystemStore, frozen: Callable[..., Frozen]
) -> None:
    """The error of the store comes through, and the frozen folder is gone all the same."""
    snapshot = frozen(a_sst=b"a", b_sst=b"b", c_sst=b"c")
    with pytest.raises(StorageError, match="the connection broke"):
        write_native(BreakingStore(local_store.url), "chk-1", snapshot, None)
    assert not os.path.exists(snapshot.folder)


def test_a_file_that_has_gone_before_it_was_written(
    local_store: FileSystemStore, frozen: Callable[..., Frozen]
) -> None:
    """The local folder is named, not the store."""
    snapshot = frozen(a_sst=b"a")
    snapshot.gone = ("missing.sst",)
    with pytest.raises(StorageError, match=f"local folder {snapshot.folder}.*No such file"):
        write_native(local_store, "chk-1", snapshot, None)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_damage_is_found(
    local_store: FileSystemStore, frozen: Callable[..., Frozen], tmp_path: Path, damage: str
) -> None:
    """A flipped bit, a missing end and added bytes: none of them is taken, and no folder stays."""
    native = write_native(local_store, "chk-1", frozen(a_sst=b"a" * 1000), None)
    data = bytearray(local_store.read("chk-1/a.sst"))
    data[500] ^= 4 if damage == "flip" else 0
    damaged = {"flip": data, "cut": data[:-1], "grow": data + b"a"}[damage]
    local_store.write("chk-1/a.sst", [bytes(damaged)])
    target = tmp_path / "restored"
    with pytest.raises(CorruptionError, match=r"chk-1/a\.sst is damaged"):
        fetch_native(local_store, native, str(target))
    assert not target.exists()


def test_a_missing_file_is_named(local_store: FileSystemStore, frozen: Callable[..., Frozen], tmp_path: Path) -> None:
    """NotFoundError with its path."""
    native = write_native(local_store, "chk-1", frozen(a_sst=b"a", b_sst=b"b"), None)
    local_store.delete("chk-1/b.sst")
    with pytest.raises(NotFoundError, match=r"chk-1/b\.sst"):
        fetch_native(local_store, native, str(tmp_path / "restored"))


def test_a_name_does_not_lead_out_of_the_folder(local_store: FileSystemStore, tmp_path: Path) -> None:
    """A name of metadata that is a path is refused before anything is read."""
    file = NativeFile("../evil", "chk-1/a", 1, "")
    with pytest.raises(CorruptionError, match="cannot name a file"):
        fetch_native(local_store, NativeState(UID, "test", (0, 8), b"", (file,)), str(tmp_path / "restored"))


def test_a_folder_that_cannot_be_used_is_named(
    local_store: FileSystemStore, frozen: Callable[..., Frozen], tmp_path: Path
) -> None:
    """Where the folder should be lies a file: the error names it and says what to do."""
    native = write_native(local_store, "chk-1", frozen(a_sst=b"a"), None)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot use the local folder .*file/restored: .*set the folder"):
        fetch_native(local_store, native, str(tmp_path / "file" / "restored"))


def test_a_disk_that_takes_no_more_is_named(
    local_store: FileSystemStore, frozen: Callable[..., Frozen], tmp_path: Path
) -> None:
    """A write that fails half-way (here for a limit on the size of files) names the folder and says what to do."""
    native = write_native(local_store, "chk-1", frozen(a_sst=b"a" * 100_000), None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot use the local folder .*restored.*too large.*Free some space"):
            fetch_native(local_store, native, str(tmp_path / "restored"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
