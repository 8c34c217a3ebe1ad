"""Events of Debezium become newest versions of rows, or a reason that names the field."""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from debezium_events import FILES, TABLE, events, every_type
from hypothesis import given
from hypothesis import strategies as st
from payload_arrays import binary

from tidegate.connectors.formats.debezium import DebeziumDecoder, DebeziumFormat
from tidegate.connectors.formats.debezium_values import unscaled_bytes
from tidegate.connectors.formats.format import PayloadUse, RowChanges
from tidegate.connectors.formats.row_versions import UNCHANGED
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import unmarked

_ITEM = pa.schema([("id", pa.int64()), ("v", pa.string())])


def _event(op: str, after: Any = None, before: Any = None) -> bytes:
    return json.dumps({"before": before, "after": after, "op": op, "source": {"snapshot": "false"}}).encode()


def _key(value: object) -> bytes:
    return json.dumps({"id": value}).encode()


def _decoder(columns: pa.Schema = _ITEM, keys: tuple[str, ...] = ("id",), **options: Any) -> DebeziumDecoder:
    return DebeziumDecoder(columns, keys, DebeziumFormat(**options))


def _fault(value: bytes, key: bytes | None = _key(1), columns: pa.Schema = _ITEM, **options: Any) -> str:
    """The reason why an event cannot be read. A good event before and after it can."""
    before, after = _event("c", {"id": 8, "v": "x"}), _event("c", {"id": 9, "v": "y"})
    found = _decoder(columns, **options).decode_records(binary([before, value, after]), binary([_key(8), key, _key(9)]))
    assert found.batch.column("id").to_pylist() == [8, 9]
    assert list(found.bad) == [1]
    return unmarked(found.bad[1])


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_real_event_is_read_with_its_types(name: str) -> None:
    """Snapshot rows, creates, updates, deletes and their tombstones, a change of key, a truncate."""
    records = events(name)
    decoder = _decoder(TABLE, truncates="apply", metadata=("op", "snapshot", "timestamp"))
    found = decoder.decode_records(binary([each.value for each in records]), binary([each.key for each in records]))
    assert not found.bad
    assert found.sources is not None
    assert found.sources.tolist() == [number for number, each in enumerate(records) if each.value is not None]
    rows = found.batch.to_pylist()
    assert [row["debezium_op"] for row in rows] == [each.event["op"] for each in records if each.event is not None]
    assert [row["row_kind"] for row in rows if row["debezium_op"] in "dt"] == ["-D"] * 4 + ["truncate"]
    assert [row["debezium_snapshot"] in ("false", None) for row in rows] == [False, False] + [True] * 17
    assert rows[0]["debezium_timestamp"] < rows[-1]["debezium_timestamp"]
    one = {name: rows[0][name] for name in TABLE.names}
    assert one == {
        "id": 1,
        "name": "one",
        "price": Decimal("1.50"),
        "at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "data": '{"a": 1}',
        "ok": True,
        "big": 9007199254740993,
        "f": 1.5,
        "raw": b"\x01\x02",
    }
    assert [rows[1][name] for name in TABLE.names] == [2, "zwei é", *[None] * 8]


def test_each_event_alone_is_read_as_among_others() -> None:
    """How records are cut into batches does not matter, and files of both forms may be mixed."""
    records = [each for pair in zip(*(events(name) for name in FILES), strict=True) for each in pair]
    whole = _decoder(TABLE, truncates="apply")
    together = whole.decode_records(binary([each.value for each in records]), binary([each.key for each in records]))
    single = _decoder(TABLE, truncates="apply")
    apart = [single.decode_records(binary([each.value]), binary([each.key])).batch for each in records]
    assert not together.bad
    assert together.batch.to_pylist() == [row for batch in apart for row in batch.to_pylist()]


