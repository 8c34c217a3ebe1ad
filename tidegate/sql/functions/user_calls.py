"""Calls of Python functions that `create_temporary_function` has named."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
from sqlglot import exp

from tidegate.api.user_functions import UserFunction
from tidegate.operators.functions.row_calls import RowCalls
from tidegate.sql.functions.aggregates import is_aggregate
from tidegate.sql.functions.call import Call
from tidegate.sql.text.dialect import WINDOW_TABLES, parse
from tidegate.sql.values.typed import Interval, Typed
from tidegate.sql.values.types import calculated, check_known
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import check_polars_has

_OTHERS: tuple[str, ...] = (
    "WINDOW",
    "SESSION_WINDOW",
    "ROW_NUMBER",
    "RANK",
    "DENSE_RANK",
    "EXPLODE",
    "EXPLODE_OUTER",
    *WINDOW_TABLES,
)
_OTHERS += ("TABLE", "DESCRIPTOR", "UNNEST", "POSEXPLODE")
"""Names of functions that the tables of functions do not have."""


def called_by_user(call: Call, function: UserFunction) -> Typed:
    """The expression that calls a function. ConfigurationError for other arguments than it takes."""
    count = len(call.args)
    if not function.least <= count <= function.most:
        wanted = str(function.least) if function.least == function.most else f"{function.least} to {function.most}"
        raise call.refused(f"the function {function.name} takes {wanted} arguments, and here are {count}")
    inputs = []
    for node, given in zip(call.nodes, call.args, strict=True):
        if isinstance(given.value, Interval):
            raise call.refused(f"{node.sql(dialect='spark')} is an interval, and no value of Python")
        inputs.append(given.expr)
    made = _polars_type(function.returns, call)
    calls = RowCalls(function.name, function.function, function.returns, function.columns)
    expr = pl.map_batches([*inputs, pl.lit(f"function {function.name}")], calls, return_dtype=made, is_elementwise=True)
    of_kind = calculated(made)
    return Typed(expr if of_kind == made else expr.cast(of_kind), of_kind)


def _polars_type(data_type: pa.DataType, call: Call) -> pl.DataType:
    """The type of polars for what a function returns. ConfigurationError for one that SQL does not calculate with."""
    try:
        check_polars_has(pa.schema([pa.field(call.name, data_type)]))
        found = pl.Series(pa.array([], data_type)).dtype
        check_known(call.name, found)
    except ConfigurationError as error:
        raise call.refused(f"the function returns {data_type}: {error}") from error
    return found


def check_name(name: str, builtin: bool) -> None:
    """ConfigurationError for a name that queries read as something else. `builtin`: SQL has such a function."""
    try:
        (node,) = parse(f"SELECT {name}(a) FROM t").expressions
    except ConfigurationError:
        node = None
    if builtin or not isinstance(node, exp.Anonymous) or is_aggregate(node) or name.upper() in _OTHERS:
        raise ConfigurationError(
            f"create_temporary_function({name!r}): in SQL this name is something else already; take another one"
        )
