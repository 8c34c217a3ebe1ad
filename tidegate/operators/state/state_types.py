"""`StateType` is the type of the values in a state: an Arrow type, a Python type, or any object that is pickled. All
values are stored as Arrow types.

Keyed state and operator state convert their values with it. Rules:

- A value is converted to its stored form when it is stored, so a restored job computes with the same values. A value
  that does not fit raises an error at once.
- The caller can change a returned value without changing the stored one.
- Nothing is pickled unless `Pickled` is declared. The stored field then has a mark (`SERIALIZER_KEY`).
- Common values use a fast path (`fast_conversion`), which does not call Arrow. All others go through `exact_array`,
  which takes 25 us. The fast path returns what Arrow would return for the value, or `NO_FAST_PATH` if that is
  uncertain. A dict or list is converted part by part into a new object. If one part has no fast path, the whole value
  has none.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import inspect
import math
import operator
import pickle
import re
import struct
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import cloudpickle
import pyarrow as pa

from tidegate.operators.row_values import column_of, exact_array, shown
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import widened_type
from tidegate.storage.schemas.row_schemas import ARROW_TYPES

SERIALIZER_KEY, _PICKLE = b"tidegate.serializer", b"pickle"


NO_FAST_PATH: Final = object()
"""Returned by a fast conversion for a value that it cannot convert, so that Arrow must convert it."""

FastConversion: TypeAlias = Callable[[Any], Any]


def no_fast_path(value: Any) -> Any:
    """Returns `NO_FAST_PATH` for every value.

    Used in place of a fast conversion for types that have none.
    """
    return NO_FAST_PATH


class Pickled:
    """Declares that a state contains any Python objects, which are stored pickled.

    Such a state cannot be read without the program's classes, and is lost if the program renames or moves them. It
    cannot be converted to another type. Restore it only from checkpoints that you trust, because reading a pickle runs
    code in it.
    """


class StateType:
    """The declared type of the values of a state, and the Arrow type in which they are stored."""

    __slots__ = ("_form", "_name", "dtype", "fast")

    def __init__(self, name: str, declared: Any) -> None:
        """Creates the type of the state `name`, or of a part of it. Raises ConfigurationError for a type that cannot be
        stored.
        """
        self._name = name
        try:
            self._form = _form(declared, ())
        except ConfigurationError as error:
            raise ConfigurationError(f"state {name!r}: {error}") from None
        if isinstance(self._form, _OptionalForm):
            self._form = self._form.inner  # None is never a value, of any type
        self.dtype = self._form.dtype
        self.fast = self._form.fast
        """Converts common values to their stored form. Returns `NO_FAST_PATH` for values that `taken` must convert."""

    @property
    def plain(self) -> bool:
        """True if stored values can be returned unchanged, because they are immutable scalars, such as numbers and
        strings.
        """
        return self._form.plain

    def field(self, name: str) -> pa.Field:
        """Returns the Arrow field called `name` of a column that stores such values."""
        return self._form.field(name)

    def taken(self, value: Any) -> Any:
        """Converts a value to its stored form, which equals the value that a checkpoint would return.

        Raises TypeError if it is None or not of the declared type.
        """
        form = self._form
        try:
            return form.put(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"state {self._name!r} keeps {form.described}, and was given {shown(value)}: {error}"
                "; put a value of the declared type, or declare another type"
            ) from error

    def check_columns(self) -> None:
        """Raises TypeError if the values are pickled, because pickled values cannot be read and written as a column."""
        if isinstance(self._form, _PickledForm):
            raise TypeError(f"state {self._name!r} keeps pickled objects: choose a key, and use value and update")

    def taken_column(self, values: Any) -> pa.Array:
        """Converts a column of values to their stored form, null for None.

        Raises TypeError if a value is not of the declared type, or would change.
        """
        self.check_columns()
        try:
            self._form.check_column(column := column_of(values, self.dtype))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise TypeError(
                f"state {self._name!r} keeps {self._form.described}: {error}"
                "; put values of the declared type, or declare another type"
            ) from error
        return column

    def handed_out(self, stored: Any) -> Any:
        """Converts a stored value to an object that the caller may change. None stays None."""
        form = self._form
        return stored if form.plain or stored is None else form.get(stored)


def check_map_key(data_type: pa.DataType) -> None:
    """Raises ConfigurationError for a type of map keys whose values compare differently in Python and in Arrow.

    This is true of timestamps in a time zone. Python compares them by the clock, so an hour that occurs twice when
    clocks are set back would make two keys equal.
    """
    zone = getattr(data_type, "tz", None)
    if zone is not None and _FIXED_ZONE.fullmatch(zone) is None:
        raise ConfigurationError(
            f"keys of a map cannot be {data_type}, because Python takes the hour that comes twice in {zone} for one; "
            f'declare pa.timestamp("{data_type.unit}", "UTC"): times of any zone can be stored, and are returned in '
            "UTC"
        )


_FIXED_ZONE = re.compile(r"(Etc/)?(UTC|GMT)|[+-]\d\d:?\d\d")
"""Time zones whose clocks are never set back."""


def check_serializers(stored: pa.Field, expected: pa.Field, state: str, operator: str) -> None:
    """Raises ConfigurationError if a field is pickled in one schema and not in the other, at any depth."""
    if _is_pickled(stored) != _is_pickled(expected):
        was, now = ("is", "is not") if _is_pickled(stored) else ("is not", "is")
        raise ConfigurationError(
            f"{operator}: state {state!r}: {stored.name!r} ({stored.type}) {was} pickled in the checkpoint, and the "
            f"type in the program {now}. Restore with the type that it was written with, or give the state a new name"
        )
    for position in range(expected.type.num_fields):
        inner = expected.type.field(position)
        if pa.types.is_struct(expected.type) and pa.types.is_struct(stored.type):
            found = stored.type.get_field_index(inner.name)
        else:
            found = position if position < stored.type.num_fields else -1
        if found >= 0:
            check_serializers(stored.type.field(found), inner, state, operator)


def holds_pickles(field: pa.Field) -> bool:
    """Returns whether the values of a stored field are pickled objects, or contain them."""
    return _is_pickled(field) or any(holds_pickles(field.type.field(i)) for i in range(field.type.num_fields))


class _Form:
    """Base class of converters between user values of one declared type and their stored form.

    `put` raises TypeError or ValueError for values that do not fit.
    """

    metadata: Mapping[bytes, bytes] | None = None
    plain = True
    """True if stored values can be returned unchanged."""
    fast: FastConversion = staticmethod(no_fast_path)
    """Converts common values to their stored form, and returns `NO_FAST_PATH` for others."""

    def __init__(self, dtype: pa.DataType, described: str) -> None:
        self.dtype = dtype
        self.described = described

    def field(self, name: str) -> pa.Field:
        """Returns the Arrow field called `name` that stores values of this type: as a column, or as a part of a nested
        type.
        """
        return pa.field(name, self.dtype, metadata=self.metadata)

    def put(self, value: Any) -> Any:
        """Converts a value of the user to its stored form."""
        raise NotImplementedError

    def get(self, stored: Any) -> Any:
        """Converts a stored value to an object for the user."""
        return stored

    def check_column(self, column: pa.Array) -> None:
        """Raises TypeError if a column of the stored type has a value that does not fit this type."""


class _ArrowForm(_Form):
    """Converts values of a type that is declared as an Arrow type, by Arrow's own conversions."""

    def __init__(self, dtype: pa.DataType) -> None:
        super().__init__(widened_type(dtype), str(dtype))  # the values of all keys meet in one column
        self.fast = fast_conversion(self.dtype)
        self.plain = not pa.types.is_nested(self.dtype)

    def put(self, value: Any) -> Any:
        stored = self.fast(value)
        if stored is not NO_FAST_PATH:
            return stored
        if value is None:
            raise TypeError(
                "None can be kept only inside a list, a dict or a dataclass, where the type is declared as "
                "Optional[...]; declare such a type, or call clear() to remove a value"
            )
        try:
            if pa.types.is_integer(self.dtype):
                operator.index(value)  # refuses a float, whatever its value
            taken = exact_array([value], self.dtype, complete=True)[0].as_py()
        except pa.ArrowException as error:
            raise TypeError(str(error)) from error
        if taken is None:
            raise TypeError("Arrow converts this value to null; give a value that is not null")
        return one_nan(taken)

    def get(self, stored: Any) -> Any:
        return stored if self.plain else _copied(stored)


