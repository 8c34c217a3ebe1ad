"""What every store must do, over the wire for S3, Google Cloud Storage, Azure and HDFS, and from another process for
the one on Ray.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import ray
from ray.exceptions import RayError
from waiting import until

from tidegate.actors.ray.memory_store import RayMemoryStore, actor_name, open_store_on_ray, start_memory
from tidegate.storage.checkpoints.memory_limit import MemoryStorage
from tidegate.storage.errors import AlreadyExistsError, InvalidPathError, NotFoundError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, check_conditional_create
from tidegate.storage.files.retrying_store import RetryingStore
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId, SubtaskIndex, VertexId
from tidegate.storage.state.local_copies import DuplicatingStore, LocalCopies, LocalFirstStore, PrivateFolder
from tidegate.testing.world.disk import SimulatedDisk, SimulatedStore
from tidegate.testing.world.faults import Faults
from tidegate.testing.world.virtual_time import World


@pytest.fixture(scope="module")
def ray_memory(plain_ray: None) -> Iterator[str]:
    """Url of the memory of an actor, in the Ray cluster of this process."""
    url, actor = start_memory(f"contract-{uuid.uuid4().hex}")
    assert is_alive(actor)
    yield url
    ray.kill(actor)


@pytest.fixture
def ray_store(ray_memory: str) -> FileSystemStore:
    """An empty store in the memory of an actor."""
    return open_store_on_ray(f"{ray_memory}/{uuid.uuid4().hex}")


@pytest.fixture
def local_first_store(memory_store: Store, tmp_path: Path) -> LocalFirstStore:
    """A store that prefers local copies, of which there are none."""
    return LocalFirstStore(memory_store, PrivateFolder(str(tmp_path / "node")), JobId("job-1"), [])


@pytest.fixture
def duplicating_store(memory_store: Store, tmp_path: Path) -> DuplicatingStore:
    """A store that keeps local copies of what is written."""
    copies = LocalCopies(
        PrivateFolder(str(tmp_path / "node")),
        JobId("job-1"),
        VertexId("map"),
        SubtaskIndex(0),
        size_bytes_max=20_000_000,
    )
    return copies.store_for(memory_store, CheckpointId(1))


@pytest.fixture
def limited_store(memory_store: Store) -> MemoryStorage:
    """A store in memory that limits states."""
    return MemoryStorage(memory_store)


@pytest.fixture
def retrying_store(memory_store: Store) -> RetryingStore:
    """A store that tries again."""
    return RetryingStore(memory_store)


@pytest.fixture
def simulated_store() -> SimulatedStore:
    """A store of the simulator, without faults."""
    disk = SimulatedDisk(World(0, Faults()))
    disk.reliable = True
    return SimulatedStore(disk, "sim://contract")


OWN = ("local", "memory", "s3", "gcs", "azure", "hdfs", "ray")
KINDS = (*OWN, "local_first", "duplicating", "limited", "retrying")


@pytest.fixture(params=[*KINDS, "simulated"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each kind of store in turn."""
    chosen: Store = request.getfixturevalue(f"{request.param}_store")
    return chosen


@pytest.fixture(params=KINDS)
def shared_store(request: pytest.FixtureRequest) -> Store:
    """Each kind of store that programs use, from many threads."""
    chosen: Store = request.getfixturevalue(f"{request.param}_store")
    return chosen


@pytest.fixture(params=OWN)
def travelling_store(request: pytest.FixtureRequest) -> FileSystemStore:
    """Each kind of store that goes from process to process."""
    chosen = request.getfixturevalue(f"{request.param}_store")
    assert isinstance(chosen, FileSystemStore)
    return chosen


def test_reads_back_what_was_written(store: Store) -> None:
    """The chunks arrive joined, in order, whatever kind of buffer they are; the size is the sum."""
    size_bytes = store.write("a/b", [b"he", bytearray(b"ll"), memoryview(b"o")])

    assert (size_bytes, store.read("a/b")) == (5, b"hello")


def test_writes_an_empty_file(store: Store) -> None:
    """No chunks make an empty file, not no file."""
    store.write("empty", [])

    assert store.exists("empty")
    assert store.read("empty") == b""


def test_replaces_a_file(store: Store) -> None:
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
def test_reads_a_range(store: Store, offset: int, length: int | None, expected: bytes) -> None:
    """A range gives its bytes, fewer where the file ends, none beyond its end."""
    store.write("f", [b"0123456789"])

    assert store.read("f", offset, length) == expected


