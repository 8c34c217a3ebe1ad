"""What tests of sinks for databases share: a sink outside of a job, with its files in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import cloudpickle
import pyarrow as pa

import tidegate as tg
from tidegate.connectors.sql import sink
from tidegate.connectors.sql.alchemy import AlchemyClient
from tidegate.connectors.sql.options import table_write
from tidegate.connectors.sql.postgres import PostgresClient
from tidegate.connectors.sql.sink import DatabaseSink
from tidegate.storage.state.key_groups import key_group_range


@dataclass
class MemoryFiles:
    """The place for files of a sink."""

    files: dict[str, bytes] = field(default_factory=dict)

    def write(self, chunks: Iterable[bytes | memoryview]) -> str:
        """Stores a file."""
        path = f"file-{len(self.files)}"
        self.files[path] = b"".join(chunks)
        return path

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns a file."""
        return self.files[path][offset : None if length is None else offset + length]


def database_sink(
    url: str,
    schema: pa.Schema,
    table: str = "t",
    mode: str = "append",
    keys: Sequence[str] = (),
    on_conflict: str | None = None,
    *,
    changes: bool = False,
    create: bool = False,
) -> DatabaseSink:
    """Makes a sink as `to_postgres` and `to_sql` do."""
    write = table_write("sink", table, mode, keys, on_conflict, "tidegate_commits", deletes=changes)
    client = (PostgresClient if url.startswith("postgresql:") else AlchemyClient)(url, write, "sink")
    return sink.database_sink(client, schema, create=create, kind_column="row_kind" if changes else None)


class SinkRun:
    """The subtasks of one sink, as the engine would run them."""

    def __init__(self, sink: DatabaseSink, job: str = "job-1") -> None:
        self._sink, self._job = cloudpickle.dumps(sink), job
        self.files = MemoryFiles()

    def context(self, subtask: int, parallelism: int, attempt: int) -> tg.CommittingContext:
        """Returns the place of a subtask."""
        buckets = key_group_range(subtask, 128, parallelism)
        return tg.CommittingContext(
            self._job, "a job", "sink", "sink", subtask, parallelism, attempt, buckets, self.files
        )

    def writer(self, subtask: int = 0, parallelism: int = 1, attempt: int = 0) -> tg.CommittingWriter:
        """Opens a writer."""
        sink: DatabaseSink = cloudpickle.loads(self._sink)
        return sink.open_writer(self.context(subtask, parallelism, attempt))

    def committer(self, subtask: int = 0, parallelism: int = 1, attempt: int = 0) -> tg.Committer:
        """Opens a committer."""
        sink: DatabaseSink = cloudpickle.loads(self._sink)
        return sink.open_committer(self.context(subtask, parallelism, attempt))

    def write(self, checkpoint: int, *batches: pa.Table) -> Sequence[tg.Committable]:
        """Returns the committables of rows."""
        writer = self.writer()
        for table in batches:
            for batch in table.to_batches():
                writer.write(batch)
        prepared = writer.prepare(checkpoint)
        writer.close()
        return prepared

    def commit(self, checkpoint: int, committables: Sequence[tg.Committable]) -> None:
        """Commits with a committer of its own."""
        committer = self.committer()
        try:
            committer.commit(tg.CommitToken(self._job, checkpoint), committables)
        finally:
            committer.close()

    def write_and_commit(self, checkpoint: int, *batches: pa.Table) -> None:
        """Writes rows and commits them."""
        self.commit(checkpoint, self.write(checkpoint, *batches))
