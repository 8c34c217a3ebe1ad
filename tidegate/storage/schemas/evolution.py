"""Migrates stored rows to the types that a program expects today (schema evolution).

Rules:

- A type may be widened if every stored value keeps its exact meaning: int32 to int64, float32 to float64, a finer unit
  of time, more digits, 32-bit integers to float64, and so on.
- A struct may gain fields, which are null in older rows, and lose fields, at any depth.
- Columns keep their names and their order. Any other change is refused, and the error names the state, the operator,
  the stored type and the expected type.
- Callers pass the stored types of key columns as the expected types: a key of another type may belong to another key
  group.

`common_schema` finds the one schema into which all stored rows of a state fit, when parts of the state were written
before and after a change. Integers (such as a sum) become floats where that is exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import widened, widened_schema
from tidegate.storage.schemas.column_names import columns_text

_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_FLOATS = (pa.float16(), pa.float32(), pa.float64())
_UNITS = ("s", "ms", "us", "ns")

_WIDER: frozenset[tuple[pa.DataType, pa.DataType]] = frozenset(
    {(one, other) for row in (_SIGNED, _UNSIGNED, _FLOATS) for i, one in enumerate(row) for other in row[i + 1 :]}
    | {(unsigned, signed) for i, unsigned in enumerate(_UNSIGNED) for signed in _SIGNED[i + 1 :]}
    | {(integer, pa.float64()) for integer in (*_SIGNED[:3], *_UNSIGNED[:3])}
    | {(pa.string(), pa.large_string()), (pa.binary(), pa.large_binary()), (pa.date32(), pa.date64())}
)


def migrated(rows: pa.RecordBatch, expected: pa.Schema, state: str, uid: str) -> pa.RecordBatch:
    """Converts stored rows of a state to the expected schema. Returns `rows` itself if nothing changes.

    Raises ConfigurationError if a type has changed to one that cannot hold the stored values, or a value does not fit.
    `state` and `uid` name the state and the operator in the error.
    """
    found = rows.schema
    if found.equals(expected):
        return rows
    where = f"state {state!r} of operator {uid!r}"
    if found.names != expected.names:
        raise ConfigurationError(
            f"{where} was stored with columns {columns_text(found)}, and the program expects {columns_text(expected)}; "
            f"{_ADVICE}"
        )
    columns = []
    for column, before, now in zip(rows.columns, found, expected, strict=True):
        reason = _refusal(before, now)
        if reason is not None:
            raise _refused(where, before, now, reason)
        try:
            columns.append(column if before.type.equals(now.type) else column.cast(now.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise _refused(where, before, now, str(error)) from error
    return pa.RecordBatch.from_arrays(columns, schema=expected)


_ADVICE = (
    "change the type back, or rename the new state, or give the operator a new uid, to start without the stored state"
)


def _refused(where: str, before: pa.Field, now: pa.Field, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} was stored with {before.name!r} as {before.type}, and the program expects {now.type}: {reason}; "
        f"{_ADVICE}"
    )


def widens(before: pa.DataType, now: pa.DataType) -> bool:
    """Returns whether every value of the type `before` can be converted to the type `now` without a loss."""
    return _type_refusal(before, now) is None


def _refusal(before: pa.Field, now: pa.Field) -> str | None:
    """Returns why the field `now` cannot hold the stored values of `before`, or None if it can."""
    if before.nullable and not now.nullable:
        return f"{now.name!r} may not be null now"
    return _type_refusal(before.type, now.type)


def _type_refusal(before: pa.DataType, now: pa.DataType) -> str | None:
    types = pa.types
    if before.equals(now) or types.is_null(before) or (before, now) in _WIDER:
        return None
    if types.is_struct(before) and types.is_struct(now):
        return _struct_refusal(before, now)
    if types.is_map(before) and types.is_map(now):
        # Keys may not lose fields: two keys might become one.
        if types.is_nested(before.key_type) and not before.key_type.equals(now.key_type):
            return "the type of its keys has changed"
        return _refusal(before.key_field, now.key_field) or _refusal(before.item_field, now.item_field)
    if _is_list(before) and (types.is_large_list(now) or type(before) is type(now)):
        if types.is_fixed_size_list(before) and before.list_size != now.list_size:
            return "the lists have another length"
        return _refusal(before.value_field, now.value_field)
    if types.is_dictionary(before) and types.is_dictionary(now):
        if before.ordered != now.ordered or before.index_type.bit_width > now.index_type.bit_width:
            return "the dictionary has other indexes"
        return _type_refusal(before.value_type, now.value_type)
    if _is_exact_number(before, now) or _is_finer(before, now):
        return None
    return f"{before} cannot become {now} without a loss"


def _struct_refusal(before: pa.StructType, now: pa.StructType) -> str | None:
    old = {field.name: field for field in before}
    new = {field.name: field for field in now}
    if len(old) < before.num_fields or len(new) < now.num_fields:
        return "a struct has two fields of one name"
    if not old.keys() & new.keys():
        return f"no field of {before} is left"
    for name, field in new.items():
        if name not in old and not field.nullable:
            return f"the new field {name!r} may not be null, and nothing was stored for it"
        if name in old and (reason := _refusal(old[name], field)) is not None:
            return f"in field {name!r}, {reason}"
    return None


def _is_list(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(data_type) or types.is_large_list(data_type) or types.is_fixed_size_list(data_type))


def _is_exact_number(before: pa.DataType, now: pa.DataType) -> bool:
    """Returns whether both types are decimals, and `now` has at least as many digits on both sides of the point."""
    if not (pa.types.is_decimal(before) and pa.types.is_decimal(now)):
        return False
    digits_kept = now.precision - now.scale >= before.precision - before.scale
    return bool(digits_kept and now.scale >= before.scale and now.bit_width >= before.bit_width)


def _is_finer(before: pa.DataType, now: pa.DataType) -> bool:
    """Returns whether both are types of time, and `now` has the same or a finer unit.

    Overflows are found by the conversion.
    """
    types = pa.types
    alike = types.is_timestamp(before) and types.is_timestamp(now) and before.tz == now.tz
    alike = alike or (types.is_time(before) and types.is_time(now))
    alike = alike or (types.is_duration(before) and types.is_duration(now))
    return bool(alike and _UNITS.index(before.unit) <= _UNITS.index(now.unit))


def common_schema(schemas: Iterable[pa.Schema], state: str, uid: str) -> pa.Schema:
    """Returns the newest of several stored schemas (given oldest first) that can hold the rows of all of them.

    Raises ConfigurationError, with both types, if there is none.
    """
    distinct = list(dict.fromkeys(map(widened_schema, schemas)))
    assert distinct, "a state without a schema"
    refused: ConfigurationError | None = None
    for schema in reversed(distinct):
        try:
            for other in distinct:
                adapted(_no_rows(other), schema, state, uid)
        except ConfigurationError as error:
            refused = refused or error
            continue
        return schema
    assert refused is not None, "no schema was tried"
    raise refused


def adapted(rows: pa.RecordBatch, schema: pa.Schema, state: str, uid: str) -> pa.RecordBatch:
    """Converts stored rows to a schema that `common_schema` returned.

    Raises ConfigurationError if a value does not fit.
    """
    rows = widened(rows)
    for position, (before, now) in enumerate(zip(rows.schema, schema, strict=False)):
        if before.type == pa.int64() and now.type == pa.float64():
            try:
                rows = rows.set_column(position, now, rows.column(position).cast(now.type))
            except pa.ArrowInvalid as error:
                raise ConfigurationError(
                    f"state {state!r} of operator {uid!r} has numbers in {before.name!r} that float64 cannot hold "
                    f"exactly: {error}; read it from a checkpoint before the column changed its type"
                ) from error
    fitting = migrated(rows, schema, state, uid)
    return pa.RecordBatch.from_arrays(fitting.columns, schema=schema)


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