@pytest.mark.parametrize(("offset", "length"), [(0, None), (1, 2), (0, 0)])
def test_reading_a_missing_file_is_not_found(store: Store, offset: int, length: int | None) -> None:
    """Whatever the range, and for the name of a folder too, NotFoundError names the file."""
    store.write("folder/f", [b"x"])

    for path in ("missing", "folder", "folder/f/below"):
        with pytest.raises(NotFoundError, match=path):
            store.read(path, offset, length)


def test_writes_a_large_file_in_odd_chunks(store: Store) -> None:
    """A file larger than two parts of an upload arrives whole and in order."""
    chunks = [bytes([i]) * 5_000_003 for i in range(7)]

    assert store.write("large", iter(chunks)) == 7 * 5_000_003
    assert store.read("large") == b"".join(chunks)


def test_create_loses_against_what_is_there(store: Store) -> None:
    """The second create raises and changes nothing, also with equal bytes."""
    store.create("f", b"first")

    for data in (b"second", b"first"):
        with pytest.raises(AlreadyExistsError, match="/f"):
            store.create("f", data)
    assert store.read("f") == b"first"


def test_create_after_delete_wins(store: Store) -> None:
    """A name that was deleted is free again."""
    store.create("f", b"first")
    store.delete("f")
    store.create("f", bytearray(b"second"))

    assert store.read("f") == b"second"


def test_one_of_many_creators_wins(shared_store: Store) -> None:
    """Of threads that create one name at once, exactly one wins, and the file is its own."""
    rivals = 6
    start = Barrier(rivals)

    def create(rival: int) -> int | None:
        start.wait()
        try:
            shared_store.create("contested", b"%d" % rival * 1000)
        except AlreadyExistsError:
            return None
        return rival

    with ThreadPoolExecutor(rivals) as pool:
        winners = [rival for rival in pool.map(create, range(rivals)) if rival is not None]

    assert len(winners) == 1
    assert shared_store.read("contested") == b"%d" % winners[0] * 1000


def test_an_interrupted_write_leaves_the_old_file(store: Store) -> None:
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


def test_lists_names_directly_below(store: Store) -> None:
    """Files and folders, once each and sorted; not their content, not siblings that share the prefix."""
    for path in ("d/b", "d/a", "d/sub/1", "d/sub/2", "d2/x", "top"):
        store.write(path, [b"x"])

    assert store.list("d") == ["a", "b", "sub"]
    assert store.list("d/") == ["a", "b", "sub"]
    assert store.list("") == ["d", "d2", "top"]
    assert (store.list("missing"), store.list("d/a"), store.list("to")) == ([], [], [])


def test_exists_knows_files_only(store: Store) -> None:
    """A folder, a prefix, or a name below a file is no file."""
    store.write("d/file", [b"x"])

    found = {path: store.exists(path) for path in ("d/file", "d", "d/fil", "d/file/below", "missing")}
    assert found == {"d/file": True, "d": False, "d/fil": False, "d/file/below": False, "missing": False}


def test_deletes_one_file(store: Store) -> None:
    """Deleting is quiet about what is not there, and takes neither folders nor siblings."""
    for path in ("d/f", "d/f2", "d/g"):
        store.write(path, [b"x"])

    for path in ("d/f", "d/f", "missing", "d", "d/g/below"):
        store.delete(path)

    assert store.list("d") == ["f2", "g"]


def test_deletes_a_tree(store: Store) -> None:
    """Every file below goes, at any depth; a sibling that shares the prefix stays."""
    paths = ("d/f", "d/e/f/g", "d2/f", "dd")
    for path in paths:
        store.write(path, [b"x"])

    for path in ("d", "d", "missing"):
        store.delete_tree(path)

    assert [path for path in paths if store.exists(path)] == ["d2/f", "dd"]


@pytest.mark.parametrize("path", ["", "/f", "a//b", "../f", "a/../../f", "a/.", ".tmp-f", "a/\0"])
def test_refuses_paths_that_leave_the_root(shared_store: Store, path: str) -> None:
    """A path that is not plainly below the root is refused by every operation on files."""
    store = shared_store
    for operation in (store.read, store.exists, store.delete, lambda p: store.create(p, b"")):
        with pytest.raises(InvalidPathError, match="is not a path inside"):
            operation(path)


def test_reopens_from_its_pickle(travelling_store: FileSystemStore) -> None:
    """A store that was sent to another process sees the same files under the same url."""
    travelling_store.write("f", [b"x"])

    reopened = pickle.loads(pickle.dumps(travelling_store))

    assert (type(reopened), reopened.url) == (type(travelling_store), travelling_store.url)
    assert reopened.read("f") == b"x"


