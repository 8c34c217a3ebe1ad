"""Finds the one schema in which all stored rows of a state can be shown, and brings rows into it.

Rules: parts of a state may have been written before and after a change of types, which only ever become wider: so one
of the schemas takes the rows of all others. A sum of integers that has become one of floats is shown as floats where
that is exact. Where no schema takes all rows nothing is guessed: it is an error with both types.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.dictionaries import widened, widened_schema
from tidegate.storage.schemas.evolution import migrated


def common_schema(schemas: Iterable[pa.Schema], state: str, uid: str) -> pa.Schema:
    """The newest of some stored schemas, given oldest first, that takes the rows of all. ConfigurationError if none."""
    distinct = list(dict.fromkeys(map(widened_schema, schemas)))
    assert distinct, "a state without a schema"
    refused: ConfigurationError | None = None
    for schema in reversed(distinct):
        try:
            for other in distinct:
                adapted(_no_rows(other), schema, state, uid)
        except ConfigurationError as error:
            refused = refused or error
            continue
        return schema
    assert refused is not None, "no schema was tried"
    raise refused


def adapted(rows: pa.RecordBatch, schema: pa.Schema, state: str, uid: str) -> pa.RecordBatch:
    """Stored rows in that schema. ConfigurationError if they do not fit into it."""
    rows = widened(rows)
    for position, (before, now) in enumerate(zip(rows.schema, schema, strict=False)):
        if before.type == pa.int64() and now.type == pa.float64():
            try:
                rows = rows.set_column(position, now, rows.column(position).cast(now.type))
            except pa.ArrowInvalid as error:
                raise ConfigurationError(
                    f"state {state!r} of operator {uid!r} has numbers in {before.name!r} that float64 cannot hold "
                    f"exactly: {error}; read it from a checkpoint before the column changed its type"
                ) from error
    fitting = migrated(rows, schema, state, uid)
    return pa.RecordBatch.from_arrays(fitting.columns, schema=schema)


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
