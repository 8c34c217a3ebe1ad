"""Converts rows between Python and Arrow without changing a value, and copies rows that functions of users return.

`exact_array` and `exact_cast` convert values to Arrow columns. Rows that functions return (`PinnedSchema`) and values
of state (`StateType`) use them. Rules:

- A value keeps its meaning, or an error names it. Arrow alone would cut off parts that do not fit: the fraction of a
  float in an integer column, the time of day in a date, microseconds, keys that a struct does not have.
- A dict in a row that a function returns, or in a value of state, must have every field of its struct, because a
  forgotten field would become null.
- A column that a function returns is cast by the same rules (`exact_casts.py`), but not between numbers and text.
- A float without a fraction counts as an integer. A float in a float32 or float16 column is rounded, which is the
  purpose of such a column, but never to infinity.
- An integer in a time column counts the unit of the column. A time with a time zone needs a column with a time zone,
  and vice versa.
- NaT and NA of pandas are nulls, because pandas' `to_dict` leaves them in rows. True and False are not numbers.
- Values of common Python types are checked by type, in one pass. Only values of other types are checked one by one.

`owned_row` and `owned_value` copy objects that a function yields, returns or emits, because the function may change its
object afterwards. Rules:

- A row is a mapping, a dataclass object or a named tuple. It becomes a dict, and so do such objects inside it.
- A row is always copied. A value inside is copied if it is mutable: lists, dicts, arrays, byte arrays.
  `owned_row_copier` skips the check of each value if no column has a type for mutable values.
- Batches are copied by `owned_batch` in `batches.py`.

`python_rows` returns the rows of a batch as dicts, like `RecordBatch.to_pylist` but faster. Rules:

- Values equal the results of Arrow's own conversion. Only types for which NumPy creates the same objects at once use
  NumPy.
- A time of day with a fraction of a microsecond is refused, where Arrow would cut it off. (For timestamps and durations
  in nanoseconds Arrow creates pandas objects, or raises without pandas.)
- The loop over the rows is compiled for the column names, as `dataclasses` compiles methods. A dict display with
  constant keys takes a third of the time of `dict(zip(names, values))`.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from types import GeneratorType, NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.state.kernels.columns import plain
from tidegate.storage.schemas import exact_casts
from tidegate.storage.schemas.batches import owned_batch, owned_table
from tidegate.storage.user_values import value_text

_VALUE_CHARACTERS_MAX = 200
_MILLISECOND = 1_000
_SECOND = 1_000_000
_SURROGATE = 'half of a surrogate pair is not valid text; decode the source with errors="replace"'
_FLOATING = (float, np.floating)


class InexactValueError(ValueError):
    """Raised for a value that the type of a column cannot represent exactly."""

    def __init__(self, value: object, wanted: pa.DataType, reason: str) -> None:
        super().__init__(f"{wanted} cannot hold {shown(value)} ({type(value).__name__}): {reason}")


def shown(value: object) -> str:
    """Returns the text of a value for an error, limited in length."""
    return value_text(value, _VALUE_CHARACTERS_MAX)


def exact_array(values: Sequence[Any], wanted: pa.DataType | None = None, *, complete: bool = False) -> pa.Array:
    """Returns values as an Arrow array of type `wanted`, or of their common type if it is None.

    With `complete`, a dict must have every field of the struct type. Otherwise missing fields are null. Raises
    InexactValueError for a value that would change, and ArrowException if values have no common type.
    """
    kinds = set(map(type, values))
    if any(issubclass(kind, pa.Scalar) for kind in kinds):
        plain = [value.as_py() if isinstance(value, pa.Scalar) else value for value in values]
        return exact_array(plain, wanted, complete=complete)
    if any(map(_is_missing, kinds)):
        return exact_array(_with_nulls(values), wanted, complete=complete)
    try:
        array = _inferred(values) if wanted is None else pa.array(values, type=wanted)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        if wanted is None and not isinstance(error, UnicodeError):
            raise
        raise _first_refused(values, pa.string() if wanted is None else wanted, error) from error
    _check(values, array.type, complete, array, kinds)
    return array


def check_exact(values: Sequence[Any], array: pa.Array) -> None:
    """Raises InexactValueError if a value of `array`, which Arrow made of `values`, differs from the original value."""
    _check(values, array.type, complete=False, array=array)


def _is_missing(kind: type) -> bool:
    """Returns whether values of a type are the nulls of pandas (NaT, NA). Does not import pandas."""
    return kind.__name__ in ("NaTType", "NAType") and kind.__module__.partition(".")[0] == "pandas"


def _with_nulls(values: Sequence[Any]) -> list[Any]:
    return [None if _is_missing(type(value)) else value for value in values]


def _inferred(values: Sequence[Any]) -> pa.Array:
    array = pa.array(values)
    # Arrow treats pandas' moments as Python's, which have no nanoseconds.
    if pa.types.is_timestamp(array.type) and any(getattr(value, "nanosecond", 0) for value in values):
        return pa.array(values, type=pa.timestamp("ns", array.type.tz))
    if pa.types.is_duration(array.type) and any(getattr(value, "nanoseconds", 0) for value in values):
        return pa.array(values, type=pa.duration("ns"))
    return array


def exact_cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Casts an array to another type, if no value changes. Floats may be rounded to a shorter float type.

    Raises InexactValueError if a value would change.
    """
    if pa.types.is_integer(column.type) and pa.types.is_temporal(wanted):
        return column.cast(wanted)
    if (reason := exact_casts.refusal_of(column.type, wanted, may_drop=False)) is not None:
        first = pc.index(column.is_valid(), True).as_py()
        raise InexactValueError(None if first < 0 else _python(column[first]), wanted, f"the column {reason}")
    try:
        return exact_casts.exact_cast(column, pa.field("", wanted), rounds=True)
    except exact_casts.InexactValueError as error:
        raise InexactValueError(_python(column[error.row]), wanted, "it would change") from error