def test_passes_its_own_self_test(store: Store) -> None:
    """Every kind of store that we ship has a conditional create, and the probe leaves nothing behind."""
    check_conditional_create(store)

    assert store.list("") == []


def test_walks_all_files(travelling_store: FileSystemStore) -> None:
    """Every file at any depth, by its path from the folder on, with its size; nothing beside the folder."""
    for path in ("d/b", "d/sub/deeper/1", "d/sub/2", "d2/x"):
        travelling_store.write(path, [path.encode()])

    found = [(file.path, file.size_bytes) for file in travelling_store.walk("d")]
    assert found == [("b", 3), ("sub/2", 7), ("sub/deeper/1", 14)]
    assert len(travelling_store.walk("")) == 4
    assert list(travelling_store.walk("missing")) == []


def test_knows_when_files_were_written(travelling_store: FileSystemStore) -> None:
    """Where the storage has times, they are of this century, and those of later files are not earlier."""
    for path in ("a", "b"):
        travelling_store.write(path, [b"x"])

    times = [file.modified_at_ms for file in travelling_store.walk("")]
    if isinstance(travelling_store, RayMemoryStore):
        assert times == [None, None]
    else:
        assert times == sorted(time for time in times if time is not None and time > 1_600_000_000_000)


def is_alive(actor: Any) -> bool:
    """Whether an actor answers, once it has started. One that is being killed does, for a while."""
    try:
        return bool(ray.get(actor.sizes.remote("")) is not None)
    except RayError:
        return False


def named_actors() -> set[str]:
    """Names that are taken. That of an actor that has died stays so for a while."""
    return {found["name"] for found in ray.util.list_named_actors(all_namespaces=True)}


@pytest.mark.usefixtures("ray_memory")
def test_a_memory_that_is_gone_is_a_storage_error() -> None:
    """Whether its actor died or never was, the error says which actor that is; a new one of the name is found."""
    name = f"gone-{uuid.uuid4().hex}"
    url, actor = start_memory(name)
    assert is_alive(actor)
    store = open_store_on_ray(url)
    store.write("f", [b"x"])
    ray.kill(actor)
    until("the death of the actor", lambda: not is_alive(actor))

    for operation in (lambda: store.read("f"), lambda: open_store_on_ray(f"{url}-never").create("f", b"x")):
        with pytest.raises(StorageError, match=f"'{name}.*/checkpoint-memory' that holds the checkpoints is gone"):
            operation()
    until("the name to be free", lambda: actor_name(name) not in named_actors())
    _, actor = start_memory(name)
    assert is_alive(actor)
    assert not store.exists("f")
    store.write("f", [b"y"])
    ray.kill(actor)


@pytest.fixture(params=OWN)
def file_system_store(request: pytest.FixtureRequest) -> FileSystemStore:
    """Each kind that users give a url of."""
    chosen: FileSystemStore = request.getfixturevalue(f"{request.param}_store")
    return chosen


def test_info_says_size_and_time_of_one_file(file_system_store: FileSystemStore) -> None:
    """As a listing does; a file that is not there, and a folder, are errors with the path."""
    store = file_system_store
    store.write("a/b", [b"12345"])
    (listed,) = store.walk("a")
    found = store.info("a/b")
    assert (found.path, found.size_bytes, found.modified_at_ms) == ("a/b", 5, listed.modified_at_ms)
    for path in ("a/c", "a"):
        with pytest.raises(NotFoundError, match=f"no file .*{path}"):
            store.info(path)


def test_a_range_comes_with_what_the_file_is(file_system_store: FileSystemStore) -> None:
    """Of the file that has the bytes. S3 has a name for these, and another one for others."""
    store = file_system_store
    store.write("a/b", [b"12345"])
    data, found = store.read_with_info("a/b", 1, 3)
    assert (data, found) == (b"234", store.info("a/b"))
    assert store.read_with_info("a/b", 4, 3)[0] == b"5"
    assert store.read_with_info("a/b", 9, 3) == (b"", found)
    store.write("a/b", [b"54321"])
    data, other = store.read_with_info("a/b", 1, 3)
    assert (data, other) == (b"432", store.info("a/b"))
    assert (found.tag != other.tag) == ("://" in store.url and not store.url.startswith(("memory:", "ray-memory:")))
    for path in ("a/c", "a"):
        with pytest.raises(NotFoundError, match=f"no file .*{path}"):
            store.read_with_info(path, 0, 1)
