"""Folders on a shared machine: nobody else can plant what we read, or have deleted what is elsewhere."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.private_folders import (
    PrivateStore,
    is_private,
    list_inside,
    make_inside,
    make_private,
    open_private,
    remove_inside,
)
from tidegate.storage.ids import CheckpointId, JobId, SubtaskIndex, VertexId
from tidegate.storage.state.local_copies import LocalCopies, PrivateFolder, remove_copies, remove_stale_copies

JOB = JobId("job-12345678")
VERTEX, SUBTASK, ONE = VertexId("map"), SubtaskIndex(0), CheckpointId(1)

Plant = Callable[[Path], None]


def _plant_link(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)


def _plant_dangling_link(folder: Path) -> None:
    folder.symlink_to(folder.parent / "nowhere")


def _plant_file(folder: Path) -> None:
    folder.write_bytes(b"")


def _plant_group_writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def _plant_world_writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)


PLANTED = [
    pytest.param(_plant_link, "is a link", id="link"),
    pytest.param(_plant_dangling_link, "is a link", id="dangling link"),
    pytest.param(_plant_file, "is not a folder", id="file"),
    pytest.param(_plant_group_writable, "can be written to by other users", id="group-writable"),
    pytest.param(_plant_world_writable, "can be written to by other users", id="world-writable"),
]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder to which everybody may write, as that of the temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def _mode(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_what_is_made_is_for_this_user_alone(shared: Path) -> None:
    """Folders have 0700 and files 0600, whatever the umask says."""
    before = os.umask(0)
    try:
        folder = shared / "tidegate-me" / "copies"
        make_private(str(folder))
        inside = Path(make_inside(str(folder), "job/task"))
        with open(inside / "f", "xb", opener=open_private) as file:
            file.write(b"x")
    finally:
        os.umask(before)
    made = [folder.parent, folder, inside.parent, inside, inside / "f"]
    assert [oct(_mode(path)) for path in made] == ["0o700"] * 4 + ["0o600"]
    make_private(str(folder))
    assert is_private(str(folder))


@pytest.mark.parametrize("where", ["folder", "above"])
@pytest.mark.parametrize(("plant", "why"), PLANTED)
def test_what_another_user_may_have_planted_is_refused(shared: Path, plant: Plant, why: str, where: str) -> None:
    """Whether it stands for the folder itself, or for the one above it where everybody may put something."""
    planted = shared / "tidegate-me"
    plant(planted)
    folder = str(planted if where == "folder" else planted / "copies")

    with pytest.raises(ConfigurationError, match=f"{planted} {why}.*(delete|have it deleted).*or name a folder"):
        make_private(folder)
    assert where == "above" or not os.path.isdir(planted) or os.listdir(planted) == []


@pytest.mark.parametrize("where", ["folder", "above"])
def test_a_folder_of_another_user_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It belongs to whoever was faster, and only an administrator can take it away."""
    planted = shared / "tidegate-me"
    planted.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: _owned_by(real(path), 4343 if str(path) == str(planted) else 0))

    with pytest.raises(ConfigurationError, match="belongs to user 4343, not to user 4242"):
        make_private(str(planted if where == "folder" else planted / "copies"))


def _owned_by(status: os.stat_result, user: int) -> os.stat_result:
    return os.stat_result((*status[:4], user, *status[5:10]))


def test_one_that_others_may_read_is_closed(shared: Path) -> None:
    """A folder of an earlier version, made with the usual umask, goes on; nobody else could write to it."""
    folder = shared / "tidegate-me"
    folder.mkdir()
    folder.chmod(0o755)

    make_private(str(folder))

    assert oct(_mode(folder)) == "0o700"


def test_links_of_an_administrator_are_followed(tmp_path: Path) -> None:
    """Where nobody else may write, a link on the way is part of the machine (`/tmp` is one in places)."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")

    make_private(str(tmp_path / "mounted" / "copies"))

    assert oct(_mode(tmp_path / "disk" / "copies")) == "0o700"


@pytest.mark.parametrize("linked", ["job", "job/task", "job/task/f"])
def test_a_deletion_does_not_follow_links(tmp_path: Path, linked: str) -> None:
    """A link at any depth is deleted at most, and what it points to stays."""
    folder, precious = tmp_path / "private", tmp_path / "precious"
    make_private(str(folder))
    (precious / "task").mkdir(parents=True)
    for file in (precious / "f", precious / "task" / "f"):
        file.write_bytes(b"mine")
    make_inside(str(folder), os.path.dirname(linked) or "other")
    (folder / linked).symlink_to(precious)

    for path in ("job/task/f", "job/task", "job"):
        remove_inside(str(folder), path)

    assert (precious / "f").read_bytes() == (precious / "task" / "f").read_bytes() == b"mine"
    assert not (folder / "job").is_symlink()
    assert list_inside(str(folder), "job") == []


def test_nothing_is_made_behind_a_link(tmp_path: Path) -> None:
    """Nor is anything listed there, or opened."""
    folder, elsewhere = tmp_path / "private", tmp_path / "elsewhere"
    make_private(str(folder))
    elsewhere.mkdir()
    (elsewhere / "f").write_bytes(b"x")
    (folder / "job").symlink_to(elsewhere)
    (folder / "f").symlink_to(elsewhere / "f")

    with pytest.raises(OSError, match="job"):
        make_inside(str(folder), "job/task")
    assert list_inside(str(folder), "job") == []
    assert os.listdir(elsewhere) == ["f"]
    with pytest.raises(OSError, match="symbolic links"):
        open_private(str(folder / "f"), os.O_RDONLY)


@pytest.mark.parametrize(("plant", "why"), PLANTED)
def test_no_copies_in_a_planted_folder(
    shared: Path, memory_store: FileSystemStore, plant: Plant, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints go on without copies, one warning says why, and nothing is deleted behind the link."""
    planted = shared / "copies"
    plant(planted)
    if planted.is_dir():
        (planted / JOB).mkdir()
        (planted / JOB / "f").write_bytes(b"mine")
        os.utime(planted / JOB / "f", (1, 1))
        os.utime(planted / JOB, (1, 1))
    copies = LocalCopies(PrivateFolder(str(planted)), JOB, VERTEX, SUBTASK, size_bytes_max=1000)
    with caplog.at_level(logging.WARNING, "tidegate"):
        for path in ("f", "g"):
            copies.store_for(memory_store, ONE).write(path, [b"state"])
        copies.confirmed(ONE)
        copies.aborted(CheckpointId(2))
        remove_copies(PrivateFolder(str(planted)), JOB)
        assert remove_stale_copies(PrivateFolder(str(planted)), 10**15) == []

    (warning,) = caplog.records
    assert why in warning.getMessage()
    if planted.is_dir():
        assert [str(p.relative_to(planted)) for p in sorted(planted.rglob("*"))] == [JOB, f"{JOB}/f"]


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been moved into the folder while that was still open."""
    (tmp_path / "f").write_bytes(b"x")
    store = PrivateStore(str(tmp_path))
    assert store.read("f") == b"x"
    monkeypatch.setattr(os, "geteuid", lambda: 4242)

    with pytest.raises(StorageError, match="belongs to another user"):
        store.read("f")


@pytest.mark.parametrize("relative", ["..", "a/../../b", "./a"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, relative: str) -> None:
    """What is made or deleted inside a private folder lies inside it, however Python was started."""
    folder = str(tmp_path / "own")
    make_private(folder)
    with pytest.raises(ConfigurationError, match="leads out"):
        make_inside(folder, relative)
    with pytest.raises(ConfigurationError, match="leads out"):
        remove_inside(folder, relative)
