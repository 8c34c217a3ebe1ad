"""Encodes and decodes typed values that must outlive a process: one codec, over msgpack.

Events, instructions, elements and checkpoint metadata are frozen dataclasses. Each class registers itself
with `@wire`; an instance travels as an extension holding its name and a map of its fields, so that fields
with defaults can be added later and old bytes still decode. An unknown class or field is an error that names
it: silently dropping something that a newer version wrote would lose data.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgpack
import pyarrow as pa

from tidegate.storage.errors import CodecError

_DATACLASS = 1
_RECORD_BATCH = 2
_FROZENSET = 3
_ENUM = 4
_SCHEMA = 5

# Raised by msgpack, Arrow (OSError and StopIteration too) and constructors for malformed bytes.
_MALFORMED = (
    ValueError,
    TypeError,
    OSError,
    StopIteration,
    RecursionError,
    pa.ArrowException,
    msgpack.UnpackException,
)

T = TypeVar("T")

_classes: dict[str, type] = {}
_field_names: dict[type, frozenset[str]] = {}
_encoders: dict[type, Callable[[Any], object]] = {}
"""Functions that encode values which msgpack does not support, by the exact class of the value."""

_PACKER_BYTES = 16 * 1024
_KEPT_BYTES_MAX = 1024 * 1024
_idle_packers: list[msgpack.Packer] = []
"""Msgpack packers that are not in use, for reuse: one per nesting level and thread.

Making a packer for each value costs more than encoding the value. A packer that has packed more than `_KEPT_BYTES_MAX`
bytes holds that much memory, and is dropped.
"""

# The constructor of ExtType without its checks in Python: one is made for every value.
_extension = partial(tuple.__new__, msgpack.ExtType)


def wire(cls: type[T]) -> type[T]:
    """Registers a frozen dataclass or an enum with the codec under its own name. Use it as a class decorator."""
    name = cls.__name__
    known = _classes.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise CodecError(
            f"two wire types are called {name!r}: {known.__module__} and {cls.__module__}; rename one of them"
        )
    _classes[name] = cls
    if known is not None:
        _encoders.pop(known, None)
    if dataclasses.is_dataclass(cls):
        names = tuple(f.name for f in dataclasses.fields(cls))
        _field_names[cls] = frozenset(names)
        _encoders[cls] = _dataclass_encoder(name, names)
    elif issubclass(cls, enum.Enum):
        _encoders[cls] = _enum_encoder(name, cls)
    else:
        raise CodecError(
            f"{name!r} cannot be a wire type: @wire supports only dataclasses and enums. Make it one of these"
        )
    return cls


def wire_types() -> dict[str, type]:
    """Returns every registered wire type by name (a copy)."""
    return dict(_classes)


def encode(value: object) -> bytes:
    """Returns the bytes of a value: wire types, Arrow batches and schemas, and plain msgpack values.

    Tuples and lists both decode as tuples. Raises CodecError for any other value.
    """
    try:
        packer = _idle_packers.pop()
    except IndexError:
        packer = msgpack.Packer(default=_default, strict_types=True, use_bin_type=True, buf_size=_PACKER_BYTES)
    try:
        packed = packer.pack(value)
    except (TypeError, ValueError, OverflowError) as error:
        # The packer holds half of the value and is not used again.
        raise CodecError(
            f"cannot encode {type(value).__name__}: {error}; use only types that the codec supports"
        ) from error
    assert isinstance(packed, bytes)
    if len(packed) <= _KEPT_BYTES_MAX:
        _idle_packers.append(packer)
    return packed


def decode(data: bytes | memoryview) -> Any:
    """Returns the value that `encode` made bytes of. Raises CodecError for truncated, foreign or newer bytes."""
    try:
        return msgpack.unpackb(data, ext_hook=_ext_hook, use_list=False, strict_map_key=False, raw=False)
    except CodecError:
        raise
    except _MALFORMED as error:
        raise CodecError(
            f"cannot decode {len(data)} bytes: {error}; the data is damaged, or tidegate did not write it"
        ) from error


def _default(value: object) -> object:
    encoder = _encoders.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, pa.RecordBatch):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write_batch(value)
        return msgpack.ExtType(_RECORD_BATCH, sink.getvalue().to_pybytes())
    if isinstance(value, pa.Schema):
        return msgpack.ExtType(_SCHEMA, value.serialize().to_pybytes())
    cls = type(value)
    raise TypeError(f"{cls.__module__}.{cls.__qualname__} is not a wire type (decorate it with @wire)")


def _dataclass_encoder(name: str, names: tuple[str, ...]) -> Callable[[Any], object]:
    get = operator.attrgetter(*names) if len(names) > 1 else None

    def encoder(value: Any) -> object:
        fields = dict(zip(names, get(value), strict=True)) if get else {n: getattr(value, n) for n in names}
        return _extension((_DATACLASS, encode([name, fields])))

    return encoder


def _enum_encoder(name: str, cls: type[enum.Enum]) -> Callable[[enum.Enum], object]:
    # Members are few and never change.
    encoded = {member: _extension((_ENUM, encode([name, member.value]))) for member in cls}
    return encoded.__getitem__


def _frozenset_encoder(value: frozenset[Any]) -> object:
    return _extension((_FROZENSET, encode(sorted(value))))


_encoders[tuple] = list
_encoders[frozenset] = _frozenset_encoder


def _ext_hook(code: int, data: bytes) -> object:
    if code == _DATACLASS:
        name, fields = decode(data)
        cls = _classes.get(name)
        if cls is None or cls not in _field_names:
            raise CodecError(
                f"unknown wire type {name!r}: a newer tidegate wrote the data, or it is damaged. Read it with the "
                "version that wrote it"
            )
        known = _field_names[cls]
        if not fields.keys() <= known:
            unknown = min(fields.keys() - known)
            raise CodecError(
                f"unknown field {unknown!r} of {name!r}: a newer tidegate wrote the data, or it is damaged. Read it "
                "with the version that wrote it"
            )
        return cls(**fields)
    if code == _ENUM:
        name, member = decode(data)
        cls = _classes.get(name)
        if cls is None or not issubclass(cls, enum.Enum):
            raise CodecError(
                f"unknown wire enum {name!r}: a newer tidegate wrote the data, or it is damaged. Read it with the "
                "version that wrote it"
            )
        return cls(member)
    if code == _FROZENSET:
        return frozenset(decode(data))
    if code == _RECORD_BATCH:
        with pa.ipc.open_stream(data) as reader:
            return reader.read_next_batch()
    if code == _SCHEMA:
        return pa.ipc.read_schema(pa.py_buffer(data))
    raise CodecError(
        f"unknown extension code {code}: a newer tidegate wrote the data, or it is damaged. Read it with the version "
        "that wrote it"
    )
