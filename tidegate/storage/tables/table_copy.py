"""Copies a table to another place, on any store: its data files, each verified, then its log.

The log is read once, so the copy is the table as it was at one moment, also while its owner goes on writing. Entries
are written the first one last: until then there is no table. A copy that was interrupted may be made again.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.storage.checkpoints.metadata import DataFile, NativeFile
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.store import Store
from tidegate.storage.state.verification import verified_native
from tidegate.storage.tables.log_parts import encoded_entry, entry_path
from tidegate.storage.tables.table_log import TableLog


def copy_table(source: Store, target: Store, uncommitted: Iterable[DataFile] = ()) -> list[NativeFile]:
    """Copy a table with all files that its log names, hidden ones too, and `uncommitted` ones that it will name.

    Returns every file of the copy, with its checksum; paths are below the table. CorruptionError, NotFoundError,
    StorageError.
    """
    entries = TableLog(source).entries()
    files = {file.path: file for file in (*(f for entry in entries for f in entry.files), *uncommitted)}
    copied = [copy_file(source, target, NativeFile("", f.path, f.size_bytes, f.checksum)) for f in files.values()]
    for entry in reversed(entries):
        data, path = encoded_entry(entry), entry_path(entry.seq)
        target.write(path, (data,))
        copied.append(NativeFile("", path, len(data), checksum_of(data)))
    return copied


def copy_file(source: Store, target: Store, file: NativeFile) -> NativeFile:
    """Copy a file to the same path of another store, a part at a time; it appears only if it is what was promised."""
    target.write(file.path, verified_native(source, file))
    return file
