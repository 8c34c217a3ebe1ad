"""RocksDB backends for tests: each in a folder of its own, which goes with it."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref

from tidegate.actors.state_backends.common.options import BackendPlace
from tidegate.actors.state_backends.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.ids import OperatorUid

MEMORY_BYTES = 4 * 1024 * 1024


class LoggedBackend(RocksBackend):
    """One that keeps what has changed, as for a changelog."""

    def __init__(self, place: BackendPlace, folder: str, memory_bytes: int) -> None:
        super().__init__(place, folder, memory_bytes, keeps_changes=True)


def rocks_backend(
    key_names: tuple[str, ...],
    max_parallelism: int,
    key_groups: range | None = None,
    folder: str | None = None,
    kind: type[RocksBackend] = RocksBackend,
) -> RocksBackend:
    """A backend in `folder`, or in a new one that is deleted when its database is."""
    parent = None
    if folder is None:
        parent = tempfile.mkdtemp(prefix="tidegate-test-")
        folder = os.path.join(parent, "db")
    groups = range(max_parallelism) if key_groups is None else key_groups
    place = BackendPlace(OperatorUid("op"), key_names, max_parallelism, groups)
    backend = kind(place, folder, MEMORY_BYTES)
    if parent is not None:
        # Not with the backend: a database that ends without its folder waits a second for it.
        weakref.finalize(backend._session.owned_folder, shutil.rmtree, parent, ignore_errors=True)
    return backend