def _python(value: pa.Scalar) -> object:
    """Returns an Arrow value as a Python object for an error text, or as a string if Python cannot represent it."""
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return str(value)


def column_of(values: Any, wanted: pa.DataType) -> pa.Array:
    """Converts the column that a function returns (an Arrow or NumPy array, a polars series, a list) to a type.

    A dict in a list, or in an array of objects, must have every field of its struct. Raises InexactValueError or
    ArrowException if a value would change or cannot be converted.
    """
    if isinstance(values, list | tuple):
        return exact_array(values, wanted, complete=True)
    column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    dtype = getattr(values, "dtype", None)
    if pa.types.is_nested(column.type) and isinstance(dtype, np.dtype) and dtype.hasobject:
        # Arrow has filled in the fields that only other dicts have.
        given = [value if valid else None for value, valid in zip(values, column.is_valid().to_pylist(), strict=True)]
        return exact_array(given, wanted, complete=True)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column if column.type == wanted else exact_cast(column, wanted)


def _first_refused(values: Sequence[Any], wanted: pa.DataType, error: Exception) -> InexactValueError:
    """Returns the error for the first value that Arrow cannot convert, found by trying the values one by one."""
    for value in values:
        try:
            pa.array([value], type=wanted)
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as refusal:
            reason = _SURROGATE if isinstance(refusal, UnicodeError) else str(refusal)
            if reason.startswith(("Could not convert", "object of type", "an integer is required")):
                reason = "values of this type do not fit"  # Arrow only repeats the value and both types
            return InexactValueError(value, wanted, reason)
    return InexactValueError(values, wanted, str(error))


