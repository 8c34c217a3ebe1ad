"""Converts a `schema=` argument into a pyarrow Schema: Python types, a dataclass, a TypedDict, or a Schema.

| Python | Arrow |
| --- | --- |
| `bool`, `int`, `float`, `str`, `bytes` | bool, int64, float64, string, binary |
| `datetime`, `date`, `time`, `timedelta` | timestamp[us] without a zone, date32, time64[us], duration[us] |
| `list[T]` (also `Sequence[T]`, `tuple[T, ...]`) | list of T |
| `dict[str, T]` (also `Mapping`) | map of string to T |
| a dataclass, a TypedDict, a NamedTuple | struct of its fields |
| `T \\| None` | T |
| a pyarrow DataType | itself: `pa.decimal128(12, 2)`, `pa.timestamp("us", "UTC")` |

Every column may be null, with `T | None` and without. `Decimal` is refused, because its number of digits is unknown.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError

SchemaLike: TypeAlias = pa.Schema | Mapping[str, Any] | type
"""Type of `schema=`: a pyarrow Schema, a mapping of names to types, a dataclass, a TypedDict or a NamedTuple."""

ARROW_TYPES: Mapping[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    dt.datetime: pa.timestamp("us"),
    dt.date: pa.date32(),
    dt.time: pa.time64("us"),
    dt.timedelta: pa.duration("us"),
}
"""The Arrow types of columns and of state that are declared with Python types."""
_LISTS = (list, tuple, collections.abc.Sequence)
_MAPS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_STREAMS_OF_ROWS = (
    *(list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Iterator),
    *(collections.abc.Generator, collections.abc.Collection),
)


def as_schema(given: SchemaLike | None, where: str) -> pa.Schema | None:
    """Converts a `schema=` argument to a pyarrow Schema. Returns None for None.

    `where` names the argument in errors, such as "map(schema=)". Raises ConfigurationError for a type without an Arrow
    type.

        as_schema({"word": str, "n": int}, "map(schema=)")
    """
    if given is None or isinstance(given, pa.Schema):
        return given
    if isinstance(given, Mapping):
        return pa.schema([_field(name, kind, where) for name, kind in given.items()])
    fields = _fields_of(given)
    if fields is None:
        raise ConfigurationError(
            f"{where} takes a pa.schema, a dict of types such as {{'word': str, 'n': int}}, a dataclass or a "
            f"TypedDict, not {given!r}"
        )
    return pa.schema([_field(name, kind, where) for name, kind in fields.items()])


def returned_schema(
    fn: object, *, many: bool = False, method: str | None = None, part: int | None = None
) -> pa.Schema | None:
    """Returns the schema of the rows that a function returns, from its return annotation. None if that names no
    columns.

    With `many` the function returns rows, annotated `list[Trip]` or `Iterator[Trip]`. If `fn` is an object, `method`
    names the method that is called. With `part` the function returns a tuple whose item `part` is the row. A dict
    without names, `dict[str, Any]`, names no columns. Raises ConfigurationError for a field without an Arrow type.
    """
    called = getattr(fn, method, None) if method is not None else fn
    if isinstance(called, type):
        return None
    if not (inspect.isfunction(called) or inspect.ismethod(called)):
        called = getattr(called, "__call__", None)  # noqa: B004 - the method itself, for its annotation
    try:
        returned = typing.get_type_hints(called, include_extras=True).get("return")
    except (NameError, TypeError, AttributeError):
        return None  # an annotation for type checkers alone, whose names cannot be resolved here
    if part is not None:
        arguments = typing.get_args(returned) if typing.get_origin(returned) is tuple else ()
        returned = arguments[part] if part < len(arguments) else None
    if many:
        returned = _without_none(returned)
        if typing.get_origin(returned) not in _STREAMS_OF_ROWS:
            return None
        arguments = typing.get_args(returned)
        returned = arguments[0] if arguments else None
    returned = _without_none(returned)
    if returned is None or _fields_of(returned) is None:
        return None
    return as_schema(returned, f"the annotation -> {returned.__name__} of {getattr(called, '__qualname__', called)}")


def python_schema(schema: pa.Schema) -> str:
    """Returns Python source for a `schema=` argument with these columns: `{"word": str, "n": int}`."""
    return "{" + ", ".join(f'"{field.name}": {_python_type(field.type)}' for field in schema) + "}"


def _field(name: object, kind: Any, where: str) -> pa.Field:
    if not isinstance(name, str):
        raise ConfigurationError(f"{where}: the key {name!r} is not a column name; give a str")
    return pa.field(name, arrow_type(kind, f"{where}: {name!r}"))


def arrow_type(kind: Any, where: str) -> pa.DataType:
    """Returns the Arrow type of a Python type, such as `list[int]`. A pyarrow type is returned unchanged.

    Raises ConfigurationError, beginning with `where`, for a value that is not the type of a column.
    """
    if isinstance(kind, pa.DataType):
        return kind
    kind = _without_none(kind)
    if typing.get_origin(kind) is typing.Annotated:
        extra = next((each for each in typing.get_args(kind)[1:] if isinstance(each, pa.DataType)), None)
        return extra if extra is not None else arrow_type(typing.get_args(kind)[0], where)
    try:
        if (found := ARROW_TYPES.get(kind)) is not None:
            return found
    except TypeError:  # not hashable, so no type
        pass
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in _LISTS and (len(arguments) == 1 or (len(arguments) == 2 and arguments[1] is Ellipsis)):
        return pa.list_(arrow_type(arguments[0], where))
    if origin in _MAPS and len(arguments) == 2:
        return pa.map_(arrow_type(arguments[0], where), arrow_type(arguments[1], where))
    if (fields := _fields_of(kind)) is not None:
        return pa.struct([_field(name, part, where) for name, part in fields.items()])
    raise ConfigurationError(f"{where}: {_shown(kind)} is not a type of a column. {_advice(kind)}")


def _advice(kind: Any) -> str:
    if kind is decimal.Decimal:
        return "A decimal needs its digits: give pa.decimal128(precision, scale)"
    if kind in _LISTS or kind in _MAPS:
        return "Give the type of its values too: list[int], dict[str, float]"
    return (
        "Use bool, int, float, str, bytes, datetime, date, time, timedelta, list[...], dict[str, ...], a dataclass, a "
        "TypedDict, or a pyarrow type such as pa.int32()"
    )


def _fields_of(kind: Any) -> Mapping[str, Any] | None:
    """Returns the types of the fields of a dataclass, a TypedDict or a NamedTuple by name, or None for another type."""
    if not isinstance(kind, type):
        return None
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {name: _required(part) for name, part in hints.items()}
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {name: hints.get(name, typing.Any) for name in kind._fields}
    return None


def _required(kind: Any) -> Any:
    """Returns a type without the `Required` or `NotRequired` of a TypedDict."""
    if typing.get_origin(kind) in (typing.Required, typing.NotRequired):
        return typing.get_args(kind)[0]
    return kind


def _without_none(kind: Any) -> Any:
    """Returns T for `T | None`, and any other type unchanged."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        others = [part for part in typing.get_args(kind) if part is not types.NoneType]
        if len(others) == 1:
            return others[0]
    return kind


