"""Compares the columns of a format's schema with the columns of a program, and casts batches from one to the other.

Casts are exact (`storage/schemas/exact_casts.py`). Types are compared at submission, values in each batch: a row with a
value that does not fit is bad.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.formats.format import PayloadUse
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.exact_casts import InexactValueError, exact_cast, refusal_of


def check_read(
    found: pa.Schema, columns: pa.Schema, kind: str, use: PayloadUse, names: Sequence[str] | None = None
) -> None:
    """Raises ConfigurationError unless payloads with the columns `found` can be read as `columns`.

    `names`: all fields of the schema, for the error, if `found` has only some of them.
    """
    for field in columns:
        if field.name not in found.names:
            raise ConfigurationError(
                f"{use.method}(format={kind!r}): the schema has no field {field.name!r}, which {use.parameter} names; "
                f"name only fields of it: {found.names if names is None else list(names)}"
            )
        if (reason := refusal_of(found.field(field.name).type, field.type)) is not None:
            raise ConfigurationError(
                f"{use.method}(format={kind!r}): column {field.name!r} {reason} in the schema; correct its type in "
                f"{use.parameter}"
            )


def check_written(columns: pa.Schema, found: pa.Schema, kind: str, use: PayloadUse) -> None:
    """Raises ConfigurationError unless each column can be written to the fields `found` of a schema."""
    for field in columns:
        if field.name not in found.names:
            raise ConfigurationError(
                f"{use.method}(format={kind!r}): the schema has no field for column {field.name!r}; it has "
                f"{found.names}. Drop the column, or add the field to the schema"
            )
        if (reason := refusal_of(field.type, found.field(field.name).type, may_drop=False)) is not None:
            raise ConfigurationError(
                f"{use.method}(format={kind!r}): column {field.name!r} {reason}, the type in the schema; cast it in a "
                "step before"
            )


def fitted(batch: pa.RecordBatch, columns: pa.Schema, bad: dict[int, str]) -> list[pa.Array]:
    """Casts the columns of a batch to the types of `columns`. The numbers of rows that do not fit, and reasons, go to
    `bad`.

    Values of bad rows are null.
    """
    return [_fitted(batch.column(field.name), field, bad) for field in columns]


def _fitted(column: pa.Array, field: pa.Field, bad: dict[int, str]) -> pa.Array:
    pieces: list[pa.Array] = []
    begin = 0
    while begin < len(column) or not pieces:
        rest = column if not begin else column.take(pa.array(range(begin, len(column)), pa.int64()))
        try:
            pieces.append(exact_cast(rest, field))
            break
        except InexactValueError as error:
            # Arrow refuses to cast a slice of lists with a null in an element outside of the slice. So it is copied.
            pieces.append(exact_cast(rest.take(pa.array(range(error.row), pa.int64())), field))
            pieces.append(pa.nulls(1, field.type))
            missing = not field.nullable and not rest[error.row].is_valid
            bad.setdefault(
                begin + error.row,
                f"column {field.name!r} is not nullable, and has no value"
                if missing
                else f"column {field.name!r}: {error.value} does not fit {field.type}",
            )
            begin += error.row + 1
    return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)


def rows_of(columns: list[pa.Array], schema: pa.Schema, bad: dict[int, str]) -> pa.RecordBatch:
    """Builds a batch from columns, without the rows whose numbers are in `bad`."""
    if bad:
        keep = np.ones(len(columns[0]), dtype=np.bool_)
        keep[list(bad)] = False
        mask = pa.array(keep)
        columns = [pc.filter(column, mask) for column in columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