def _check(
    values: Sequence[Any],
    wanted: pa.DataType,
    complete: bool,
    array: pa.Array | None = None,
    kinds: set[type] | None = None,
) -> None:
    """Raises InexactValueError for a value that Arrow would change in a column of type `wanted`.

    `array` is the converted column. `kinds` are the Python types of the values, or None if not known.
    """
    kinds = set(map(type, values)) if kinds is None else kinds
    kinds.discard(NoneType)
    if any(map(_is_missing, kinds)):
        values = _with_nulls(values)
        kinds = {kind for kind in kinds if not _is_missing(kind)}
    if pa.types.is_nested(wanted) or pa.types.is_dictionary(wanted):
        _check_nested(values, kinds, wanted, complete)
    elif pa.types.is_floating(wanted) and all(kind is int or issubclass(kind, _FLOATING) for kind in kinds):
        if not pa.types.is_float64(wanted):
            _check_finite(values, wanted, array)
    elif not kinds <= _EXACT.get(wanted.id, _NONE):
        if kinds <= {int, float} and pa.types.is_integer(wanted):
            _check_each((v for v in values if type(v) is float), wanted, float.is_integer, "it is not a whole number")
        elif not (kinds == {int} and pa.types.is_temporal(wanted)):
            _check_round_trip(values, wanted, array)
    elif kinds and pa.types.is_temporal(wanted):
        _check_times([value for value in values if value is not None] if None in values else values, kinds, wanted)


def _check_nested(values: Sequence[Any], kinds: set[type], wanted: pa.DataType, complete: bool) -> None:
    present = [value for value in values if value is not None]
    if pa.types.is_dictionary(wanted):
        _check(values, wanted.value_type, complete)
    elif pa.types.is_struct(wanted):
        _check_kinds(present, kinds, (dict, Mapping), wanted, "it is not a dict")
        names = {field.name for field in wanted}
        if not set(chain.from_iterable(present)) <= names:
            value = next(value for value in present if not value.keys() <= names)
            extra = ", ".join(repr(name) for name in value if name not in names)
            raise InexactValueError(value, wanted, f"the type has no field {extra}")
        if complete and any(len(value) < len(names) for value in present):
            value = next(value for value in present if len(value) < len(names))
            lacks = [field.name for field in wanted if field.name not in value]
            raise InexactValueError(
                value, wanted, f"it lacks {', '.join(map(repr, lacks))}; give {lacks[0]!r}: None for a null"
            )
        for field in wanted:
            _check_field([value.get(field.name) for value in present], field, wanted, complete)
    elif pa.types.is_map(wanted):
        _check_kinds(present, kinds, (dict, Mapping, list, tuple), wanted, "it is not a dict")
        pairs = [pair for value in present for pair in (value.items() if isinstance(value, Mapping) else value)]
        _check([key for key, _ in pairs], wanted.key_type, complete)
        _check_field([item for _, item in pairs], wanted.item_field, wanted, complete)
    elif isinstance(
        wanted, pa.ListType | pa.LargeListType | pa.FixedSizeListType | pa.ListViewType | pa.LargeListViewType
    ):
        _check_kinds(present, kinds, (list, tuple, np.ndarray), wanted, "it is neither a list nor a tuple")
        if np.ndarray in kinds:
            present = [value.tolist() if isinstance(value, np.ndarray) else value for value in present]
        _check_field(list(chain.from_iterable(present)), wanted.value_field, wanted, complete)
    else:
        _check_round_trip(values, wanted, None)


def _check_field(values: list[Any], field: pa.Field, around: pa.DataType, complete: bool) -> None:
    if not field.nullable and None in values:
        raise InexactValueError(None, around, f"{field.name!r} in it cannot be null")
    _check(values, field.type, complete)


def _check_kinds(
    present: Sequence[Any], kinds: set[type], allowed: tuple[type, ...], wanted: pa.DataType, reason: str
) -> None:
    if not all(issubclass(kind, allowed) for kind in kinds):
        raise InexactValueError(next(v for v in present if not isinstance(v, allowed)), wanted, reason)


def _check_each(values: Iterable[Any], wanted: pa.DataType, holds: Callable[[Any], bool], reason: str) -> None:
    values = list(values)
    if not all(map(holds, values)):
        raise InexactValueError(next(value for value in values if not holds(value)), wanted, reason)


