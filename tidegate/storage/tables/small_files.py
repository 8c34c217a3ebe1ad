"""Puts the rows of many small files of a table into few large ones.

Rules:

- Whoever compacts owns the table meanwhile: only the owner commits, so nothing is committed behind its back, and it is
  fenced itself when a job takes the table.
- One line of jobs at a time: rows of different lines never meet in a file, because a restored job hides rows of its own
  line and of no other.
- What is replaced stays in the log, and its files stay: any checkpoint can be restored, any version read.
- Rows keep their order within a line and a partition. In an upsert table only the newest row of a key stays in a file.
- A file that is large enough is not read; the commit names it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import InvariantError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import AttemptNumber, JobId
from tidegate.storage.tables.partitions import DATA_FILE_SUFFIX, folder_of
from tidegate.storage.tables.table_files import data_dir, newest_rows, read_files, write_data_file
from tidegate.storage.tables.table_info import TableInfo

FILE_BYTES = 64 << 20
"""How large files become, in bytes as they are stored."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Files whose rows go into one, all of one partition; a single file stays as it is."""

    files: tuple[DataFile, ...]

    @property
    def folder(self) -> str:
        """That of their partition, below the folder of an attempt; empty for none."""
        return folder_of(self.files[0].path)


def rewrites_of(files: Iterable[DataFile], file_bytes: int) -> list[Rewrite]:
    """What to make of a line's files: small ones next to each other in a partition become one of `file_bytes` at most.

    A file counts as small below half of `file_bytes`.
    """
    done: list[Rewrite] = []
    runs: dict[str, list[DataFile]] = {}
    sizes: dict[str, int] = {}
    for file in files:
        folder = folder_of(file.path)
        run = runs.setdefault(folder, [])
        small = file.size_bytes < file_bytes // 2
        if run and (not small or sizes[folder] + file.size_bytes > file_bytes):
            done.append(Rewrite(tuple(run)))
            run.clear()
        if small:
            sizes[folder] = file.size_bytes + (sizes[folder] if run else 0)
            run.append(file)
        else:
            done.append(Rewrite((file,)))
    return done + [Rewrite(tuple(run)) for run in runs.values() if run]


def worth_it(rewrites: Sequence[Rewrite]) -> bool:
    """Whether there are fewer files afterwards."""
    return any(len(rewrite.files) > 1 for rewrite in rewrites)


def rewritten(store: Store, info: TableInfo, job_id: JobId, rewrites: Sequence[Rewrite]) -> tuple[DataFile, ...]:
    """The files that take the place of all these, in order; those that are new are written."""
    return tuple(
        rewrite.files[0] if len(rewrite.files) == 1 else _write(store, info, job_id, number, rewrite)
        for number, rewrite in enumerate(rewrites)
    )


def _write(store: Store, info: TableInfo, job_id: JobId, number: int, rewrite: Rewrite) -> DataFile:
    rows: pa.Table = read_files(store, info, rewrite.files)
    if info.mode == "upsert":
        rows = newest_rows(rows, info.keys)
    elif rows.num_rows != sum(file.rows for file in rewrite.files):
        raise InvariantError(f"{rewrite.files} have {rows.num_rows} rows, which is not what the log says")
    folder = f"{data_dir(job_id, AttemptNumber(0))}/{rewrite.folder}".rstrip("/")
    return write_data_file(store, f"{folder}/{number:06d}{DATA_FILE_SUFFIX}", rows.combine_chunks().to_batches())
