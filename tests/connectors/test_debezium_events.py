"""Events of Debezium become newest versions of rows, or a reason that names the field."""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from debezium_events import FILES, TABLE, events
from hypothesis import given
from hypothesis import strategies as st

from tidegate.connectors.formats.changes import UNCHANGED
from tidegate.connectors.formats.debezium import DebeziumDecoder, DebeziumFormat
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
    found = _decoder(columns, **options).decode([before, value, after], [_key(8), key, _key(9)])
    assert found.batch.column("id").to_pylist() == [8, 9]
    assert list(found.bad) == [1]
    return unmarked(found.bad[1])


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_real_event_is_read_with_its_types(name: str) -> None:
    """Snapshot rows, creates, updates, deletes and their tombstones, a change of key, a truncate."""
    records = events(name)
    decoder = _decoder(TABLE, truncates="apply", metadata=("op", "snapshot", "timestamp"))
    found = decoder.decode([each.value for each in records], [each.key for each in records])
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
    together = whole.decode([each.value for each in records], [each.key for each in records])
    single = _decoder(TABLE, truncates="apply")
    apart = [single.decode([each.value], [each.key]).batch for each in records]
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
    found = _decoder(columns).decode(values, [_key(i) for i in range(len(numbers))])
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
    found = _decoder(columns).decode([_event("c", row), _event("c", empty)], [_key(1), _key(2)])
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
        found = _decoder(columns, decimals=mode).decode([_event("c", {"id": 1, "v": value})], [_key(1)])
        assert found.batch.column("v").to_pylist() == [Decimal("1234.50")]


def test_a_deletion_has_its_keys_from_the_row_or_from_the_record() -> None:
    """With REPLICA IDENTITY NOTHING and in other databases `before` may be missing."""
    values = [_event("d", before={"id": 1, "v": None}), _event("d"), None]
    found = _decoder().decode(values, [_key(1), _key(2), _key(2)])
    assert not found.bad
    assert found.batch.column("id").to_pylist() == [1, 2]
    assert found.batch.column("row_kind").to_pylist() == ["-D", "-D"]


def test_values_that_the_database_did_not_write_are_listed() -> None:
    """Text, bytes and arrays have a placeholder, which no row is shown with."""
    columns = pa.schema([("id", pa.int64()), ("t", pa.string()), ("b", pa.binary()), ("a", pa.list_(pa.string()))])
    mark = "__debezium_unavailable_value"
    row = {"id": 1, "t": mark, "b": base64.b64encode(mark.encode()).decode(), "a": [mark]}
    other = {"id": 2, "t": f"about {mark}", "b": None, "a": []}
    found = _decoder(columns).decode([_event("u", row), _event("u", other)], [_key(1), _key(2)])
    assert not found.bad
    assert found.batch.column(UNCHANGED).to_pylist() == [["t", "b", "a"], None]
    first, second = found.batch.to_pylist()
    assert [first[name] for name in "tba"] == [None, None, None]
    assert [second[name] for name in "tba"] == [f"about {mark}", None, []]


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
    assert "the key of the record" in _fault(_event("c", row), b"1")
    assert "after/v" in _fault(_event("c", {"id": 1, "v": 5}))


def test_a_value_that_does_not_fit_makes_its_event_bad() -> None:
    """Numbers with too many digits, bytes that are none, times after midnight, and nulls where none may be."""

    def fault(kind: pa.DataType, value: object, nullable: bool = True) -> str:
        columns = pa.schema([("id", pa.int64()), pa.field("v", kind, nullable)])
        found = _decoder(columns).decode([_event("c", {"id": 1, "v": value})], [_key(1)])
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
        found = _decoder(columns).decode([record.value], [record.key])
        assert not found.batch.num_rows
        return unmarked(found.bad[0])

    def changed(name: str, kind: pa.DataType) -> pa.Schema:
        return pa.schema([(each.name, kind if each.name == name else each.type) for each in TABLE])

    assert "'price' has 2 decimal places in the event, and 3" in fault(changed("price", pa.decimal128(10, 3)))
    assert "use pa.decimal128" in fault(changed("price", pa.binary()))
    assert "'at' is a string in the event" in fault(changed("at", pa.timestamp("us")))
    assert "field 'new' is missing in the schema" in fault(TABLE.append(pa.field("new", pa.string())))
    text = (record.value or b"").replace(b"io.debezium.time.ZonedTimestamp", b"io.debezium.time.MicroTimestamp")
    found = _decoder(changed("at", pa.timestamp("ms"))).decode([text], [record.key])
    assert "counts us in the event" in found.bad[0]


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
