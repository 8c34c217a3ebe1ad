"""`FrozenRocks`: a RocksDB database as it was when a snapshot was taken: a folder of links to its files.

Which files there are, and for which key groups each is needed, is found out by whoever writes the snapshot.
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
from tidegate.storage.rocksdb.database import MEMORY_BYTES_MIN, open_files, reported
from tidegate.storage.rocksdb.value_layout import HEAD, ROCKSDB, RocksDescription, describe

LiveFiles: TypeAlias = list[dict[str, Any]]
"""What RocksDB says of its tables: name, level, first and last key of each."""

TABLE_SUFFIX = ".sst"
_UNUSED = re.compile(r".*\.log|OPTIONS-.*|rocksdict-config\.json")
"""The write-ahead log, which is empty, and settings: who opens the files has their own."""


class FrozenRocks:
    """A `FrozenNative`: it owns its folder, which goes when nobody holds this object any more.

    `make` links the files into it, if that is still to do; then `live_files` tells of them, or None if they must be
    opened for that. `give_up` deletes it, or sees to it that it never comes.
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

    def files_are_there(self) -> None:
        """See to it that the files are in the folder. Raises StorageError."""
        self._make()

    def files(self) -> Mapping[str, tuple[int, int] | None]:
        """All files that are needed. Raises StorageError."""
        self.files_are_there()
        with reported("list the files of a snapshot", self.folder):
            names = [name for name in os.listdir(self.folder) if not _UNUSED.fullmatch(name)]
        groups = needed_for(self._live_files() or self._opened())
        # A table that is linked, but in no level, belongs to nothing.
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
        """The tables of `base`, if they were written by a database that this one descends from."""
        try:
            known = base.backend == ROCKSDB and describe(base).lineage == self._description.lineage
        except TidegateError:
            return {}
        return {file.name: file for file in base.files if known and file.name.endswith(TABLE_SUFFIX)}

    def description(self) -> bytes:
        """The description of the states."""
        return self._description.to_bytes()

    def release(self) -> None:
        """Delete the folder. Again is the same as once."""
        self._deletion()


def needed_for(live_files: LiveFiles) -> dict[str, tuple[int, int] | None]:
    """Names of tables, each with the key groups that cannot be read without it.

    RocksDB opens every table of level 0 when it begins to read. In a deeper level it opens the first table that ends at
    or behind the key that it looks for, and the next one when it comes to the end of that: so a table is also needed
    for the last key group of the one before it, and for those between the two. Tables of such a level overlap in no
    entry, but may have the same key, an older entry in an older table: which of these comes first cannot be seen from
    their keys, so they are needed together.
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
    """Tables, sorted, with those that have a key in common as one."""
    found: list[tuple[bytes, bytes, list[str]]] = []
    for first_key, last_key, name in tables:
        if found and first_key <= found[-1][1]:
            start_key, end_key, names = found[-1]
            found[-1] = start_key, max(end_key, last_key), [*names, name]
        else:
            found.append((first_key, last_key, [name]))
    return found