@given(st.lists(st.none() | st.integers(-(10**38) + 1, 10**38 - 1), max_size=30), st.integers(0, 38))
def test_precise_decimals_are_exact(numbers: list[int | None], scale: int) -> None:
    """Integers of any length in two's complement, as `BigInteger.toByteArray` writes them."""

    def written(number: int | None) -> str | None:
        if number is None:
            return None
        size = (number if number >= 0 else ~number).bit_length() // 8 + 1
        return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()

    columns = pa.schema([("id", pa.int64()), ("v", pa.decimal128(38, scale))])
    values = [_event("c", {"id": i, "v": written(number)}) for i, number in enumerate(numbers)]
    found = _decoder(columns).decode_records(binary(values), binary([_key(i) for i in range(len(numbers))]))
    assert not found.bad
    given_back = [None if v is None else int(v.scaleb(scale)) for v in map(_exact, found.batch.column("v").to_pylist())]
    assert given_back == numbers


class _Wide(Decimal):
    """`scaleb` of a decimal rounds to 28 digits."""

    def scaleb(self, other: Any, context: Any = None) -> Decimal:
        sign, digits, exponent = self.as_tuple()
        assert isinstance(exponent, int)
        return Decimal((sign, digits, exponent + other))


def _exact(value: Decimal | None) -> _Wide | None:
    return None if value is None else _Wide(value)


def test_times_are_integers_in_the_unit_of_their_type() -> None:
    """Zoned timestamps are text. Values may be in structs and lists."""
    inner = pa.struct([("n", pa.decimal128(5, 2)), ("d", pa.list_(pa.date32()))])
    columns = pa.schema(
        [
            ("id", pa.int64()),
            ("ms", pa.timestamp("ms")),
            ("us", pa.timestamp("us")),
            ("zoned", pa.timestamp("us", "UTC")),
            ("t", pa.time64("us")),
            ("t3", pa.time32("ms")),
            ("long", pa.duration("us")),
            ("more", inner),
        ]
    )
    row = {
        "id": 1,
        "ms": 1_000,
        "us": -1,
        "zoned": "2026-01-02T03:04:05Z",
        "t": 1_000_001,
        "t3": 2_000,
        "long": 5,
        "more": {"n": "AJY=", "d": [0, 1]},
    }
    empty = dict.fromkeys(row) | {"id": 2}
    found = _decoder(columns).decode_records(binary([_event("c", row), _event("c", empty)]), binary([_key(1), _key(2)]))
    assert not found.bad
    assert list(found.batch.to_pylist()[0].values())[:8] == [
        1,
        datetime(1970, 1, 1, 0, 0, 1),
        datetime(1969, 12, 31, 23, 59, 59, 999_999),
        datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        time(0, 0, 1, 1),
        time(0, 0, 2),
        timedelta(microseconds=5),
        {"n": Decimal("1.50"), "d": [date(1970, 1, 1), date(1970, 1, 2)]},
    ]
    assert [found.batch.to_pylist()[1][name] for name in columns.names] == [2, *[None] * 7]


def test_decimals_may_be_text_or_numbers() -> None:
    """Decimals follow `decimal.handling.mode`."""
    columns = pa.schema([("id", pa.int64()), ("v", pa.decimal128(10, 2))])
    for mode, value in (("string", "1234.50"), ("double", 1234.5)):
        found = _decoder(columns, decimals=mode).decode_records(
            binary([_event("c", {"id": 1, "v": value})]), binary([_key(1)])
        )
        assert found.batch.column("v").to_pylist() == [Decimal("1234.50")]


def test_a_deletion_has_its_keys_from_the_row_or_from_the_record() -> None:
    """With REPLICA IDENTITY NOTHING and in other databases `before` may be missing."""
    values = [_event("d", before={"id": 1, "v": None}), _event("d"), None]
    found = _decoder().decode_records(binary(values), binary([_key(1), _key(2), _key(2)]))
    assert not found.bad
    assert found.batch.column("id").to_pylist() == [1, 2]
    assert found.batch.column("row_kind").to_pylist() == ["-D", "-D"]


