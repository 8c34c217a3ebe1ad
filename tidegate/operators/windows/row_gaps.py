"""The gap of each row, of sessions whose gap is a column: until when a row holds its session open.

A gap is a duration, or a whole number of milliseconds. A row without one, or with one that is not greater than 0,
belongs to no session, and is refused with its values.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidegate.operators.operator import OperatorContext
from tidegate.operators.operator_errors import blame_row, first_row
from tidegate.operators.windows.window_specs import SIZE_MS_MAX, Session, Times
from tidegate.state.kernels.columns import fixed_values, plain, valid_mask
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.reserved_names import own_name
from tidegate.storage.user_values import value_text

GAP = own_name("session_gap")
"""The column of a gap that is computed by an expression."""

_PER_MS = {"us": 1_000, "ns": 1_000_000}


def check_gap_column(schema: pa.Schema, column: str) -> None:
    """Raise ConfigurationError unless a schema has this column, once, of a type that can be a gap."""
    shown = "the expression" if column == GAP else f"column {column!r}"
    if schema.get_field_index(column) < 0:
        raise ConfigurationError(
            f'tg.Session(gap={column!r}): this is neither a duration, such as "30min", nor one of the columns '
            f"{schema.names}"
        )
    data_type = schema.field(column).type
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    if not (pa.types.is_duration(data_type) or pa.types.is_integer(data_type)):
        raise ConfigurationError(
            f"tg.Session(gap=...): {shown} is {data_type}; a gap is a duration, or a whole number of milliseconds: "
            "pl.duration(seconds=...) makes one, or cast it to int64"
        )


def row_ends(context: OperatorContext, batch: pa.RecordBatch, times: Times, spec: Session) -> Times:
    """The end of a session of each row alone. OperatorError for a row without a gap that is greater than 0."""
    if spec.gap_ms is not None:
        return times + spec.gap_ms
    assert isinstance(spec.column, str), "an expression that was not computed"
    check_gap_column(batch.schema, spec.column)
    column = batch.column(spec.column)
    values = plain(column)
    gaps = fixed_values(values).astype(np.int64)
    if pa.types.is_duration(values.type) and values.type.unit != "ms":
        # What milliseconds have no number for is refused below all the same.
        per_ms = _PER_MS.get(values.type.unit)
        gaps = np.clip(gaps, -SIZE_MS_MAX, SIZE_MS_MAX) * 1_000 if per_ms is None else gaps // per_ms
    fits = (gaps > 0) & (gaps <= SIZE_MS_MAX)
    mask = valid_mask(values)
    if len(mask):
        fits &= mask != 0
    if not fits.all():
        _refuse(context, batch, column, int(np.flatnonzero(~fits)[0]), spec)
    return times + gaps


def _refuse(context: OperatorContext, batch: pa.RecordBatch, column: pa.Array, number: int, spec: Session) -> None:
    shown = "computed" if spec.column == GAP else f"in column {spec.column!r}"
    told = "null"
    if column[number].is_valid:
        in_units = pa.types.is_duration(column.type)  # dates of Python have no room for all of them
        value = column.slice(number, 1).view(pa.int64())[0] if in_units else column[number]
        told = value_text(value.as_py()) + (f" {column.type.unit}" if in_units else "")
    row = batch.slice(number, 1)
    if spec.column == GAP:
        row = row.drop_columns([GAP])
    with blame_row(context, first_row(row) or {}, number):
        raise ConfigurationError(
            f"tg.Session: the gap of a row is {told} ({shown}); it must be 1 ms or more, and at most 35,000 years. "
            "Filter such rows out before the window, or give them a gap with fill_null or pl.when(...)"
        )
