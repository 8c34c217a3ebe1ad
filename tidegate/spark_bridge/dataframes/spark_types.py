"""Translates Spark schemas into Arrow schemas, and back.

Rules:

* A column keeps its values exactly. If that is impossible, an error names the column.
* Fields of a nullable struct are nullable (`without_false_promises`).
* Timestamps are in microseconds. If they have a time zone, it is UTC.
* An Arrow type that Spark lacks (unsigned or half-precision numbers, nanoseconds, …) becomes a larger or similar type
  that Spark has (`for_spark`). A cast to it is checked for overflow.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.types as types
from pyspark.errors import PySparkTypeError, PySparkValueError
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type
from pyspark.sql.types import ArrayType, DataType, MapType, NullType, StructType, UserDefinedType

from tidegate.storage.errors import ConfigurationError

# PySpark 4.3 requires the zone of timestamps; earlier ones take UTC, and no such argument.
_ZONE: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_type).parameters else {}

_WIDENED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}


def arrow_schema_of(schema: StructType) -> pa.Schema:
    """Returns the Arrow schema of a Spark schema.

    Raises ConfigurationError if there are no columns, or two with the same name. For a column whose type Arrow does not
    support, that has no type (void) or a user-defined type, the error names the column.
    """
    if not schema.fields:
        raise ConfigurationError("the DataFrame has no columns; select at least one")
    name, times = Counter(schema.names).most_common(1)[0]
    if times > 1:
        raise ConfigurationError(f"the DataFrame has {times} columns called {name!r}; rename them apart")
    fields = []
    for field in schema.fields:
        _refuse_unsupported(field.name, field.dataType)
        found = pa.field(field.name, _arrow_type_of(field.dataType), nullable=field.nullable)
        fields.append(found.with_type(without_false_promises(found)))
    return pa.schema(fields)


def without_false_promises(field: pa.Field) -> pa.DataType:
    """Returns the type of a field in which the fields of nullable structs are nullable, too.

    Spark declares the fields of a struct as never null if they are not null in structs that are not null. Arrow, files
    and kernels check that for null structs as well.
    """
    data_type = field.type
    if types.is_struct(data_type):
        inner = [part.with_nullable(part.nullable or field.nullable) for part in data_type]
        return pa.struct([part.with_type(without_false_promises(part)) for part in inner])
    if types.is_map(data_type):
        key = data_type.key_field
        item = data_type.item_field
        parts = [part.with_type(without_false_promises(part)) for part in (key, item)]
        return pa.map_(*parts, keys_sorted=data_type.keys_sorted)
    if types.is_list(data_type):
        element = data_type.value_field
        return pa.list_(element.with_type(without_false_promises(element)))
    return data_type


def readable_schema(df: DataFrame) -> StructType:
    """Returns `df.schema`. Raises ConfigurationError for a column with a type that only exists in Spark's JVM."""
    try:
        return df.schema
    except PySparkValueError:
        for field in json.loads(df._jdf.schema().json())["fields"]:
            try:
                StructType.fromJson({"type": "struct", "fields": [field]})
            except PySparkValueError as error:
                raise ConfigurationError(
                    f"column {field['name']!r} is of type {field['type']}, which Python cannot hold; cast it or drop it"
                ) from error
        raise


def spark_schema_of(schema: pa.Schema) -> StructType:
    """Returns the Spark schema of an Arrow schema. Rows must have the Arrow schema `for_spark(schema)`.

    Raises ConfigurationError, which names the column, for a type without an equivalent in Spark.
    """
    return from_arrow_schema(for_spark(schema), prefer_timestamp_ntz=True)


def for_spark(schema: pa.Schema) -> pa.Schema:
    """Returns the Arrow schema in which Spark accepts rows of `schema`. Types that Spark supports are unchanged.

    Raises ConfigurationError, which names the column, for a type without an equivalent in Spark.
    """
    fields = [pa.field(field.name, _spark_form(field.name, field.type), field.nullable) for field in schema]
    return pa.schema([field.with_type(without_false_promises(field)) for field in fields])


def _arrow_type_of(data_type: DataType) -> pa.DataType:
    return to_arrow_type(data_type, **_ZONE)


def _refuse_unsupported(column: str, data_type: DataType) -> None:
    if isinstance(data_type, NullType | UserDefinedType):
        raise ConfigurationError(
            f"column {column!r} is of type {data_type.simpleString()}, which a stream cannot hold; cast it "
            "to a plain type or drop it"
        )
    if isinstance(data_type, ArrayType):
        _refuse_unsupported(f"{column}.element", data_type.elementType)
    elif isinstance(data_type, MapType):
        _refuse_unsupported(f"{column}.key", data_type.keyType)
        _refuse_unsupported(f"{column}.value", data_type.valueType)
    elif isinstance(data_type, StructType):
        for field in data_type.fields:
            _refuse_unsupported(f"{column}.{field.name}", field.dataType)
    else:
        try:
            _arrow_type_of(data_type)
        except PySparkTypeError as error:
            raise ConfigurationError(
                f"column {column!r} is of type {data_type.simpleString()}, which Arrow cannot hold; cast it or drop it"
            ) from error


def _spark_form(column: str, arrow: pa.DataType) -> pa.DataType:
    if arrow in _WIDENED:
        return _WIDENED[arrow]
    if types.is_timestamp(arrow):
        return pa.timestamp("us", "UTC" if arrow.tz is not None else None)
    if types.is_duration(arrow):
        return pa.duration("us")
    if types.is_large_string(arrow) or types.is_string_view(arrow):
        return pa.string()
    if types.is_large_binary(arrow) or types.is_binary_view(arrow) or types.is_fixed_size_binary(arrow):
        return pa.binary()
    if types.is_dictionary(arrow):
        return _spark_form(column, arrow.value_type)
    if types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow):
        element = arrow.value_field
        return pa.list_(pa.field("element", _spark_form(f"{column}.element", element.type), element.nullable))
    if types.is_map(arrow):
        return pa.map_(
            pa.field("key", _spark_form(f"{column}.key", arrow.key_type), nullable=False),
            pa.field("value", _spark_form(f"{column}.value", arrow.item_type), arrow.item_field.nullable),
        )
    if types.is_struct(arrow):
        return pa.struct([pa.field(f.name, _spark_form(f"{column}.{f.name}", f.type), f.nullable) for f in arrow])
    if types.is_decimal(arrow) and arrow.precision <= 38:
        return pa.decimal128(arrow.precision, arrow.scale)
    plain = (types.is_boolean, types.is_signed_integer, types.is_floating, types.is_string, types.is_binary)
    if any(is_type(arrow) for is_type in plain) or types.is_date32(arrow):
        return arrow
    raise ConfigurationError(
        f"column {column!r} is of type {arrow}, which Spark has no type for; read the table with Arrow instead"
    )
