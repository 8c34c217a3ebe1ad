"""Converts PostgreSQL's text format of values to Arrow, a column at a time.

| in PostgreSQL | in the stream |
| --- | --- |
| `boolean`, `smallint`, `integer`, `bigint`, `real`, `double precision` | bool, int16, int32, int64, float32, float64 |
| `numeric(p, s)` up to 76 digits | decimal128(p, s), or decimal256 |
| `date`, `time`, `timestamp`, `timestamptz` | date32, time64, timestamp in microseconds, the last in UTC |
| `bytea` | binary |
| everything else: text, json, uuid, enums, arrays, `numeric` without a precision | string, as PostgreSQL writes it |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.formats.text import DEFAULTS, Converter, converted, converter_of
from tidegate.connectors.postgres_cdc.options import CdcColumn, CdcTable

_TYPES = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    26: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1083: pa.time64("us"),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", "UTC"),
}
_NUMERIC = 1700
_MODIFIER_HEADER = 4


def arrow_type(oid: int, modifier: int) -> pa.DataType:
    """Returns the Arrow type for a PostgreSQL type.

    `modifier`: its type modifier, such as the precision; -1 for none.
    """
    if oid == _NUMERIC and modifier >= _MODIFIER_HEADER:
        digits = (modifier - _MODIFIER_HEADER) >> 16
        scale = (modifier - _MODIFIER_HEADER) & 0x7FF
        if scale <= digits <= 38:
            return pa.decimal128(digits, scale)
        if scale <= digits <= 76:
            return pa.decimal256(digits, scale)
    return _TYPES.get(oid, pa.string())


def column_type(column: CdcColumn) -> pa.DataType:
    """Returns the Arrow type of a table's column."""
    return arrow_type(column.base_oid, column.modifier)


_VARCHAR = 1043
_INTEGERS = (20, 21, 23)
_TEXTS = (25, _VARCHAR)
_TIMES = (1083, 1114, 1184, 1266)


def keeps_values(column: CdcColumn, oid: int, modifier: int) -> bool:
    """Returns whether stored values of a column do not change when the column's type becomes the given type.

    PostgreSQL rewrites a table for most other changes of a type, and its log does not contain the rewritten rows.
    """
    if oid == column.oid and (modifier == column.modifier or column.oid != column.base_oid):
        return True  # A domain has the modifier of its base type.
    if oid != column.base_oid:
        return any(oid in alike and column.base_oid in alike for alike in (_INTEGERS, _TEXTS))
    if oid == _NUMERIC:
        was = arrow_type(oid, column.modifier)
        now = arrow_type(oid, modifier)
        return bool(was == now or (pa.types.is_decimal(was) and pa.types.is_decimal(now) and was.scale == now.scale))
    if oid in _TIMES:
        return modifier == -1 or (column.modifier != -1 and modifier >= column.modifier)
    return oid == _VARCHAR


def row_schema(table: CdcTable) -> pa.Schema:
    """Returns the Arrow columns of a table."""
    return pa.schema([pa.field(each.name, column_type(each)) for each in table.columns])


class TextColumns:
    """Converts the texts of a table's columns to Arrow values."""

    def __init__(self, table: CdcTable) -> None:
        self._fields = list(row_schema(table))
        self._converters = [_converter(field) for field in self._fields]

    def arrays(self, columns: Sequence[pa.Array], reasons: dict[int, str]) -> list[pa.Array]:
        """Converts columns of strings to values. `reasons` gets the rows with a value that does not fit."""
        return [
            converted(texts, field, convert, reasons, blank_is_null=False)
            for texts, field, convert in zip(columns, self._fields, self._converters, strict=True)
        ]


def _converter(field: pa.Field) -> Converter | None:
    if pa.types.is_boolean(field.type):
        return _booleans
    if pa.types.is_binary(field.type):
        return _bytes
    return converter_of(field, DEFAULTS)


def _booleans(texts: pa.Array) -> pa.Array:
    known = pc.index_in(texts, pa.array(["f", "t"]))
    if known.null_count != texts.null_count:
        raise pa.ArrowInvalid(
            "PostgreSQL sent a boolean that is neither t nor f; this is a bug in tidegate, please report it"
        )
    return known.cast(pa.bool_())


def _bytes(texts: pa.Array) -> pa.Array:
    r"""Converts PostgreSQL's hexadecimal format of bytea (`\\x...`) to bytes."""
    import polars as pl

    if pc.all(pc.starts_with(texts, "\\x"), min_count=0).as_py() is False:
        raise pa.ArrowInvalid("PostgreSQL sent bytes that do not start with \\x; set bytea_output = hex on the server")
    digits = pc.utf8_slice_codeunits(texts, 2)
    try:
        found = pl.Series(digits).str.decode("hex", strict=True).to_arrow()
    except pl.exceptions.ComputeError as error:
        raise pa.ArrowInvalid(
            "PostgreSQL sent bytes that are not hexadecimal; this is a bug in tidegate, please report it"
        ) from error
    values = found.cast(pa.binary())
    assert np.array_equal(
        values.is_null().to_numpy(zero_copy_only=False), texts.is_null().to_numpy(zero_copy_only=False)
    )
    return values
