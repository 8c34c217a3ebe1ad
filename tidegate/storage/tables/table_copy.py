"""Copies a table to another place, on any store: its data files, each verified, then its log.

The log is read once, so the copy is the table as it was at one moment, also while its owner continues to write. Entries
are written in reverse order, the first one last: until then the table does not exist. The snapshot of a log that was
cut is written last, and until then the table is damaged. An interrupted copy may be repeated. Rows that were handed on
are deleted at the source, possibly during the copy. The copy omits these rows, and contains the mark that records this.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.storage.checkpoints.metadata import DataFile, NativeFile
from tidegate.storage.errors import NotFoundError
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.store import Store
from tidegate.storage.state.state_file import verified_native
from tidegate.storage.tables.handed_rows import HandedMark, encoded_mark, mark_path, newest_mark
from tidegate.storage.tables.log.entries import TableEntry, TableVacuum, covers
from tidegate.storage.tables.log.tail import encoded_cut_log, encoded_entry, entry_path
from tidegate.storage.tables.log.vacuum import deletable_files
from tidegate.storage.tables.table_log import TableLog


def copy_table(source: Store, target: Store, uncommitted: Iterable[DataFile] = ()) -> list[NativeFile]:
    """Copies a table with all files that its log names (also hidden ones), and the files `uncommitted`, to another
    store.

    Returns every file of the copy, with its checksum. Paths are relative to the table. Raises CorruptionError,
    NotFoundError, StorageError.
    """
    fold, entries = TableLog(source).whole()
    number, mark = newest_mark(source)
    handed = _paths_in(entries, mark)
    # Files that a vacuum has deleted are missing, and not needed.
    vacuumed = next((entry.vacuum for entry in reversed(entries) if entry.vacuum is not None), TableVacuum())
    deleted = deletable_files(entries, vacuumed)
    files = {file.path: file for file in (*(f for entry in entries for f in entry.files), *uncommitted)}
    copied = []
    for file in files.values():
        if file.path in handed or file.path in deleted:
            continue
        try:
            copied.append(copy_file(source, target, NativeFile("", file.path, file.size_bytes, file.checksum)))
        except NotFoundError:
            number, mark = newest_mark(source)
            handed = _paths_in(entries, mark)
            if file.path not in handed:
                raise
    if number:
        copied.append(_written(target, mark_path(number), encoded_mark(mark)))
    if fold is not None and fold.cut is not None:
        return copied + [_written(target, path, data) for path, data in encoded_cut_log(fold, entries)]
    copied += [_written(target, entry_path(entry.seq), encoded_entry(entry)) for entry in reversed(entries)]
    return copied


def _paths_in(entries: Iterable[TableEntry], mark: HandedMark) -> set[str]:
    return {file.path for entry in entries if covers(mark.entries, entry.seq) for file in entry.files}


def _written(target: Store, path: str, data: bytes) -> NativeFile:
    target.write(path, (data,))
    return NativeFile("", path, len(data), checksum_of(data))


def copy_file(source: Store, target: Store, file: NativeFile) -> NativeFile:
    """Copies a file to the same path of another store, a part at a time.

    The copy appears only if size and checksum match. Raises CorruptionError, NotFoundError, StorageError.
    """
    target.write(file.path, verified_native(source, file))
    return file
