"""Migrates stored rows to the types that a program expects today (schema evolution).

Rules: a type may be widened, so that every value that was stored keeps its exact meaning (int32 to int64, float32 to
float64, a finer unit of time, more digits, and so on; 32-bit integers also to float64); a struct may get fields (null
in what was stored) and lose fields, at any depth. Columns keep their names and their order. Anything else is refused,
and the error says which state of which operator it is, what it was and what it should be.

Of key columns the stored types are to be expected: a key of another type may belong to another key group.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.columns_text import columns_text

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
    """Stored rows of a state in the columns that are expected; the same object where they are what they were.

    ConfigurationError if a type has changed to one that cannot hold what was stored, or a value does not fit.
    """
    found = rows.schema
    if found.equals(expected):
        return rows
    whose = f"state {state!r} of operator {uid!r}"
    if found.names != expected.names:
        raise ConfigurationError(
            f"{whose} was stored with columns {columns_text(found)}, and the program expects {columns_text(expected)}; "
            f"{_ADVICE}"
        )
    columns = []
    for column, before, now in zip(rows.columns, found, expected, strict=True):
        reason = _refusal(before, now)
        if reason is not None:
            raise _refused(whose, before, now, reason)
        try:
            columns.append(column if before.type.equals(now.type) else column.cast(now.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise _refused(whose, before, now, str(error)) from error
    return pa.RecordBatch.from_arrays(columns, schema=expected)


_ADVICE = (
    "give the state back its type, or give the new one another name, or the operator a new uid, to start without what "
    "was stored"
)


def _refused(whose: str, before: pa.Field, now: pa.Field, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{whose} was stored with {before.name!r} as {before.type}, and the program expects {now.type}: {reason}; "
        f"{_ADVICE}"
    )


def widens(before: pa.DataType, now: pa.DataType) -> bool:
    """Whether every value of a type has the same meaning in another one."""
    return _type_refusal(before, now) is None


def _refusal(before: pa.Field, now: pa.Field) -> str | None:
    """Why what a field held cannot be held by it now; None if it can."""
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
        # Of keys nothing may be left out: two of them might become one.
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
    """Whether a decimal has as many digits as before on both sides of the point, or more."""
    if not (pa.types.is_decimal(before) and pa.types.is_decimal(now)):
        return False
    digits_kept = now.precision - now.scale >= before.precision - before.scale
    return bool(digits_kept and now.scale >= before.scale and now.bit_width >= before.bit_width)


def _is_finer(before: pa.DataType, now: pa.DataType) -> bool:
    """Whether a time has the same or a finer unit; whether its values fit is seen when they are converted."""
    types = pa.types
    alike = types.is_timestamp(before) and types.is_timestamp(now) and before.tz == now.tz
    alike = alike or (types.is_time(before) and types.is_time(now))
    alike = alike or (types.is_duration(before) and types.is_duration(now))
    return bool(alike and _UNITS.index(before.unit) <= _UNITS.index(now.unit))
