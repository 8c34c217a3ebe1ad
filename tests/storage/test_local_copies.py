"""What a task keeps on its node's disk beside its checkpoints, and when it goes."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
from counting_store import CountingStore

from tidegate.storage.errors import StorageError
from tidegate.storage.files.store import Buffer
from tidegate.storage.ids import CheckpointId, JobId, SubtaskIndex, VertexId
from tidegate.storage.state import local_copies
from tidegate.storage.state.local_copies import (
    LocalCopies,
    PrivateFolder,
    UnfinishedFile,
    remove_copies,
    remove_stale_copies,
)

JOB = JobId("job-12345678")
ONE, TWO, THREE = CheckpointId(1), CheckpointId(2), CheckpointId(3)


@pytest.fixture
def primary(tmp_path: Path) -> CountingStore:
    """The storage that counts."""
    return CountingStore(str(tmp_path / "primary"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The node's folder, not there yet."""
    return tmp_path / "node"


def copies_in(folder: Path, size_bytes_max: int = 1_000_000) -> LocalCopies:
    """Those of one task."""
    return LocalCopies(
        PrivateFolder(str(folder)), JOB, VertexId("map/1"), SubtaskIndex(0), size_bytes_max=size_bytes_max
    )


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write(copies: LocalCopies, primary: CountingStore, number: CheckpointId, path: str, data: bytes = b"data") -> None:
    """Write one file of a checkpoint, in two chunks."""
    assert copies.store_for(primary, number).write(path, [data[:1], memoryview(data)[1:]]) == len(data)


def test_a_file_is_written_to_both(folder: Path, primary: CountingStore) -> None:
    """The same bytes, under the task's own folder and the path in the primary storage."""
    write(copies_in(folder), primary, ONE, f"{JOB}/chk-1/map-0", b"some state")

    assert files_in(folder) == {f"{JOB}/map%2F1-0/chk-1/{JOB}/chk-1/map-0": b"some state"}
    assert primary.read(f"{JOB}/chk-1/map-0") == b"some state"


def test_a_confirmed_checkpoint_lets_go_of_older_ones(folder: Path, primary: CountingStore) -> None:
    """Copies of older checkpoints go, but for what the confirmed one needs; newer ones and its own stay."""
    copies = copies_in(folder)
    for number in (ONE, TWO, THREE):
        write(copies, primary, number, f"exclusive-{number}")
        write(copies, primary, number, f"shared-{number}")

    copies.confirmed(TWO, {"shared-1"})

    left = ["chk-1/shared-1", "chk-2/exclusive-2", "chk-2/shared-2", "chk-3/exclusive-3", "chk-3/shared-3"]
    assert [name.removeprefix(f"{JOB}/map%2F1-0/") for name in files_in(folder)] == left
    assert copies.size_bytes == 5 * 4
    copies.confirmed(THREE)
    assert copies.size_bytes == 2 * 4
    assert os.listdir(folder / JOB / "map%2F1-0") == ["chk-3"]


