"""Sinks that keep the contract of `tg.Sink`."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import tidegate as tg

Row = dict[str, object]


class FolderSink(tg.Sink):
    """Parquet files, which a commit moves from `.staged` into the folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._number = 0
        self._batches: list[pa.RecordBatch] = []

    def open(self, context: tg.SinkContext) -> None:
        """Remember the prefix."""
        self.prefix = context.prefix
        (self.folder / ".staged").mkdir(parents=True, exist_ok=True)

    def write(self, batch: pa.RecordBatch) -> None:
        """Keep the rows until the next checkpoint."""
        self._batches.append(batch)

    def prepare(self) -> Iterable[bytes]:
        """One file."""
        if not self._batches:
            return []
        name = f"{self.prefix}-{self._number}.parquet"
        pq.write_table(pa.Table.from_batches(self._batches), self.folder / ".staged" / name)
        self._number, self._batches = self._number + 1, []
        return [name.encode()]

    def commit(self, committables: Sequence[bytes], context: tg.CommitContext) -> None:
        """Move the files that were not moved before."""
        for name in (committable.decode() for committable in committables):
            if not (self.folder / name).exists():
                os.replace(self.folder / ".staged" / name, self.folder / name)

    def abort(self, job_id: str) -> None:
        """Delete what the job has left."""
        for left in (self.folder / ".staged").glob(f"{job_id}-*"):
            left.unlink()

    def rows(self) -> list[Row]:
        """The rows of all files that are visible."""
        return [row for file in self.folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]


class SqliteSink(tg.Sink):
    """A table of SQLite. Rows wait in a table beside it; a commit moves them, in one transaction."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        with closing(sqlite3.connect(self.path)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS staged (prefix TEXT, number INT, k INT, x INT)")
            db.execute("CREATE TABLE IF NOT EXISTS numbers (k INT, x INT)")

    def open(self, context: tg.SinkContext) -> None:
        """Connect."""
        self.prefix, self.number = context.prefix, 0
        self._db = sqlite3.connect(self.path, timeout=240, check_same_thread=False)

    def write(self, batch: pa.RecordBatch) -> None:
        """Rows are staged, in a transaction that ends with `prepare`."""
        rows = [(self.prefix, self.number, row["k"], row["x"]) for row in batch.to_pylist()]
        with self._db:
            self._db.executemany("INSERT INTO staged VALUES (?, ?, ?, ?)", rows)

    def prepare(self) -> Iterable[bytes]:
        """What was staged has a number."""
        self.number += 1
        return [f"{self.prefix}/{self.number - 1}".encode()]

    def close(self) -> None:
        """Disconnect."""
        self._db.close()

    def commit(self, committables: Sequence[bytes], context: tg.CommitContext) -> None:
        """Move rows; those that were moved before are not there any more."""
        with closing(sqlite3.connect(self.path, timeout=240)) as db, db:
            for committable in committables:
                staged = committable.decode().rsplit("/", 1)
                db.execute("INSERT INTO numbers SELECT k, x FROM staged WHERE prefix = ? AND number = ?", staged)
                db.execute("DELETE FROM staged WHERE prefix = ? AND number = ?", staged)

    def abort(self, job_id: str) -> None:
        """Delete what the job has left."""
        with closing(sqlite3.connect(self.path, timeout=240)) as db, db:
            db.execute("DELETE FROM staged WHERE prefix LIKE ? || '-%'", (job_id,))

    def rows(self, table: str = "numbers") -> list[Row]:
        """The rows of a table."""
        with closing(sqlite3.connect(self.path, timeout=240)) as db:
            return [{"k": k, "x": x} for k, x in db.execute(f"SELECT k, x FROM {table}")]