def test_values_that_the_database_did_not_write_are_listed() -> None:
    """Text, bytes and arrays have a placeholder, which no row is shown with."""
    columns = pa.schema([("id", pa.int64()), ("t", pa.string()), ("b", pa.binary()), ("a", pa.list_(pa.string()))])
    mark = "__debezium_unavailable_value"
    row = {"id": 1, "t": mark, "b": base64.b64encode(mark.encode()).decode(), "a": [mark]}
    other = {"id": 2, "t": f"about {mark}", "b": None, "a": []}
    found = _decoder(columns).decode_records(binary([_event("u", row), _event("u", other)]), binary([_key(1), _key(2)]))
    assert not found.bad
    assert found.batch.column(UNCHANGED).to_pylist() == [["t", "b", "a"], None]
    first, second = found.batch.to_pylist()
    assert [first[name] for name in "tba"] == [None, None, None]
    assert [second[name] for name in "tba"] == [f"about {mark}", None, []]


MARK = "__debezium_unavailable_value"
BYTES_OF_MARK = [base64.b64encode(bytes([each])).decode() for each in MARK.encode()]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_(pa.int16()), list(MARK.encode())),
        (pa.list_(pa.int64()), list(MARK.encode())),
        (pa.list_(pa.date32()), list(MARK.encode())),
        (pa.list_(pa.timestamp("us")), list(MARK.encode())),
        (pa.list_(pa.float64()), [float(each) for each in MARK.encode()]),
        (pa.list_(pa.decimal128(5, 1)), BYTES_OF_MARK),
        (
            pa.list_(pa.struct([("scale", pa.int32()), ("value", pa.binary())])),
            [{"scale": 0, "value": each} for each in BYTES_OF_MARK],
        ),
        (pa.list_(pa.string()), ["b68a35a7-17ad-35b3-af2a-ae46edb4545a"]),  # UUID.nameUUIDFromBytes of Java
        (pa.list_(pa.binary()), [base64.b64encode(MARK.encode()).decode()]),
        (pa.string(), json.dumps({MARK: MARK}, separators=(",", ":"))),  # an hstore
        (pa.string(), MARK.encode().hex()),
        (pa.string(), base64.urlsafe_b64encode(MARK.encode()).decode()),
        (pa.dictionary(pa.int32(), pa.string()), MARK),
    ],
)
def test_a_placeholder_has_the_type_of_its_column(kind: pa.DataType, value: Any) -> None:
    """Debezium writes arrays of numbers with an element for each byte. Arrays that differ from it are values."""
    columns = pa.schema([("id", pa.int64()), ("v", kind)])
    others = [value[:-1], None] if isinstance(value, list) else [None]
    values = [_event("u", {"id": 1, "v": each}) for each in (value, *others)]
    found = _decoder(columns).decode_records(binary(values), binary([_key(1)] * len(values)))
    assert not found.bad
    assert found.batch.column(UNCHANGED).to_pylist() == [["v"], *[None] * len(others)]
    assert found.batch.column("v").is_valid().to_pylist() == [False, *(each is not None for each in others)]


def test_a_placeholder_may_be_written_with_escapes() -> None:
    """JSON may write each character in two forms. A value of the same size is no placeholder."""
    columns = pa.schema([("id", pa.int64()), ("v", pa.string())])
    values = [_event("u", {"id": 1, "v": each}) for each in (MARK, MARK.upper())]
    escaped = values[0].replace(b"_", b"\\u005f")
    found = _decoder(columns).decode_records(binary([escaped, values[1]]), binary([_key(1)] * 2))
    assert not found.bad
    assert found.batch.column(UNCHANGED).to_pylist() == [["v"], None]
    assert found.batch.column("v").to_pylist() == [None, MARK.upper()]