def test_an_aborted_checkpoint_leaves_nothing(
    folder: Path, primary: CountingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """What was copied for it goes, also what is still being written when it is aborted, and that is no fault."""
    copies = copies_in(folder)
    write(copies, primary, ONE, "f")
    write(copies, primary, TWO, "f")

    def chunks() -> Iterator[bytes]:
        yield b"x"
        copies.aborted(ONE)
        yield b"y"

    assert copies.store_for(primary, ONE).write("g", chunks()) == 2
    assert os.listdir(folder / JOB / "map%2F1-0") == ["chk-2"]
    assert copies.size_bytes == 4
    assert caplog.records == []


class AbortingFolder(PrivateFolder):
    """A folder in which an abort arrives on another thread each time that a file is begun."""

    copies: LocalCopies
    aborts: list[threading.Thread]

    def begin(self, path: str) -> UnfinishedFile:
        abort = threading.Thread(target=self.copies.aborted, args=(ONE,))
        self.aborts.append(abort)
        abort.start()
        return super().begin(path)

    def make_way(self) -> None:
        """Called where the folder is there and the file is not: an abort that may go on has time to."""
        self.aborts[-1].join(0.2)


def test_an_abort_as_a_copy_begins_is_no_failure(
    folder: Path, primary: CountingStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is logged, so that a real failure is logged later; nothing is left, and a later file is not begun."""
    node = AbortingFolder(str(folder))
    copies = LocalCopies(node, JOB, VertexId("map/1"), SubtaskIndex(0), size_bytes_max=1_000_000)
    node.copies, node.aborts = copies, []
    make_inside = local_copies.make_inside

    def made(*arguments: str) -> str:
        found = make_inside(*arguments)
        node.make_way()
        return found

    monkeypatch.setattr(local_copies, "make_inside", made)
    write(copies, primary, ONE, "f")
    for abort in node.aborts:
        abort.join()
    write(copies, primary, ONE, "g")

    assert (caplog.records, len(node.aborts), copies.size_bytes) == ([], 1, 0)
    assert files_in(folder) == {}


def test_a_failed_write_leaves_no_copy(folder: Path, primary: CountingStore) -> None:
    """A copy is there only when the primary is known to have the file; its error comes through."""
    copies = copies_in(folder)
    primary.fails = True

    with pytest.raises(StorageError, match="connection broke"):
        write(copies, primary, ONE, "f")
    assert (files_in(folder), copies.size_bytes) == ({}, 0)


class _BrokenDisk(FileIO):
    """A file on a disk that takes some bytes and then no more."""

    taken_bytes_max = 3

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        """Write a little."""
        if self.tell() >= self.taken_bytes_max:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(memoryview(data)[:2])


def test_a_full_disk_costs_nothing_but_the_copy(
    folder: Path, primary: CountingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints are written whole, one warning says what is wrong, and copies are kept again when there is room."""
    copies = copies_in(folder)
    monkeypatch.setattr("tidegate.storage.state.local_copies.FileIO", _BrokenDisk)
    with caplog.at_level(logging.WARNING):
        for number in (ONE, TWO):
            for name in ("a", "b"):
                write(copies, primary, number, f"{number}-{name}", b"0123456789")

    assert primary.read("2-b") == b"0123456789"
    assert (files_in(folder), copies.size_bytes) == ({}, 0)
    (warning,) = caplog.records
    assert "map/1 subtask 0" in warning.getMessage()
    assert "No space left" in warning.getMessage()
    monkeypatch.undo()
    write(copies, primary, THREE, "3-a")
    assert list(files_in(folder).values()) == [b"data"]


def test_a_folder_that_cannot_be_used_costs_nothing_but_the_copies(
    folder: Path, primary: CountingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a file is in the way of the folder, nothing raises, and one warning says so."""
    folder.write_bytes(b"no folder")
    copies = copies_in(folder)
    with caplog.at_level(logging.WARNING):
        write(copies, primary, ONE, "f")
        write(copies, primary, TWO, "f")
        copies.confirmed(TWO)
        copies.aborted(THREE)

    assert primary.read("f") == b"data"
    assert len(caplog.records) == 1


def test_the_disk_that_copies_take_is_bounded(
    folder: Path, primary: CountingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that does not fit is dropped, said once; what was confirmed before makes room."""
    copies = copies_in(folder, size_bytes_max=10)
    write(copies, primary, ONE, "a", b"12345678")
    with caplog.at_level(logging.WARNING):
        write(copies, primary, TWO, "b", b"12345678")
        write(copies, primary, TWO, "c", b"12345678")

    assert [Path(name).name for name in files_in(folder)] == ["a"]
    assert len(caplog.records) == 1
    assert "10 bytes" in caplog.records[0].getMessage()
    copies.confirmed(TWO)
    write(copies, primary, THREE, "d", b"1234567890")
    assert [Path(name).name for name in files_in(folder)] == ["d"]


def test_a_new_attempt_knows_what_the_old_one_left(folder: Path, primary: CountingStore) -> None:
    """Copies of an earlier attempt count, and go with the next confirmed checkpoint; what it left half written goes."""
    write(copies_in(folder), primary, ONE, "d/f")
    torn = folder / JOB / "map%2F1-0" / "chk-1" / "d" / ".tmp-torn"
    torn.write_bytes(b"half")

    copies = copies_in(folder)

    assert copies.size_bytes == 4
    assert not torn.exists()
    copies.confirmed(TWO)
    assert files_in(folder) == {}


def test_what_an_old_attempt_still_writes_goes_too(folder: Path, primary: CountingStore) -> None:
    """A process that was taken for dead finishes a copy beside those that the new attempt knows: it goes with the next
    complete checkpoint, also from a folder in which others are needed."""
    old = copies_in(folder)
    write(old, primary, ONE, "shared")
    new = copies_in(folder)
    write(old, primary, ONE, "late")

    new.confirmed(TWO, {"shared"})

    assert list(files_in(folder)) == [f"{JOB}/map%2F1-0/chk-1/shared"]
    assert new.size_bytes == 4
    new.confirmed(THREE)
    assert not files_in(folder)
    assert new.size_bytes == 0


def test_a_replaced_file_counts_once(folder: Path, primary: CountingStore) -> None:
    """Writing a path of a checkpoint again replaces its copy."""
    copies = copies_in(folder)
    write(copies, primary, ONE, "f", b"long long")
    write(copies, primary, ONE, "f", b"short")

    assert (list(files_in(folder).values()), copies.size_bytes) == ([b"short"], 5)


def test_jobs_that_are_gone_leave_nothing(folder: Path, primary: CountingStore) -> None:
    """A job's copies are deleted as a whole at its end, and by age where it had no chance; others stay."""
    for job in ("old-1", "new-1", "over-1"):
        copies = LocalCopies(
            PrivateFolder(str(folder)), JobId(job), VertexId("map"), SubtaskIndex(0), size_bytes_max=100
        )
        write(copies, primary, ONE, "f")
    remove_copies(PrivateFolder(str(folder)), JobId("over-1"))
    remove_copies(PrivateFolder(str(folder)), JobId("never-was"))
    for path in [folder / "old-1", *(folder / "old-1").rglob("*")]:
        os.utime(path, (1_000, 1_000))

    assert remove_stale_copies(PrivateFolder(str(folder)), 1_000_001) == ["old-1"]
    assert remove_stale_copies(PrivateFolder(str(folder / "missing")), 1_000_001) == []
    assert os.listdir(folder) == ["new-1"]


def test_everything_else_goes_to_the_primary_alone(folder: Path, primary: CountingStore) -> None:
    """Metadata, say, is created in the primary and nowhere else."""
    store = copies_in(folder).store_for(primary, ONE)
    store.create("d/m", b"meta")

    assert (store.url, store.read("d/m"), store.exists("d/m"), store.list("d")) == (primary.url, b"meta", True, ["m"])
    store.delete("d/m")
    store.delete_tree("d")
    assert primary.list("") == []
    assert not folder.exists()
