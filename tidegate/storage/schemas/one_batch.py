"""Tables as batches. A column of `string` or `binary` holds 2 GiB at most; a table with more makes several batches.

Whoever needs all rows in one says so (`one_batch`, `together`), and hears where that cannot be. Whoever reads on from a
row takes what one of them has (`slice_from`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError


def one_batch(table: pa.Table, what: str) -> pa.RecordBatch:
    """All rows of a table. ConfigurationError where a column has more of them than its type can hold."""
    whole = table.combine_chunks()
    batches = whole.to_batches()
    if len(batches) > 1:
        field = next(field for field, column in zip(whole.schema, whole.columns, strict=True) if column.num_chunks > 1)
        raise ConfigurationError(
            f"{what}: {table.num_rows:,} rows are needed at once, and have more than 2 GiB in column {field.name!r} of "
            f"type {field.type}; cast the column to {_larger(field.type)}, or see to it that there are fewer rows"
        )
    return batches[0] if batches else pa.RecordBatch.from_pylist([], whole.schema)


def together(batches: Sequence[pa.RecordBatch], what: str) -> pa.RecordBatch:
    """All rows of batches of one schema, at least one. ConfigurationError where a column is too large for its type."""
    try:
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    except pa.ArrowInvalid as error:
        rows = sum(batch.num_rows for batch in batches)
        raise ConfigurationError(
            f"{what}: {rows:,} rows are needed at once, and have more in a column than its type can hold: {error}"
        ) from error


def slice_from(batches: Sequence[pa.RecordBatch], row: int, rows_max: int) -> pa.RecordBatch:
    """Rows of consecutive batches from a row on, which is in one of them: to the end of that one at most. No copy."""
    for batch in batches:
        if row < batch.num_rows:
            return batch.slice(row, rows_max) if row or rows_max < batch.num_rows else batch
        row -= batch.num_rows
    raise IndexError(f"there is no row {row}")


def _larger(data_type: pa.DataType) -> str:
    return f"large_{data_type}"