@pytest.mark.parametrize("mark", [MARK, "\x01"])
def test_an_array_of_booleans_has_no_placeholder(mark: str) -> None:
    """Debezium has none for it, and an array of as many booleans as the placeholder has bytes is a value."""
    columns = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.bool_()))])
    value = [True] * len(mark)
    found = _decoder(columns, unavailable=mark).decode_records(
        binary([_event("u", {"id": 1, "v": value})]), binary([_key(1)])
    )
    assert (found.bad, found.batch.column("v").to_pylist()) == ({}, [value])
    assert found.batch.column(UNCHANGED).to_pylist() == [None]


@pytest.mark.parametrize("unavailable", ["", 5, None, b"x"])
def test_a_placeholder_is_a_text(unavailable: object) -> None:
    """An empty one would make each empty value an unchanged value."""
    with pytest.raises(ConfigurationError, match=r"unavailable=.*: give the connector's unavailable.value.placeholder"):
        DebeziumFormat(unavailable=unavailable)  # type: ignore[arg-type]


def test_metadata_is_a_list_of_names() -> None:
    """One name would be taken for its letters."""
    with pytest.raises(ConfigurationError, match=r"metadata='op'\): give a list of names, as in \['op'\]"):
        DebeziumFormat(metadata="op")  # type: ignore[arg-type]


def test_reasons_name_the_field() -> None:
    """Each event is judged alone."""
    row = {"id": 1, "v": "x"}
    assert "not an event of Debezium" in _fault(b'{"id": 1, "v": "x"}')
    assert "not a JSON object" in _fault(b"1")
    assert "field 'op' is 'm'" in _fault(_event("m", row))
    assert "field 'after' is missing in an event with op 'u'" in _fault(_event("u"))
    assert "the table was truncated" in _fault(_event("t"), None)
    assert "the record has no key" in _fault(_event("c", row), None)
    assert "field 'v' is missing in 'after'" in _fault(_event("c", {"id": 1}))
    assert "field 'id' is 1 in the row, and 2 in the key" in _fault(_event("c", row), _key(2))
    assert "columns ['id', 'x'], and keys= has ['id']" in _fault(_event("c", row), b'{"id": 1, "x": 1}')
    assert "columns ['x'], and keys= has ['id']" in _fault(_event("c", row), b'{"x": 1}')
    assert "field 'id' is null in the key of the record" in _fault(_event("c", row), b'{"id": null}')
    assert "the key of the record" in _fault(_event("c", row), b"1")
    assert "column 'after.v': a JSON number" in _fault(_event("c", {"id": 1, "v": 5}))


def test_a_value_that_does_not_fit_makes_its_event_bad() -> None:
    """Numbers with too many digits, bytes that are none, times after midnight, and nulls where none may be."""

    def fault(kind: pa.DataType, value: object, nullable: bool = True) -> str:
        columns = pa.schema([("id", pa.int64()), pa.field("v", kind, nullable)])
        found = _decoder(columns).decode_records(binary([_event("c", {"id": 1, "v": value})]), binary([_key(1)]))
        assert not found.batch.num_rows
        return unmarked(found.bad[0])

    assert "field 'v': the number, of 2 bytes, is not a value of decimal128(4, 2)" in fault(
        pa.decimal128(4, 2), base64.b64encode((30_000).to_bytes(2, "big")).decode()
    )
    assert "of 17 bytes" in fault(pa.decimal128(38, 2), base64.b64encode(bytes([1] * 17)).decode())
    assert "after.v" in fault(pa.decimal128(10, 2), "1.50")
    assert "not a time of a day" in fault(pa.time32("ms"), 86_400_000)
    assert "is not nullable" in fault(pa.string(), None, nullable=False)


