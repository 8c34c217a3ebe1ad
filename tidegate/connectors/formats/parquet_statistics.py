"""Finds, from the statistics of a Parquet file, the row groups in which no row can match the program's filter.

Statistics contain bounds of the values of a column. Rules:

- Bounds are not exact values: long strings may be truncated in them. Polars compares them with the constants of the
  program's filter, so that types are converted as in the filter.
- Unknown and uncertain bounds allow any value: missing statistics, text that was cut within a character, a column that
  is stored in another type than the program reads.
- Statistics do not cover NaN, which polars treats as greater than any number. Therefore the upper bound of floats is
  NaN.
- A comparison with null is never true, so a group that has only nulls in a column passes no comparison.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as types

from tidegate.connectors.pushed_filters import ColumnTest, constant_of
from tidegate.storage.schemas.polars_frames import polars_has

_VALUES_MAX = 100
"""For a list of more values, only the smallest and the largest value are compared."""
_UNITS = {"ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}


def counting(parquet: pq.ParquetFile, schema: pa.Schema, rows: tuple[tuple[ColumnTest, ...], ...]) -> list[bool]:
    """Returns for each row group whether it may contain a row that passes the filter.

    `rows` has alternatives, each a conjunction of tests.
    """
    statistics = _Statistics(parquet, schema)
    found = pl.repeat(False, statistics.groups, eager=True)
    for tests in rows:
        passing = pl.repeat(True, statistics.groups, eager=True)
        for test in tests:
            passing &= _may_pass(statistics.bounds(test.column), test, statistics.groups)
        found |= passing
    return found.to_list()


def may_count(constants: pa.RecordBatch, rows: tuple[tuple[ColumnTest, ...], ...]) -> bool:
    """Returns whether a row may pass the filter `rows`, given its values in some columns (`constants`). Its other
    columns are unknown.
    """
    known = {name: _exactly(constants.column(name)) for name in constants.schema.names}
    return any(all(_may_pass(known.get(test.column), test, 1)[0] for test in tests) for tests in rows)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Lower and upper bounds of a column in each row group: `low` and `high` (null if unknown), and whether the group
    has no nulls or only nulls.
    """

    low: pl.Series
    high: pl.Series
    no_nulls: pl.Series
    only_nulls: pl.Series


def _exactly(value: pa.Array) -> _Bounds | None:
    """Returns the bounds of a column with a single value, or None if values of its type are not comparable."""
    if not _is_ordered(value.type):
        return None
    found = pl.Series(pl.from_arrow(value))
    null = pl.Series([value[0].as_py() is None])
    return _Bounds(found, found, ~null, null)


class _Statistics:
    """The statistics of all row groups of a file, by column."""

    def __init__(self, parquet: pq.ParquetFile, schema: pa.Schema) -> None:
        self._parquet = parquet
        self._schema = schema
        self._known: dict[str, _Bounds | None] = {}

    @property
    def groups(self) -> int:
        """Returns the number of row groups."""
        groups: int = self._parquet.metadata.num_row_groups
        return groups

    def bounds(self, column: str) -> _Bounds | None:
        """Returns the bounds of a column in each row group, or None if they are unknown."""
        if column not in self._known:
            self._known[column] = self._bounds(column)
        return self._known[column]

    def _bounds(self, column: str) -> _Bounds | None:
        index = self._leaf(column)
        if index is None:
            return None
        kind = self._schema.field(column).type
        low = []
        high = []
        no_nulls = []
        only_nulls = []
        for group in range(self.groups):
            chunk = self._parquet.metadata.row_group(group).column(index)
            statistics = chunk.statistics if chunk.is_stats_set else None
            least, greatest = extremes(statistics, kind, chunk.physical_type)
            low.append(least)
            high.append(greatest)
            nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
            no_nulls.append(nulls == 0)
            only_nulls.append(nulls is not None and nulls == self._parquet.metadata.row_group(group).num_rows)
        return _Bounds(_series(low, kind), _series(high, kind), pl.Series(no_nulls), pl.Series(only_nulls))

    def _leaf(self, column: str) -> int | None:
        """Returns the index of a non-nested column in the file, or None if it is nested or stored in another type."""
        stored = self._parquet.schema_arrow
        if column not in self._schema.names or stored.names.count(column) != 1:
            return None
        if stored.field(column).type != self._schema.field(column).type or not _is_ordered(stored.field(column).type):
            return None
        # A column in a struct has a dot in its path, and so may the name of a column.
        leaves = [index for index in range(len(self._parquet.schema)) if self._parquet.schema[index].path == column]
        return leaves[0] if len(leaves) == 1 else None


