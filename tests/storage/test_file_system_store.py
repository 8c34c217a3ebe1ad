"""What is special to one kind of store, and which urls and stores are refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, check_conditional_create, join_url, open_store
from tidegate.storage.files.store import Buffer


def test_urls_of_local_folders_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a folder is spelled, its url opens it from any working directory."""
    monkeypatch.chdir(tmp_path)

    urls = {open_store(url).url for url in ("x", "./x/", f"file://{tmp_path}/x", f"file://localhost{tmp_path}/x")}
    urls.add(open_store(f"{tmp_path}/y/../x").url)

    assert urls == {str(tmp_path / "x")}


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("", "empty"),
        ("file://", "empty"),
        ("ftp://h/x", "'ftp'"),
        ("s3://", "no bucket"),
        ("file://evil/x", "host 'evil'"),
        ("//evil/x", "host 'evil'"),
        ("file:////evil/x", "host 'evil'"),
        ("file://localhost//evil/x", "host 'evil'"),
        ("file://folder", "host 'folder'"),
        ("file:/folder", "write 'file://"),
        ("s3:/bucket/folder", "write 's3://"),
    ],
)
def test_refuses_urls_it_cannot_store_at(url: str, named: str) -> None:
    """The error says what is wrong with the url."""
    with pytest.raises(ConfigurationError, match=named):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("memory://x", {"key": "k"}, "'key'"),
        ("/x", {"anon": True}, "'anon'"),
        ("s3://b/x", {"client_kwargs": {"region_name": "eu-west-1"}}, "AWS_DEFAULT_REGION"),
        ("s3://b/x", {"timeout_ms": 0}, "timeout_ms=0"),
    ],
)
def test_refuses_options_that_would_be_ignored(url: str, options: dict[str, object], named: str) -> None:
    """An option that means nothing to the store, or that its libraries ignore, is an error that names it."""
    with pytest.raises(ConfigurationError, match=named):
        open_store(url, **options)


def test_hides_and_sweeps_what_a_killed_writer_left(local_store: FileSystemStore) -> None:
    """A temporary file is never listed, and is deleted on demand with nothing else."""
    local_store.write("d/f", [b"x"])
    Path(local_store.url, "d", ".tmp-left").write_bytes(b"torn")

    assert local_store.list("d") == ["f"]
    assert local_store.delete_temporary("d") == 1
    assert os.listdir(Path(local_store.url, "d")) == ["f"]


def test_a_file_that_cannot_be_synced_does_not_appear(
    local_store: FileSystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk refuses the bytes, the call fails, the old file stays, and nothing is left over."""
    local_store.write("d/f", [b"old"])

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "disk is broken")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"cannot write .*/d/f: .*disk is broken"):
        local_store.write("d/f", [b"new"])
    with pytest.raises(StorageError, match=r"cannot create .*/d/g: .*disk is broken"):
        local_store.create("d/g", b"new")
    monkeypatch.undo()

    assert os.listdir(Path(local_store.url, "d")) == ["f"]
    assert local_store.read("d/f") == b"old"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are synced from now on."""
    paths: list[str] = []
    real = os.fsync

    def counted(descriptor: int) -> None:
        real(descriptor)
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", counted)
    return paths


def test_a_repeated_write_syncs_the_name_of_a_new_folder(
    local_store: FileSystemStore, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refused to sync the parent, and the folder exists already. Once it is synced, it is not synced again."""
    local_store.write("first", [b"x"])

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError, match="disk is broken"):
            local_store.create("chk-1/_metadata", b"x")
    synced.clear()
    local_store.create("chk-1/_metadata", b"x")
    local_store.create("chk-1/later", b"x")

    assert synced.count(local_store.url) == 1


def test_a_write_syncs_the_name_of_a_folder_that_another_writer_has_not_synced_yet(
    local_store: FileSystemStore, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writer has made the folder, and its parent is on its way to the disk."""
    local_store.write("first", [b"x"])
    counted = os.fsync

    def slow(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", counted)
        synced.clear()
        local_store.create("chk-1/faster", b"x")
        assert local_store.url in synced
        counted(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    local_store.create("chk-1/_metadata", b"x")

    assert synced.count(local_store.url) == 2


def test_a_file_in_the_way_is_a_storage_error(local_store: FileSystemStore) -> None:
    """A file where a folder is needed is a StorageError; create does not mistake it for a lost race."""
    local_store.write("f", [b"x"])

    with pytest.raises(StorageError):
        local_store.write("f/below", [b"x"])
    with pytest.raises(StorageError) as caught:
        local_store.create("f/below", b"x")
    assert not isinstance(caught.value, AlreadyExistsError)


class _Overwriting(FileSystemStore):
    """A store whose conditional create replaces, as some S3 servers' does."""

    def create(self, path: str, data: Buffer) -> None:
        self.write(path, (data,))


class _Destroying(FileSystemStore):
    """A store whose conditional create replaces and then says that it lost."""

    def create(self, path: str, data: Buffer) -> None:
        lost = self.exists(path)
        self.write(path, (data,))
        if lost:
            raise AlreadyExistsError(path)


@pytest.mark.parametrize("kind", [_Overwriting, _Destroying])
def test_refuses_a_store_without_conditional_create(kind: type[FileSystemStore], tmp_path: Path) -> None:
    """The self-test says that exactly-once cannot be kept there, and cleans up."""
    store = kind(str(tmp_path))

    with pytest.raises(ConfigurationError, match="has no conditional create"):
        check_conditional_create(store)
    assert store.list("") == []


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("/a", "b/c", "/a/b/c"),
        ("/", "b", "/b"),
        ("memory://", "b", "memory://b"),
        ("s3://b/p", "", "s3://b/p"),
    ],
)
def test_joins_urls(root: str, path: str, expected: str) -> None:
    """Exactly one slash joins a root and a path."""
    assert join_url(root, path) == expected
