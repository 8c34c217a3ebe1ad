"""Parts of random pipelines: sources, steps, tables, and counts of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.stream import Stream
from tidegate.storage.tables.maintenance import FILE_BYTES, CompactionSettings
from tidegate.storage.tables.table_info import TableMode
from tidegate.testing.runtime.run import Rows, counted

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
SPLITS = 4
FAN_IN = 2
"""Number of files that a compaction of a table merges."""
HISTORY_MS: int | None = None
"""For how many ms tables keep files that they no longer show; None for not at all. A test sets it."""

Data = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Topology:
    """Builds a pipeline over three inputs, and computes its output."""

    build: Callable[[StreamEnvironment, Sequence[Data], Sequence[int]], None]
    expect: Callable[[Sequence[Data], Sequence[int]], Rows]
    rescalable: bool = True
    """True if the rows are the same at any parallelism."""
    given: Callable[[Sequence[Data], Rows | None], Rows] | None = None
    """Computes the required output from the rows of its tables, where it depends on how channels are read.

    Without rows (None) it returns the rows that there may be before the end, for the tables where that is known.
    """


def source_of(env: StreamEnvironment, data: Data, number: int, width: int) -> Stream:
    """Returns a source of an input."""
    return env.from_batches(
        rows_of(data), splits=SPLITS, uid=f"source{number}", name=f"source{number}", parallelism=width
    )


def rows_of(data: Data) -> pa.Table:
    """Returns an input as a table."""
    return pa.table({"k": [k for k, _ in data], "v": [v for _, v in data]}, schema=SCHEMA)


def table_of(stream: Stream, name: str, width: int, keys: tuple[str, ...] = ()) -> None:
    """Writes a stream to a table. With `keys` it upserts."""
    mode: TableMode = "upsert" if keys else "append"
    table = stream.to_table(
        f"sim://{name}", mode=mode, keys=keys, if_exists="overwrite", uid=f"{name}-table", parallelism=width
    )
    # Jobs are short, so that compactions start after a few commits.
    table.options = replace(table.options, compaction=CompactionSettings(FILE_BYTES, FAN_IN), history_ms=HISTORY_MS)


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the rows with twice their values."""
    return pa.RecordBatch.from_arrays([batch.column("k"), pc.multiply(batch.column("v"), 2)], schema=SCHEMA)


def mapped(
    stream: Stream, uid: str, fn: Callable[[pa.RecordBatch], pa.RecordBatch], width: int, schema: pa.Schema = SCHEMA
) -> Stream:
    """Returns the stream after a function of batches."""
    return stream.map_batches(fn, schema=schema, uid=uid, parallelism=width)


def grouped(rows: Iterable[tuple[int, ...]]) -> Counter[str]:
    """Computes one row for each key: the key, the number of rows, and the sum of each other column."""
    groups: dict[int, list[int]] = {}
    for key, *values in rows:
        group = groups.setdefault(key, [0] * (1 + len(values)))
        group[0] += 1
        for index, value in enumerate(values):
            group[1 + index] += value
    return counted([(key, *group) for key, group in groups.items()])
