"""Upserts to Delta and Iceberg tables: how their rows are staged until the commit, and which rows have which keys.

A lake table is changed by one commit for all subtasks of a checkpoint. Until then each subtask writes its rows to its
own files (`staged_rows.py`). Rules:

- A file has only the last row of each key. All rows of a key arrive at one subtask, in order, so the last file with a
  key has its newest row.
- The hidden column `_tidegate_deleted` marks a key whose last row was retracted (`UserSinkOperator`).
- A null key is refused, because a null is equal to no other value in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.staged_rows import RowStage
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type, settled_type
from tidegate.storage.schemas.column_names import DELETED_COLUMN

STAGED_BYTES_MAX = 64 << 20
"""Size in bytes of the buffered rows of one file."""


def upsert_stage(
    keys: tuple[str, ...],
    write: Callable[[Iterable[memoryview]], str],
    check: Callable[[pa.Table], None],
    bytes_max: int = STAGED_BYTES_MAX,
) -> RowStage:
    """Returns a stage for the rows of one writer. `write` stores a new file, and returns its path.

    `check` is called with the rows of each file. It raises an error for rows that the table cannot store.
    """

    def convert(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        rows = last_of_each_key(plain_table(pa.Table.from_batches(batches)), keys)
        check(rows)
        found: list[pa.RecordBatch] = rows.to_batches()
        return found

    return RowStage(write, bytes_max=bytes_max, convert=convert)


def check_keys(batch: pa.RecordBatch, keys: Sequence[str]) -> None:
    """Raises ConfigurationError if a key column has a null, or a date that filters of the tables do not have."""
    for name in keys:
        column = batch.column(name)
        if column.null_count:
            raise ConfigurationError(
                f"the key column {name!r} has a row without a value, which no row of a table equals: filter such rows, "
                "or give them a value"
            )
        if pa.types.is_date32(column.type) and len(column):
            found = pc.min_max(column.cast(pa.int32()))
            if found["min"].as_py() < _DAYS[0] or found["max"].as_py() > _DAYS[1]:
                raise ConfigurationError(
                    f"the key column {name!r} has a date outside of the years 1 to 9999, which a commit cannot look "
                    "up: filter such rows, or change the date"
                )


_DAYS = (-719_162, 2_932_896)
"""The first and last date of Python, in days since 1970."""


def plain_table(rows: pa.Table) -> pa.Table:
    """Returns the rows with plain types instead of dictionaries and views, which Parquet readers may return as other
    types.
    """
    fields = [pa.field(field.name, settled_type(decoded_type(field.type))) for field in rows.schema]
    wanted = pa.schema(fields)
    return rows if rows.schema.equals(wanted) else rows.cast(wanted)


def last_of_each_key(rows: pa.Table, keys: tuple[str, ...]) -> pa.Table:
    """Returns the last row of each key, in the original order."""
    index = KeyIndex(keys)
    slots = index.upsert(_key_batch(rows, keys)).slots
    last = np.empty(index.size, dtype=np.int64)
    last[slots] = np.arange(rows.num_rows, dtype=np.int64)  # NumPy assigns in order: the last row stays
    last.sort()
    return rows if len(last) == rows.num_rows else rows.take(pa.array(last))


def rows_with_other_keys(rows: pa.Table, changes: pa.Table, keys: tuple[str, ...]) -> NDArray[np.bool_]:
    """Returns True for each row whose key is not in `changes`. The key columns must have types that hold all values of
    their columns in `changes`.
    """
    index = KeyIndex(keys)
    there = plain_table(rows.select(list(keys)))
    index.upsert(_key_batch(changes.select(list(keys)).cast(there.schema), keys))
    changed = index.size
    others: NDArray[np.bool_] = index.upsert(_key_batch(there, keys)).slots >= changed
    return others


def split_changes(changes: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Splits changes into the rows to insert or update, and the rows whose keys are deleted."""
    if DELETED_COLUMN not in changes.schema.names:
        return changes, changes.slice(0, 0)
    deleted = changes.column(DELETED_COLUMN)
    rows = changes.drop_columns([DELETED_COLUMN])
    return rows.filter(pc.invert(deleted)), rows.filter(deleted)


def _key_batch(rows: pa.Table, keys: tuple[str, ...]) -> pa.RecordBatch:
    chosen = rows.select(list(keys)).combine_chunks()
    batches = chosen.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], chosen.schema)