_PYTHON_NAMES: Mapping[pa.DataType, str] = {arrow: kind.__name__ for kind, arrow in ARROW_TYPES.items()}


def _python_type(data_type: pa.DataType) -> str:
    if (found := _PYTHON_NAMES.get(data_type)) is not None:
        return found
    if pa.types.is_list(data_type):
        return f"list[{_python_type(data_type.value_type)}]"
    if pa.types.is_map(data_type):
        return f"dict[{_python_type(data_type.key_type)}, {_python_type(data_type.item_type)}]"
    if pa.types.is_struct(data_type):
        fields = ", ".join(f'("{field.name}", {_arrow_text(field.type)})' for field in data_type)
        return f"pa.struct([{fields}])"
    return _arrow_text(data_type)


def _arrow_text(data_type: pa.DataType) -> str:
    """Returns the Python source of an Arrow type, such as `pa.int32()`."""
    if pa.types.is_timestamp(data_type):
        zone = "" if data_type.tz is None else f', "{data_type.tz}"'
        return f'pa.timestamp("{data_type.unit}"{zone})'
    if pa.types.is_decimal(data_type):
        return f"pa.decimal{data_type.bit_width}({data_type.precision}, {data_type.scale})"
    if pa.types.is_duration(data_type) or pa.types.is_time(data_type):
        return f'pa.{str(data_type).partition("[")[0]}("{data_type.unit}")'
    if pa.types.is_list(data_type):
        return f"pa.list_({_arrow_text(data_type.value_type)})"
    if pa.types.is_map(data_type):
        return f"pa.map_({_arrow_text(data_type.key_type)}, {_arrow_text(data_type.item_type)})"
    if pa.types.is_struct(data_type):
        fields = ", ".join(f'("{field.name}", {_arrow_text(field.type)})' for field in data_type)
        return f"pa.struct([{fields}])"
    names = {"bool": "bool_", "double": "float64", "float": "float32", "halffloat": "float16"}
    name = str(data_type)
    plain = name.partition("[")[0]
    return f"pa.{names.get(plain, plain)}()"


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