def test_a_schema_in_the_event_is_compared_with_the_columns() -> None:
    """A wrong scale or unit, or a missing column, would give wrong values without an error."""
    record = events(FILES[1])[1]  # Its values are null, so that only the schema shows the difference.

    def fault(columns: pa.Schema) -> str:
        found = _decoder(columns).decode_records(binary([record.value]), binary([record.key]))
        assert not found.batch.num_rows
        return unmarked(found.bad[0])

    def changed(name: str, kind: pa.DataType) -> pa.Schema:
        return pa.schema([(each.name, kind if each.name == name else each.type) for each in TABLE])

    assert "'price' has 2 decimal places in the event, and 3" in fault(changed("price", pa.decimal128(10, 3)))
    assert "use pa.decimal128" in fault(changed("price", pa.binary()))
    assert "'at' is a string in the event" in fault(changed("at", pa.timestamp("us")))
    assert "field 'new' is missing in the schema" in fault(TABLE.append(pa.field("new", pa.string())))
    text = (record.value or b"").replace(b"io.debezium.time.ZonedTimestamp", b"io.debezium.time.MicroTimestamp")
    found = _decoder(changed("at", pa.timestamp("ms"))).decode_records(binary([text]), binary([record.key]))
    assert "counts us in the event" in found.bad[0]


_CENTS = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "2"}}
_MILLIS = {"type": "int64", "name": "io.debezium.time.Timestamp"}


@pytest.mark.parametrize(
    ("described", "value", "wanted", "message"),
    [
        ({"type": "int64"}, 1_700_000_000, pa.timestamp("us"), "'v' is int64 in the event"),
        ({"type": "int32"}, 1_700, pa.date32(), "'v' is int32 in the event"),
        (_MILLIS, 1_700, pa.date32(), "'v' is int64 (io.debezium.time.Timestamp) in the event"),
        ({"type": "bytes"}, "YWJj", pa.string(), "'v' is bytes in the event"),
        ({"type": "string"}, "abcd", pa.binary(), "'v' is string in the event"),
        ({"type": "array", "items": _CENTS}, ["BNI="], pa.list_(pa.decimal128(9, 3)), "each has 2 decimal places"),
        ({"type": "array", "items": _MILLIS}, [1_700], pa.list_(pa.timestamp("us")), "each counts ms in the event"),
        ({"type": "array", "items": {"type": "bytes"}}, ["YWJj"], pa.list_(pa.string()), "each is bytes"),
        (
            {"type": "struct", "fields": [{**_MILLIS, "field": "a"}]},
            {"a": 1_700},
            pa.struct([("a", pa.timestamp("us"))]),
            "'v' has the member 'a', which counts ms",
        ),
    ],
)
def test_a_schema_in_the_event_shows_a_value_of_another_meaning(
    described: dict[str, Any], value: object, wanted: pa.DataType, message: str
) -> None:
    """At any depth: the value itself would be read as another one."""
    fields = [{"type": "int32", "field": "id"}, {**described, "field": "v", "optional": True}]
    images = [{"type": "struct", "fields": fields, "field": name} for name in ("before", "after")]
    event = {"before": None, "after": {"id": 1, "v": value}, "op": "c"}
    record = {"schema": {"type": "struct", "fields": images}, "payload": event}
    columns = pa.schema([("id", pa.int32()), ("v", wanted)])
    found = _decoder(columns).decode_records(binary([json.dumps(record).encode()]), binary([b'{"id":1}']))
    assert message in unmarked(found.bad[0])


def test_wrong_arguments_are_refused() -> None:
    """Before anything is read."""
    with pytest.raises(ConfigurationError, match="needs keys="):
        _decoder(keys=())
    with pytest.raises(ConfigurationError, match="not 'x'"):
        _decoder(keys=("x",))
    with pytest.raises(ConfigurationError, match="'row_kind' is reserved"):
        _decoder(pa.schema([("id", pa.int64()), ("row_kind", pa.string())]))
    with pytest.raises(ConfigurationError, match="too wide"):
        _decoder(pa.schema([("id", pa.int64()), ("v", pa.decimal256(50, 2))]))
    with pytest.raises(ConfigurationError, match="decimals"):
        DebeziumFormat(decimals="text")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="metadata"):
        DebeziumFormat(metadata=("lsn",))


