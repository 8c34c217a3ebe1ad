"""Checkpoint storage in memory: what it takes, and what it says about a state that is too large."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.actors.ray.memory_store import HeldFiles, RayMemoryStore
from tidegate.storage.checkpoints.memory_limit import STATE_BYTES_MAX_DEFAULT, MemoryStorage
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.snapshot import FrozenTable
from tidegate.storage.state.state_file import read_state, write_state

UID = OperatorUid("totals")


def state_of(size_bytes: int) -> FrozenTable:
    """A state whose one column takes so many bytes."""
    return FrozenTable("n", StateKind.LIST, lambda: pa.record_batch({"b": [b"x" * size_bytes]}))


def test_a_state_within_the_limit_is_inlined(memory_store: FileSystemStore) -> None:
    """It goes into the metadata with the limit as the threshold; no file is made."""
    storage = MemoryStorage(memory_store)
    handle = write_state(
        storage,
        "job-1/chk-1/map-0",
        [(UID, state_of(4_000_000))],
        inline_bytes_max=storage.state_bytes_max,
    )

    assert handle is not None
    assert (handle.path, storage.list("")) == (None, [])
    assert read_state(storage, handle, UID)[0].rows.column(0)[0].as_py() == b"x" * 4_000_000


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("job-1/chk-1/map%2Fodd-3", "'map/odd' subtask 3"),
        ("job-1/chk-12/map-0-channels", "in-flight rows of 'map' subtask 0"),
        ("job-1/shared/chk-2/sum-7", "'sum' subtask 7"),
        ("job-1/shared/chk-2/sum-7=totals/000012.sst", "'sum' subtask 7"),
        ("job-1/shared/changelog/sum.up-7.000001-00000012.base", "'sum.up' subtask 7"),
    ],
)
def test_a_state_beyond_the_limit_is_refused(memory_store: FileSystemStore, path: str, owner: str) -> None:
    """The error names the subtask, the size, the limit and what to do; nothing is kept."""
    storage = MemoryStorage(memory_store, state_bytes_max=10)

    with pytest.raises(StorageError) as caught:
        storage.write(path, [b"12345678", b"9012345"])
    told = str(caught.value)
    assert all(part in told for part in (owner, "15 bytes", "10 bytes", "s3://bucket", storage.url))
    assert storage.list("") == []
    assert storage.write(path, [b"12345678", b"90"]) == 10
    assert storage.read(path) == b"1234567890"


def test_the_limit_is_for_states_alone(memory_store: FileSystemStore) -> None:
    """The event log's snapshots, metadata and other files may be larger."""
    storage = MemoryStorage(memory_store, state_bytes_max=10)
    for path in ("job-1/events/snapshot-000000000001", "job-1/chk-1/_metadata", "table/data/job-1/000001/a-0.parquet"):
        assert storage.write(path, [bytes(100)]) == 100
    storage.create("job-1/chk-2/_metadata", bytes(100))


def test_the_default_limit_is_five_megabytes(memory_store: FileSystemStore) -> None:
    """As in Flink."""
    assert MemoryStorage(memory_store).state_bytes_max == STATE_BYTES_MAX_DEFAULT == 5 * 1024 * 1024


def test_what_an_actor_holds_is_bounded() -> None:
    """All files together; a file that is replaced or deleted makes room, and a refused one changes nothing."""
    files = HeldFiles(10)
    assert files.put("/a/f", b"123456", False) is None
    assert files.put("/a/g", b"12345", True) == "full"
    assert files.put("/a/f", b"1", False) == "exists"
    assert files.put("/a/f/below", b"1", True) == "in the way"
    assert files.get("/a/f", 4, 9) == b"56"
    assert files.put("/a/f", b"12345", True) is None
    assert files.put("/a/g", b"12345", False) is None
    files.delete_tree("/a")
    assert files.put("/b", b"1234567890", False) is None


@pytest.mark.parametrize("url", ["ray-memory://", "memory://x", "/x"])
def test_refuses_urls_of_other_kinds(url: str) -> None:
    """The error says how such a url looks."""
    with pytest.raises(ConfigurationError, match="ray-memory://<name>"):
        RayMemoryStore(url)