def _copied(stored: Any) -> Any:
    """Returns a copy of a value that Arrow returned, with new lists and dicts. Other values are immutable."""
    if type(stored) is dict:
        return {name: _copied(part) for name, part in stored.items()}
    if type(stored) is list:
        return [_copied(part) for part in stored]
    return tuple([_copied(part) for part in stored]) if type(stored) is tuple else stored


class _MomentForm(_ArrowForm):
    """Converts values of type `datetime.datetime` without a time zone."""

    def __init__(self) -> None:
        super().__init__(pa.timestamp("us"))

    def put(self, value: Any) -> Any:
        if isinstance(value, dt.datetime) and value.tzinfo is not None:
            raise TypeError('it has a time zone: declare pa.timestamp("us", "UTC") to store such times')
        return super().put(value)


class _OptionalForm(_Form):
    """Converts values of an inner type that may be None."""

    def __init__(self, inner: _Form) -> None:
        super().__init__(inner.dtype, f"Optional[{inner.described}]")
        self.inner, self.metadata, self.plain = inner, inner.metadata, inner.plain

    def put(self, value: Any) -> Any:
        return None if value is None else self.inner.put(value)

    def get(self, stored: Any) -> Any:
        return None if stored is None else self.inner.get(stored)


class _SequenceForm(_Form):
    """Converts values of the types `list[T]` and `tuple[T, ...]`."""

    plain = False

    def __init__(self, make: type[list[Any]] | type[tuple[Any, ...]], item: _Form) -> None:
        super().__init__(pa.list_(item.field("item")), f"{make.__name__}[{item.described}]")
        self._make: Callable[[Any], Any] = make
        self._item = item

    def put(self, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{type(value).__name__} is neither a list nor a tuple; give one of them")
        return [self._item.put(item) for item in value]

    def get(self, stored: Any) -> Any:
        return self._make([self._item.get(item) for item in stored])


class _DictForm(_Form):
    """Converts values of type `dict[K, V]`."""

    plain = False

    def __init__(self, key: _Form, value: _Form) -> None:
        if not key.plain or isinstance(key, _OptionalForm):
            raise ConfigurationError(
                f"keys of a dict cannot be {key.described}; declare a plain type, such as str or int"
            )
        check_map_key(key.dtype)
        super().__init__(
            pa.map_(key.field("key").with_nullable(False), value.field("value")),
            f"dict[{key.described}, {value.described}]",
        )
        self._key, self._value = key, value

    def put(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"{type(value).__name__} is not a dict; give one")
        return [(self._key.put(key), self._value.put(item)) for key, item in value.items()]

    def get(self, stored: Any) -> Any:
        return {one_nan(key): self._value.get(item) for key, item in stored}


class _RecordForm(_Form):
    """Converts objects of a dataclass, which are stored as a struct.

    A field that is missing in a stored struct gets its default.
    """

    plain = False

    def __init__(self, record: type, forms: dict[str, _Form]) -> None:
        super().__init__(pa.struct([form.field(name) for name, form in forms.items()]), record.__name__)
        self._record = record
        self._forms = tuple(forms.items())
        self._defaults: dict[str, Callable[[], Any]] = {}
        for field in dataclasses.fields(record):
            if field.default is not dataclasses.MISSING:
                self._defaults[field.name] = partial(copy.copy, field.default)
            elif field.default_factory is not dataclasses.MISSING:
                self._defaults[field.name] = field.default_factory

    def put(self, value: Any) -> Any:
        if type(value) is not self._record:
            raise TypeError(f"{type(value).__name__} is not {self._record.__name__}; give an object of it")
        stored = {}
        for name, form in self._forms:
            try:
                stored[name] = form.put(getattr(value, name))
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name}: {error}") from error
        return stored

    def get(self, stored: Any) -> Any:
        return self._record(**{name: self._part(name, form, stored[name]) for name, form in self._forms})

    def _part(self, name: str, form: _Form, stored: Any) -> Any:
        if stored is not None:
            return form.get(stored)
        default = None if isinstance(form, _OptionalForm) else self._defaults.get(name)
        return None if default is None else default()

    def check_column(self, column: pa.Array) -> None:
        for (name, form), part in zip(self._forms, column.filter(column.is_valid()).flatten(), strict=True):
            if part.null_count and not isinstance(form, _OptionalForm):
                raise TypeError(
                    f"{name}: None can be kept only where Optional[...] is declared; declare it, or give a value"
                )
            form.check_column(part)


