"""`StateType`: types of values in state: Arrow's, Python's, and pickled objects. All are stored as Arrow types.

Keyed state and operator state convert their values with it. Rules:

- A value is converted to its stored form when it is put in. So a restored job computes with the very same values. What
  does not fit is an error there and then.
- The caller can change what is handed out without changing what is stored.
- Nothing is pickled unless `Pickled` is asked for. Then the stored field says so (`SERIALIZER_KEY`).

### MERGE
Values of Arrow types as state keeps them, for values that need no look by Arrow: the way that common ones take.

`StateType` asks here first. What is not quick goes through `exact_array`, which takes 25 us. Rules:

- What a quick conversion gives is what Arrow would give back of the same value. Where that is not certain it says
  `NOT_QUICK`.
- A dict or list is converted into a new one, part by part. One part that is not quick makes the whole value so.
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
from tidegate.storage.schemas.dictionaries import widened_type
from tidegate.storage.schemas.row_schemas import ARROW_TYPES

SERIALIZER_KEY, _PICKLE = b"tidegate.serializer", b"pickle"


NOT_QUICK: Final = object()
"""The answer for a value that Arrow has to look at."""

Quick: TypeAlias = Callable[[Any], Any]


def never_quick(value: Any) -> Any:
    """The conversion of types of which no value is common."""
    return NOT_QUICK


class Pickled:
    """As the type of a state: any Python object, kept pickled.

    Such a state cannot be read without the program's classes, and is lost to a program that renames or moves them. It
    is not migrated. Restore it only from checkpoints that you trust: reading a pickle runs what is in it.
    """


class StateType:
    """Values of one declared type, and the Arrow type in which they are stored."""

    __slots__ = ("_form", "_name", "dtype", "quick")

    def __init__(self, name: str, declared: Any) -> None:
        """The type of (a part of) the state `name`. ConfigurationError for a type that cannot be kept."""
        self._name = name
        try:
            self._form = _form(declared, ())
        except ConfigurationError as error:
            raise ConfigurationError(f"state {name!r}: {error}") from None
        if isinstance(self._form, _OptionalForm):
            self._form = self._form.inner  # None is no state, whatever the type
        self.dtype = self._form.dtype
        self.quick = self._form.quick
        """Common values as they are stored; `NOT_QUICK` for those that `taken` has to look at."""

    @property
    def plain(self) -> bool:
        """Whether values are handed out as they are stored: single ones, such as a number or a string."""
        return self._form.plain

    def field(self, name: str) -> pa.Field:
        """The field of a stored column of such values."""
        return self._form.field(name)

    def taken(self, value: Any) -> Any:
        """The value as it is stored: what a checkpoint would give back. TypeError if it is None or of another type."""
        form = self._form
        try:
            return form.put(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"state {self._name!r} keeps {form.described}, and was given {shown(value)}: {error}"
            ) from error

    def check_columns(self) -> None:
        """Raise TypeError for pickled values: they are no column."""
        if isinstance(self._form, _PickledForm):
            raise TypeError(f"state {self._name!r} keeps pickled objects: choose a key, and use value and update")

    def taken_column(self, values: Any) -> pa.Array:
        """Many values as they are stored, null for none. TypeError if one is of another type, or would change."""
        self.check_columns()
        try:
            self._form.check_column(column := column_of(values, self.dtype))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise TypeError(f"state {self._name!r} keeps {self._form.described}: {error}") from error
        return column

    def handed_out(self, stored: Any) -> Any:
        """The value of what is stored, as an object that the caller may change. None stays None."""
        form = self._form
        return stored if form.plain or stored is None else form.get(stored)


def check_map_key(data_type: pa.DataType) -> None:
    """Raise ConfigurationError for a type whose values Python compares otherwise than Arrow.

    Of moments in one time zone Python compares what the clock shows. Where clocks are set back an hour comes twice, so
    two keys would be one.
    """
    zone = getattr(data_type, "tz", None)
    if zone is not None and _FIXED_ZONE.fullmatch(zone) is None:
        raise ConfigurationError(
            f"keys of a map cannot be {data_type}, because Python takes the hour that comes twice in {zone} for one; "
            f'declare pa.timestamp("{data_type.unit}", "UTC"): moments of any zone may be put in, and come out in UTC'
        )


_FIXED_ZONE = re.compile(r"(Etc/)?(UTC|GMT)|[+-]\d\d:?\d\d")
"""Time zones whose clocks are never set."""


def check_serializers(stored: pa.Field, expected: pa.Field, state: str) -> None:
    """Raise ConfigurationError where one of the fields, or a field in them, holds pickles and the other does not."""
    if _is_pickled(stored) != _is_pickled(expected):
        was, now = ("pickled objects", "not") if _is_pickled(stored) else ("not pickled", "that")
        raise ConfigurationError(
            f"state {state!r}: what the checkpoint has in {stored.name!r} ({stored.type}) is {was}, and the program's "
            f"type is {now}; restore with the type that it was written with, or give the state a new name"
        )
    for position in range(expected.type.num_fields):
        inner = expected.type.field(position)
        if pa.types.is_struct(expected.type) and pa.types.is_struct(stored.type):
            found = stored.type.get_field_index(inner.name)
        else:
            found = position if position < stored.type.num_fields else -1
        if found >= 0:
            check_serializers(stored.type.field(found), inner, state)


def holds_pickles(field: pa.Field) -> bool:
    """Whether the values of a stored field are pickled, or hold something that is."""
    return _is_pickled(field) or any(holds_pickles(field.type.field(i)) for i in range(field.type.num_fields))


class _Form:
    """How values of one type are stored. `put` raises TypeError or ValueError for what does not fit."""

    metadata: Mapping[bytes, bytes] | None = None
    plain = True
    """Whether what is stored is handed out as it is."""
    quick: Quick = staticmethod(never_quick)
    """As of `StateType`."""

    def __init__(self, dtype: pa.DataType, described: str) -> None:
        self.dtype = dtype
        self.described = described

    def field(self, name: str) -> pa.Field:
        """The field of a column, a struct, list or map."""
        return pa.field(name, self.dtype, metadata=self.metadata)

    def put(self, value: Any) -> Any:
        """The value as it is stored."""
        raise NotImplementedError

    def get(self, stored: Any) -> Any:
        """The value of what is stored."""
        return stored

    def check_column(self, column: pa.Array) -> None:
        """Raise TypeError if a value in a column of the stored type is none of this."""


class _ArrowForm(_Form):
    """Values as Arrow takes them in and gives them out."""

    def __init__(self, dtype: pa.DataType) -> None:
        super().__init__(widened_type(dtype), str(dtype))  # the values of all keys meet in one column
        self.quick = quick_conversion(self.dtype)
        self.plain = not pa.types.is_nested(self.dtype)

    def put(self, value: Any) -> Any:
        stored = self.quick(value)
        if stored is not NOT_QUICK:
            return stored
        if value is None:
            raise TypeError("None can be kept only within something else, and there only as Optional[...]")
        try:
            if pa.types.is_integer(self.dtype):
                operator.index(value)  # refuses a float, whatever its value
            taken = exact_array([value], self.dtype, complete=True)[0].as_py()
        except pa.ArrowException as error:
            raise TypeError(str(error)) from error
        if taken is None:
            raise TypeError("to Arrow it is null")
        return one_nan(taken)

    def get(self, stored: Any) -> Any:
        return stored if self.plain else _copied(stored)


def _copied(stored: Any) -> Any:
    """A copy of a value as Arrow gives it out: new lists and dicts; nothing else in it can be changed."""
    if type(stored) is dict:
        return {name: _copied(part) for name, part in stored.items()}
    if type(stored) is list:
        return [_copied(part) for part in stored]
    return tuple([_copied(part) for part in stored]) if type(stored) is tuple else stored


class _MomentForm(_ArrowForm):
    """`datetime.datetime` without a time zone."""

    def __init__(self) -> None:
        super().__init__(pa.timestamp("us"))

    def put(self, value: Any) -> Any:
        if isinstance(value, dt.datetime) and value.tzinfo is not None:
            raise TypeError('it has a time zone: declare pa.timestamp("us", "UTC") to keep such moments')
        return super().put(value)


class _OptionalForm(_Form):
    """None, or a value, within something else."""

    def __init__(self, inner: _Form) -> None:
        super().__init__(inner.dtype, f"Optional[{inner.described}]")
        self.inner, self.metadata, self.plain = inner, inner.metadata, inner.plain

    def put(self, value: Any) -> Any:
        return None if value is None else self.inner.put(value)

    def get(self, stored: Any) -> Any:
        return None if stored is None else self.inner.get(stored)


class _SequenceForm(_Form):
    """`list[T]` and `tuple[T, ...]`."""

    plain = False

    def __init__(self, make: type[list[Any]] | type[tuple[Any, ...]], item: _Form) -> None:
        super().__init__(pa.list_(item.field("item")), f"{make.__name__}[{item.described}]")
        self._make: Callable[[Any], Any] = make
        self._item = item

    def put(self, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{type(value).__name__} is neither a list nor a tuple")
        return [self._item.put(item) for item in value]

    def get(self, stored: Any) -> Any:
        return self._make([self._item.get(item) for item in stored])


class _DictForm(_Form):
    """`dict[K, V]`."""

    plain = False

    def __init__(self, key: _Form, value: _Form) -> None:
        if not key.plain or isinstance(key, _OptionalForm):
            raise ConfigurationError(f"keys of a dict must be of a plain type, not {key.described}")
        check_map_key(key.dtype)
        super().__init__(
            pa.map_(key.field("key").with_nullable(False), value.field("value")),
            f"dict[{key.described}, {value.described}]",
        )
        self._key, self._value = key, value

    def put(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"{type(value).__name__} is not a dict")
        return [(self._key.put(key), self._value.put(item)) for key, item in value.items()]

    def get(self, stored: Any) -> Any:
        return {one_nan(key): self._value.get(item) for key, item in stored}


class _RecordForm(_Form):
    """A dataclass, as a struct. A field that an older program did not have has its default."""

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
            raise TypeError(f"{type(value).__name__} is not {self._record.__name__}")
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
                raise TypeError(f"{name}: None can be kept only where Optional[...] is declared")
            form.check_column(part)


class _PickledForm(_Form):
    """Any object, as the bytes of its pickle."""

    metadata = types.MappingProxyType({SERIALIZER_KEY: _PICKLE})
    plain = False

    def __init__(self) -> None:
        super().__init__(pa.binary(), "pickled objects")

    def field(self, name: str) -> pa.Field:
        return pa.field(name, self.dtype, metadata={SERIALIZER_KEY: _PICKLE})

    def put(self, value: Any) -> Any:
        if value is None:
            raise TypeError("None is no state")
        try:
            return cloudpickle.dumps(value)
        except Exception as error:  # whatever the object's own code raises
            raise TypeError(f"it cannot be pickled: {error}") from error

    def get(self, stored: Any) -> Any:
        return pickle.loads(stored)


def _form(declared: Any, around: tuple[type, ...]) -> _Form:
    """The form of a declared type. `around`: the dataclasses that it is nested in."""
    if isinstance(declared, pa.DataType):
        return _ArrowForm(declared)
    if declared is dt.datetime:
        return _MomentForm()
    if declared is Pickled:
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
        raise ConfigurationError(f"{record.__name__} holds itself; a stored type cannot")
    try:
        hints = typing.get_type_hints(record)
    except (NameError, TypeError) as error:
        raise ConfigurationError(f"the types of the fields of {record.__name__} cannot be found: {error}") from error
    fields = dataclasses.fields(record)
    made_from = {name for name, one in inspect.signature(record).parameters.items() if one.default is one.empty}
    if not all(field.init for field in fields) or not made_from <= {field.name for field in fields} or not fields:
        raise ConfigurationError(f"{record.__name__} cannot be made again from its fields alone, so it cannot be kept")
    forms = {}
    for field in fields:
        try:
            forms[field.name] = _form(hints[field.name], (*around, record))
        except ConfigurationError as error:
            raise ConfigurationError(f"{record.__name__}.{field.name}: {error}") from None
    return _RecordForm(record, forms)


def _refusal(declared: Any) -> str:
    advice = {
        list: "say of what: list[int]",
        dict: "say of what: dict[str, float]",
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


def quick_conversion(data_type: pa.DataType) -> Quick:
    """How values of a type are converted; `NOT_QUICK` for all of them if the type is an uncommon one.

    Only nested ones may hold None.
    """
    kinds = pa.types
    if isinstance(data_type, pa.BaseExtensionType):
        return never_quick
    if kinds.is_integer(data_type):
        bits = data_type.bit_width
        unsigned = kinds.is_unsigned_integer(data_type)
        return _integer(0 if unsigned else -(2 ** (bits - 1)), 2 ** (bits if unsigned else bits - 1))
    if kinds.is_struct(data_type):
        return _struct(data_type)
    if kinds.is_list(data_type) or kinds.is_large_list(data_type):
        return _list(data_type)
    return _OF_TYPE.get(data_type, never_quick)


def one_nan(value: Any) -> Any:
    """NaN as one object, so that a map finds it again; anything else as it is."""
    return math.nan if isinstance(value, float) and value != value else value


def _integer(least: int, end: int) -> Quick:
    def convert(value: Any) -> Any:
        return value if type(value) is int and least <= value < end else NOT_QUICK

    return convert


def _float(value: Any) -> Any:
    if type(value) is not float:
        return NOT_QUICK
    return value if value == value else math.nan


def _single(value: Any) -> Any:
    if type(value) is not float:
        return NOT_QUICK
    try:
        (rounded,) = _SINGLE.unpack(_SINGLE.pack(value))
    except OverflowError:
        return NOT_QUICK
    return rounded if rounded == rounded else math.nan


def _text(value: Any) -> Any:
    if type(value) is not str:
        return NOT_QUICK
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # the checkpoint that has to write it would fail
            return NOT_QUICK
    return value


def _moment(value: Any) -> Any:
    return value if type(value) is dt.datetime and value.tzinfo is None and not value.fold else NOT_QUICK


def _duration(value: Any) -> Any:
    return value if type(value) is dt.timedelta and -_MICROSECONDS_END <= value <= _MICROSECONDS_END else NOT_QUICK


def _same(python_type: type[Any]) -> Quick:
    def convert(value: Any) -> Any:
        return value if type(value) is python_type else NOT_QUICK

    return convert


def _struct(data_type: pa.DataType) -> Quick:
    parts = tuple((field.name, _part(field)) for field in data_type)
    if len({name for name, _ in parts}) < len(parts):
        return never_quick

    def convert(value: Any) -> Any:
        if type(value) is not dict or len(value) != len(parts):
            return NOT_QUICK
        stored = {}
        for name, quick in parts:
            part = quick(value.get(name, NOT_QUICK))
            if part is NOT_QUICK:
                return NOT_QUICK
            stored[name] = part
        return stored

    return convert


def _part(field: pa.Field) -> Quick:
    """The conversion of a field, element or entry, which may be None if it is nullable."""
    quick = quick_conversion(field.type)
    return (lambda value: None if value is None else quick(value)) if field.nullable else quick


def _list(data_type: pa.DataType) -> Quick:
    quick = _part(data_type.value_field)

    def convert(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            return NOT_QUICK
        stored = [quick(item) for item in value]
        return NOT_QUICK if NOT_QUICK in stored else stored

    return convert


_OF_TYPE: dict[pa.DataType, Quick] = {
    pa.float64(): _float,
    pa.float32(): _single,
    pa.string(): _text,
    pa.binary(): _same(bytes),
    pa.bool_(): _same(bool),
    pa.date32(): _same(dt.date),
    pa.timestamp("us"): _moment,
    pa.duration("us"): _duration,
}
