"""`Handover` passes the stored tables of a checkpoint to a restored operator. `Spool` keeps tables that do not fit into
memory in local files until then.

A table is referenced until the operator has loaded it into its backend, and no longer. A restore therefore never has a
state in memory twice. The operator first inspects all tables (the sequence), and then consumes them once, with `taken`.
No other code keeps a reference to a table.

A backend on disk may have state that is larger than memory. Its tables cannot be read from the checkpoint storage while
it loads them: a damaged file has to be found before a task opens, so that an older checkpoint is used. The reader
therefore writes the tables, verified, into a local folder of the task, in runs. In the `Handover` a run looks like one
table without rows, and its tables are read one by one when they are consumed. Rules:

- At most `MEMORY_BYTES` of keyed state stay in memory. State that is not keyed is in memory with every backend.
- A run is a sequence of tables of one state, layer and schema.
- A file is deleted when its run is opened to be consumed. Files that are never opened are deleted with the folder.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import overload

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import StorageError
from tidegate.storage.files.private_folders import FOLDER_MODE, open_private
from tidegate.storage.state.snapshot import StateTable

TOGETHER_BYTES_MAX = 1 << 26
"""Limit in bytes of a merged table. A column of strings can have 2 GiB at most, and rows may be large."""


class Handover(Sequence[StateTable]):
    """The restored tables that the operator has not consumed yet, as a sequence."""

    __slots__ = ("_left",)

    def __init__(self, tables: Iterable[StateTable | SpooledTables] = ()) -> None:
        self._left = deque(tables)

    def __len__(self) -> int:
        return len(self._left)

    @overload
    def __getitem__(self, index: int) -> StateTable: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StateTable]: ...
    def __getitem__(self, index: int | slice) -> StateTable | Sequence[StateTable]:
        return tuple(map(_shown, self._left))[index] if isinstance(index, slice) else _shown(self._left[index])

    def __iter__(self) -> Iterator[StateTable]:
        return map(_shown, self._left)

    def __repr__(self) -> str:
        return f"Handover({list(self._left)!r})"

    def take(self) -> Iterator[StateTable]:
        """Yields each restored table in order, and drops its reference when the next table is requested."""
        while self._left:
            first = self._left[0]
            if isinstance(first, SpooledTables):
                self._left.popleft()
                yield from first.take()
            else:
                del first  # a name for the table would hold it for as long as it is taken in
                yield self._next()

    def _next(self) -> StateTable:
        table = self._left.popleft()
        assert isinstance(table, StateTable)
        return table


def _shown(tables: StateTable | SpooledTables) -> StateTable:
    return tables.head if isinstance(tables, SpooledTables) else tables


def keys_at_most(tables: Iterable[StateTable]) -> int:
    """Returns an upper bound of the number of keys in restored in-memory tables: the rows in layer 0 of the largest
    state.
    """
    rows: Counter[str] = Counter()
    for table in tables:
        if table.kind is StateKind.KEYED and not table.removed and table.layer == 0:
            rows[table.state] += table.rows.num_rows
    return max(rows.values(), default=0)


def merge_small_tables(tables: Iterable[StateTable], rows_max: int) -> Iterator[StateTable]:
    """Merges adjacent tables of one state, kind, layer and schema into tables of up to `rows_max` rows and 64 MiB.

    Larger tables are yielded unchanged. State that is stored in many chunks is then loaded in few steps. Up to
    `rows_max` rows are in memory twice meanwhile.
    """
    group: list[StateTable] = []
    rows = size_bytes = 0
    for table in tables:
        rows, size_bytes = rows + table.rows.num_rows, size_bytes + table.rows.nbytes
        if group and not (_alike(group[0], table) and rows <= rows_max and size_bytes <= TOGETHER_BYTES_MAX):
            yield _together(group)
            rows, size_bytes = table.rows.num_rows, table.rows.nbytes
        group.append(table)
        del table  # a name for the table would hold it for as long as it is taken in
    if group:
        yield _together(group)


def _alike(one: StateTable, other: StateTable) -> bool:
    same = (one.state, one.kind, one.removed, one.layer) == (other.state, other.kind, other.removed, other.layer)
    return same and bool(one.rows.schema.equals(other.rows.schema, check_metadata=True))


def _together(group: list[StateTable]) -> StateTable:
    """Concatenates the tables in the list `group` into one table, and empties the list."""
    first = group[0]
    if len(group) > 1:
        first = replace(first, rows=pa.concat_batches([table.rows for table in group]))
    group.clear()
    return first


def taken(tables: Sequence[StateTable]) -> Iterator[StateTable]:
    """Yields the tables to restore. If `tables` is a `Handover`, each table is dropped after its turn. Any other
    sequence is not changed.
    """
    return tables.take() if isinstance(tables, Handover) else iter(tables)


MEMORY_BYTES = 4 * 1024 * 1024
"""Limit in bytes of one operator's keyed state that stays in memory during a restore.