class _PickledForm(_Form):
    """Converts values of any type, which are stored as the bytes of their pickle."""

    metadata = types.MappingProxyType({SERIALIZER_KEY: _PICKLE})
    plain = False

    def __init__(self) -> None:
        super().__init__(pa.binary(), "pickled objects")

    def field(self, name: str) -> pa.Field:
        return pa.field(name, self.dtype, metadata={SERIALIZER_KEY: _PICKLE})

    def put(self, value: Any) -> Any:
        if value is None:
            raise TypeError("None cannot be stored as state; to remove the value call clear()")
        try:
            return cloudpickle.dumps(value)
        except Exception as error:  # whatever the object's own code raises
            raise TypeError(f"it cannot be pickled: {error}; store its parts as plain values") from error

    def get(self, stored: Any) -> Any:
        return pickle.loads(stored)


def _form(declared: Any, around: tuple[type, ...]) -> _Form:
    """Returns the converter for a declared type. `around` are the dataclasses that contain it, to detect recursion."""
    if isinstance(declared, pa.DataType):
        return _ArrowForm(declared)
    if declared is dt.datetime:
        return _MomentForm()
    if declared is Pickled or isinstance(declared, Pickled):
        return _PickledForm()
    if isinstance(declared, type) and declared in ARROW_TYPES:
        return _ArrowForm(ARROW_TYPES[declared])
    if isinstance(declared, type) and dataclasses.is_dataclass(declared):
        return _record_form(declared, around)
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        if len(inner) == 1 and len(arguments) == 2:
            return _OptionalForm(_form(inner[0], around))
    elif origin is list or (origin is tuple and arguments[1:] == (...,)):
        return _SequenceForm(origin, _form(arguments[0], around))
    elif origin is dict:
        return _DictForm(*(_form(argument, around) for argument in arguments))
    raise ConfigurationError(_refusal(declared))


