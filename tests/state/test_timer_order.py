"""Timers of one moment fire in the order of their keys, whatever types these have, on every backend alike."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.operators.state.keys import KeyCodec, key_columns, sort_key
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.storage.errors import CorruptionError
from tidegate.storage.state.rocksdb.keys import TimerKeys, end_of_moment, moment_bytes, moment_of, timer_rows

TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float16(), st.sampled_from([0.0, -0.0, 1.5, -1.5, float("inf"), float("nan")])),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=4)),
    (pa.large_string(), st.text(alphabet="a\x00\xff\U0001f600", max_size=4)),
    (pa.binary(), st.binary(max_size=4)),
    (pa.binary(2), st.binary(min_size=2, max_size=2)),
    (pa.decimal128(12, 3), st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: Decimal(n).scaleb(-3))),
    (pa.decimal256(76, 0), st.sampled_from([-(10**76) + 1, -1, 0, 1, 10**76 - 1]).map(Decimal)),
    (pa.date32(), st.dates()),
    (pa.time32("ms"), st.times().map(lambda t: t.replace(microsecond=0))),
    (pa.time64("ns"), st.times()),
    (pa.timestamp("ns", "UTC"), st.integers(-(2**60), 2**60)),
    (pa.duration("us"), st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999))),
    (pa.null(), st.none()),
]


@st.composite
def keys_of(draw: st.DrawFn) -> pa.RecordBatch:
    """Stored key columns of one or two types, each key once."""
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=2))
    rows = draw(st.lists(st.tuples(*(st.none() | values for _, values in types)), min_size=1, max_size=8))
    columns = [pa.array([row[i] for row in rows], data_type) for i, (data_type, _) in enumerate(types)]
    names = [f"k{i}" for i in range(len(types))]
    batch = key_columns(pa.RecordBatch.from_arrays(columns, names=names), names)
    encoded = KeyCodec(batch.schema).encode(batch)
    first = sorted({repr(key): row for row, key in enumerate(encoded)}.values())
    return batch.take(pa.array(first))


@settings(max_examples=300, deadline=None)
@given(keys=keys_of())
def test_timers_of_one_moment_fire_by_key(keys: pa.RecordBatch) -> None:
    """By value, then NaN, then null, of each column in turn; on disk by the bytes, which give the key again."""
    codec = KeyCodec(keys.schema)
    names = tuple(keys.schema.names)
    expected = list(map(repr, sorted(codec.encode(keys), key=sort_key)))
    rows = keys.num_rows

    form = TimerKeys(keys.schema)
    ascending = sorted(form.encode(keys))
    assert len(set(ascending)) == rows
    assert not any(b.startswith(a) for a, b in pairwise(ascending))
    decoded = form.decode(ascending, 0)
    assert decoded.schema.equals(keys.schema)
    assert list(map(repr, codec.encode(decoded))) == expected

    backend = ColumnarBackend(8, names, incremental=False)
    backend.fix_keys(keys.schema)
    backend.timers.change(keys, [0] * rows, [5] * rows, [True] * rows)
    assert list(map(repr, codec.encode(backend.timers.due(0, 5, rows).keys))) == expected


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-(2**63), 2**63 - 1)), min_size=2, max_size=2))
def test_moments_ascend_in_their_bytes(timers: list[tuple[int, int]]) -> None:
    """By clock, then by moment, with an end behind each that lies before the next one."""
    (one, other) = sorted(timers)
    assert (moment_bytes(*one) < moment_bytes(*other)) == (one < other)
    assert moment_of(moment_bytes(*one), 0) == one
    assert moment_bytes(*one) + b"\xff" * 9 < end_of_moment(*one)
    assert one == other or end_of_moment(*one) <= moment_bytes(*other)


def test_the_bytes_are_pinned() -> None:
    """Checkpoints of files have them: golden values."""
    schema = pa.schema({"k": pa.int64(), "s": pa.string(), "f": pa.float64()})
    keys = pa.record_batch([pa.array([-2]), pa.array(["a\x00"]), pa.array([1.5])], schema=schema)
    (key,) = TimerKeys(schema).encode(keys)

    assert key.hex() == "007ffffffffffffffe" + "006100ff0000" + "00bff8000000000000"
    assert moment_bytes(1, 3).hex() == "018000000000000003"
    rows = timer_rows([moment_bytes(1, 3) + key], schema)
    assert rows.to_pylist() == [
        {
            "k": -2,
            "s": "a\x00",
            "f": 1.5,
            "_tidegate_timer_domain": "processing_time",
            "_tidegate_timer_timestamp_ms": 3,
        }
    ]


@pytest.mark.parametrize("types", [[pa.int64()], [pa.string()], [pa.decimal128(9, 2)], [pa.float64(), pa.string()]])
def test_damaged_keys_are_told(types: list[pa.DataType]) -> None:
    """Bytes that end too early, go on too far, or name no clock."""
    schema = pa.schema([(f"k{i}", data_type) for i, data_type in enumerate(types)])
    values = {pa.int64(): 7, pa.string(): "x", pa.decimal128(9, 2): Decimal("1.25"), pa.float64(): 2.5}
    keys = pa.record_batch([pa.array([values[data_type]], data_type) for data_type in types], schema=schema)
    (key,) = TimerKeys(schema).encode(keys)
    for damaged in (key[:-1], key + b"\x00", b""):
        with pytest.raises(CorruptionError, match="stored timers do not have the key columns"):
            timer_rows([moment_bytes(0, 1) + damaged], schema)
    with pytest.raises(CorruptionError, match="unknown clock"):
        timer_rows([b"\x02" + moment_bytes(0, 1)[1:] + key], schema)
