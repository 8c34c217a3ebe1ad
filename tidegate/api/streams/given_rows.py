"""Makes Arrow tables of what a program holds as Python objects: rows, for `from_rows`, and pandas frames."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.operators.output_schema import PinnedSchema, SchemaMismatchError
from tidegate.operators.row_values import InexactValueError, check_exact, is_record, owned_row
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema

if TYPE_CHECKING:
    import pandas as pd

VALUE = "value"
"""The column of rows that are single values, as in Spark's text source."""
_SINGLE = (str, bytes, int, float, bool)


def table_of_rows(rows: Iterable[Any], schema: SchemaLike | None, columns: Sequence[str] | None) -> pa.Table:
    """Returns rows as a table.

    `rows` are dicts, dataclass objects or named tuples; or tuples, whose names are `columns` or those of `schema`; or
    single strings and numbers, which become the column "value". Without `schema` types are those of the values, and a
    column that a row lacks is null there. ConfigurationError for rows that do not fit, and for an empty list without
    `schema`.
    """
    given = as_schema(schema, "from_rows(schema=)")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise ConfigurationError(f"from_rows takes a list of rows, not {type(rows).__name__}; put it into a list")
    if columns is not None and isinstance(columns, str):
        raise ConfigurationError(f"from_rows(columns={columns!r}): give a list of names")
    names = list(columns) if columns is not None else None if given is None else given.names
    if given is not None and columns is not None and list(columns) != given.names:
        raise ConfigurationError(f"from_rows: columns={list(columns)} differ from those of schema=, {given.names}")
    made = [_row(number, row, names) for number, row in enumerate(rows)]
    if not made:
        if given is None:
            raise ConfigurationError(
                "from_rows([]): without rows give the columns, such as schema={'k': str, 'n': int}"
            )
        return given.empty_table()
    try:
        batch = PinnedSchema(given).from_rows(made)
    except SchemaMismatchError as error:
        raise ConfigurationError(f"from_rows: {error}") from error
    if nulls := [field.name for field in batch.schema if pa.types.is_null(field.type)]:
        raise ConfigurationError(f"from_rows: column {nulls[0]!r} is null in every row; give its type in schema=")
    return pa.Table.from_batches([batch])


def _row(number: int, row: Any, names: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(row, Mapping) or is_record(row):
        try:
            return owned_row(row)
        except TypeError as error:
            raise ConfigurationError(f"from_rows: row {number} has a value of no type of a column: {error}") from error
    if isinstance(row, tuple | list):
        if names is None:
            raise ConfigurationError(
                f"from_rows: row {number} is a {type(row).__name__}; name its values with columns=['k', 'n'] or schema="
            )
        if len(row) != len(names):
            raise ConfigurationError(f"from_rows: row {number} has {len(row)} values, and the columns are {names}")
        return dict(zip(names, row, strict=True))
    if isinstance(row, _SINGLE):
        if names is not None and len(names) != 1:
            raise ConfigurationError(f"from_rows: row {number} is a single {type(row).__name__}, for columns {names}")
        return {VALUE if names is None else names[0]: row}
    raise ConfigurationError(
        f"from_rows: row {number} is a {type(row).__name__}; a row is a dict, a dataclass object, a tuple, a string or "
        "a number"
    )


def without_pandas(data: Any) -> Any:
    """Returns what `from_batches` was given, with Arrow tables for pandas frames, also in a list."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return data
    if isinstance(data, list | tuple):
        return [_of_pandas(part) if isinstance(part, pandas.DataFrame) else part for part in data]
    return _of_pandas(data) if isinstance(data, pandas.DataFrame) else data


def _of_pandas(frame: pd.DataFrame) -> pa.Table:
    """Returns a pandas frame as a table, with nulls where pandas has NaN or NaT. A plain index of numbers is dropped.

    ConfigurationError for an index with a name, and for columns that Arrow cannot take.
    """
    index = frame.index
    if index.nlevels > 1 or index.name is not None:
        raise ConfigurationError(
            f"from_batches: the index {list(index.names)} of the pandas DataFrame would be lost; make it columns with "
            "reset_index(), or drop it with reset_index(drop=True)"
        )
    if bad := [name for name in frame.columns if not isinstance(name, str)]:
        raise ConfigurationError(f"from_batches: the pandas column {bad[0]!r} has no string as its name; rename it")
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ConfigurationError(f"from_batches: the pandas DataFrame does not fit into Arrow: {error}") from error
    for name in table.column_names:
        if frame[name].dtype == object:
            _check_objects(name, frame[name], table[name].combine_chunks())
    return table


def _check_objects(name: str, values: pd.Series, array: pa.Array) -> None:
    """Raise ConfigurationError for a Python object that Arrow has changed, as it makes dates of dates and times."""
    given = [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
    try:
        check_exact(given, array)
    except InexactValueError as error:
        raise ConfigurationError(f"from_batches: pandas column {name!r}: {error}; give it one type") from error
