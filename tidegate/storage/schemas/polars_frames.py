"""Recognises polars frames, expressions and supported types without importing polars.

Importing polars takes a quarter of a second, so a driver or a process of a job imports it only if the job's functions
or expressions use it.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import polars as pl
    from typing_extensions import TypeIs


_INSTEAD = ", to pa.decimal128(38, ...) or a float"
_IN_UTC = ", to a zone of the time zone database, such as UTC"
_OFFSET = re.compile(r"[+-](\d\d):?(\d\d)")
_ARROW_LACKS = frozenset({"Object", "Int128", "UInt128"})


def is_polars_frame(value: object) -> TypeIs[pl.DataFrame]:
    """Returns whether a value is a polars DataFrame."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.DataFrame)


def is_polars_expression(value: object) -> TypeIs[pl.Expr]:
    """Returns whether a value is a polars expression."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.Expr)


def exact_column(name: str) -> pl.Expr:
    """Returns the polars expression for the column with exactly this name, even if `pl.col` would treat the name as a
    pattern.
    """
    import polars as pl
    import polars.selectors as cs

    is_pattern = name == "*" or (name.startswith("^") and name.endswith("$"))
    return cs.by_name(name).as_expr() if is_pattern else pl.col(name)


def polars_has(dtype: pa.DataType) -> bool:
    """Returns whether polars supports a type. Polars panics for types that it does not support."""
    kinds = pa.types
    if kinds.is_decimal(dtype) and (not kinds.is_decimal128(dtype) or dtype.scale < 0):
        return False
    if kinds.is_interval(dtype) or kinds.is_union(dtype) or kinds.is_run_end_encoded(dtype):
        return False
    if kinds.is_list_view(dtype) or kinds.is_large_list_view(dtype):
        return False
    if kinds.is_timestamp(dtype) and not _has_zone(dtype.tz):
        return False
    return all(polars_has(dtype.field(at).type) for at in range(dtype.num_fields)) if dtype.num_fields else True


@cache
def _has_zone(zone: str | None) -> bool:
    """Returns whether polars supports a time zone: a name in the time zone database, or an offset of whole hours."""
    if zone is None:
        return True
    if offset := _OFFSET.fullmatch(zone):
        return offset[2] == "00" and int(offset[1]) <= (12 if zone[0] == "-" else 14)
    try:
        return bool(ZoneInfo(zone).key)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False


def in_zones_of_polars(dtype: pa.DataType) -> pa.DataType:
    """Returns the type with UTC in place of time zones that polars does not support.

    A cast to it keeps every instant.
    """
    kinds = pa.types
    if polars_has(dtype):
        return dtype
    if kinds.is_timestamp(dtype):
        return pa.timestamp(dtype.unit, "UTC")
    if kinds.is_struct(dtype):
        return pa.struct([field.with_type(in_zones_of_polars(field.type)) for field in dtype])
    if kinds.is_list(dtype):
        return pa.list_(dtype.value_field.with_type(in_zones_of_polars(dtype.value_type)))
    if kinds.is_large_list(dtype):
        return pa.large_list(dtype.value_field.with_type(in_zones_of_polars(dtype.value_type)))
    if kinds.is_map(dtype):
        return pa.map_(in_zones_of_polars(dtype.key_type), in_zones_of_polars(dtype.item_type))
    return dtype


def check_arrow_has(name: str, dtype: pl.DataType) -> None:
    """Raises ConfigurationError for a polars column whose type Arrow does not have.

    Polars itself would return addresses of Python objects as bytes, and 128-bit integers under a type of its own.
    """
    if lacking := _lacking(dtype):
        instead = "pl.Decimal(38, 0), pl.Int64 or pl.Float64" if lacking != "Object" else "a type of values, or drop it"
        raise ConfigurationError(
            f"column {name!r} is {dtype} for polars, and Arrow has no type for {lacking}; cast it to {instead}"
        )


def _lacking(dtype: pl.DataType) -> str | None:
    kind = dtype.base_type().__name__
    if kind in _ARROW_LACKS:
        return kind
    if kind in ("List", "Array"):
        return _lacking(dtype.inner)  # type: ignore[attr-defined]
    if kind == "Struct":
        return next((found for field in dtype.fields if (found := _lacking(field.dtype))), None)  # type: ignore[attr-defined]
    return None


def arrow_of(frame: pl.DataFrame) -> pa.Table:
    """Converts a polars frame to an Arrow table.

    Raises ConfigurationError, which names the column, for a type that Arrow does not have.
    """
    for name, dtype in frame.schema.items():
        check_arrow_has(name, dtype)
    return frame.to_arrow()


def check_polars_has(schema: pa.Schema, so: str | None = None) -> None:
    """Raises ConfigurationError for a column whose type polars does not have, so that expressions cannot read it.

    `so` replaces the end of the error text, which has the consequence and what to do.
    """
    for field in schema:
        if not polars_has(field.type):
            expressions = (
                "no expression can read: polars has no such type; cast it with pyarrow, in "
                f"map_batches{_instead_of(field.type)}"
            )
            raise ConfigurationError(f"column {field.name!r} is {field.type}, which {so or expressions}")


def _instead_of(dtype: pa.DataType) -> str:
    if pa.types.is_decimal(dtype):
        return _INSTEAD
    return _IN_UTC if pa.types.is_timestamp(dtype) else ""


def with_types_of_polars(schema: pa.Schema) -> pa.Schema:
    """Returns the schema with substitutes for types that polars does not have.

    Used to find out which columns an expression selects.
    """
    for at, field in enumerate(schema):
        if not polars_has(field.type):
            zoned = pa.timestamp(field.type.unit, "UTC") if pa.types.is_timestamp(field.type) else pa.null()
            instead = pa.decimal128(38) if pa.types.is_decimal(field.type) else zoned
            schema = schema.set(at, field.with_type(instead))
    return schema
