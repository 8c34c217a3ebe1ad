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


def is_polars_frame(value: object) -> TypeIs[pl.DataFrame]:
    """Whether a value is a polars DataFrame."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.DataFrame)


def is_polars_expression(value: object) -> TypeIs[pl.Expr]:
    """Whether a value is a polars expression."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.Expr)


def polars_has(dtype: pa.DataType) -> bool:
    """Whether polars has a type. It panics for those that it lacks."""
    if pa.types.is_decimal256(dtype):
        return False
    return all(polars_has(dtype.field(at).type) for at in range(dtype.num_fields)) if dtype.num_fields else True


def check_polars_has(schema: pa.Schema) -> None:
    """Raise ConfigurationError for a column that polars cannot hold, so that no expression can read it."""
    for field in schema:
        if not polars_has(field.type):
            raise ConfigurationError(
                f"column {field.name!r} is {field.type}, which no expression can read: polars has decimals of at most "
                "38 digits; cast it with pyarrow, in map_batches, to pa.decimal128(38, ...) or a float"
            )


def with_types_of_polars(schema: pa.Schema) -> pa.Schema:
    """The columns, those that polars lacks with another type: to learn what expressions choose and how it is called."""
    for at, field in enumerate(schema):
        if not polars_has(field.type):
            instead = pa.decimal128(38) if pa.types.is_decimal(field.type) else pa.null()
            schema = schema.set(at, field.with_type(instead))
    return schema
