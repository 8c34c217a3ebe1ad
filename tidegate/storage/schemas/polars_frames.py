"""Tells polars frames and expressions from other values, and what polars can hold, without loading polars.

A driver or a process of a job loads polars, which takes a quarter of a second, only if the job's functions or
expressions use it. Nobody can give us a frame or an expression who has not loaded it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import polars as pl
    from typing_extensions import TypeIs


_INSTEAD = ", to pa.decimal128(38, ...) or a float"


def is_polars_frame(value: object) -> TypeIs[pl.DataFrame]:
    """Whether a value is a polars DataFrame."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.DataFrame)


def is_polars_expression(value: object) -> TypeIs[pl.Expr]:
    """Whether a value is a polars expression."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.Expr)


def exact_column(name: str) -> pl.Expr:
    """The expression of the column of this very name, also where `pl.col` would take the name for a pattern."""
    import polars as pl
    import polars.selectors as cs

    is_pattern = name == "*" or (name.startswith("^") and name.endswith("$"))
    return cs.by_name(name).as_expr() if is_pattern else pl.col(name)


def polars_has(dtype: pa.DataType) -> bool:
    """Whether polars has a type. It panics for those that it lacks."""
    kinds = pa.types
    if kinds.is_decimal(dtype) and (not kinds.is_decimal128(dtype) or dtype.scale < 0):
        return False
    if kinds.is_interval(dtype) or kinds.is_union(dtype) or kinds.is_run_end_encoded(dtype):
        return False
    if kinds.is_list_view(dtype) or kinds.is_large_list_view(dtype):
        return False
    return all(polars_has(dtype.field(at).type) for at in range(dtype.num_fields)) if dtype.num_fields else True


def check_polars_has(schema: pa.Schema) -> None:
    """Raise ConfigurationError for a column that polars cannot hold, so that no expression can read it."""
    for field in schema:
        if not polars_has(field.type):
            raise ConfigurationError(
                f"column {field.name!r} is {field.type}, which no expression can read: polars has no such type; "
                f"cast it with pyarrow, in map_batches{_INSTEAD if pa.types.is_decimal(field.type) else ''}"
            )


def with_types_of_polars(schema: pa.Schema) -> pa.Schema:
    """The columns, those that polars lacks with another type: to learn what expressions choose and how it is called."""
    for at, field in enumerate(schema):
        if not polars_has(field.type):
            instead = pa.decimal128(38) if pa.types.is_decimal(field.type) else pa.null()
            schema = schema.set(at, field.with_type(instead))
    return schema