def _written(
    rows: pa.RecordBatch, before: list[int], after: list[int], keys: tuple[str, ...] = ("id",), **options: Any
) -> tuple[list[bytes], list[bytes], dict[int, str]]:
    """The values and the keys of changes of rows, and the changes that cannot be written."""
    form, topic = DebeziumFormat(**options), "shop.public.items"
    values = form.for_writing(rows.schema, PayloadUse("to_kafka", (topic,), keys=keys)).encoder()
    changes = RowChanges(np.array(before), np.array(after))
    found = values.encode_changes(rows, changes, None, topic)
    good = [int(row) for number, row in enumerate(changes.rows) if number not in found.bad]
    of_key = rows.take(pa.array(good, pa.int64())).select(list(keys))
    made = form.for_writing(of_key.schema, PayloadUse("to_kafka", (topic,), "key", keys)).encoder().encode(of_key)
    assert not made.bad
    return found.payloads.to_pylist(), made.payloads.to_pylist(), found.bad


def test_events_are_written_as_debezium_writes_them() -> None:
    """The same rows before and after, with the same keys. The envelope has no members that Debezium's has not."""
    records = [each for each in events(FILES[0]) if each.event is not None and each.event["op"] != "t"]
    found = _decoder(TABLE).decode_records(
        binary([each.value for each in records]), binary([each.key for each in records])
    )
    rows = found.batch.select(TABLE.names)
    newest: dict[int, int] = {}
    before, after = [], []
    for number, each in enumerate(records):
        assert each.event is not None
        key = (each.event["after"] or each.event["before"])["id"]
        before.append(newest.get(key, -1))
        after.append(-1 if each.event["op"] == "d" else number)
        newest |= {key: number}
        if each.event["op"] == "d":
            del newest[key]
    values, keys, bad = _written(rows, before, after)
    assert not bad
    assert keys == [each.key for each in records]
    for value, each in zip(values, records, strict=True):
        event = json.loads(value)
        assert each.event is not None
        assert (event["before"], event["after"]) == (each.event["before"], each.event["after"])
        assert event["op"] == each.event["op"].replace("r", "c")
        assert set(event) <= set(each.event)
        assert set(event["source"]) <= set(each.event["source"])
    assert (event["source"]["name"], event["source"]["table"]) == ("shop", "items")


def test_events_that_are_written_are_read_as_the_same_rows() -> None:
    """Values of every type of an event come back, in structs and lists, with nulls, and in slices."""
    columns, row = every_type()
    empty = dict.fromkeys(row) | {"id": ""}
    rows = pa.RecordBatch.from_pylist([row, empty, row | {"id": "c"}, empty | {"id": "d"}], schema=columns).slice(1)
    values, keys, bad = _written(rows, [-1, -1, -1], [0, 1, 2])
    assert not bad
    found = _decoder(columns).decode_records(binary(values), binary(keys))
    assert not found.bad
    assert found.batch.select(columns.names).equals(rows)


