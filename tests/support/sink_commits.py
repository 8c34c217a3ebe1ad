"""Calls of a `tg.Sink`, each on a copy of the sink, as in the processes of a job."""

from __future__ import annotations

from collections.abc import Iterable

import cloudpickle
import pyarrow as pa

import tidegate as tg


def committed(sink: tg.Sink, checkpoint: int, prepared: Iterable[bytes], job: str = "job-1") -> None:
    """Commits as a coordinator in a process of its own does."""
    cloudpickle.loads(cloudpickle.dumps(sink)).commit(list(prepared), tg.CommitContext(job, checkpoint, "sink"))


def prepared(sink: tg.Sink, rows: pa.Table, attempt: int = 0, job: str = "job-1") -> list[bytes]:
    """Writes rows as a subtask in a process of its own does."""
    writer = cloudpickle.loads(cloudpickle.dumps(sink))
    writer.open(tg.SinkContext(job, "a job", "sink", 0, 1, attempt))
    for batch in rows.to_batches():
        writer.write(batch)
    found = list(writer.prepare())
    writer.close()
    return found
