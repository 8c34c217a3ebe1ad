"""`Projection` computes columns from a batch with polars expressions. `Select` and `WithColumns` use it.

Rules:

- Polars receives only the columns that expressions read, because strings are copied on the way in and on the way out.
- An expression that only names a column copies it unchanged, under any name. Its type must equal the type that polars
  would return. Otherwise the column is computed.
- Columns and types are the same with and without rows.
- A column that polars cannot hold is copied, and expressions cannot read it.

`UnionColumns` converts rows to the columns that several streams share, so that these can be united by name. Columns,
and fields of structs at any depth, are matched by name. Missing columns are null. A type may be widened to a type that
has all its values (`tidegate/storage/schemas/evolution.py`), and `united` finds these types. Values therefore never
change and are never dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from tidegate.operators.operator import Columns, Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.operators.output_schema import FromPolars, empty_frame, polars_frame
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.evolution import widens
from tidegate.storage.schemas.polars_frames import check_polars_has, polars_has, with_types_of_polars


@dataclass(frozen=True, slots=True)
class _Plan:
    """A compiled projection: how to compute the columns of batches with one schema."""

    schema: pa.Schema
    output: pa.Schema
    copied: dict[str, str]
    """Maps each output column that is a plain copy to its input column."""
    rest: tuple[pl.Expr, ...]
    reads: Columns
    casts: frozenset[str]
    """The output columns that are casts."""


class Projection:
    """Computes expressions over the batches of a stream."""

    def __init__(self, expressions: Sequence[pl.Expr]) -> None:
        self._expressions = tuple(expressions)
        self._from_polars = FromPolars()
        self._plan: _Plan | None = None

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the computed columns for a batch.

        Raises the errors of polars for expressions that do not fit the columns.
        """
        if self._plan is None or not self._plan.schema.equals(batch.schema):
            self._plan = self._planned(batch.schema)
        plan = self._plan
        columns = {name: batch.column(source) for name, source in plan.copied.items()}
        if plan.rest:
            frame = computed(frame_of(batch, plan.reads), plan.rest)
            made = self._from_polars.convert(frame, batch.schema, plan.casts)
            columns.update(zip(made.schema.names, made.columns, strict=True))
        return pa.RecordBatch.from_arrays([columns[name] for name in plan.output.names], names=plan.output.names)

    def _planned(self, schema: pa.Schema) -> _Plan:
        frame = empty_frame(schema)
        casts = frozenset(name for each in self._expressions if _is_cast(each) for name in frame.select(each).columns)
        made = computed(frame, self._expressions)
        output = self._from_polars.convert(made, with_types_of_polars(schema), casts).schema
        copied: dict[str, str] = {}
        rest = []
        for expression in self._expressions:
            pairs = [*_copies(expression, frame)]
            for new, old in pairs:
                if not polars_has(schema.field(old).type):
                    output = output.set(output.get_field_index(new), schema.field(old).with_name(new))
            if pairs and all(output.field(new).type == schema.field(old).type for new, old in pairs):
                copied.update(pairs)
            else:
                rest.append(expression)
        reads = columns_read(rest)
        check_polars_has(pa.schema([field for field in schema if reads is None or field.name in reads]))
        return _Plan(schema, output, copied, tuple(rest), reads, casts)


def columns_read(expressions: Sequence[pl.Expr]) -> Columns:
    """Returns the columns that expressions read.

    None, which means all columns, if an expression selects columns by a pattern or a type.
    """
    if any('"Selector"' in expression.meta.serialize(format="json") for expression in expressions):
        return None
    return frozenset(name for expression in expressions for name in expression.meta.root_names())


def frame_of(batch: pa.RecordBatch, reads: Columns) -> pl.DataFrame:
    """Returns the columns `reads` of a batch as a polars frame.

    If no column is read, the frame has the first column, so that it has the right number of rows.
    """
    if reads is None:
        return polars_frame(batch)
    names = [name for name in batch.schema.names if name in reads]
    return polars_frame(batch.select(names or batch.schema.names[:1]))


def computed(frame: pl.DataFrame, expressions: Sequence[pl.Expr]) -> pl.DataFrame:
    """Returns the columns that the expressions compute, with as many rows as the frame."""
    made = frame.select(expressions)
    if made.height == frame.height:
        return made
    return frame.with_columns(expressions).select(made.columns)  # nothing but literals, which are repeated


def _copies(expression: pl.Expr, frame: pl.DataFrame) -> Iterator[tuple[str, str]]:
    """Yields pairs of an output name and an input name if the expression only copies columns.

    Otherwise yields nothing.
    """
    bare = expression.meta.undo_aliases()
    if bare.meta.is_column_selection():
        yield from zip(frame.select(expression).columns, frame.select(bare).columns, strict=True)


