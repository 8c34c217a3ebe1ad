"""How keys and values lie in RocksDB: what goes in comes out, equal keys have equal bytes, and the bytes are pinned."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.state.rocksdb.keys import packed_rows
from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.errors import CodecError, ConfigurationError, CorruptionError
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.rocksdb import keys
from tidegate.storage.state.rocksdb.keys import decode_rows, row_end
from tidegate.storage.state.rocksdb.value_layout import (
    FORMAT_VERSION,
    RocksDescription,
    RocksForm,
    RocksState,
    describe,
    list_codec,
    map_key_codec,
    physical,
    table_layout,
    value_codec,
)

PLAIN: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text()),
    (pa.large_string(), st.text()),
    (pa.binary(), st.binary()),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(12, 3), st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: Decimal(n).scaleb(-3))),
    (pa.decimal256(60, 0), st.integers(-(10**60) + 1, 10**60 - 1).map(Decimal)),
    (pa.date32(), st.dates()),
    (pa.date64(), st.dates()),
    (pa.time32("ms"), st.integers(0, 86_399_999)),
    (pa.time64("ns"), st.integers(0, 86_399_999_999_999)),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("ns", "UTC"), st.integers(-(2**60), 2**60)),
    (pa.timestamp("s", "Europe/Berlin"), st.integers(0, 2**31)),
    (pa.duration("ns"), st.integers(-(2**60), 2**60)),
    (pa.duration("ms"), st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999)).map(lambda d: d // dt.timedelta(0, 1))),
]
OTHERS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.float16(), st.floats(width=16, allow_nan=False)),
    (pa.month_day_nano_interval(), st.tuples(*[st.integers(-1000, 1000)] * 3).map(pa.MonthDayNano)),
]


def _lists(inner: tuple[pa.DataType, st.SearchStrategy[Any]]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    data_type, values = inner
    return pa.list_(data_type), st.lists(st.none() | values, max_size=3)


def _structs(
    fields: list[tuple[pa.DataType, st.SearchStrategy[Any]]],
) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    names = [f"f{number}" for number in range(len(fields))]
    types = [pa.field(name, data_type) for name, (data_type, _) in zip(names, fields, strict=True)]
    values = {name: st.none() | values for name, (_, values) in zip(names, fields, strict=True)}
    return pa.struct(types), st.fixed_dictionaries(values)


def _maps(inner: tuple[pa.DataType, st.SearchStrategy[Any]]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    data_type, values = inner
    return pa.map_(pa.string(), data_type), st.lists(st.tuples(st.text(max_size=3), st.none() | values), max_size=3)


TYPED = st.recursive(
    st.sampled_from([*PLAIN, *OTHERS]),
    lambda inner: inner.map(_lists) | inner.map(_maps) | st.lists(inner, min_size=1, max_size=3).map(_structs),
    max_leaves=4,
)


def same(left: Any, right: Any) -> bool:
    """Equal, NaN being equal to itself, and of the same class."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


@given(data=st.data())
def test_values_come_back_as_arrow_gives_them(data: st.DataObject) -> None:
    """A value of any type, and a list of them, equal what Arrow itself would give back."""
    data_type, values = data.draw(TYPED)
    rests = pa.array(data.draw(st.lists(values, max_size=4)), type=data_type).to_pylist()
    codec, pieces = value_codec(data_type), list_codec(data_type)
    assert all(same(codec.decode(codec.encode(value)), value) for value in rests)
    assert same(pieces.decode(pieces.encode(rests)), rests)


@given(data=st.data())
def test_keys_of_maps_come_back_in_order(data: st.DataObject) -> None:
    """Keys of a map are what they were; numbers and strings are sorted as their bytes are."""
    data_type, values = data.draw(st.sampled_from(PLAIN))
    keys = pa.array(data.draw(st.lists(values, max_size=6)), type=data_type).to_pylist()
    codec = map_key_codec(data_type)
    assert all(same(codec.decode(codec.encode(key)), key) for key in keys)
    numbers = pa.types.is_integer(data_type) or pa.types.is_floating(data_type)
    if numbers or pa.types.is_string(data_type):
        ordered = sorted({key for key in keys if key == key})
        assert [codec.encode(key) for key in ordered] == sorted(codec.encode(key) for key in ordered)


def test_equal_keys_of_maps_have_equal_bytes() -> None:
    """There is one zero and one NaN."""
    codec = map_key_codec(pa.float64())
    assert codec.encode(0.0) == codec.encode(-0.0)
    assert codec.encode(math.nan) == codec.encode(float(np.frombuffer(b"\x01\0\0\0\0\0\xf8\xff", "<f8")[0]))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xd9\x05a"])
