"""Sinks that commit in their tasks and keep the contract: a table of SQLite, and files that follow their rows."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa

import tidegate as tg

Row = dict[str, object]


class SqliteLedger(tg.CommittingSink):
    """A table of SQLite. Rows wait in checkpoint storage; a commit inserts them with its tokens in one transaction."""

    def __init__(self, path: str | Path, buckets: int = 16) -> None:
        self.path = str(path)
        self.buckets = buckets
        with closing(sqlite3.connect(self.path, timeout=240)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS numbers (k INT, x INT)")
            db.execute("CREATE TABLE IF NOT EXISTS tokens (job TEXT, bucket INT, checkpoint INT)")
            db.execute("CREATE TABLE IF NOT EXISTS calls (job TEXT, checkpoint INT, subtask INT, attempt INT)")

    def open_writer(self, context: tg.CommittingContext) -> tg.CommittingWriter:
        """Opens a writer."""
        return FileWriter(context)

    def open_committer(self, context: tg.CommittingContext) -> tg.Committer:
        """Connects."""
        return SqliteCommitter(self.path, context)

    def rows(self) -> list[Row]:
        """The rows that are visible."""
        return [{"k": k, "x": x} for k, x in self.query("SELECT k, x FROM numbers")]

    def query(self, text: str) -> list[tuple[object, ...]]:
        """The rows of a query."""
        with closing(sqlite3.connect(self.path, timeout=240)) as db:
            return list(db.execute(text))


class FileWriter(tg.CommittingWriter):
    """Writes the rows of each bucket to a file of checkpoint storage. The bucket of a row is that of its column k."""

    def __init__(self, context: tg.CommittingContext) -> None:
        self._context = context
        self._rows: dict[int, list[list[object]]] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        """Keep the rows until the next checkpoint."""
        buckets = self._context.buckets
        for row in batch.to_pylist():
            self._rows.setdefault(buckets[row["k"] % len(buckets)], []).append([row["k"], row["x"]])

    def prepare(self, checkpoint_id: int) -> Sequence[tg.Committable]:
        """One file for each bucket."""
        rows, self._rows = self._rows, {}
        return [
            tg.Committable(bucket, str(len(found)).encode(), (self._context.files.write([json.dumps(found).encode()]),))
            for bucket, found in sorted(rows.items())
        ]


class SqliteCommitter(tg.Committer):
    """Inserts the rows of buckets whose token is not stored yet."""

    def __init__(self, path: str, context: tg.CommittingContext) -> None:
        self._context = context
        self._db = sqlite3.connect(path, timeout=240, check_same_thread=False, isolation_level=None)

    def commit(self, token: tg.CommitToken, committables: Sequence[tg.Committable]) -> None:
        """One transaction, which takes the lock of the database first."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            c = self._context
            self._db.execute(
                "INSERT INTO calls VALUES (?, ?, ?, ?)", (token.job_id, token.checkpoint_id, c.subtask, c.attempt)
            )
            for committable in committables:
                key = token.job_id, committable.bucket
                found = self._db.execute("SELECT max(checkpoint) FROM tokens WHERE job = ? AND bucket = ?", key)
                stored = found.fetchone()[0]
                if stored is not None and token.is_covered_by(tg.CommitToken(token.job_id, stored)):
                    continue
                rows = [row for path in committable.files for row in json.loads(c.files.read(path))]
                assert len(rows) == int(committable.data)
                self._db.executemany("INSERT INTO numbers VALUES (?, ?)", rows)
                self._db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (*key, token.checkpoint_id))
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Disconnect."""
        self._db.close()


class _DyingCommitter(SqliteCommitter):
    """Its process dies once before a commit, and once after one, before the task has the answer."""

    def __init__(self, path: str, context: tg.CommittingContext) -> None:
        super().__init__(path, context)
        self._path = path

    def commit(self, token: tg.CommitToken, committables: Sequence[tg.Committable]) -> None:
        self._die_once("before")
        super().commit(token, committables)
        self._die_once("after")

    def _die_once(self, when: str) -> None:
        flag = Path(f"{self._path}.{when}")
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class DyingLedger(SqliteLedger):
    """A ledger at which processes die while they commit."""

    def open_committer(self, context: tg.CommittingContext) -> tg.Committer:
        """Connects."""
        return _DyingCommitter(self.path, context)