def _check_finite(values: Sequence[Any], wanted: pa.DataType, array: pa.Array | None) -> None:
    array = pa.array(values, type=wanted) if array is None else array
    if pc.any(pc.is_inf(array)).as_py():
        for value, taken in zip(values, array.to_pylist(), strict=True):
            if taken is not None and math.isinf(taken) and not math.isinf(value):
                raise InexactValueError(value, wanted, "it is too large")


def _check_times(present: Sequence[Any], kinds: set[type], wanted: pa.DataType) -> None:
    """Raises InexactValueError for a time that is finer than the unit of the column, or that has a time zone where the
    column has none, or vice versa.
    """
    if kinds & {dt.datetime, dt.time}:
        zoned = [value for value in present if value.tzinfo is not None] if any(map(_TZINFO, present)) else []
        if getattr(wanted, "tz", None) is None:
            if zoned:
                raise InexactValueError(zoned[0], wanted, "it has a time zone, and the column has none")
        elif len(zoned) < len(present):
            value = next(value for value in present if value.tzinfo is None)
            raise InexactValueError(value, wanted, "it has no time zone, and the column has one")
    step = {"s": _SECOND, "ms": _MILLISECOND}.get(getattr(wanted, "unit", "us"))
    if step is not None:
        part = _MICROSECONDS if dt.timedelta in kinds else _MICROSECOND
        if any(micros % step for micros in map(part, present)):
            value = next(value for value in present if part(value) % step)
            raise InexactValueError(value, wanted, "it is finer than the unit of the column")


def _check_round_trip(values: Sequence[Any], wanted: pa.DataType, array: pa.Array | None) -> None:
    array = pa.array(values, type=wanted) if array is None else array
    for value, taken in zip(values, array.to_pylist(), strict=True):
        if value is None or (taken != taken and value != value):
            continue
        if taken == value and isinstance(value, bool | np.bool_) == isinstance(taken, bool):
            continue
        raise InexactValueError(value, wanted, f"it would become {shown(taken)}")


_TZINFO, _MICROSECOND, _MICROSECONDS = attrgetter("tzinfo"), attrgetter("microsecond"), attrgetter("microseconds")
_NONE: frozenset[type] = frozenset()


def _exact_types() -> dict[int, frozenset[type]]:
    """Returns, for the id of each Arrow type, the Python types whose values Arrow either stores exactly or refuses."""
    exact: dict[int, frozenset[type]] = {}
    for made in (pa.int8, pa.int16, pa.int32, pa.int64, pa.uint8, pa.uint16, pa.uint32, pa.uint64):
        exact[made().id] = frozenset({int})
    for made in (pa.string, pa.large_string, pa.string_view):
        exact[made().id] = frozenset({str})
    for made in (pa.binary, pa.large_binary, pa.binary_view):
        exact[made().id] = frozenset({bytes})
    exact[pa.binary(1).id] = frozenset({bytes})
    exact[pa.bool_().id] = frozenset({bool})
    for wide in (pa.decimal32(1), pa.decimal64(1), pa.decimal128(1), pa.decimal256(1)):
        exact[wide.id] = frozenset({decimal.Decimal, int})
    for date in (pa.date32(), pa.date64()):
        exact[date.id] = frozenset({dt.date})
    for time in (pa.time32("s"), pa.time64("us")):
        exact[time.id] = frozenset({dt.time})
    exact[pa.timestamp("us").id] = frozenset({dt.datetime})
    exact[pa.duration("us").id] = frozenset({dt.timedelta})
    return exact


_EXACT = _exact_types()


_FIXED = frozenset(
    {
        *(NoneType, bool, int, float, str, bytes, decimal.Decimal, uuid.UUID),
        *(dt.datetime, dt.date, dt.time, dt.timedelta),
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, np.datetime64, np.timedelta64, np.str_, np.bytes_),
    }
)
"""Python types whose objects are immutable."""
_LEFT_ALONE = (pa.Scalar, str, bytes, int, float, dt.date, dt.time, dt.timedelta, decimal.Decimal, np.generic)
"""Types whose subclasses also count as immutable, such as pandas' timestamps and enumerations of strings."""

