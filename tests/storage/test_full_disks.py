"""Disks that are full or read-only: real small ones where the tests may mount them, and errors in their place."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId, JobId, SubtaskIndex, VertexId
from tidegate.storage.state.local_copies import LocalCopies, PrivateFolder

DISK_BYTES = 64 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("these tests may not mount file systems")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    """Nothing can be written there from here on."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def test_a_full_disk_is_an_error_that_says_so(small_disk: Path) -> None:
    """The old file stays, nothing is left over, and there is room again for what fits."""
    store = open_store(str(small_disk))
    store.write("d/f", [b"old"])

    with pytest.raises(StorageError, match=r"cannot write .*/d/f: .*No space left.*free some space"):
        store.write("d/f", (bytes(8_000) for _ in range(20)))
    with pytest.raises(StorageError, match=r"cannot create .*/d/g: .*No space left"):
        store.create("d/g", bytes(2 * DISK_BYTES))
    assert os.listdir(small_disk / "d") == ["f"]
    assert store.read("d/f") == b"old"
    assert store.write("d/h", [bytes(DISK_BYTES // 2)]) == DISK_BYTES // 2


def test_a_read_only_disk_is_an_error_that_says_so(small_disk: Path) -> None:
    """What is there can be read; writing, creating and deleting say what to do."""
    store = open_store(str(small_disk))
    store.write("f", [b"old"])
    make_read_only(small_disk)

    for operation in (
        lambda: store.write("f", [b"new"]),
        lambda: store.create("g", b"new"),
        lambda: store.delete("f"),
        lambda: store.delete_tree(""),
    ):
        with pytest.raises(StorageError, match=r"Read-only file system.*make the file system writable"):
            operation()
    assert store.read("f") == b"old"


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_checkpoints_are_written_though_copies_cannot_be(
    small_disk: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a local disk that takes nothing, the primary storage has every file, and one warning says why."""
    primary = open_store(str(tmp_path / "primary"))
    node = str(small_disk / "node")
    copies = LocalCopies(PrivateFolder(node), JobId("job-1"), VertexId("map"), SubtaskIndex(0), size_bytes_max=10**9)
    if how == "read-only":
        make_read_only(small_disk)
    chunk = os.urandom(10_000)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            store = copies.store_for(primary, CheckpointId(number))
            assert store.write(f"job-1/chk-{number}/map-0", [chunk] * 20) == 200_000
            copies.confirmed(CheckpointId(number))

    assert primary.read("job-1/chk-3/map-0") == chunk * 20
    assert [p for p in small_disk.rglob("*") if p.is_file()] == []
    (warning,) = caplog.records
    assert {"full": "No space left", "read-only": "Read-only"}[how] in warning.getMessage()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "raise the quota"),
        (errno.EROFS, "make the file system writable"),
        (errno.EACCES, "check credentials and permissions"),
    ],
)
def test_what_the_disk_says_comes_with_advice(
    local_store: FileSystemStore, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    """Each fault that a user can mend says how."""

    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=f"{os.strerror(code)}.*{advice}"):
        local_store.write("f", [b"x"])
