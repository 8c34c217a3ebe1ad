"""What every store must do, over the wire for S3."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tidegate.storage.errors import AlreadyExistsError, NotFoundError, StorageError
from tidegate.storage.filesystem import FileSystemStore, check_conditional_create


def test_reads_back_what_was_written(store: FileSystemStore) -> None:
    """The chunks arrive joined, in order, whatever kind of buffer they are; the size is the sum."""
    size_bytes = store.write("a/b", [b"he", bytearray(b"ll"), memoryview(b"o")])

    assert (size_bytes, store.read("a/b")) == (5, b"hello")


def test_writes_an_empty_file(store: FileSystemStore) -> None:
    """No chunks make an empty file, not no file."""
    store.write("empty", [])

    assert store.exists("empty")
    assert store.read("empty") == b""


def test_replaces_a_file(store: FileSystemStore) -> None:
    """A second write leaves nothing of the first."""
    store.write("f", [b"a longer first version"])
    store.write("f", [b"second"])

    assert store.read("f") == b"second"


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, None, b"0123456789"),
        (3, None, b"3456789"),
        (2, 4, b"2345"),
        (8, 9, b"89"),
        (4, 0, b""),
        (10, 5, b""),
        (99, 1, b""),
    ],
)
def test_reads_a_range(store: FileSystemStore, offset: int, length: int | None, expected: bytes) -> None:
    """A range gives its bytes, fewer where the file ends, none beyond its end."""
    store.write("f", [b"0123456789"])

    assert store.read("f", offset, length) == expected


@pytest.mark.parametrize(("offset", "length"), [(0, None), (1, 2), (0, 0)])
def test_reading_a_missing_file_is_not_found(store: FileSystemStore, offset: int, length: int | None) -> None:
    """Whatever the range, and for the name of a folder too, NotFoundError names the file."""
    store.write("folder/f", [b"x"])

    for path in ("missing", "folder", "folder/f/below"):
        with pytest.raises(NotFoundError, match=path):
            store.read(path, offset, length)


def test_writes_a_large_file_in_odd_chunks(store: FileSystemStore) -> None:
    """A file larger than two parts of an upload arrives whole and in order."""
    chunks = [bytes([i]) * 5_000_003 for i in range(7)]

    assert store.write("large", iter(chunks)) == 7 * 5_000_003
    assert store.read("large") == b"".join(chunks)


def test_create_loses_against_what_is_there(store: FileSystemStore) -> None:
    """The second create raises and changes nothing, also with equal bytes."""
    store.create("f", b"first")

    for data in (b"second", b"first"):
        with pytest.raises(AlreadyExistsError, match="/f"):
            store.create("f", data)
    assert store.read("f") == b"first"


def test_create_after_delete_wins(store: FileSystemStore) -> None:
    """A name that was deleted is free again."""
    store.create("f", b"first")
    store.delete("f")
    store.create("f", bytearray(b"second"))

    assert store.read("f") == b"second"


def test_one_of_many_creators_wins(store: FileSystemStore) -> None:
    """Of threads that create one name at once, exactly one wins, and the file is its own."""
    rivals = 6
    start = Barrier(rivals)

    def create(rival: int) -> int | None:
        start.wait()
        try:
            store.create("contested", b"%d" % rival * 1000)
        except AlreadyExistsError:
            return None
        return rival

    with ThreadPoolExecutor(rivals) as pool:
        winners = [rival for rival in pool.map(create, range(rivals)) if rival is not None]

    assert len(winners) == 1
    assert store.read("contested") == b"%d" % winners[0] * 1000


def test_an_interrupted_write_leaves_the_old_file(store: FileSystemStore) -> None:
    """When the source of the chunks fails, its error comes through, and there is only the old file."""
    store.write("d/f", [b"old"])

    def failing() -> Iterator[bytes]:
        for _ in range(5):
            yield bytes(9_000_000)
        raise ZeroDivisionError

    for path in ("d/f", "d/new"):
        with pytest.raises(ZeroDivisionError):
            store.write(path, failing())

    assert store.list("d") == ["f"]
    assert store.read("d/f") == b"old"


def test_lists_names_directly_below(store: FileSystemStore) -> None:
    """Files and folders, once each and sorted; not their content, not siblings that share the prefix."""
    for path in ("d/b", "d/a", "d/sub/1", "d/sub/2", "d2/x", "top"):
        store.write(path, [b"x"])

    assert store.list("d") == ["a", "b", "sub"]
    assert store.list("d/") == ["a", "b", "sub"]
    assert store.list("") == ["d", "d2", "top"]
    assert (store.list("missing"), store.list("d/a"), store.list("to")) == ([], [], [])


def test_exists_knows_files_only(store: FileSystemStore) -> None:
    """A folder, a prefix, or a name below a file is no file."""
    store.write("d/file", [b"x"])

    found = {path: store.exists(path) for path in ("d/file", "d", "d/fil", "d/file/below", "missing")}
    assert found == {"d/file": True, "d": False, "d/fil": False, "d/file/below": False, "missing": False}


def test_deletes_one_file(store: FileSystemStore) -> None:
    """Deleting is quiet about what is not there, and takes neither folders nor siblings."""
    for path in ("d/f", "d/f2", "d/g"):
        store.write(path, [b"x"])

    for path in ("d/f", "d/f", "missing", "d", "d/g/below"):
        store.delete(path)

    assert store.list("d") == ["f2", "g"]


def test_deletes_a_tree(store: FileSystemStore) -> None:
    """Every file below goes, at any depth; a sibling that shares the prefix stays."""
    paths = ("d/f", "d/e/f/g", "d2/f", "dd")
    for path in paths:
        store.write(path, [b"x"])

    for path in ("d", "d", "missing"):
        store.delete_tree(path)

    assert [path for path in paths if store.exists(path)] == ["d2/f", "dd"]


@pytest.mark.parametrize("path", ["", "/f", "a//b", "../f", "a/../../f", "a/.", ".tmp-f", "a/\0"])
def test_refuses_paths_that_leave_the_root(store: FileSystemStore, path: str) -> None:
    """A path that is not plainly below the root is refused by every operation on files."""
    for operation in (store.read, store.exists, store.delete, lambda p: store.create(p, b"")):
        with pytest.raises(StorageError, match="is no path inside"):
            operation(path)


def test_reopens_from_its_pickle(store: FileSystemStore) -> None:
    """A store that was sent to another process sees the same files under the same url."""
    store.write("f", [b"x"])

    reopened = pickle.loads(pickle.dumps(store))

    assert (reopened.url, reopened.read("f")) == (store.url, b"x")


def test_passes_its_own_self_test(store: FileSystemStore) -> None:
    """Every kind of store that we ship has a conditional create, and the probe leaves nothing behind."""
    check_conditional_create(store)

    assert store.list("") == []
