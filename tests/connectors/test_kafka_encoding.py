"""Rows become records of Kafka: each part from its columns, and bad rows with their reason."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from tidegate.connectors.formats.format import PayloadUse
from tidegate.connectors.formats.json_format import JsonFormat
from tidegate.connectors.kafka.encoding import RecordLayout, RecordMaker
from tidegate.storage.errors import ConfigurationError

ROWS = pa.RecordBatch.from_pylist(
    [
        {"k": "a", "n": 1, "f": 0.5, "to": "one", "p": 3, "at": datetime(2024, 1, 2, tzinfo=UTC), "h": "x"},
        {"k": None, "n": 2, "f": None, "to": "two", "p": None, "at": None, "h": None},
        {"k": "c", "n": 3, "f": 1.5, "to": "one", "p": 0, "at": datetime(2024, 1, 3, tzinfo=UTC), "h": "z"},
    ],
    schema=pa.schema(
        [
            ("k", pa.string()),
            ("n", pa.int64()),
            ("f", pa.float64()),
            ("to", pa.string()),
            ("p", pa.int64()),
            ("at", pa.timestamp("us", "UTC")),
            ("h", pa.string()),
        ]
    ),
)


def layout(*value: str, key: tuple[str, ...] = ("k",), key_format: bool = False, **parts: object) -> RecordLayout:
    """Return a layout with JSON values of some columns."""
    schema = ROWS.schema
    values = JsonFormat().for_writing(pa.schema([schema.field(name) for name in value]), PayloadUse("to_kafka"))
    keys = None
    if key_format:
        keys = JsonFormat().for_writing(pa.schema([schema.field(name) for name in key]), PayloadUse("to_kafka"))
    found = RecordLayout(value, values, key, keys, **parts)  # type: ignore[arg-type]
    found.check(schema)
    return found


def made(found: RecordLayout, rows: pa.RecordBatch = ROWS, limit: int = 10_000) -> tuple[list[dict], dict[int, str]]:  # type: ignore[type-arg]
    """Return the records of rows and the bad rows."""
    result = RecordMaker(found, "t", limit).make(rows)
    assert result.records.schema == found.schema
    return result.records.to_pylist(), result.bad


def test_each_part_comes_from_its_columns() -> None:
    """Nulls stand for no key, the partitioner, the time of sending, and a header without a value."""
    found = layout("n", "f", topic="to", partition="p", timestamp="at", headers={"first": "h", "second": "k"})
    records, bad = made(found)
    assert bad == {}
    assert records == [
        {
            "topic": "one",
            "partition": 3,
            "key": b"a",
            "value": b'{"n":1,"f":0.5}',
            "headers": [{"key": "first", "value": b"x"}, {"key": "second", "value": b"a"}],
            "timestamp": 1_704_153_600_000,
        },
        {
            "topic": "two",
            "partition": None,
            "key": None,
            "value": b'{"n":2,"f":null}',
            "headers": [{"key": "first", "value": None}, {"key": "second", "value": None}],
            "timestamp": None,
        },
        {
            "topic": "one",
            "partition": 0,
            "key": b"c",
            "value": b'{"n":3,"f":1.5}',
            "headers": [{"key": "first", "value": b"z"}, {"key": "second", "value": b"c"}],
            "timestamp": 1_704_240_000_000,
        },
    ]


def test_keys_of_several_columns_are_objects() -> None:
    """In the order in which they are named."""
    records, _ = made(layout("n", key=("n", "k"), key_format=True))
    assert [record["key"] for record in records] == [b'{"n":1,"k":"a"}', b'{"n":2,"k":null}', b'{"n":3,"k":"c"}']


def test_raw_values_are_the_bytes_of_a_column() -> None:
    """A null is a tombstone."""
    records, _ = made(RecordLayout(("k",), None, ("h",)))
    assert records == [{"key": b"x", "value": b"a"}, {"key": None, "value": None}, {"key": b"z", "value": b"c"}]


@pytest.mark.parametrize(
    ("changes", "parts", "reason"),
    [
        ({"f": float("nan")}, {}, "column 'f' is NaN or infinite"),
        ({"to": "no topic"}, {"topic": "to"}, "which is not the name of a topic"),
        ({"to": None}, {"topic": "to"}, "column 'to' is null"),
        ({"p": -1}, {"partition": "p"}, "column 'p' is -1, which is not a partition"),
        ({"at": datetime(1969, 1, 1, tzinfo=UTC)}, {"timestamp": "at"}, "before 1970"),
        ({"k": "x" * 200}, {}, r"the record has \d+ bytes; the topic takes up to 100"),
        ({"h": "x" * 200}, {"headers": {"h": "h"}}, r"the record has \d+ bytes; the topic takes up to 100"),
    ],
)
def test_a_bad_row_is_named_and_the_other_rows_are_written(
    changes: dict[str, object], parts: dict[str, object], reason: str
) -> None:
    """By its number in the batch."""
    rows = ROWS.to_pylist()
    rows[1] |= changes
    records, bad = made(layout("n", "f", **parts), pa.RecordBatch.from_pylist(rows, schema=ROWS.schema), limit=100)
    assert [record["value"] for record in records] == [b'{"n":1,"f":0.5}', b'{"n":3,"f":1.5}']
    assert list(bad) == [1]
    import re

    assert re.search(reason, bad[1]), bad


def test_retracted_rows_are_tombstones() -> None:
    """Their values need not fit the format; without a key they are bad."""
    rows = ROWS.to_pylist()
    rows[2]["f"] = float("inf")
    batch = pa.RecordBatch.from_pylist(rows, schema=ROWS.schema)
    result = RecordMaker(layout("n", "f"), "t", 1_000).make(batch, np.array([False, True, True]))
    assert result.records.to_pylist() == [{"key": b"a", "value": b'{"n":1,"f":0.5}'}, {"key": b"c", "value": None}]
    assert list(result.bad) == [1]
    assert "the key is null" in result.bad[1]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"topic": "n"}, r"to_kafka\(topic=\): column 'n' is int64; it must have strings"),
        ({"partition": "k"}, "must have integers"),
        ({"timestamp": "k"}, "must have timestamps"),
        ({"headers": {"x": "n"}}, "must have strings or bytes"),
        ({"headers": "k"}, "must have lists of structs"),
        ({"headers": {"x": "missing"}}, "there is no column 'missing'"),
    ],
)
def test_columns_of_other_types_are_refused(parts: dict[str, object], reason: str) -> None:
    """Before anything runs."""
    with pytest.raises(ConfigurationError, match=reason):
        layout("n", **parts)


def test_a_column_of_headers_is_taken_as_it_is() -> None:
    """Also with large strings, and without headers at all."""
    headers = pa.array(
        [[("a", b"1"), ("a", b"2")], None, []],
        pa.list_(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())])),
    )
    rows = ROWS.append_column("all", headers)
    found = RecordLayout(("k",), headers="all")
    found.check(rows.schema)
    records, _ = made(found, rows)
    assert [record["headers"] for record in records] == [
        [{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}],
        None,
        [],
    ]