def _record_form(record: type, around: tuple[type, ...]) -> _RecordForm:
    if record in around:
        raise ConfigurationError(
            f"{record.__name__} holds itself in one of its fields, and such a type cannot be stored; store a flat "
            "list of its parts instead"
        )
    try:
        hints = typing.get_type_hints(record)
    except (NameError, TypeError) as error:
        raise ConfigurationError(
            f"the types of the fields of {record.__name__} cannot be found: {error}"
            "; import these types where the class is defined"
        ) from error
    fields = dataclasses.fields(record)
    made_from = {name for name, one in inspect.signature(record).parameters.items() if one.default is one.empty}
    if not all(field.init for field in fields) or not made_from <= {field.name for field in fields} or not fields:
        raise ConfigurationError(
            f"{record.__name__} cannot be made again from its fields alone, so it cannot be stored; its constructor "
            "must take all fields, and no other argument without a default"
        )
    forms = {}
    for field in fields:
        try:
            forms[field.name] = _form(hints[field.name], (*around, record))
        except ConfigurationError as error:
            raise ConfigurationError(f"{record.__name__}.{field.name}: {error}") from None
    return _RecordForm(record, forms)


def _refusal(declared: Any) -> str:
    advice = {
        list: "add the type of its elements, for example list[int]",
        dict: "add the types of its keys and values, for example dict[str, float]",
        tuple: "use tuple[int, ...], or a dataclass",
        decimal.Decimal: "use pa.decimal128(precision, scale)",
    }.get(declared, "use a dataclass for records, or tg.Pickled for any object")
    return (
        f"needs an Arrow type such as pa.int64(), or a Python type such as int, list[float] or a dataclass, not "
        f"{declared!r}; {advice}"
    )