RowCopier = Callable[[Any], dict[str, Any]]


def owned_row(row: Any) -> dict[str, Any]:
    """Returns a row as a new dict that shares no mutable object with it.

    Raises TypeError if `row` is not a mapping, a dataclass object or a named tuple.
    """
    if not isinstance(row, Mapping):
        row = _fields_of(row)
    return {name: value if type(value) in _FIXED else owned_value(value) for name, value in row.items()}


def owned_flat_row(row: Any) -> dict[str, Any]:
    """Returns a row as a new dict, without copying its values, which are immutable.

    Raises TypeError if it is not a row.
    """
    if type(row) is dict:
        return row.copy()
    return dict(row) if isinstance(row, Mapping) else _fields_of(row)


def owned_row_copier(schema: pa.Schema | None) -> RowCopier:
    """Returns the function that copies rows of a schema: `owned_flat_row` if all columns have immutable values, else
    `owned_row`.

    `schema` is None if it is not known yet.
    """
    return owned_row if schema is None or any(_may_change(field.type) for field in schema) else owned_flat_row


def owned_value(value: Any) -> Any:
    """Returns a copy of a value, or the value itself if it is immutable."""
    kind = type(value)
    if kind in _FIXED:
        return value
    if kind is list:
        if _FIXED.issuperset(map(type, value)):
            return value.copy()
        return [owned_value(part) for part in value]
    if kind is dict:
        return {name: part if type(part) in _FIXED else owned_value(part) for name, part in value.items()}
    if kind is tuple:
        return tuple([owned_value(part) for part in value])
    if kind is memoryview:
        return bytes(value)
    if is_record(value):
        return {name: owned_value(part) for name, part in _fields_of(value).items()}
    if isinstance(value, _LEFT_ALONE):
        return value
    try:
        return copy.deepcopy(value)
    except TypeError as error:
        raise TypeError(
            f"a row has a {kind.__name__}, which is not a value of a column and cannot be copied ({error}); return a "
            "number, a text, a list, a dict or another value that a column has"
        ) from error


def owned_result(result: Any) -> Any:
    """Returns a copy of a function's result: a row, a batch or a table. Returns other objects unchanged."""
    if isinstance(result, Mapping) or is_record(result):
        return owned_row(result)
    if isinstance(result, pa.RecordBatch):
        return owned_batch(result)
    if isinstance(result, pa.Table):
        return owned_table(result)
    return result


def _may_change(data_type: pa.DataType) -> bool:
    """Returns whether a column of a type accepts mutable Python values."""
    kinds = pa.types
    if kinds.is_dictionary(data_type):
        return _may_change(data_type.value_type)
    return not (
        kinds.is_integer(data_type)
        or kinds.is_floating(data_type)
        or kinds.is_boolean(data_type)
        or kinds.is_string(data_type)
        or kinds.is_large_string(data_type)
        or kinds.is_string_view(data_type)
        or kinds.is_decimal(data_type)
        or kinds.is_temporal(data_type)
    )


def returned_rows(returned: object) -> Iterable[Any]:
    """Returns the result of a function that returns several rows.

    Raises TypeError if it is one row, a text, or not iterable. The keys of a dict would be taken for rows, and an empty
    dict for no rows.
    """
    kind = type(returned)
    if kind is list or kind is GeneratorType:
        return returned  # type: ignore[return-value]
    if isinstance(returned, Mapping) or is_record(returned):
        raise TypeError("the function returned one row; return an iterable of rows, or yield each row")
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise TypeError(f"the function must return an iterable of rows, not {kind.__name__}; return [] for no rows")
    return returned


