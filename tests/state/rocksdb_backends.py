"""RocksDB backends for tests: each in a folder of its own, which goes with it."""

from __future__ import annotations

import tempfile

from tidegate.state.common.options import BackendPlace
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.ids import OperatorUid

MEMORY_BYTES = 4 * 1024 * 1024
CACHE_BYTES = 35_520
"""An empty index, and room for some 15 rows: less than most tests have."""
SMALL_CACHE_BYTES = 37_200
"""Room for some three rows of a row table: nearly each batch makes room."""


class LoggedBackend(RocksBackend):
    """One that keeps what has changed, as for a changelog."""

    def __init__(self, place: BackendPlace, folder: str, memory_bytes: int, cache_bytes: int = 0) -> None:
        super().__init__(place, folder, memory_bytes, keeps_changes=True, cache_bytes=cache_bytes)


def rocks_backend(
    key_names: tuple[str, ...],
    max_parallelism: int,
    key_groups: range | None = None,
    folder: str | None = None,
    kind: type[RocksBackend] = RocksBackend,
    cache_bytes: int = 0,
    files: bool = False,
) -> RocksBackend:
    """A backend in `folder`, or in a new one, which it deletes at its end. With `files` few rows are a file, too."""
    if folder is None:
        folder = tempfile.mkdtemp(prefix="tidegate-test-")
    groups = range(max_parallelism) if key_groups is None else key_groups
    place = BackendPlace(OperatorUid("op"), key_names, max_parallelism, groups)
    backend = kind(place, folder, MEMORY_BYTES, cache_bytes=cache_bytes)
    return with_files(backend) if files else backend


def with_files(backend: RocksBackend) -> RocksBackend:
    """The same: whatever leaves memory gets into the database as a file, however little it is."""
    backend._session.file_rows_min = backend._session.write_buffer_bytes = 1
    return backend