def _is_cast(expression: pl.Expr) -> bool:
    """Returns whether the outermost operation of an expression is a cast."""
    return expression.meta.undo_aliases().meta.serialize(format="json").startswith('{"Cast"')


_CANDIDATES = (pa.int16(), pa.int32(), pa.int64(), pa.float64())
"""Types to try, smallest first, for two types neither of which contains the values of the other, such as int32 and
uint32.
"""


class UnionColumns(Operator):
    """Operator that converts rows to the columns of `schema`, for a union of streams by name. Keeps no state."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the columns that later steps read (`after`) unchanged, because columns keep their names."""
        return after

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emits the converted rows. Raises OperatorError for a value that cannot be converted, such as a time out of
        range.
        """
        with blame(self.context, batch):
            columns = [self._column(batch, field) for field in self._schema]
            rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        emit(rows)

    def _column(self, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
        if batch.schema.get_field_index(field.name) < 0:
            return pa.nulls(batch.num_rows, field.type)
        column = batch.column(field.name)
        if column.type.equals(field.type):
            return column
        return (column.dictionary_decode() if pa.types.is_dictionary(column.type) else column).cast(field.type)


def united(schemas: Sequence[pa.Schema], allow_missing: bool) -> pa.Schema:
    """Returns the schema of a union by name: the columns of all streams, in the order of their first appearance.

    With `allow_missing` a column may be missing in a stream, and is null there. Raises ConfigurationError for columns
    that are missing, or have no common type.
    """
    names = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    for number, schema in enumerate(schemas, start=1):
        if len(set(schema.names)) < len(schema.names):
            raise ConfigurationError(
                f"union: two columns of stream {number} share a name: {columns_text(schema)}; rename one of them"
            )
        missing = [name for name in names if name not in schema.names]
        if missing and not allow_missing:
            raise ConfigurationError(
                f"union: stream {number} has no column {missing[0]!r}, only {columns_text(schema)}; with "
                "allow_missing=True it is null in its rows"
                "; or add the column with with_columns"
            )
    return pa.schema([_field(name, schemas, allow_missing) for name in names])


def _field(name: str, schemas: Sequence[pa.Schema], allow_missing: bool) -> pa.Field:
    fields = [schema.field(name) for schema in schemas if name in schema.names]
    found = fields[0].type
    for other in (field.type for field in fields[1:]):
        wider = _wider(found, other, allow_missing)
        if wider is None:
            advice = "cast one of them with with_columns"
            if not allow_missing and _wider(found, other, True) is not None:
                advice = "with allow_missing=True a field that a struct lacks is null"
            raise ConfigurationError(
                f"union: column {name!r} is {found} in one stream and {other} in another, and neither type has all "
                f"values of the other; {advice}"
            )
        found = wider
    nullable = len(fields) < len(schemas) or any(field.nullable for field in fields)
    return pa.field(name, found, nullable)


def _wider(one: pa.DataType, other: pa.DataType, allow_missing: bool) -> pa.DataType | None:
    """Returns the type that can represent all values of both types, or None if there is none."""
    if one.equals(other):
        return one
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _wider_struct(one, other, allow_missing)
    if pa.types.is_list(one) and pa.types.is_list(other):
        item = _wider_field(one.value_field, other.value_field, allow_missing)
        return None if item is None else pa.list_(item)
    if pa.types.is_map(one) and pa.types.is_map(other) and one.key_type.equals(other.key_type):
        item = _wider_field(one.item_field, other.item_field, allow_missing)
        return None if item is None else pa.map_(one.key_field, item)
    one, other = decoded_type(one), decoded_type(other)
    if pa.types.is_nested(one) and pa.types.is_nested(other):
        return None
    return next((t for t in (one, other, *_CANDIDATES) if widens(one, t) and widens(other, t)), None)


def _wider_struct(one: pa.StructType, other: pa.StructType, allow_missing: bool) -> pa.DataType | None:
    left, right = {field.name: field for field in one}, {field.name: field for field in other}
    if len(left) < one.num_fields or len(right) < other.num_fields:
        return None
    if left.keys() != right.keys() and not allow_missing:
        return None
    fields: list[pa.Field] = []
    for name in dict.fromkeys([*left, *right]):
        if name in left and name in right:
            field = _wider_field(left[name], right[name], allow_missing)
            if field is None:
                return None
            fields.append(field)
        else:
            fields.append((left if name in left else right)[name].with_nullable(True))
    return pa.struct(fields)


def _wider_field(one: pa.Field, other: pa.Field, allow_missing: bool) -> pa.Field | None:
    found = _wider(one.type, other.type, allow_missing)
    return None if found is None else pa.field(one.name, found, one.nullable or other.nullable)
