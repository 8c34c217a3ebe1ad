"""JSON as a format of payloads: what is written is read back, and is JSON for every other reader."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_arrays import binary

from tidegate.connectors.formats.csv import CsvFormat
from tidegate.connectors.formats.format import Format, PayloadUse, repeated_keys
from tidegate.connectors.formats.json import JsonFormat
from tidegate.storage.errors import ConfigurationError

READING = PayloadUse("from_kafka", ("t",))
WRITING = PayloadUse("to_kafka", ("t",))
DIGITS = st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9)
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "i": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "u": (pa.uint16(), st.integers(0, 2**16 - 1)),
    "f": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "g": (pa.float32(), st.floats(allow_nan=False, allow_infinity=False, width=32)),
    "b": (pa.bool_(), st.booleans()),
    "s": (pa.string(), st.text(max_size=8)),
    'a "name"\\': (pa.string(), st.sampled_from(['"', "\\", '\\"', "\n", "\x00", "\x1f", "\x7f", "é", " "])),
    "x": (pa.binary(), st.binary(max_size=8)),
    "n": (pa.decimal128(18, 3), DIGITS),
    "d": (pa.date32(), st.dates()),
    "t": (pa.time64("us"), st.times()),
    "z": (pa.timestamp("us"), st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1))),
    "w": (pa.timestamp("us", "UTC"), st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1))),
    "l": (pa.list_(pa.int32()), st.lists(st.none() | st.integers(-5, 5), max_size=3)),
    "p": (
        pa.struct([("q", pa.string()), ("r", pa.list_(pa.float64()))]),
        st.fixed_dictionaries(
            {"q": st.none() | st.text(max_size=3), "r": st.none() | st.lists(st.sampled_from([0.5]))}
        ),
    ),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
ROWS = st.lists(st.fixed_dictionaries({name: st.none() | values for name, (_, values) in COLUMNS.items()}), max_size=6)


def encoded(batch: pa.RecordBatch) -> list[bytes]:
    """The payloads of rows that are all good."""
    found = JsonFormat().for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert found.bad == {}
    return found.payloads.to_pylist()


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(0, 2))
def test_rows_are_read_back_as_they_were(rows: list[dict[str, Any]], start: int) -> None:
    """Every value of every type, with nulls anywhere, also in a batch that is a slice of another."""
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA).slice(start)
    payloads = encoded(batch)
    back = JsonFormat().for_reading(SCHEMA, READING).decoder().decode(binary(payloads))
    assert back.bad == {}
    assert back.batch.to_pylist() == batch.to_pylist()
    for payload, row in zip(payloads, rows[start:], strict=True):
        plain = json.loads(payload, parse_float=decimal.Decimal)
        assert list(plain) == list(COLUMNS)
        assert all(plain[name] == row[name] for name in ("i", "u", "b", "s", "l", 'a "name"\\'))


def test_nested_values_and_maps_become_objects() -> None:
    """Members are in the order of columns, and a map is an object."""
    batch = pa.record_batch(
        {
            "m": pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())),
            "k": pa.array(["x", None, "x"]).dictionary_encode(),
            "s": pa.array([{"a": [1.5]}, {"a": None}, None], pa.struct([("a", pa.list_(pa.float64()))])),
            "v": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
        }
    )
    assert encoded(batch) == [
        b'{"m":{"a":1,"b":null},"k":"x","s":{"a":[1.5]},"v":[1,2]}',
        b'{"m":null,"k":null,"s":{"a":null},"v":null}',
        b'{"m":{},"k":"x","s":null,"v":[3,4]}',
    ]


def test_a_row_with_a_float_that_json_lacks_is_bad() -> None:
    """Also inside of lists; the rows around it are written."""
    batch = pa.record_batch({"x": [[1.0], [2.0, float("nan")], None, [float("-inf")]], "i": [1, 2, 3, 4]})
    found = JsonFormat().for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert found.payloads.to_pylist() == [b'{"x":[1],"i":1}', b'{"x":null,"i":3}']
    assert sorted(found.bad) == [1, 3]
    assert "column 'x' is NaN or infinite" in found.bad[1]


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_a_year_without_four_digits_makes_a_row_bad(unit: str, zone: str | None) -> None:
    """No reader takes its text, also within a list."""
    factor = {"s": 1, "ms": 10**3, "us": 10**6}[unit]
    first, end = -719_528 * 86_400 * factor, 2_932_897 * 86_400 * factor
    times = pa.array([first - 1, first, None, end - 1, end], pa.timestamp(unit, zone))
    for column in (times, pa.ListArray.from_arrays(pa.array(range(6), pa.int32()), times)):
        batch = pa.RecordBatch.from_arrays([column], names=["a"])
        found = JsonFormat().for_writing(batch.schema, WRITING).encoder().encode(batch)
        assert sorted(found.bad) == [0, 4]
        assert found.bad[0].startswith("column 'a' has a year outside 0 to 9999")
        read = JsonFormat().for_reading(batch.schema, READING).decoder().decode(binary(found.payloads.to_pylist()))
        assert read.bad == {}
        assert read.batch.column(0).equals(column.take(pa.array([1, 2, 3])))


@pytest.mark.parametrize("form", [JsonFormat(), CsvFormat()])
def test_a_date64_that_is_no_date_makes_a_row_bad(form: Format) -> None:
    """A time of day would be lost, and a year without four digits is refused by readers."""
    day = 86_400_000
    counts = pa.array([0, 5_000, None, 2**62, -(2**62), 2_932_897 * day, 10 * day], pa.int64())
    batch = pa.record_batch({"a": counts.view(pa.date64()), "b": range(7)})
    found = form.for_writing(batch.schema, WRITING).encoder().encode(batch)
    reasons = {1: "is a date with a time of day", **dict.fromkeys((3, 4, 5), "has a year outside 0 to 9999")}
    assert sorted(found.bad) == [1, 3, 4, 5]
    for row, reason in reasons.items():
        assert found.bad[row].startswith(f"column 'a' {reason}")
    read = form.for_reading(batch.schema, READING).decoder().decode(binary(found.payloads.to_pylist()))
    assert (read.bad, read.batch) == ({}, batch.take([0, 2, 6]))


def test_a_map_with_a_key_twice_makes_a_row_bad() -> None:
    """Readers of an object keep one of two members with the same name."""
    kind = pa.map_(pa.string(), pa.int64())
    maps = [[("a", 1), ("b", 1)], [("a", 1), ("b", 2), ("a", 3)], None, [], [("a", 1)]]
    batch = pa.RecordBatch.from_arrays([pa.array([maps[1], *maps], kind)], names=["m"]).slice(1)
    found = JsonFormat().for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert [json.loads(each)["m"] for each in found.payloads.to_pylist()] == [{"a": 1, "b": 1}, None, {}, {"a": 1}]
    assert list(found.bad) == [1]
    assert found.bad[1].startswith("column 'm' is a map with a key twice")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=5), max_size=8))
def test_entries_that_repeat_a_key_are_found(maps: list[list[str]]) -> None:
    """Each entry whose key an earlier entry of the same map has, in order."""
    keys = [key for each in maps for key in each]
    repeats = [key in each[:place] for each in maps for place, key in enumerate(each)]
    lengths = np.array([len(each) for each in maps], dtype=np.int64)
    assert repeated_keys(pa.array(keys, pa.string()), lengths).tolist() == np.flatnonzero(repeats).tolist()


def test_types_that_json_lacks_are_refused_by_name() -> None:
    """At submission, with the column."""
    for kind, text in [
        (pa.duration("s"), "the type duration"),
        (pa.map_(pa.int64(), pa.string()), "a map with keys of type int64"),
        (pa.list_(pa.struct([("a", pa.duration("s"))])), "the type duration"),
        (pa.struct([("a", pa.int64()), ("a", pa.int64())]), "a struct with two fields 'a'"),
    ]:
        with pytest.raises(ConfigurationError, match=rf"to_kafka\(format='json'\): column 'c' is .*; {text}"):
            JsonFormat().for_writing(pa.schema([("c", kind)]), WRITING)


def test_reading_needs_columns() -> None:
    """JSON has no schema of its own."""
    with pytest.raises(ConfigurationError, match=r"from_kafka\(format='json'\): give the columns, value="):
        JsonFormat().for_reading(None, READING)


def test_a_missing_payload_is_a_row_of_nulls() -> None:
    """Tombstones keep their place among rows and bad payloads; a column that is not nullable makes them bad."""
    payloads = [None, b'{"x":1}', b"{", None, b'{"x":2}']
    decoder = JsonFormat().for_reading(pa.schema([("x", pa.int64())]), READING).decoder()
    found = decoder.decode_with_nulls(binary(payloads))
    assert (found.batch.column("x").to_pylist(), list(found.bad)) == ([None, 1, None, 2], [2])
    assert found.payload_of_rows(5).tolist() == [0, 1, 3, 4]
    required = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    found = JsonFormat().for_reading(required, READING).decoder().decode_with_nulls(binary(payloads))
    assert (found.batch.column("x").to_pylist(), sorted(found.bad)) == ([1, 2], [0, 2, 3])
    assert found.bad[0] == "column 'x' is not nullable, and has no value"


@pytest.mark.parametrize("kind", [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")])
@pytest.mark.parametrize("form", [JsonFormat(), CsvFormat()])
def test_a_time_that_is_not_one_of_a_day_is_bad(kind: pa.DataType, form: Format) -> None:
    """Arrow does not check times, and its text of such a time is not a time."""
    per_day = 86_400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
    counts = pa.array([0, per_day - 1, per_day, -1, None], pa.int32() if kind.bit_width == 32 else pa.int64())
    rows = pa.record_batch([pa.Array.from_buffers(kind, 5, counts.buffers())], names=["at"])
    found = form.for_writing(rows.schema, WRITING).encoder().encode(rows)
    assert sorted(found.bad) == [2, 3]
    assert found.bad[2].startswith("column 'at' is not a time between 00:00 and 24:00")
    read = form.for_reading(rows.schema, READING).decoder().decode_with_nulls(found.payloads)
    assert read.batch["at"].cast(counts.type).to_pylist() == [0, per_day - 1, None]