def _is_pickled(field: pa.Field) -> bool:
    return (field.metadata or {}).get(SERIALIZER_KEY) == _PICKLE


_SINGLE = struct.Struct("<f")
_MICROSECONDS_END = dt.timedelta(microseconds=2**63 - 1)


def fast_conversion(data_type: pa.DataType) -> FastConversion:
    """Returns the fast conversion for an Arrow type.

    For an uncommon type, the returned function always returns `NO_FAST_PATH`. It accepts None only inside nested types.
    """
    kinds = pa.types
    if isinstance(data_type, pa.BaseExtensionType):
        return no_fast_path
    if kinds.is_integer(data_type):
        bits = data_type.bit_width
        unsigned = kinds.is_unsigned_integer(data_type)
        return _integer(0 if unsigned else -(2 ** (bits - 1)), 2 ** (bits if unsigned else bits - 1))
    if kinds.is_struct(data_type):
        return _struct(data_type)
    if kinds.is_list(data_type) or kinds.is_large_list(data_type):
        return _list(data_type)
    return _OF_TYPE.get(data_type, no_fast_path)


def one_nan(value: Any) -> Any:
    """Returns the same object for every NaN, so that a dict finds it as a key. Returns other values unchanged."""
    return math.nan if isinstance(value, float) and value != value else value


def _integer(least: int, end: int) -> FastConversion:
    def convert(value: Any) -> Any:
        return value if type(value) is int and least <= value < end else NO_FAST_PATH

    return convert


def _float(value: Any) -> Any:
    if type(value) is not float:
        return NO_FAST_PATH
    return value if value == value else math.nan


def _single(value: Any) -> Any:
    if type(value) is not float:
        return NO_FAST_PATH
    try:
        (rounded,) = _SINGLE.unpack(_SINGLE.pack(value))
    except OverflowError:
        return NO_FAST_PATH
    return rounded if rounded == rounded else math.nan


def _text(value: Any) -> Any:
    if type(value) is not str:
        return NO_FAST_PATH
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # the checkpoint that has to write it would fail
            return NO_FAST_PATH
    return value


def _moment(value: Any) -> Any:
    return value if type(value) is dt.datetime and value.tzinfo is None and not value.fold else NO_FAST_PATH


def _duration(value: Any) -> Any:
    return value if type(value) is dt.timedelta and -_MICROSECONDS_END <= value <= _MICROSECONDS_END else NO_FAST_PATH


def _same(python_type: type[Any]) -> FastConversion:
    def convert(value: Any) -> Any:
        return value if type(value) is python_type else NO_FAST_PATH

    return convert


def _struct(data_type: pa.DataType) -> FastConversion:
    parts = tuple((field.name, _part(field)) for field in data_type)
    if len({name for name, _ in parts}) < len(parts):
        return no_fast_path

    def convert(value: Any) -> Any:
        if type(value) is not dict or len(value) != len(parts):
            return NO_FAST_PATH
        stored = {}
        for name, fast in parts:
            part = fast(value.get(name, NO_FAST_PATH))
            if part is NO_FAST_PATH:
                return NO_FAST_PATH
            stored[name] = part
        return stored

    return convert


def _part(field: pa.Field) -> FastConversion:
    """Returns the fast conversion for a part of a nested type: a struct field, list element or map entry.

    The conversion accepts None if the field is nullable.
    """
    fast = fast_conversion(field.type)
    return (lambda value: None if value is None else fast(value)) if field.nullable else fast


def _list(data_type: pa.DataType) -> FastConversion:
    fast = _part(data_type.value_field)

    def convert(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            return NO_FAST_PATH
        stored = [fast(item) for item in value]
        return NO_FAST_PATH if NO_FAST_PATH in stored else stored

    return convert


_OF_TYPE: dict[pa.DataType, FastConversion] = {
    pa.float64(): _float,
    pa.float32(): _single,
    pa.string(): _text,
    pa.binary(): _same(bytes),
    pa.bool_(): _same(bool),
    pa.date32(): _same(dt.date),
    pa.timestamp("us"): _moment,
    pa.duration("us"): _duration,
}