def is_record(value: object) -> bool:
    """Returns whether a value is a dataclass object or a named tuple, which is treated like a dict of its fields."""
    kind = type(value)
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _fields_of(row: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass object or a named tuple, by name. Raises TypeError for any other object."""
    if dataclasses.is_dataclass(type(row)):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    if is_record(row):
        return dict(zip(row._fields, row, strict=True))
    advice = "to drop rows use filter or flat_map" if row is None else "return a dict with a value for each column"
    raise TypeError(f"a row must be a dict, not {type(row).__name__}: {value_text(row)}; {advice}")


_BY_NUMPY = frozenset(
    made().id
    for made in (
        *(pa.int8, pa.int16, pa.int32, pa.int64, pa.uint8, pa.uint16, pa.uint32, pa.uint64),
        *(pa.float32, pa.float64, pa.bool_),
    )
)
_TEXT = frozenset({pa.string().id, pa.large_string().id})


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows of a batch as dicts.

    Raises ValueError if two columns share a name, or for a time that Python cannot represent.
    """
    names = batch.schema.names
    if not names or len(set(names)) < len(names):
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    columns = zip(names, batch.columns, strict=True)
    return _maker(tuple(names))(*(python_values(column, f"column {name!r}") for name, column in columns))


@lru_cache(maxsize=256)
def _maker(names: tuple[str, ...]) -> Callable[..., list[dict[str, Any]]]:
    """Returns a compiled function that takes the values of each column and returns a dict for each row.

    The column names appear in its code only as string literals.
    """
    values = [f"v{number}" for number in range(len(names))]
    display = ", ".join(f"{name!r}: {value}" for name, value in zip(names, values, strict=True))
    columns = [f"c{number}" for number in range(len(names))]
    loop = f"for {', '.join(values)}, in zip({', '.join(columns)}, strict=True)"
    made: Callable[..., list[dict[str, Any]]] = eval(f"lambda {', '.join(columns)}: [{{{display}}} {loop}]")
    return made


def python_values(column: pa.Array, where: str = "a column") -> list[Any]:
    """Returns the values of a column as Python objects, None for null.

    Raises ValueError for a time that Python cannot represent. `where` is the beginning of the error.
    """
    if column.type.id in _TEXT:
        texts: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return texts
    if column.type.id not in _BY_NUMPY:
        if _has_fine_times(column.type):
            _check_fine_times(column, where)
        others: list[Any] = column.to_pylist()
        return others
    if column.null_count == 0:
        numbers: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return numbers
    nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
    values: list[Any] = (
        column.fill_null(False if pa.types.is_boolean(column.type) else 0).to_numpy(zero_copy_only=False).tolist()
    )
    for row in nulls.tolist():
        values[row] = None
    return values


@lru_cache(maxsize=256)
def _has_fine_times(data_type: pa.DataType) -> bool:
    """Returns whether a type is, or contains, a time of day in nanoseconds."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _has_fine_times(data_type.storage_type)
    if pa.types.is_dictionary(data_type) or pa.types.is_run_end_encoded(data_type):
        return _has_fine_times(data_type.value_type)
    if pa.types.is_nested(data_type):
        return any(_has_fine_times(data_type.field(number).type) for number in range(data_type.num_fields))
    return bool(data_type == pa.time64("ns"))


def _check_fine_times(column: pa.Array, where: str) -> None:
    """Raises ValueError for a time of day with a fraction of a microsecond."""
    column = plain(column)
    if not _has_fine_times(column.type):
        return
    if pa.types.is_struct(column.type):
        for field in column.flatten():
            _check_fine_times(field, where)
    elif pa.types.is_map(column.type):
        # `keys` and `items` have the values of other rows, too, if the column is a slice.
        rows = column.take(pa.array(np.arange(len(column))))
        _check_fine_times(rows.keys, where)
        _check_fine_times(rows.items, where)
    elif pa.types.is_nested(column.type):
        _check_fine_times(pc.list_flatten(column), where)
    elif (column.view(pa.int64()).fill_null(0).to_numpy() % 1_000).any():
        raise ValueError(
            f"{where} has a time of day that is finer than a microsecond, and times of Python are not; cast it to "
            "time64[us] first, or use map_batches"
        )
