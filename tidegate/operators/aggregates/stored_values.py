"""How single values of a column are kept in the columns of a table, and what such columns say.

Most types are kept as they are, in a column with the name of the aggregate: numbers and times where kernels change them
in place, strings and nested values as Arrow values. Two are not, and their columns say so by a suffix, so that stored
columns alone tell the type of the values:

- A boolean is a byte, in `_tidegate_x.as_bool`.
- A decimal is the two words of its 128 bits, in `_tidegate_x.decimal(10,2).high` and `_tidegate_x.decimal(10,2).low`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.accumulate import decimal_words, decimals_of
from tidegate.state.kernels.columns import array_of, fixed_values, plain, storage_dtype
from tidegate.storage.schemas.reserved_names import is_reserved, part_name

_BOOL = ".as_bool"
_DECIMAL = re.compile(r"\.decimal\((\d+),(-?\d+)\)\.(?:high|low)$")
DIGITS_MAX = 38
"""Most digits of a decimal of 128 bits."""


def is_small_decimal(data_type: pa.DataType) -> bool:
    """Whether the type is a decimal of at most 128 bits."""
    return bool(pa.types.is_decimal(data_type) and data_type.bit_width <= 128)


def is_fixed(data_type: pa.DataType) -> bool:
    """Whether values of a type without dictionaries are kept in columns of fixed width."""
    return storage_dtype(data_type) is not None or pa.types.is_boolean(data_type) or is_small_decimal(data_type)


def is_text(data_type: pa.DataType) -> bool:
    """Whether values of a type, as they are kept, are strings or bytes."""
    kinds, kept = pa.types, kept_type(data_type)
    return bool(
        kinds.is_string(kept) or kinds.is_large_string(kept) or kinds.is_binary(kept) or kinds.is_large_binary(kept)
    )


def kept_type(data_type: pa.DataType) -> pa.DataType:
    """The type in which values that are of no fixed width are kept: without encodings."""
    return plain(pa.array([], data_type)).type


def value_suffixes(data_type: pa.DataType) -> tuple[str, ...]:
    """Suffixes of the columns that keep a value of a type without dictionaries."""
    if pa.types.is_boolean(data_type):
        return (_BOOL,)
    if is_small_decimal(data_type):
        return decimal_suffixes(data_type.precision, data_type.scale)
    return ("",)


def value_fields(name: str, data_type: pa.DataType, suffix: str = "") -> tuple[pa.Field, ...]:
    """Columns that keep a value of a type, for the aggregate `name`. `suffix` says which of its values it is."""
    suffixes = value_suffixes(data_type)
    if pa.types.is_boolean(data_type):
        return (pa.field(part_name(name, suffix + _BOOL), pa.uint8()),)
    if len(suffixes) == 1:
        return (pa.field(part_name(name, suffix), data_type if is_fixed(data_type) else kept_type(data_type)),)
    high, low = (part_name(name, suffix + each) for each in suffixes)
    return (pa.field(high, pa.int64()), pa.field(low, pa.uint64()))


def value_type(fields: Sequence[pa.Field]) -> pa.DataType:
    """The type of the values that columns (at least those of `value_fields`) keep."""
    first = fields[0]
    if is_reserved(first.name) and first.name.endswith(_BOOL):
        return pa.bool_()
    decimal = decimal_of(first.name)
    return first.type if decimal is None else decimal


def decimal_of(name: str) -> pa.DataType | None:
    """The type of the decimals that are kept in a column of this name; None if it keeps no decimals."""
    found = _DECIMAL.search(name) if is_reserved(name) else None
    return None if found is None else pa.decimal128(int(found[1]), int(found[2]))


def decimal_suffixes(precision: int, scale: int) -> tuple[str, str]:
    """Suffixes of the columns of a decimal."""
    return f".decimal({precision},{scale}).high", f".decimal({precision},{scale}).low"


def value_words(column: pa.Array) -> list[NDArray[Any]]:
    """The values of a column as they are kept where their width is fixed: an array for each of `value_fields`.

    Without dictionaries. Undefined under a null.
    """
    if pa.types.is_boolean(column.type):
        return [fixed_values(column.cast(pa.uint8()))]
    if pa.types.is_decimal(column.type):
        highs, lows = decimal_words(column.cast(pa.decimal128(column.type.precision, column.type.scale)))
        return [highs, lows]
    return [fixed_values(column)]


def value_array(words: Sequence[NDArray[Any]], valid: NDArray[np.uint8] | None, data_type: pa.DataType) -> pa.Array:
    """The column whose values are kept as these arrays. Entries with `valid` 0 are null."""
    if pa.types.is_boolean(data_type):
        bits = pa.py_buffer(np.packbits(words[0] == 1, bitorder="little"))
        bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(pa.bool_(), len(words[0]), [bitmap, bits])
    if pa.types.is_decimal(data_type):
        return decimals_of(words[0], words[1], valid, data_type)
    return array_of(words[0], valid, data_type)
