"""New files on the local disk: parts of any size in few calls, room ahead, and a system that takes less than given."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.files import local_files
from tidegate.storage.files.local_files import GATHERED_BYTES, PARTS_MAX, STEP_BYTES, write_synced


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each call that writes."""
    sizes: list[int] = []
    real = os.writev

    def counted(descriptor: int, parts: Sequence[memoryview]) -> int:
        sizes.append(sum(map(len, parts)))
        return real(descriptor, parts)

    monkeypatch.setattr(os, "writev", counted)
    return sizes


def test_parts_are_written_together(tmp_path: Path, calls: list[int]) -> None:
    """Small parts and large ones come in their order, in calls of some size, and so do more than one call may have."""
    parts = [bytes([number % 251]) * (200_000 if number % 7 == 0 else 3) for number in range(40)]
    many = [b"x", b""] * PARTS_MAX

    assert write_synced(str(tmp_path / "f"), parts) == sum(map(len, parts))
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert all(size >= GATHERED_BYTES for size in calls[:-1])
    assert len(calls) < 4
    assert write_synced(str(tmp_path / "g"), many) == PARTS_MAX
    assert (tmp_path / "g").read_bytes() == b"x" * PARTS_MAX


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(1, 5))
def test_a_system_that_takes_little_gets_all(parts: list[bytes], taken_max: int) -> None:
    """A call may write fewer bytes than it was given, in the middle of a part or at its end."""
    written = bytearray()

    def some(_: int, given: Sequence[memoryview]) -> int:
        taken = b"".join(given)[:taken_max]
        written.extend(taken)
        return len(taken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", some)
        local_files._write_all(0, [memoryview(part) for part in parts])
    assert bytes(written) == b"".join(parts)


def test_a_file_keeps_no_more_room_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is asked for ahead, in steps that double, and what is left over is given back."""
    asked: list[int] = []
    real = local_files._make_room
    monkeypatch.setattr(local_files, "_make_room", lambda file, size: (asked.append(size), real(file, size)))
    size_bytes = 9 * (1 << 20)

    write_synced(str(tmp_path / "f"), [os.urandom(1 << 20)] * 9)

    status = os.stat(tmp_path / "f")
    assert status.st_size == size_bytes
    assert status.st_blocks * 512 < size_bytes + (1 << 20)
    assert asked == [4 << 20, 8 << 20, 16 << 20]


def test_the_disk_begins_before_the_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each whole, aligned step of a file is given to the disk once, in order, after its bytes are written."""
    begun: list[tuple[int, int]] = []
    ctypes.set_errno(errno.ESPIPE)

    def begin(descriptor: int, start: int, size_bytes: int, _: int) -> int:
        assert os.fstat(descriptor).st_size >= start + size_bytes
        begun.append((start, start + size_bytes))
        return -1

    monkeypatch.setattr(local_files, "_sync_file_range", begin)
    part = os.urandom(STEP_BYTES // 4 * 3)

    assert write_synced(str(tmp_path / "f"), [part] * 7) == 7 * len(part)
    assert (tmp_path / "f").read_bytes() == part * 7
    assert begun == [(step * STEP_BYTES, (step + 1) * STEP_BYTES) for step in range(5)]

    begun.clear()
    write_synced(str(tmp_path / "large"), [bytes(3 * STEP_BYTES + 1), bytes(STEP_BYTES - 2)])
    assert begun == [(0, 3 * STEP_BYTES)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_early_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The sync at the end might not be told any more."""

    def fail(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(local_files, "_sync_file_range", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        write_synced(str(tmp_path / "f"), [bytes(STEP_BYTES)])


def test_a_system_without_these_calls_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no such calls, or refuses them, the file is written all the same."""
    data = os.urandom(STEP_BYTES + GATHERED_BYTES + 1)
    ctypes.set_errno(errno.EINVAL)
    for number, call in enumerate((None, lambda *_: -1)):
        monkeypatch.setattr(local_files, "_fallocate", call)
        monkeypatch.setattr(local_files, "_sync_file_range", call)
        assert write_synced(str(tmp_path / str(number)), [data]) == len(data)
        assert (tmp_path / str(number)).read_bytes() == data


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    """The file must be new."""
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_synced(str(tmp_path / "f"), [b"new"])
    assert (tmp_path / "f").read_bytes() == b"old"
