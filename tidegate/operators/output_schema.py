"""`PinnedSchema` keeps the schema of an operator's output equal for all batches.

Each operator that calls functions of the user has one, and a table sink has one for its input. Rules:

- The first output batch determines names and types, unless the user gave a schema.
- A column that was all null so far takes the type of its first values.
- Any other change is an error that names the column.
- Strings from polars get the type of the input column with that name, or else plain `string`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.operators.row_values import (
    InexactValueError,
    RowCopier,
    exact_array,
    exact_cast,
    owned_row_copier,
    shown,
)
from tidegate.storage.schemas.arrow_types import plain_schema, settled_type
from tidegate.storage.schemas.polars_frames import check_arrow_has, check_polars_has, with_types_of_polars

if TYPE_CHECKING:
    import polars as pl

_ADVICE = "pass schema= to fix names and types"
_GIVEN_ADVICE = "return what fits, or give the column another type in schema="


class SchemaMismatchError(ValueError):
    """Raised if an output batch does not have the schema of the earlier batches.

    `row` is the index of the first row that does not fit, or None if unknown.
    """

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


class PinnedSchema:
    """The schema of an operator's output, which does not change once it is known."""

    __slots__ = ("_given", "_maker", "own_row", "schema")

    def __init__(self, given: pa.Schema | None = None, maker: object = None) -> None:
        """Takes the schema that the program gave (`given`), or None, and the user's function that makes the rows
        (`maker`), for errors.
        """
        self._given = given is not None
        self._maker = maker
        self.schema: pa.Schema | None = given
        """The schema, or None before the first batch."""
        self.own_row: RowCopier = owned_row_copier(given)
        """Copies a row that a function returned, as a dict. Raises TypeError for an object that is not a row."""

    def conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the batch with the columns of the schema, in their order and types. The first batch determines the
        schema.

        Raises SchemaMismatchError if columns are missing or added, or if a type cannot be converted.
        """
        batch = batch.replace_schema_metadata(None)
        if batch.schema is not self.schema and (plain := plain_schema(batch.schema)) is not batch.schema:
            batch = batch.cast(plain)
        if self.schema is None:
            self._fix(batch.schema)
            return batch
        if batch.schema.equals(self.schema):
            return batch
        self._check_names(batch.schema.names)
        columns = []
        for position, name in enumerate(self.schema.names):
            column = batch.column(name)
            self._promote(position, column.type)
            wanted = self.schema.field(position).type
            if column.type != wanted:
                if not (self._given or pa.types.is_null(column.type)):
                    raise _mismatch(name, wanted, column.type)
                try:
                    column = exact_cast(column, wanted)
                except InexactValueError as error:
                    row = getattr(error.__cause__, "row", None)
                    raise SchemaMismatchError(f"column {name!r}: {error}; {_GIVEN_ADVICE}", row) from error
                except pa.ArrowException as error:
                    raise _mismatch(name, wanted, column.type, str(error)) from error
            if column.null_count and not self.schema.field(position).nullable:
                raise SchemaMismatchError(
                    f"column {name!r} cannot be null in schema=, and is null in a row"
                    "; return a value, or make the column nullable in schema=",
                    pc.index(column.is_null(), True).as_py(),
                )
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def from_rows(self, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        """Returns a batch made of one or more rows. Raises SchemaMismatchError if the rows do not fit the schema.

        Without a given schema, columns that a row lacks are null. With a given schema each row must have all columns,
        because a forgotten column would become null unnoticed.
        """
        names = list(rows[0]) if self.schema is None else self.schema.names
        values = _alike(rows, names)
        if values is None:
            names = list(dict.fromkeys(chain.from_iterable(rows)))
            if self.schema is not None:
                self._check_names([*self.schema.names, *(n for n in names if n not in self.schema.names)])
                if self._given:
                    self._check_complete(rows)
                names = self.schema.names
            values = [[row.get(name) for row in rows] for name in names]
        if unnamed := [name for name in names if not isinstance(name, str)]:
            raise SchemaMismatchError(f"a row has the key {unnamed[0]!r}; column names must be strings")
        columns = [self._column(name, of_name) for name, of_name in zip(names, values, strict=True)]
        batch = pa.RecordBatch.from_arrays(columns, names=names)
        return self.conform(batch)

    def _check_complete(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises SchemaMismatchError for a row that lacks a column of the schema that the program gave."""
        assert self.schema is not None
        for number, row in enumerate(rows):
            if missing := [name for name in self.schema.names if name not in row]:
                columns = ", ".join(map(repr, missing))
                raise SchemaMismatchError(
                    f"{_called(self._maker)} returned a row without {columns}, which schema= has: {shown(dict(row))}. "
                    f"Return every column of schema=, {missing[0]!r}: None for a null, or take it out of schema=",
                    number,
                )

    def _column(self, name: str, values: list[Any]) -> pa.Array:
        wanted = pa.null() if self.schema is None else self.schema.field(name).type
        try:
            return exact_array(values, None if pa.types.is_null(wanted) else wanted, complete=self._given)
        except InexactValueError as error:
            row = None if pa.types.is_null(wanted) else _refused_row(values, wanted, complete=self._given)
            if self._given:
                raise SchemaMismatchError(f"column {name!r}: {error}; {_GIVEN_ADVICE}", row) from error
            was = "" if pa.types.is_null(wanted) else f" was {wanted} before"
            raise SchemaMismatchError(f"column {name!r}{was}: {error}; {_ADVICE}", row) from error
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            row, reason = _without_common_type(values)
            raise SchemaMismatchError(f"column {name!r}: {reason}", row) from error

    def _promote(self, position: int, found: pa.DataType) -> None:
        assert self.schema is not None
        field = self.schema.field(position)
        if not self._given and pa.types.is_null(field.type) and not pa.types.is_null(found):
            self._fix(self.schema.set(position, field.with_type(found)))

    def _fix(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.own_row = owned_row_copier(schema)

    def _check_names(self, names: Sequence[str]) -> None:
        assert self.schema is not None
        if len(set(names)) < len(names):
            raise SchemaMismatchError(f"two columns of the output share a name: {list(names)}; rename one of them")
        missing = [name for name in self.schema.names if name not in names]
        unknown = [name for name in names if name not in self.schema.names]
        if missing or unknown:
            was = "schema= has" if self._given else "the first output batch had"
            changes = [
                f"{verb}: {', '.join(map(repr, columns))}"
                for verb, columns in (("missing", missing), ("new", unknown))
                if columns
            ]
            raise SchemaMismatchError(
                f"{was} columns {self.schema.names}; in this batch {' and '.join(changes)}"
                + ("" if self._given else f"; {_ADVICE}")
            )


def _refused_row(values: Sequence[Any], wanted: pa.DataType, *, complete: bool) -> int | None:
    """Returns the index of the first value that is refused alone, or None if there is none."""
    for row, value in enumerate(values):
        try:
            exact_array([value], wanted, complete=complete)
        except (InexactValueError, pa.ArrowException, ValueError, TypeError, OverflowError):
            return row
    return None


def _without_common_type(values: Sequence[Any]) -> tuple[int, str]:
    """Returns the index of the first value for which Arrow infers no type, or another type than for the values before
    it, and the reason for errors.
    """
    for row, value in enumerate(values):
        if not _has_common_type([value]):
            return row, _without_type(value)
    row = bisect_left(range(len(values) - 1), True, key=lambda last: not _has_common_type(values[: last + 1]))
    before = sorted({type(value).__name__ for value in values[:row] if value is not None})
    return row, (
        f"a value of type {type(values[row]).__name__} has no common type with the values before it "
        f"({', '.join(before)}); return values of one type, or give schema="
    )


def _without_type(value: object) -> str:
    """Returns why no column can have this value, for errors. Names the innermost value that is the reason."""
    if isinstance(value, Mapping):
        parts = list(value.values())
        if any(not isinstance(key, str) for key in value):
            return "a dict has keys that are not strings; give the column the type of a map in schema="
    else:
        parts = list(value) if isinstance(value, list | tuple) else []
    for part in parts:
        if not _has_common_type([part]):
            return _without_type(part)
    if parts:
        return _without_common_type(parts)[1]
    if isinstance(value, int):
        return "an integer does not fit into 64 bits; give the column a decimal type in schema="
    return (
        f"a value of type {type(value).__name__} has no type of a column; convert it to a number, a text, bytes, a "
        "time, a list or a dict"
    )


def _has_common_type(values: Sequence[Any]) -> bool:
    try:
        exact_array(values)
    except (InexactValueError, pa.ArrowException, ValueError, TypeError, OverflowError):
        return False
    return True


def _called(maker: object) -> str:
    """Returns how to refer to the function that makes the rows in an error."""
    if maker is None:
        return "the function"
    name = getattr(maker, "__qualname__", None) or type(maker).__qualname__
    return f"the function {name.rpartition('<locals>.')[2]}"


def _alike(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[Any]] | None:
    """Returns the values of each column if all rows are dicts with exactly the keys `names`, else None."""
    if set(map(type, rows)) != {dict} or set(map(len, rows)) != {len(names)} or len(set(names)) < len(names):
        return None
    try:
        return [list(map(itemgetter(name), rows)) for name in names]
    except KeyError:
        return None


class FromPolars:
    """Converts polars frames, made from batches of one stream, back to Arrow."""

    __slots__ = ("_dtypes", "_schema")

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._dtypes: Mapping[str, pl.DataType] = {}

    def convert(self, frame: pl.DataFrame, source: pa.Schema, casts: Collection[str] = ()) -> pa.RecordBatch:
        """Converts a polars frame to one Arrow batch. `source` is the schema of the batch from which the frame was
        computed.

        A column that still has the polars type of the column with the same name in `source` gets the Arrow type of that
        column. `casts` are columns that the program has cast: texts and bytes among them get Arrow's plain types,
        because polars has one type for strings and large strings.
        """
        if self._schema is None or not self._schema.equals(source):
            self._schema = source
            self._dtypes = empty_frame(source).schema
        columns = []
        for series in frame.get_columns():
            if self._dtypes.get(series.name) != series.dtype:
                check_arrow_has(series.name, series.dtype)
            column = series.rechunk().to_arrow()
            is_plain = series.name in casts and str(series.dtype) in ("String", "Binary")
            if self._dtypes.get(series.name) == series.dtype and not is_plain:
                wanted = source.field(series.name).type
            else:
                wanted = settled_type(column.type)
            columns.append(_retyped(column, wanted))
        return pa.RecordBatch.from_arrays(columns, names=frame.columns)


def polars_frame(batch: pa.RecordBatch) -> pl.DataFrame:
    """Returns the batch as a polars frame. Data is not copied if polars has the same type.

    Raises ConfigurationError for a type that polars does not support.
    """
    import polars as pl

    check_polars_has(batch.schema)
    return pl.DataFrame(batch)  # `pl.from_arrow` gives the same, column by column, which takes several times as long


def empty_frame(schema: pa.Schema) -> pl.DataFrame:
    """Returns a polars frame with these columns and no rows.

    Column types that polars does not support are replaced by others.
    """
    return polars_frame(pa.RecordBatch.from_pylist([], with_types_of_polars(schema)))


def _retyped(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if column.type == wanted:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_dictionary(wanted):
        column = column.cast(wanted.value_type).dictionary_encode()
    return column.cast(wanted)


def _mismatch(name: str, wanted: object, found: object, reason: str = "") -> SchemaMismatchError:
    detail = f" ({reason})" if reason else ""
    return SchemaMismatchError(f"column {name!r} was {wanted} before and is {found} in this batch{detail}; {_ADVICE}")
