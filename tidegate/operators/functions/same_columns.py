"""`SameColumns`: brings rows into the columns that several streams share, so that these can be united by name.

Rules: a column is found by its name, and so is a field of a struct, at any depth; what is missing is null. A type may
be widened to one that has all its values (`tidegate/storage/schemas/evolution.py`); `united` finds these types. So no
value changes its meaning, and none is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.operators.operator import Columns, Emit, Operator
from tidegate.operators.operator_errors import blame
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.dictionaries import decoded_type
from tidegate.storage.schemas.evolution import widens

_CANDIDATES = (pa.int16(), pa.int32(), pa.int64(), pa.float64())
"""Types that have all values of two others, neither of which has those of the other: int32 and uint32, for instance."""


class SameColumns(Operator):
    """Rows with the columns of `schema`. Stateless."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def needed_columns(self, after: Columns) -> Columns:
        """Those of the same names."""
        return after

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Emit the rows. OperatorError for a value that does not fit after all, such as a time out of range."""
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
    """The columns of streams that are united by name, in the order of their first appearance. ConfigurationError."""
    names = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    for number, schema in enumerate(schemas, start=1):
        if len(set(schema.names)) < len(schema.names):
            raise ConfigurationError(f"union: two columns of stream {number} share a name: {columns_text(schema)}")
        missing = [name for name in names if name not in schema.names]
        if missing and not allow_missing:
            raise ConfigurationError(
                f"union: stream {number} has no column {missing[0]!r}, only {columns_text(schema)}; with "
                "allow_missing=True it is null in its rows"
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
    """A type that has all values of two others, if there is one."""
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
