"""Rows become records of Kafka: each part from its columns, and bad rows with their reason."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from tidegate.connectors.formats.debezium import DebeziumFormat
from tidegate.connectors.formats.format import PayloadUse, RowChanges, WriteFormat
from tidegate.connectors.formats.json import JsonFormat
from tidegate.connectors.formats.raw import RawWrite
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
    keys: WriteFormat = RawWrite()
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
    records, _ = made(RecordLayout(("k",), RawWrite(), ("h",), RawWrite()))
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


def test_deleted_rows_are_tombstones() -> None:
    """Their values need not fit the format; without a key they are bad."""
    rows = ROWS.to_pylist()
    rows[2]["f"] = float("inf")
    batch = pa.RecordBatch.from_pylist(rows, schema=ROWS.schema)
    changes = RowChanges(np.array([-1, 1, 2]), np.array([0, -1, -1]))
    result = RecordMaker(layout("n", "f", replaces=True), "t", 1_000).make(batch, changes)
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
    found = RecordLayout(("k",), RawWrite(), headers="all")
    found.check(rows.schema)
    records, _ = made(found, rows)
    assert [record["headers"] for record in records] == [
        [{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}],
        None,
        [],
    ]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2**61 + 1, 9 * 10**15, None], pa.timestamp("s")),
        ([2**63, 9 * 10**18, None], pa.uint64()),
    ],
)
def test_a_timestamp_does_not_wrap_around(values: list[int | None], kind: pa.DataType) -> None:
    """Seconds become milliseconds, and unsigned numbers signed ones."""
    rows = pa.RecordBatch.from_arrays([pa.array([b"x"] * 3), pa.array(values, kind)], names=["k", "at"])
    records, bad = made(RecordLayout(("k",), RawWrite(), timestamp="at"), rows)
    assert [record["timestamp"] for record in records] == [9 * 10**18, None]
    assert bad == {0: "column 'at' is too far in the future for a timestamp of Kafka"}


@pytest.mark.parametrize("seconds", [-(2**62), -(2**63) // 1_000 - 1_000, -1])
def test_an_early_timestamp_does_not_wrap_around(seconds: int) -> None:
    """In milliseconds, the first one is 0, and the second one is far in the future."""
    rows = pa.RecordBatch.from_pydict({"k": [b"x"], "at": pa.array([seconds], pa.timestamp("s"))})
    _, bad = made(RecordLayout(("k",), RawWrite(), timestamp="at"), rows)
    assert bad == {0: "column 'at' is before 1970, which is not a timestamp of Kafka"}


def test_no_headers_are_no_column() -> None:
    """An empty dict, as a program may compute it."""
    records, bad = made(RecordLayout(("k",), RawWrite(), headers={}), ROWS)
    assert ([list(record) for record in records], bad) == ([["value"]] * len(ROWS), {})


def test_a_header_without_a_name_makes_a_row_bad() -> None:
    """Also a header that is null. The rows around it are written."""
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    listed = [[("a", b"1")], [("a", b"1"), (None, b"2")], [None]]
    rows = ROWS.append_column("all", pa.array(listed, kind))
    records, bad = made(RecordLayout(("k",), RawWrite(), headers="all"), rows)
    assert [record["headers"] for record in records] == [[{"key": "a", "value": b"1"}]]
    assert bad == dict.fromkeys([1, 2], "column 'all' has a header whose key is null; a header of Kafka has a key")


def test_a_record_that_replaces_another_one_has_a_key() -> None:
    """Records without a key would go to any partition."""
    result = RecordMaker(layout("n", replaces=True), "t", 1_000).make(ROWS)
    assert list(result.bad) == [1]
    assert "the key is null" in result.bad[1]


def test_a_deletion_that_has_a_value_is_followed_by_a_tombstone() -> None:
    """Both have the same key and timestamp. A change that is bad has neither, and names its row."""
    form = DebeziumFormat()
    columns = pa.schema([ROWS.schema.field("n"), ROWS.schema.field("f")])
    values = form.for_writing(columns, PayloadUse("to_kafka", ("s.t",), keys=("n",)))
    keys = form.for_writing(columns.remove(1), PayloadUse("to_kafka", ("s.t",), "key", ("n",)))
    found = RecordLayout(("n", "f"), values, ("n",), keys, timestamp="at")
    rows = ROWS.to_pylist()
    rows[1] |= {"f": float("nan"), "at": datetime(2024, 1, 4, tzinfo=UTC)}
    batch = pa.RecordBatch.from_pylist(rows, schema=ROWS.schema)
    changes = RowChanges(np.array([2, -1, -1]), np.array([-1, 1, 0]))
    result = RecordMaker(found, "s.t", 1_000).make(batch, changes)
    assert list(result.bad) == [1]
    assert "column 'f' is NaN" in result.bad[1]
    records = result.records.to_pylist()
    assert [(record["key"], record["timestamp"]) for record in records] == [
        (b'{"n":3}', 1_704_240_000_000),
        (b'{"n":3}', 1_704_240_000_000),
        (b'{"n":1}', 1_704_153_600_000),
    ]
    deleted, tombstone, created = (record["value"] for record in records)
    assert tombstone is None
    assert json.loads(deleted) | {"source": None, "ts_ms": 0} == {
        "before": {"n": 3, "f": 1.5}, "after": None, "source": None, "transaction": None, "op": "d", "ts_ms": 0,
    }  # fmt: skip
    assert json.loads(deleted)["source"]["ts_ms"] == 1_704_240_000_000
    assert json.loads(created)["op"] == "c"
