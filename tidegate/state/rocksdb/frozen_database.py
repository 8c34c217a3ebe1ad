"""`FrozenRocks`: a RocksDB database as it was when a snapshot was taken, as a folder of links to its files.

The thread that writes the snapshot finds out which files there are, and which key groups need each of them.
"""

from __future__ import annotations

import os
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tidegate.storage.checkpoints.metadata import NativeFile, NativeState
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.rocksdb.database import MEMORY_BYTES_MIN, open_files, reported
from tidegate.storage.state.rocksdb.value_layout import HEAD, ROCKSDB, RocksDescription, describe

LiveFiles: TypeAlias = list[dict[str, Any]]
"""The tables of a database as RocksDB reports them: name, level, first and last key of each."""

TABLE_SUFFIX = ".sst"
_UNUSED = re.compile(r".*\.log|OPTIONS-.*|rocksdict-config\.json")
"""The write-ahead log, which is empty, and settings, because the process that opens the files has its own settings."""


class FrozenRocks:
    """A snapshot of a RocksDB database (a `FrozenNative`). It owns its folder, which is deleted when this object is
    garbage-collected.

    - `make` links the files into the folder, unless that is done.
    - `live_files` then describes the tables, or returns None if the files must be opened to find out.
    - `give_up` deletes the folder, or prevents that it is ever made.
    """

    backend = ROCKSDB

    def __init__(
        self,
        uid: OperatorUid,
        folder: str,
        key_groups: tuple[int, int],
        description: RocksDescription,
        make: Callable[[], None],
        live_files: Callable[[], LiveFiles | None],
        give_up: Callable[[], None],
    ) -> None:
        self.uid = uid
        self.folder = folder
        self.key_groups = key_groups
        self._description = description
        self._make = make
        self._live_files = live_files
        self._deletion = weakref.finalize(self, give_up)

    def ensure_files(self) -> None:
        """Hard-links the files of the database into the folder, unless that was done. Raises StorageError."""
        self._make()

    def files(self) -> Mapping[str, tuple[int, int] | None]:
        """Returns all files of the snapshot by name, each with the range of key groups that need it, or None for all.
        Raises StorageError.
        """
        self.ensure_files()
        with reported("list the files of a snapshot", self.folder):
            names = [name for name in os.listdir(self.folder) if not _UNUSED.fullmatch(name)]
        groups = needed_for(self._live_files() or self._opened())
        # A linked table that is in no level is not part of the database.
        return {name: groups.get(name) for name in names if not name.endswith(TABLE_SUFFIX) or name in groups}

    def _opened(self) -> LiveFiles:
        database = open_files(self.folder, MEMORY_BYTES_MIN)
        try:
            with reported("list the files of a snapshot", self.folder):
                found: LiveFiles = database.live_files()
                return found
        finally:
            database.close()

    def stored(self, base: NativeState) -> Mapping[str, NativeFile]:
        """Returns the files of the older snapshot `base`, by name.

        Empty if the database of `base` is not an ancestor of this database, because equal names then do not mean equal
        bytes.
        """
        try:
            known = base.backend == ROCKSDB and describe(base).lineage == self._description.lineage
        except TidegateError:
            return {}
        return {file.name: file for file in base.files if known and file.name.endswith(TABLE_SUFFIX)}

    def description(self) -> bytes:
        """Returns the description of keys and states, encoded as bytes."""
        return self._description.to_bytes()

    def release(self) -> None:
        """Deletes the folder of the snapshot. Safe to repeat."""
        self._deletion()


def needed_for(live_files: LiveFiles) -> dict[str, tuple[int, int] | None]:
    """Returns the names of tables, each with the key groups that cannot be read without it (None: all).

    RocksDB opens every table of level 0 when it begins to read. In a deeper level it opens the first table that ends at
    or after the key that it seeks, and the next table at the end of that one. A table is therefore also needed for the
    last key group of the table before it, and for the key groups between the two. Tables of one level do not overlap in
    entries, but two of them may contain the same key, the older entry in the older table. Their keys do not show which
    of them comes first, so such tables are needed together.
    """
    needed: dict[str, tuple[int, int] | None] = {}
    levels = defaultdict(list)
    for file in live_files:
        name = file["name"].lstrip("/")
        if file["level"] == 0:
            needed[name] = None
        else:
            levels[file["level"]].append((file["start_key"], file["end_key"], name))
    for tables in levels.values():
        before = 0
        for first_key, last_key, names in _together(sorted(tables)):
            first, last = (HEAD.unpack_from(key)[0] for key in (first_key, last_key))
            needed |= dict.fromkeys(names, (min(before, first), last + 1))
            before = last
    return needed


def _together(tables: list[tuple[bytes, bytes, str]]) -> list[tuple[bytes, bytes, list[str]]]:
    """Merges sorted key ranges of files that overlap into one range, with the names of all its files."""
    found: list[tuple[bytes, bytes, list[str]]] = []
    for first_key, last_key, name in tables:
        if found and first_key <= found[-1][1]:
            start_key, end_key, names = found[-1]
            found[-1] = start_key, max(end_key, last_key), [*names, name]
        else:
            found.append((first_key, last_key, [name]))
    return found
