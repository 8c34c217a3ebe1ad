"""Casts between Arrow types without any loss.

Arrow's safe casts are not enough: they turn 7 into True, 23:59 into a date, 0.125 into 0.12 and a number into a time.
Rules:

- Types of one family are cast: numbers to numbers, text and bytes to each other, times to times, durations to
  durations. A cast between families is refused before any value is read.
- Every value must be unchanged after a cast to the requested type and back. The sign of zero counts, and NaN equals
  NaN.
- Nested values are cast leaf by leaf. Fields of a struct are found by name. A field that is only in the stored type is
  not read; a field that the stored type lacks is refused, or null where the caller allows that.
- A value that does not fit is reported with its column and row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from tidegate.storage.user_values import marked

_VALUE_CHARACTERS_MAX = 80


class InexactValueError(ValueError):
    """Raised for a value that does not fit the requested type.

    `row` is the 0-based index in the array that was cast.
    """

    def __init__(self, row: int, value: str, data_type: pa.DataType) -> None:
        super().__init__(f"{value} does not fit {data_type}")
        self.row = row
        self.value = value
        self.data_type = data_type


def refusal_of(
    stored: pa.DataType, wanted: pa.DataType, *, may_lack: bool = False, may_drop: bool = True
) -> str | None:
    """Returns why no value of type `stored` can be cast to `wanted`, or None if some values can. The text continues a
    sentence that begins with a column name.

    `may_lack`: fields of structs that the stored type lacks become null. `may_drop`: fields that only the stored type
    has are omitted.
    """
    inner = partial(refusal_of, may_lack=may_lack, may_drop=may_drop)
    if types.is_dictionary(stored):
        stored = stored.value_type
    if types.is_dictionary(wanted):
        wanted = wanted.value_type
    if stored.equals(wanted) or types.is_null(stored):
        return None
    if _is_list(stored) and _is_list(wanted):
        if types.is_fixed_size_list(wanted) and not types.is_fixed_size_list(stored):
            return f"is {stored} and not {wanted}"
        return _within("its elements", inner(stored.value_type, wanted.value_type))
    if types.is_map(stored) and types.is_map(wanted):
        keys = inner(stored.key_type, wanted.key_type)
        items = inner(stored.item_type, wanted.item_type)
        return _within("its keys", keys) or _within("its values", items)
    if types.is_struct(stored) and types.is_struct(wanted):
        names = [field.name for field in stored]
        if not may_drop and (lost := [name for name in names if wanted.get_field_index(name) < 0]):
            return f"has the field {lost[0]!r}, which would be lost"
        for field in wanted:
            if names.count(field.name) > 1:
                return f"has {names.count(field.name)} fields {field.name!r}"
            if field.name not in names:
                if may_lack and field.nullable:
                    continue
                return f"has no field {field.name!r}; it has {names}"
            found = inner(stored.field(field.name).type, field.type)
            if found is not None:
                return _within(f"its field {field.name!r}", found)
        return None
    if _family(stored) is None or _family(stored) != _family(wanted) or not _zones_agree(stored, wanted):
        return f"is {stored} and not {wanted}"
    return None


def exact_cast(array: pa.Array, wanted: pa.Field, *, rounds: bool = False) -> pa.Array:
    """Returns the array cast to the type of the field `wanted`. Call `refusal_of` first, which must have returned None.

    `rounds`: floats may lose digits in a floating type of less precision, but must not become infinite. Raises
    InexactValueError for the first value that does not fit, also for a null where the field allows none.
    """
    if not _fits(array, wanted, rounds):
        row = _first_row(len(array), lambda begin, end: _fits(array.slice(begin, end - begin), wanted, rounds))
        raise InexactValueError(row, text_of(array[row]), wanted.type)
    # All values are known to fit. A safe cast would also check values outside of a slice or below a null.
    return array if array.type.equals(wanted.type) else array.cast(wanted.type, safe=False)


def misencoded_row(array: pa.Array) -> int | None:
    """Returns the index of the first row with a string that is not valid UTF-8, or None.

    Arrow does not check strings in Parquet.
    """
    if not _has_text(array.type) or _is_encoded(array):
        return None
    return _first_row(len(array), lambda begin, end: _is_encoded(array.slice(begin, end - begin)))


def _is_encoded(array: pa.Array) -> bool:
    for leaf in leaves(array):
        if types.is_dictionary(leaf.type):
            # A dictionary may hold values that no row has.
            if not _is_valid_text(leaf.dictionary) and not _is_valid_text(leaf.dictionary_decode()):
                return False
        elif not _is_valid_text(leaf):
            return False
    return True


def _is_valid_text(array: pa.Array) -> bool:
    if not _is_text(array.type):
        return True
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _has_text(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return _has_text(kind.value_type)
    return _is_text(kind) or any(_has_text(kind.field(at).type) for at in range(kind.num_fields))


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def text_of(value: pa.Scalar) -> str:
    """Returns the repr of a value for an error text, between the marks of user values (`user_values.py`), cut after 80
    characters.
    """
    text = _odd_time(value)
    if text is None:
        try:
            text = repr(value.as_py())
        except (ValueError, OverflowError):  # Python has no such date.
            text = _count_text(value) if hasattr(value, "value") else f"a value of type {value.type}"
    return marked(text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]}…")


def _odd_time(value: pa.Scalar) -> str | None:
    """Returns the text of a date with a time of day, or of a time that is not one of a day, both of which Python would
    show as another value. None for all other values.
    """
    kind = value.type
    if not value.is_valid or not (types.is_date64(kind) or types.is_time(kind)):
        return None
    per_day = times_per_day("ms" if types.is_date64(kind) else kind.unit)
    is_odd = value.value % per_day != 0 if types.is_date64(kind) else not 0 <= value.value < per_day
    return _count_text(value) if is_odd else None


def _count_text(value: pa.Scalar) -> str:
    return f"{value.value} as {value.type}"


def times_per_day(unit: str) -> int:
    """Returns the number of a unit ("s", "ms", "us", "ns") in a day."""
    return 86_400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]


def leaves(array: pa.Array) -> Iterator[pa.Array]:
    """Yields the non-nested arrays inside an array, in the order of its type. Values below a null are omitted."""
    kind = array.type
    if types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
        kind = array.type
    if _is_list(kind):
        yield from leaves(array.flatten())
    elif types.is_struct(kind):
        for child in array.flatten():
            yield from leaves(child)
    else:
        yield array


def _within(where: str, reason: str | None) -> str | None:
    return None if reason is None else f"({where}) {reason}"


def _first_row(rows: int, fits: Callable[[int, int], bool]) -> int:
    """Returns the index of the first row that does not fit, by binary search.

    `fits` returns whether all rows of a range fit. At least one row must not fit.
    """
    begin, end = 0, rows
    while end - begin > 1:
        middle = (begin + end) // 2
        if fits(begin, middle):
            begin = middle
        else:
            end = middle
    return begin


def _fits(array: pa.Array, wanted: pa.Field, rounds: bool) -> bool:
    if not wanted.nullable and array.null_count:
        return False
    kind, stored = wanted.type, array.type
    if stored.equals(kind) and not _forbids_nulls(kind):
        return True
    if types.is_dictionary(kind) or types.is_dictionary(stored):
        values = array.dictionary if types.is_dictionary(stored) else array
        plain = kind.value_type if types.is_dictionary(kind) else kind
        # A dictionary may hold values that no row has.
        return _fits(values, pa.field("", plain), rounds) or _fits(_decoded(array), pa.field("", plain), rounds)
    if types.is_map(kind) and types.is_map(stored):
        entries = pa.list_(pa.struct([stored.key_field, stored.item_field]))
        fields = array.cast(entries).flatten().flatten()
        keys, items = fields
        return _fits(keys, kind.key_field, rounds) and _fits(items, kind.item_field, rounds)
    if _is_list(kind) and _is_list(stored):
        return _fits(array.flatten(), kind.value_field, rounds)
    if types.is_struct(kind) and types.is_struct(stored):
        children = dict(zip((field.name for field in stored), array.flatten(), strict=True))
        # A null struct has null fields, whatever the fields allow.
        there = array.is_valid()
        return all(
            _fits(children[field.name] if field.nullable else children[field.name].filter(there), field, rounds)
            for field in kind
            if field.name in children
        )
    if types.is_null(stored):
        return True
    try:
        result = array.cast(kind)
        if rounds and types.is_floating(kind) and types.is_floating(stored):
            return not pc.any(pc.and_(pc.is_inf(result), pc.invert(pc.is_inf(array)))).as_py()
        # Bytes are compared. A safe cast from bytes to a string would also require UTF-8.
        return _are_equal(array, result.cast(stored, safe=not _is_text(stored)))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False


def _decoded(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if types.is_dictionary(array.type) else array


def _are_equal(first: pa.Array, second: pa.Array) -> bool:
    """Returns whether two arrays of one type have equal values. 0.0 and -0.0 differ, NaN equals NaN."""
    if first.equals(second):
        if not types.is_floating(first.type) or not first.null_count < len(first):
            return True
    elif not types.is_floating(first.type):
        return False
    present = first.is_valid()
    if not present.equals(second.is_valid()):
        return False
    a, b = (each.filter(present).to_numpy(zero_copy_only=False) for each in (first, second))
    same = (a == b) & (np.signbit(a) == np.signbit(b))
    return bool(np.all(same | (np.isnan(a) & np.isnan(b))))


def _forbids_nulls(kind: pa.DataType) -> bool:
    """Returns whether a nested type has a field, at any depth, that is not nullable."""
    if types.is_dictionary(kind):
        return False
    if types.is_map(kind):
        # Arrow itself keeps keys from being null.
        return not kind.item_field.nullable or _forbids_nulls(kind.item_type)
    return any(not field.nullable or _forbids_nulls(field.type) for field in map(kind.field, range(kind.num_fields)))


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _family(kind: pa.DataType) -> str | None:
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if _is_text(kind):
        return "text"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "text"
    if types.is_fixed_size_binary(kind):
        return "text"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "time"
    if types.is_time(kind):
        return "time of day"
    return "duration" if types.is_duration(kind) else None


def _zones_agree(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Returns whether a cast between two types of time keeps the instant.

    A time without a zone may only be cast to UTC, and vice versa.
    """
    zones = [kind.tz if types.is_timestamp(kind) else None for kind in (stored, wanted)]
    return None not in zones or all(zone in (None, "UTC", "Etc/UTC", "+00:00") for zone in zones)
