"""`Spool`: stored rows on their way into a backend that works on disk: what does not fit waits there, too.

A backend whose state may be larger than memory cannot be restored from tables that all are in memory. They cannot be
read from storage while it takes them in either: a damaged file has to be found before a task opens, so that it is
passed over for an older checkpoint, and an outage has to be waited for. So whoever reads them writes them, verified,
into a folder of the task, one run after the other, and the operator reads them there.

Rules: no more than `MEMORY_BYTES` of keyed state stay in memory (other state lives there in every backend). A run is
what comes with one state, layer and schema, in its order. A file goes when it is opened to be taken in; what is never
taken in goes with the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import StorageError
from tidegate.storage.files.private_folders import FOLDER_MODE, open_private
from tidegate.storage.state.snapshot import StateTable

MEMORY_BYTES = 4 * 1024 * 1024
"""Of each operator so much is not written to the disk: most restores in tests and small jobs touch none."""


@dataclass(frozen=True, slots=True)
class SpooledTables:
    """Tables of one state, layer and schema in a file of this machine; `head` is one without rows."""

    head: StateTable
    path: str

    @property
    def kind(self) -> StateKind:
        """Kind of the state."""
        return self.head.kind

    @property
    def layer(self) -> int:
        """Their layer."""
        return self.head.layer

    def take(self) -> Iterator[StateTable]:
        """Each table in its order, read from the file, which is gone afterwards. StorageError."""
        head = self.head
        with _used(self.path):
            # Not mapped: the pages of a mapped file count as the memory of the process until it is closed.
            source = pa.OSFile(self.path)
            os.unlink(self.path)
        with source, pa.ipc.open_stream(source) as reader:
            for rows in reader:
                yield StateTable(head.state, head.kind, rows, head.removed, head.layer)


class Spool:
    """Takes in the tables of one operator, and keeps them in `folder` beyond a bound."""

    def __init__(self, folder: str, memory_bytes: int | None = None) -> None:
        self.folder = folder
        self._left_bytes = MEMORY_BYTES if memory_bytes is None else memory_bytes
        self._files = 0

    def keep(self, tables: Iterable[StateTable]) -> list[StateTable | SpooledTables]:
        """The tables, or what stands for them, in their order. StorageError if the folder cannot be used."""
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
    """A file that is being written."""

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
        """Whether a table is of the same state, layer and schema."""
        head = self.spooled.head
        same = (table.state, table.removed, table.layer) == (head.state, head.removed, head.layer)
        return same and table.rows.schema.equals(head.rows.schema, check_metadata=True)

    def write(self, rows: pa.RecordBatch) -> None:
        """Add a table. StorageError."""
        with _used(self.spooled.path):
            self._writer.write_batch(rows)

    def close(self) -> None:
        """No table follows. StorageError."""
        with _used(self.spooled.path):
            self._writer.close()
            self._file.close()


@contextmanager
def _used(path: str) -> Iterator[None]:
    """Faults of the local file system as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot keep state in {path} while it is restored: {error}. Free some space there, or set the folder of "
            "the state backend to one that can be written to"
        ) from error