Only larger state is written to the disk, so most restores need no file.
"""


@dataclass(frozen=True, slots=True)
class SpooledTables:
    """Tables of one state, layer and schema in a local file.

    `head` is a table without rows that has these properties.
    """

    head: StateTable
    path: str

    @property
    def kind(self) -> StateKind:
        """Returns the kind of the state to which the tables belong."""
        return self.head.kind

    @property
    def layer(self) -> int:
        """Returns the layer number of the tables."""
        return self.head.layer

    def take(self) -> Iterator[StateTable]:
        """Yields each table in order from the local file, and deletes the file. Raises StorageError."""
        head = self.head
        with _used(self.path):
            # Not mapped: the pages of a mapped file count as the memory of the process until it is closed.
            source = pa.OSFile(self.path)
            os.unlink(self.path)
        with source, pa.ipc.open_stream(source) as reader:
            for rows in reader:
                yield StateTable(head.state, head.kind, rows, head.removed, head.layer)


class Spool:
    """Stores the restored tables of one operator: in memory up to a limit, and in files of `folder` beyond the
    limit.
    """

    def __init__(self, folder: str, memory_bytes: int | None = None) -> None:
        self.folder = folder
        self._left_bytes = MEMORY_BYTES if memory_bytes is None else memory_bytes
        self._files = 0

    def keep(self, tables: Iterable[StateTable]) -> list[StateTable | SpooledTables]:
        """Stores tables, and returns them in their order: in memory, or as files with several tables. Raises
        StorageError if the folder cannot be used.
        """
        kept: list[StateTable | SpooledTables] = []
        run: _Run | None = None
        try:
            for table in tables:
                if table.kind is not StateKind.KEYED:
                    kept.append(table)
                    continue
                self._left_bytes -= table.rows.nbytes
                if run is None and self._left_bytes >= 0:
                    kept.append(table)
                    continue
                if run is None or not run.fits(table):
                    if run is not None:
                        run.close()
                    run = self._begin(table)
                    kept.append(run.spooled)
                run.write(table.rows)
        finally:
            if run is not None:
                run.close()
        return kept

    def _begin(self, table: StateTable) -> _Run:
        with _used(self.folder):
            os.makedirs(self.folder, FOLDER_MODE, exist_ok=True)
        path = os.path.join(self.folder, f"{self._files:06d}.arrow")
        self._files += 1
        return _Run(table, path)


class _Run:
    """A local file to which consecutive tables with one state, layer and schema are written."""

    def __init__(self, first: StateTable, path: str) -> None:
        head = StateTable(first.state, first.kind, first.rows.slice(0, 0), first.removed, first.layer)
        self.spooled = SpooledTables(head, path)
        with _used(path):
            with suppress(FileNotFoundError):
                os.unlink(path)  # left by a restore that was tried before
            os.close(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            self._file = pa.OSFile(path, "wb")
            self._writer = pa.ipc.new_stream(self._file, first.rows.schema)

    def fits(self, table: StateTable) -> bool:
        """Returns whether a table has the state, layer and schema of the file, so that it can be written to it."""
        head = self.spooled.head
        same = (table.state, table.removed, table.layer) == (head.state, head.removed, head.layer)
        return same and table.rows.schema.equals(head.rows.schema, check_metadata=True)

    def write(self, rows: pa.RecordBatch) -> None:
        """Appends the rows of a table to the file. Raises StorageError."""
        with _used(self.spooled.path):
            self._writer.write_batch(rows)

    def close(self) -> None:
        """Completes the file. Raises StorageError."""
        with _used(self.spooled.path):
            self._writer.close()
            self._file.close()


@contextmanager
def _used(path: str) -> Iterator[None]:
    """Returns a context that converts errors of the local file system to StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot keep state in {path} while it is restored: {error}. Free some space there, or set the folder of "
            "the state backend to a writable one"
        ) from error