@given(st.lists(st.none() | st.integers(-(10**38) + 1, 10**38 - 1), max_size=30), st.integers(0, 38))
def test_decimals_are_written_as_the_shortest_integers(numbers: list[int | None], scale: int) -> None:
    """As `BigInteger.toByteArray` writes them."""
    values = [None if n is None else Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -scale)) for n in numbers]
    found = unscaled_bytes(pa.array([None, *values], pa.decimal128(38, scale)).slice(1)).to_pylist()
    sizes = [0 if n is None else (n if n >= 0 else ~n).bit_length() // 8 + 1 for n in numbers]
    expected = [
        None if n is None else n.to_bytes(size, "big", signed=True) for n, size in zip(numbers, sizes, strict=True)
    ]
    assert found == expected


@pytest.mark.parametrize("mode", ["string", "double"])
def test_decimals_are_written_in_the_mode_of_the_connector(mode: str) -> None:
    """And are read in it."""
    rows = pa.RecordBatch.from_pylist(
        [{"id": 1, "v": Decimal("-0.50")}, {"id": 2, "v": None}],
        schema=pa.schema([("id", pa.int64()), ("v", pa.decimal128(9, 2))]),
    )
    values, keys, _ = _written(rows, [-1, -1], [0, 1], decimals=mode)
    assert json.loads(values[0])["after"]["v"] == ("-0.50" if mode == "string" else -0.5)
    assert (
        _decoder(rows.schema, decimals=mode)
        .decode_records(binary(values), binary(keys))
        .batch.select(["id", "v"])
        .equals(rows)
    )


def test_a_row_that_no_event_can_hold_is_bad() -> None:
    """As the row before a change, it has its keys alone."""
    nan = float("nan")
    rows = pa.RecordBatch.from_pylist([{"id": n, "v": nan if n == 1 else 0.5} for n in (1, 1, 2, 2)])
    rows = rows.set_column(1, "v", pa.array([nan, 2.5, 0.5, nan]))
    values, _, bad = _written(rows, [0, 2, 0], [1, 3, -1])
    assert list(bad) == [1]
    assert "column 'v' is NaN" in unmarked(bad[1])
    images = [(event["op"], event["before"], event["after"]) for event in map(json.loads, values)]
    assert images == [("u", {"id": 1, "v": None}, {"id": 1, "v": 2.5}), ("d", {"id": 1, "v": None}, None)]


def test_a_key_without_a_value_is_bad() -> None:
    """The row would have no identity."""
    columns = pa.schema([("id", pa.int64())])
    keys = DebeziumFormat().for_writing(columns, PayloadUse("to_kafka", ("t",), "key", ("id",))).encoder()
    found = keys.encode(pa.RecordBatch.from_pylist([{"id": 1}, {"id": None}], schema=columns))
    assert found.payloads.to_pylist() == [b'{"id":1}']
    assert "'id' is null" in unmarked(found.bad[1])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (pa.timestamp("s"), "counts times in ms, us or ns"),
        (pa.time32("s"), "counts times in ms, us or ns"),
        (pa.list_(pa.duration("s")), "counts durations in us or ns"),
        (pa.decimal256(40, 2), "up to 38 digits"),
        (pa.map_(pa.string(), pa.date32()), "only structs and lists"),
        (pa.large_list(pa.binary()), None),
        (pa.large_list(pa.timestamp("us")), "only structs and lists"),
        (pa.map_(pa.int32(), pa.int32()), "a map with keys of type int32"),
    ],
)
def test_columns_that_events_cannot_hold_are_refused(kind: pa.DataType, reason: str | None) -> None:
    """With the name of the column."""
    columns, use = pa.schema([("id", pa.int64()), ("v", kind)]), PayloadUse("to_kafka", ("t",), keys=("id",))
    if reason is None:
        DebeziumFormat().for_writing(columns, use)
        return
    with pytest.raises(ConfigurationError, match=rf"column 'v' is .*{reason}"):
        DebeziumFormat().for_writing(columns, use)


def test_options_and_columns_that_do_not_apply_to_writing_are_refused() -> None:
    """A key that is not in the rows, and options of the reader."""
    with pytest.raises(ConfigurationError, match="add 'id' to value="):
        DebeziumFormat().for_writing(pa.schema([("v", pa.int64())]), PayloadUse("to_kafka", ("t",), keys=("id",)))
    for options in ({"truncates": "apply"}, {"metadata": ["op"]}, {"unavailable": "x"}):
        with pytest.raises(ConfigurationError, match=f"remove {next(iter(options))}="):
            DebeziumFormat(**options).for_writing(_ITEM, PayloadUse("to_kafka", ("t",), keys=("id",)))  # type: ignore[arg-type]