def _is_ordered(kind: pa.DataType) -> bool:
    """Returns whether Parquet and polars sort values of this type in the same order."""
    plain = (types.is_boolean, types.is_integer, types.is_float32, types.is_float64, types.is_date32)
    text = types.is_string(kind) or types.is_large_string(kind)
    return (
        text
        or any(is_type(kind) for is_type in plain)
        or (types.is_timestamp(kind) and kind.unit in _UNITS and polars_has(kind))
    )


def extremes(statistics: Any, kind: pa.DataType, physical: str) -> tuple[Any, Any]:
    """Returns the lower and upper bound of a column in a row group as values that Arrow accepts; None for an unknown
    bound.
    """
    if statistics is None or not statistics.has_min_max:
        return None, None
    if types.is_timestamp(kind):
        unit = json.loads(statistics.logical_type.to_json()).get("timeUnit")
        known = physical == "INT64" and unit == _UNITS[kind.unit]
        return (statistics.min_raw, statistics.max_raw) if known else (None, None)
    if types.is_date32(kind):
        return statistics.min_raw, statistics.max_raw
    if types.is_string(kind) or types.is_large_string(kind):
        return _text(statistics.min_raw), _text(statistics.max_raw)
    low = statistics.min
    high = statistics.max
    if types.is_floating(kind):
        return None if math.isnan(low) or math.isnan(high) else low, math.nan
    return low, high


def _text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None  # It was cut within a character.


def _series(values: list[Any], kind: pa.DataType) -> pl.Series:
    """Returns bounds as a polars series, with the type that the column has in the filter."""
    stored = pa.int64() if types.is_timestamp(kind) else pa.int32() if types.is_date32(kind) else kind
    return pl.Series(pl.from_arrow(pa.array(values, stored).view(kind)))


def _may_pass(bounds: _Bounds | None, test: ColumnTest, groups: int) -> pl.Series:
    anything = pl.repeat(True, groups, eager=True)
    if bounds is None:
        return anything
    if test.test == "is_null":
        return ~bounds.no_nulls
    if test.test == "is_not_null":
        return ~bounds.only_nulls
    constant = constant_of(test)
    frame = pl.DataFrame({"low": bounds.low, "high": bounds.high})
    if test.test == "is_in":
        wanted = _one_of(constant, bounds.low.dtype)
        if wanted is None:
            return anything & ~bounds.only_nulls
    else:
        wanted = _within(test.test, constant)
    return frame.select(wanted.fill_null(True)).to_series() & ~bounds.only_nulls


def _within(test: str, constant: pl.Expr) -> pl.Expr:
    """Returns a polars expression that is true if a value between the bounds may pass a comparison with `constant`.
    Null if unknown.
    """
    low = pl.col("low")
    high = pl.col("high")
    match test:
        case "<":
            return low < constant
        case "<=":
            return low <= constant
        case ">":
            return high > constant
        case ">=":
            return high >= constant
    return (low <= constant) & (high >= constant)


def _one_of(constant: pl.Expr, kind: pl.DataType) -> pl.Expr | None:
    """Returns the expression of `_within` for membership in a list.

    None if the values have a type that cannot be compared.
    """
    values = pl.select(constant).to_series()
    if values.dtype == pl.List:
        values = values.explode(empty_as_null=False)
    values = values.drop_nulls().unique()
    if values.is_empty():
        return pl.lit(False)
    if values.dtype != kind and not _are_alike(values.dtype, kind):
        return None
    if len(values) <= _VALUES_MAX:
        return pl.any_horizontal(_within("==", pl.lit(value, values.dtype)) for value in values)
    if values.dtype.is_float():
        return None  # There may be NaN among them, which is none of the extremes.
    least, greatest = (pl.lit(value, values.dtype) for value in (values.min(), values.max()))
    return _within(">=", least) & _within("<=", greatest)


def _are_alike(first: pl.DataType, second: pl.DataType) -> bool:
    """Returns whether both are signed integers, or both are unsigned integers."""
    signed = first.is_signed_integer() and second.is_signed_integer()
    return signed or (first.is_unsigned_integer() and second.is_unsigned_integer())
