"""Puts the rows of many small files of a table into few large ones.

Rules:

- A compaction of a table at rest owns it meanwhile: only the owner commits, so nothing is committed behind its back,
  and it is fenced itself when a job takes the table. One beside a running job: see `running_compaction.py`.
- One line of jobs at a time: rows of different lines never meet in a file, because a restored job hides rows of its own
  line and of no other.
- What is replaced stays in the log, and its files stay: any checkpoint can be restored, any version read.
- Rows keep their order within a line and a partition. In an upsert table only the newest row of a key stays in a file.
- A row that says that its key was deleted stays as long as an older row of the key may show with it. So it goes from
  what becomes the first file of a partition, where one line of jobs alone has ever claimed the table: whatever else
  shows with that file is newer. A job of another line that is restored may show rows that are older, also such that
  nobody has committed yet.
- A file that is large enough is not read; the commit names it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import InvariantError
from tidegate.storage.files.store import Store
from tidegate.storage.tables.hidden_columns import DELETED_COLUMN
from tidegate.storage.tables.partitions import DATA_FILE_SUFFIX, folder_of
from tidegate.storage.tables.table_files import (
    newest_rows,
    read_rows,
    stored_schema,
    write_data_file,
    write_joined_file,
)
from tidegate.storage.tables.table_info import TableInfo

FILE_BYTES = 64 << 20
"""How large files become, in bytes as they are stored."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Files whose rows go into one, all of one partition; a single file stays as it is."""

    files: tuple[DataFile, ...]
    is_first: bool = False
    """Whether none of the files that are put together is before these in their partition."""

    @property
    def folder(self) -> str:
        """That of their partition, below the folder of an attempt; empty for none."""
        return folder_of(self.files[0].path)


def is_small(file: DataFile, file_bytes: int) -> bool:
    """Whether a file is to be put together with others, where files are to have `file_bytes`."""
    return file.size_bytes < file_bytes // 2


def rewrites_of(files: Iterable[DataFile], file_bytes: int) -> list[Rewrite]:
    """What to make of a line's files: small ones next to each other in a partition become one of `file_bytes` at most.

    A file counts as small below half of `file_bytes`.
    """
    done: list[Rewrite] = []
    runs: dict[str, list[DataFile]] = {}
    sizes: dict[str, int] = {}
    begun: set[str] = set()

    def end(folder: str, run: list[DataFile]) -> None:
        done.append(Rewrite(tuple(run), folder not in begun))
        begun.add(folder)

    for file in files:
        folder = folder_of(file.path)
        run = runs.setdefault(folder, [])
        small = is_small(file, file_bytes)
        if run and (not small or sizes[folder] + file.size_bytes > file_bytes):
            end(folder, run)
            run.clear()
        if small:
            sizes[folder] = file.size_bytes + (sizes[folder] if run else 0)
            run.append(file)
        else:
            end(folder, [file])
    for folder, run in runs.items():
        if run:
            end(folder, run)
    return done


def worth_it(rewrites: Sequence[Rewrite]) -> bool:
    """Whether there are fewer files afterwards."""
    return any(len(rewrite.files) > 1 for rewrite in rewrites)


def rewritten(
    store: Store,
    info: TableInfo,
    folder: str,
    prefix: str,
    rewrites: Sequence[Rewrite],
    may_go_on: Callable[[], None] = lambda: None,
    *,
    from_beginning: bool = False,
) -> tuple[DataFile, ...]:
    """The files that take the place of all these, in order; those that are new are written.

    They are in `folder`, and below it in those of their partitions, with names that begin with `prefix`. `may_go_on` is
    called before each file is read; what it raises ends the work. `from_beginning`: whether nothing older than these
    files can ever show with them: they begin what the one line of the table shows.
    """

    def written(number: int, rewrite: Rewrite) -> DataFile:
        if len(rewrite.files) == 1:
            return rewrite.files[0]
        path = f"{folder}/{rewrite.folder}".rstrip("/") + f"/{prefix}{number:06d}{DATA_FILE_SUFFIX}"
        forgets = from_beginning and rewrite.is_first and info.deletes
        return _write(store, info, path, rewrite, may_go_on, forgets)

    return tuple(written(number, rewrite) for number, rewrite in enumerate(rewrites))


def _write(
    store: Store, info: TableInfo, path: str, rewrite: Rewrite, may_go_on: Callable[[], None], forgets: bool
) -> DataFile:
    """`forgets`: leave out the rows that say that their key was deleted."""

    def tables() -> Iterator[pa.Table]:
        for file in rewrite.files:
            may_go_on()
            yield read_rows(store, info, file)

    rows = sum(file.rows for file in rewrite.files)
    if info.mode == "append":
        written = write_joined_file(store, path, stored_schema(info), tables())
        found = written.rows
    else:
        table = pa.concat_tables(tables()).unify_dictionaries()
        found = table.num_rows
        newest = newest_rows(table, info)
        if forgets:
            newest = newest.filter(pc.invert(newest.column(DELETED_COLUMN)))
        batches = newest.combine_chunks().to_batches()
        written = write_data_file(store, path, batches or [pa.RecordBatch.from_pylist([], newest.schema)])
    if found != rows:
        store.delete(path)
        raise InvariantError(f"{rewrite.files} have {found} rows, which is not what the log says")
    return written
