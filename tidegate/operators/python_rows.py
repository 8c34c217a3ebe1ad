"""Rows of a batch as dicts, for functions of a row: what `RecordBatch.to_pylist` gives, in less time.

Rules:

- The values are those of Arrow's own conversion. Only types for which NumPy makes the very same objects in one go
  take that way.
- A time of day that is finer than Python's is refused, where Arrow would cut it off. (Of timestamps and durations Arrow
  makes pandas' objects, which have nanoseconds, or refuses them where there is no pandas.)

The loop over the rows is compiled for the names of the columns, as `dataclasses` compiles methods: a dict display with
constant keys takes a third of the time of `dict(zip(names, values))`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.state.kernels.columns import plain

_BY_NUMPY = frozenset(
    made().id
    for made in (
        *(pa.int8, pa.int16, pa.int32, pa.int64, pa.uint8, pa.uint16, pa.uint32, pa.uint64),
        *(pa.float32, pa.float64, pa.bool_),
    )
)
_TEXT = frozenset({pa.string().id, pa.large_string().id})


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """A dict for each row. ValueError if two columns share a name, or for a time that Python cannot hold."""
    names = batch.schema.names
    if not names or len(set(names)) < len(names):
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    columns = zip(names, batch.columns, strict=True)
    return _maker(tuple(names))(*(python_values(column, f"column {name!r}") for name, column in columns))


@lru_cache(maxsize=256)
def _maker(names: tuple[str, ...]) -> Callable[..., list[dict[str, Any]]]:
    """A function that makes rows of columns with these names. Names stand in it as Python strings and nothing else."""
    values = [f"v{number}" for number in range(len(names))]
    display = ", ".join(f"{name!r}: {value}" for name, value in zip(names, values, strict=True))
    columns = [f"c{number}" for number in range(len(names))]
    loop = f"for {', '.join(values)}, in zip({', '.join(columns)}, strict=True)"
    made: Callable[..., list[dict[str, Any]]] = eval(f"lambda {', '.join(columns)}: [{{{display}}} {loop}]")
    return made


def python_values(column: pa.Array, where: str = "a column") -> list[Any]:
    """The values of a column, None for null. ValueError for a time that Python cannot hold; `where` begins it."""
    if column.type.id in _TEXT:
        texts: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return texts
    if column.type.id not in _BY_NUMPY:
        if _has_fine_times(column.type):
            _check_times(column, where)
        others: list[Any] = column.to_pylist()
        return others
    if column.null_count == 0:
        numbers: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return numbers
    nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
    values: list[Any] = (
        column.fill_null(False if pa.types.is_boolean(column.type) else 0).to_numpy(zero_copy_only=False).tolist()
    )
    for row in nulls.tolist():
        values[row] = None
    return values


@lru_cache(maxsize=256)
def _has_fine_times(data_type: pa.DataType) -> bool:
    """Whether values of a type have times of day in nanoseconds."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _has_fine_times(data_type.storage_type)
    if pa.types.is_dictionary(data_type) or pa.types.is_run_end_encoded(data_type):
        return _has_fine_times(data_type.value_type)
    if pa.types.is_nested(data_type):
        return any(_has_fine_times(data_type.field(number).type) for number in range(data_type.num_fields))
    return bool(data_type == pa.time64("ns"))


def _check_times(column: pa.Array, where: str) -> None:
    """Raise ValueError for a time of day with a fraction of a microsecond."""
    column = plain(column)
    if not _has_fine_times(column.type):
        return
    if pa.types.is_struct(column.type):
        for field in column.flatten():
            _check_times(field, where)
    elif pa.types.is_map(column.type):
        # `keys` and `items` have the values of other rows, too, if the column is a slice.
        rows = column.take(pa.array(np.arange(len(column))))
        _check_times(rows.keys, where)
        _check_times(rows.items, where)
    elif pa.types.is_nested(column.type):
        _check_times(pc.list_flatten(column), where)
    elif (column.view(pa.int64()).fill_null(0).to_numpy() % 1_000).any():
        raise ValueError(
            f"{where} has a time of day that is finer than a microsecond, and times of Python are not; cast it to "
            "time64[us] first, or use map_batches"
        )