def test_torn_values_are_no_values(data: bytes) -> None:
    """Bytes that nothing was encoded to are CorruptionError for every codec that checks."""
    for codec in (
        value_codec(pa.string()),
        value_codec(pa.date32()),
        list_codec(pa.int64()),
        map_key_codec(pa.int64()),
    ):
        with pytest.raises(CorruptionError, match="cannot be decoded"):
            codec.decode(data)


WORD = b"\x01\x05\x00\x00\x00\x00\x00\x00\x00"
TEXT = b"\x01\x02\x00\x00\x00\x00\x00\x00\x00hi"


def test_rows_of_keys_are_read() -> None:
    """The bytes of rows, pinned: words and strings with nulls among them, narrow types, booleans and decimals."""
    schema = pa.schema({"a": pa.int16(), "b": pa.string(), "c": pa.bool_()})
    true = b"\x01\x01" + bytes(7)
    rows = decode_rows([WORD + TEXT + true, b"\x00" + b"\x00" + b"\x00", WORD + b"\x00" + true], schema)
    assert rows.to_pylist() == [
        {"a": 5, "b": "hi", "c": True},
        {"a": None, "b": None, "c": None},
        {"a": 5, "b": None, "c": True},
    ]
    rows.validate(full=True)
    end = row_end(schema)
    assert end(b"head" + WORD + TEXT + true + b"more", 4) == 4 + 9 + 11 + 9
    assert end(b"\x00\x00\x00more", 0) == 3
    assert decode_rows([], schema).num_rows == 0


LONG = b"\x01" + b"\xff" * 7 + b"\x7f" + b"hi"
"""A string that is said to be so long that its end has no number."""


@pytest.mark.parametrize(
    "row", [b"", WORD, WORD + TEXT[:-1], WORD + TEXT + b"x", WORD[:-1], b"\x01" + WORD + TEXT, WORD + LONG]
)
def test_torn_rows_are_no_rows(row: bytes) -> None:
    """A row that is too short or too long is CorruptionError, also among good ones."""
    schema = pa.schema({"a": pa.int64(), "b": pa.string()})
    good = WORD + TEXT
    assert decode_rows([good], schema).num_rows == 1
    with pytest.raises(CorruptionError, match="are not rows of the key columns"):
        decode_rows([good, row, good], schema)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.binary(max_size=7), max_size=30), st.sampled_from([pa.binary(), pa.large_binary()]))
