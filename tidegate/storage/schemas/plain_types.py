"""Brings Arrow types down to plain ones: without views, without any of polars' variants, or comparable.

Files, kernels and Spark know no views (`string_view`, `binary_view`), so they end where batches come in: in data in
memory, and in what functions of the user return. A schema that promises them is refused.
"""

from __future__ import annotations

import pyarrow as pa


def holds_views(data_type: pa.DataType) -> bool:
    """Whether values of a type are views, or have some in them."""
    return not without_views(data_type).equals(data_type)


def without_views(data_type: pa.DataType) -> pa.DataType:
    """The type with plain strings and binary in the place of views."""
    types = pa.types
    if types.is_string_view(data_type):
        return pa.large_string()
    if types.is_binary_view(data_type):
        return pa.large_binary()
    if types.is_dictionary(data_type):
        return pa.dictionary(data_type.index_type, without_views(data_type.value_type), data_type.ordered)
    if types.is_struct(data_type):
        return pa.struct([field.with_type(without_views(field.type)) for field in data_type])
    if types.is_map(data_type):
        key, item = data_type.key_field, data_type.item_field
        fields = (key.with_type(without_views(key.type)), item.with_type(without_views(item.type)))
        return pa.map_(*fields, keys_sorted=data_type.keys_sorted)
    if types.is_fixed_size_list(data_type):
        return pa.list_(_field_without_views(data_type), data_type.list_size)
    if types.is_large_list(data_type):
        return pa.large_list(_field_without_views(data_type))
    if types.is_list(data_type):
        return pa.list_(_field_without_views(data_type))
    return data_type


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema without views; the same object if it has none."""
    if not any(holds_views(field.type) for field in schema):
        return schema
    return pa.schema([field.with_type(without_views(field.type)) for field in schema])


def form_with_rows(data_type: pa.DataType) -> str | None:
    """What to do with values of a type if Arrow cannot take some of them from a column, as all steps do; else None."""
    if pa.types.is_run_end_encoded(data_type):
        return "decode it first, with pyarrow.compute.run_end_decode"
    if pa.types.is_union(data_type):
        return "use a struct with a field for each type"
    if pa.types.is_dictionary(data_type):
        return form_with_rows(data_type.value_type)
    fields = (data_type.field(position) for position in range(data_type.num_fields))
    return next((found for field in fields if (found := form_with_rows(field.type)) is not None), None)


def settled_type(data_type: pa.DataType) -> pa.DataType:
    """The type without polars' variants.

    Large strings and lists, views and categories become the plain ones.
    """
    if data_type in (pa.large_string(), pa.string_view()):
        return pa.string()
    if data_type in (pa.large_binary(), pa.binary_view()):
        return pa.binary()
    if pa.types.is_dictionary(data_type):
        return settled_type(data_type.value_type)
    if pa.types.is_large_list(data_type) or pa.types.is_list(data_type):
        return pa.list_(settled_type(data_type.value_type))
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(settled_type(data_type.value_type), data_type.list_size)
    if pa.types.is_struct(data_type):
        return pa.struct([pa.field(field.name, settled_type(field.type)) for field in data_type])
    if pa.types.is_map(data_type):
        return pa.map_(settled_type(data_type.key_type), settled_type(data_type.item_type))
    return data_type


def comparable(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The same values in a type that Arrow compares, sorts and groups: it cannot do so with float16."""
    return column.cast(pa.float32()) if pa.types.is_float16(column.type) else column


def _field_without_views(data_type: pa.DataType) -> pa.Field:
    return data_type.value_field.with_type(without_views(data_type.value_type))
