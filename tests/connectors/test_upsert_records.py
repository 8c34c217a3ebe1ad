"""Upserts by key become newest versions of rows, or a reason that names the field."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from payload_arrays import binary

from tidegate.connectors.formats.format import DecodedRecords, PayloadDecoder, PayloadUse
from tidegate.connectors.formats.upsert import UpsertFormat
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import unmarked

ITEM = pa.schema([("id", pa.int64()), ("part", pa.string()), ("v", pa.float64())])


def decoder(*keys: str, columns: pa.Schema = ITEM) -> PayloadDecoder:
    """Returns a decoder of rows with these keys."""
    return UpsertFormat().for_reading(columns, PayloadUse("from_kafka", ("t",), keys=keys)).decoder()


def rows(found: DecodedRecords) -> list[tuple[object, ...]]:
    """Returns the columns and the kind of each row."""
    return [tuple(row.values())[:4] for row in found.batch.to_pylist()]


def test_values_are_rows_and_tombstones_are_deletions() -> None:
    """With keys of several columns, in any order."""
    values = [b'{"id": 1, "part": "a", "v": 0.5}', None, b'{"id": 2, "part": "b", "v": null}']
    keys = [b'{"id":1,"part":"a"}', b'{"part":"a","id":1}', b'{"id":2,"part":"b"}']
    found = decoder("part", "id").decode_records(binary(values), binary(keys))
    assert not found.bad
    assert rows(found) == [(1, "a", 0.5, "+U"), (1, "a", None, "-D"), (2, "b", None, "+U")]
    assert found.payload_of_rows(3).tolist() == [0, 1, 2]


def test_a_key_of_strings_is_the_text_itself() -> None:
    """Also if it is empty, or looks like JSON."""
    values = [json.dumps({"id": n, "part": part, "v": 1}).encode() for n, part in enumerate(("", '{"part":"x"}'))]
    found = decoder("part").decode_records(binary([*values, None]), binary([b"", b'{"part":"x"}', "é".encode()]))
    assert not found.bad
    assert rows(found) == [(0, "", 1.0, "+U"), (1, '{"part":"x"}', 1.0, "+U"), (None, "é", None, "-D")]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_a_key_that_to_kafka_writes_as_it_is_is_read_as_it_is(kind: pa.DataType) -> None:
    """Also with offsets of 64 bits."""
    columns = pa.schema([("part", kind), ("v", pa.int64())])
    value = b'{"part": "aGk=", "v": 1}'
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    found = decoder("part", columns=columns).decode_records(
        binary([value, None]), binary([b"aGk=" if is_text else b"hi", b"x"])
    )
    assert not found.bad
    assert [row["v"] for row in found.batch.to_pylist()] == [1, None]


@pytest.mark.parametrize(
    ("value", "key", "reason"),
    [
        (b'{"id": 2, "part": "a"}', b'{"id":1}', "field 'id' is 2 in the value, and 1 in the key"),
        (b'{"part": "a"}', b'{"id":1}', "field 'id' is None in the value"),
        (b'{"id": 1, "v": "x"}', b'{"id":1}', "column 'v': a JSON string is not a value of type double"),
        (b"[]", b'{"id":1}', "not a JSON object"),
        (b'{"id": 1}', None, "the record has no key"),
        (None, None, "the record has no key"),
        (None, b'{"id":"x"}', "the key of the record: "),
        (None, b'{"id":null}', "is null in the key"),
        (None, b'{"part":"a"}', r"has the columns \['part'\], not \['id'\]"),
        (None, b'{"id":1,"v":2}', r"has the columns \['id', 'v'\], not \['id'\]"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(value: bytes | None, key: bytes | None, reason: str) -> None:
    """Records before and after it are read."""
    good = b'{"id": 8, "part": "a", "v": 1}'
    found = decoder("id").decode_records(binary([good, value, None]), binary([b'{"id":8}', key, b'{"id":9}']))
    assert rows(found) == [(8, "a", 1.0, "+U"), (9, None, None, "-D")]
    assert list(found.bad) == [1]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(unmarked(found.bad[1]))


def test_keys_that_are_not_utf8_are_bad() -> None:
    """A key of bytes takes them."""
    value = b'{"id": 1, "part": "a", "v": 1}'
    found = decoder("part").decode_records(binary([value, None]), binary([b"a", b"\xff"]))
    assert list(found.bad) == [1]
    columns = pa.schema([("part", pa.binary()), ("v", pa.int64())])
    found = decoder("part", columns=columns).decode_records(
        binary([b'{"part": "/w==", "v": 1}', None]), binary([b"\xff", b"\xfe"])
    )
    assert not found.bad
    assert [row["part"] for row in found.batch.to_pylist()] == [b"\xff", b"\xfe"]


def test_columns_that_do_not_fit_are_refused() -> None:
    """When the job is written."""
    for columns, keys, reason in (
        (ITEM, (), "no key is given"),
        (ITEM, ("no",), "not 'no'"),
        (None, ("id",), "give the columns"),
        (pa.schema([("id", pa.int64()), ("row_kind", pa.string())]), ("id",), "reserved"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            UpsertFormat().for_reading(columns, PayloadUse("from_kafka", ("t",), keys=keys))