def test_strings_are_copied_some_at_a_time(values: list[bytes | None], data_type: pa.DataType) -> None:
    """Those that are longer than what is copied together, alone."""
    column = pa.array(values, data_type)
    rows = packed_rows([column], pa.schema({"b": data_type}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_COPIED_BYTES", 5)
        found = decode_rows(rows, pa.schema({"b": data_type}))
    found.validate(full=True)
    assert found.column(0).equals(column)


def test_what_no_column_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 32 bits are not wrapped around; a large column has room, and so have values of one width."""
    monkeypatch.setattr(keys, "COLUMN_BYTES_MAX", 7)
    for data_type in (pa.string(), pa.large_string(), pa.binary(4)):
        rows = packed_rows([pa.array(["abcd", "efgh"]).cast(data_type)], pa.schema({"s": data_type}))
        if data_type == pa.string():
            with pytest.raises(
                ConfigurationError, match=r"2 rows .* 8 bytes .* of type string.* cast it to large_string"
            ):
                decode_rows(rows, pa.schema({"s": data_type}))
        else:
            assert decode_rows(rows, pa.schema({"s": data_type})).num_rows == 2


def test_packed_rows_come_back() -> None:
    """Columns of every width, with nulls and without, as slices too; rows of another size are refused."""
    schema = pa.schema({"a": pa.int8(), "b": pa.float64(), "c": pa.timestamp("ms"), "d": pa.float32()})
    columns = [
        pa.array([9, 1, None, 3], pa.int8()).slice(1),
        pa.array([9.0, 1.5, 2.5, math.inf]).slice(1),
        pa.array([0, None, None, 7], pa.timestamp("ms")).slice(1),
        pa.array([0, -1.0, None, 2.0], pa.float32()).slice(1),
    ]
    layout = table_layout(schema)
    packed = layout.packed(columns)
    assert [len(row) for row in packed] == [1 + 1 + 8 + 8 + 4] * 3
    assert [c.to_pylist() for c in layout.columns(packed)] == [c.to_pylist() for c in columns]
    assert packed[0][0] == 0b1011
    with pytest.raises(CorruptionError, match="bytes instead of"):
        layout.columns([*packed, packed[0][:-1]])


def test_rows_of_any_width() -> None:
    """Values of any types and nulls come back as they were, also out of slices, in the encoding of row tables."""
    schema = pa.schema({"n": pa.uint64(), "s": pa.string(), "l": pa.list_(pa.timestamp("us")), "b": pa.bool_()})
    moment = dt.datetime(2020, 1, 2, 3, 4, 5, 6)
    columns = [
        pa.array([1, None, 2**64 - 1, 3], pa.uint64()).slice(1),
        pa.array(["x", "", None, "täglich"]).slice(1),
        pa.array([[], None, [moment, None], []], pa.list_(pa.timestamp("us"))).slice(1),
        pa.array([None, True, False, None]).slice(1),
    ]
    layout = table_layout(schema)
    packed = packed_rows(columns, schema)
    assert [c.to_pylist() for c in layout.columns(packed)] == [c.to_pylist() for c in columns]
    with pytest.raises(CorruptionError):
        layout.columns([*packed, packed[0][:-1]])


@given(data=st.data())
def test_nested_values_in_rows_keep_their_bytes(data: st.DataObject) -> None:
    """Rows have the bytes that `value_codec` gives the values: checkpoints that were written so are read on."""
    data_type, values = data.draw(TYPED.filter(lambda drawn: pa.types.is_nested(drawn[0])))
    column = pa.array(data.draw(st.lists(st.none() | values, max_size=4)), type=data_type)
    (stored,) = physical(pa.record_batch({"v": column})).columns
    encode = value_codec(data_type).encode
    given = column.to_pylist()
    exact = "time64" not in str(data_type)  # Python's times have no nanoseconds
    if exact:
        assert stored.to_pylist() == [None if value is None else encode(value) for value in given]
    schema = pa.schema({"v": data_type})
    (back,) = table_layout(schema).columns(packed_rows([column], schema))
    assert back.type == data_type
    assert same(back.to_pylist(), given)


@pytest.mark.parametrize(
    ("inner", "number"),
    [
        (pa.time64("ns"), 86_399_999_999_999),
        (pa.timestamp("ns", "UTC"), 2**62 + 1),
        (pa.timestamp("s"), 10**13),
        (pa.duration("s"), 2**62),
    ],
    ids=str,
)
def test_nested_times_keep_every_bit(inner: pa.DataType, number: int) -> None:
    """Also nanoseconds, and moments that Python has no objects for; in lists, structs and maps, and out of slices."""
    times = pa.array([7, 1001, None, number], pa.int64()).cast(inner)
    offsets = pa.array([0, 2, 2, 4], pa.int32())
    columns = [
        pa.ListArray.from_arrays(offsets, times).slice(1),
        pa.FixedSizeListArray.from_arrays(times, 1).slice(2),
        pa.StructArray.from_arrays([times, times], ["a", "b"]).slice(2),
        pa.MapArray.from_arrays(offsets, pa.array(list("abcd")), times).slice(1),
    ]
    schema = pa.schema([(str(number), column.type) for number, column in enumerate(columns)])
    back = table_layout(schema).columns(packed_rows(columns, schema))
    for column, found in zip(columns, back, strict=True):
        assert found.equals(column)
    texts = pa.array([[b"no time"]], pa.list_(pa.binary()))
    wrong = packed_rows([texts], pa.schema({"v": texts.type}))
    with pytest.raises(CorruptionError, match="are not of the type list"):
        table_layout(pa.schema({"v": pa.list_(inner)})).columns(wrong)


def test_descriptions() -> None:
    """A description comes back; that of a newer tidegate, of another backend, or of none, is refused."""
    schema = pa.schema({"k": pa.string()})
    state = RocksState("s", 3, RocksForm.MAP, pa.schema({"s": pa.map_(pa.string(), pa.int64())}))
    description = RocksDescription(FORMAT_VERSION, "ab", 128, schema, (state,), 17)
    native = NativeState(OperatorUid("op"), "rocksdb", (0, 8), description.to_bytes(), ())
    assert describe(native) == description
    other = replace(description, version=FORMAT_VERSION + 1)
    with pytest.raises(CodecError, match="operator 'op' has format version 5, and this tidegate reads version 4"):
        describe(NativeState(OperatorUid("op"), "rocksdb", (0, 8), other.to_bytes(), ()))
    with pytest.raises(CodecError, match="backend 'other'"):
        describe(NativeState(OperatorUid("op"), "other", (0, 8), description.to_bytes(), ()))
    with pytest.raises(CorruptionError, match="no description"):
        describe(NativeState(OperatorUid("op"), "rocksdb", (0, 8), b"\x01", ()))
