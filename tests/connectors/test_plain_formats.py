"""CSV, text and raw bytes as formats of payloads: what is written is read back, and each payload counts by itself."""

from __future__ import annotations

import datetime as dt
import decimal
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_arrays import binary

from tidegate.api.streams.sources import record_format
from tidegate.connectors.formats.csv import CsvFormat
from tidegate.connectors.formats.format import PayloadUse
from tidegate.connectors.formats.json import JsonFormat
from tidegate.connectors.formats.raw import RawFormat
from tidegate.connectors.kafka.records import RecordReader, Records
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import unmarked

READING = PayloadUse("from_kafka", ("orders",))
WRITING = PayloadUse("to_kafka", ("orders",))
_TEXTS = st.text(max_size=4) | st.sampled_from(['"', "\\", '\\"', ",", "\n", "\r", " a", "a\t", ";", "NA", "#", "'"])
COLUMNS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), _TEXTS),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(dt.datetime(1700, 1, 1), timezones=st.just(dt.UTC))),
    (pa.time64("us"), st.times()),
    (pa.decimal128(9, 2), st.integers(-(10**9) + 1, 10**9 - 1).map(lambda each: decimal.Decimal(each).scaleb(-2))),
]


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Rows with nulls in columns of any type that CSV holds."""
    kinds = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=4))
    count = draw(st.integers(0, 6))
    columns = [pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), k) for k, values in kinds]
    return pa.record_batch(columns, names=[f"c{number}" for number in range(len(kinds))])


_OPTIONS = st.sampled_from([{}, {"sep": ";", "escape": ""}, {"quote": "'", "sep": "\t"}, {"escape": '"'}])


@settings(max_examples=300, deadline=None)
@given(batches(), _OPTIONS)
def test_rows_of_csv_are_read_back(batch: pa.RecordBatch, options: dict[str, object]) -> None:
    """All at once, with a broken payload among them, and one at a time."""
    form = CsvFormat(options)
    encoded = form.for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert encoded.bad == {}
    payloads = encoded.payloads.to_pylist()
    decoder = form.for_reading(batch.schema, READING).decoder()
    found = decoder.decode(binary(payloads))
    assert found.bad == {}
    assert found.batch.equals(batch)
    quote = str(options.get("quote", '"')).encode()
    broken = decoder.decode(binary([*payloads[:1], quote + b"x", *payloads[1:]]))
    assert list(broken.bad) == [min(1, len(payloads))]
    assert broken.batch.equals(batch)
    alone = [decoder.decode(binary([payload])).batch for payload in payloads]
    assert pa.Table.from_batches(alone, batch.schema).equals(pa.Table.from_batches([batch]))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"1", "the row has 1 values, and the schema has 2 columns"),
        (b"1,a\n2,b", "it has 2 records of CSV, and must have one"),
        (b"", "it has no record of CSV"),
        (b"  ", "it has no record of CSV"),
        (b'1,"a', "a quoted value has no closing quote"),
        (b"1,\xff", "byte 2 of the value, 0xff, is not UTF-8"),
        (b"x,a", "column 'n': 'x' is not a value of type int64"),
    ],
)
def test_a_payload_that_is_not_one_record_is_bad(payload: bytes, reason: str) -> None:
    """Between two good ones. A line break behind a record is allowed."""
    columns = pa.schema([("n", pa.int64()), ("s", pa.string())])
    found = CsvFormat().for_reading(columns, READING).decoder().decode(binary([b"1,a\r\n", payload, b"3,c"]))
    assert found.batch.to_pylist() == [{"n": 1, "s": "a"}, {"n": 3, "s": "c"}]
    assert list(found.bad) == [1]
    assert reason in unmarked(found.bad[1])


def test_a_byte_order_mark_before_a_record_is_ignored() -> None:
    """A text that begins with one is written in quotes, and keeps it."""
    columns = pa.schema([("a", pa.string()), ("b", pa.int64())])
    decoder = CsvFormat().for_reading(columns, READING).decoder()
    found = decoder.decode(binary([b"\xef\xbb\xbfx,1", b"y,2", b'\xef\xbb\xbf"z",3']))
    assert found.bad == {}
    assert found.batch.to_pylist() == [{"a": "x", "b": 1}, {"a": "y", "b": 2}, {"a": "z", "b": 3}]
    batch = pa.RecordBatch.from_pydict({"a": ["\ufeffx", "x\ufeff"], "b": [1, 2]})
    written = CsvFormat().for_writing(columns, WRITING).encoder().encode(batch).payloads.to_pylist()
    assert decoder.decode(binary(written)).batch.equals(batch)


@pytest.mark.parametrize("null", ["\\N", "a,b", " ", "x\ny", "NA"])
def test_a_null_is_read_back_whatever_its_text_is(null: str) -> None:
    """In quotes if the text needs them."""
    batch = pa.RecordBatch.from_pydict({"a": ["x", None, None], "b": [None, 1, None]})
    form = CsvFormat({"nullValue": null})
    found = form.for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert not found.bad
    read = form.for_reading(batch.schema, READING).decoder().decode(binary(found.payloads.to_pylist()))
    assert read.bad == {}
    assert read.batch.equals(batch)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nullValue": '"'}, "nullValue='\"' has a character that needs quotes"),
        ({"nullValue": "a,b", "quote": ""}, "nullValue='a,b' has a character that needs quotes"),
        ({"nullValue": "a,\\"}, "has a character that needs quotes or an escape"),
        ({"nanValue": ""}, "nanValue='' would be read as another value"),
        ({"nanValue": "5"}, "nanValue='5' would be read as another value"),
        ({"positiveInf": "-Inf"}, "positiveInf='-Inf' would be read as another value"),
        ({"nanValue": "x "}, "nanValue='x ' would be read as another value"),
        ({"nanValue": "\tx"}, "nanValue='\\tx' would be read as another value"),
        ({"nanValue": "n", "nullValue": "n"}, "nanValue='n' would be read as another value"),
        ({"nullValue": "Inf"}, "positiveInf='Inf' would be read as another value"),
    ],
)
def test_texts_that_would_be_read_as_other_values_are_refused(options: dict[str, object], reason: str) -> None:
    """When the program is made. A null in quotes, or a NaN like a number, would be another value for each reader."""
    columns = pa.schema([("a", pa.float64()), ("b", pa.string())])
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        CsvFormat(options).for_writing(columns, WRITING)
    encoded = columns.set(0, pa.field("a", pa.dictionary(pa.int32(), pa.float64())))
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        CsvFormat(options).for_writing(encoded, WRITING)
    if "nanValue" in options:
        CsvFormat(options).for_writing(columns.remove(0), WRITING)


def test_a_year_without_four_digits_makes_a_row_bad() -> None:
    """No reader of CSV takes it."""
    days = pa.array([0, 2_932_896, 2_932_897, -719_528, -719_529], pa.date32())
    batch = pa.RecordBatch.from_arrays([days], names=["a"])
    found = CsvFormat().for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert found.payloads.to_pylist() == [b"1970-01-01", b"9999-12-31", b"0000-01-01"]
    assert sorted(found.bad) == [2, 4]
    assert found.bad[2].startswith("column 'a' has a year outside 0 to 9999")


def test_what_csv_cannot_hold_is_refused() -> None:
    """Types and options when the job is submitted, values row by row."""
    for kind in (pa.list_(pa.int64()), pa.binary(), pa.struct([("a", pa.int64())]), pa.duration("s")):
        with pytest.raises(ConfigurationError, match=r"to_kafka\(format='csv'\): column 'x' is .*, which CSV cannot"):
            CsvFormat().for_writing(pa.schema([("x", kind)]), WRITING)
    with pytest.raises(ConfigurationError, match="'header' does not apply to records without a header"):
        CsvFormat({"header": True})
    with pytest.raises(ConfigurationError, match=r"from_kafka\(format='csv'\): give the columns"):
        CsvFormat().for_reading(None, READING)
    batch = pa.record_batch({"s": ["NA", "b", None]})
    found = CsvFormat({"nullValue": "NA"}).for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert found.payloads.to_pylist() == [b"b", b"NA"]
    assert found.bad == {0: "column 's' equals nullValue, so it would be null"}
    found = (
        CsvFormat({"quote": ""}).for_writing(batch.schema, WRITING).encoder().encode(pa.record_batch({"s": ["a,b"]}))
    )
    assert found.bad == {0: "column 's' has a separator or a line break, or begins or ends with a blank"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | st.binary(max_size=4), max_size=6))
def test_bytes_and_texts_are_the_payloads(payloads: list[bytes | None]) -> None:
    """A missing payload is a null, in both directions. Text that is not UTF-8 is bad."""
    found = RawFormat().for_reading(None, READING).decoder().decode_with_nulls(binary(payloads))
    assert found.bad == {}
    assert found.batch.to_pydict() == {"value": payloads}
    assert (
        RawFormat()
        .for_writing(found.batch.schema, WRITING)
        .encoder()
        .encode(found.batch)
        .payloads.equals(found.batch.column(0))
    )
    text = RawFormat(text=True).for_reading(pa.schema([("line", pa.string())]), READING).decoder()
    good = {}
    for number, payload in enumerate(payloads):
        try:
            good[number] = None if payload is None else payload.decode()
        except UnicodeDecodeError:
            continue
    found = text.decode_with_nulls(binary(payloads))
    assert found.batch.to_pydict() == {"line": list(good.values())}
    assert sorted(found.bad) == sorted(set(range(len(payloads))) - set(good))
    back = RawFormat(text=True).for_writing(found.batch.schema, WRITING).encoder().encode(found.batch).payloads
    assert back.to_pylist() == [None if each is None else each.encode() for each in good.values()]


def test_columns_of_single_values_are_checked() -> None:
    """One column, of bytes or strings."""
    for form, columns, reason in [
        (RawFormat(), {"a": pa.int64()}, r"to_kafka\(value=\): column 'a' is int64; it must have strings or bytes"),
        (RawFormat(text=True), {"a": pa.binary()}, "it must have strings"),
        (RawFormat(), {"a": pa.string(), "b": pa.string()}, r"the value of one column, and value= has 2: \['a', 'b'\]"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            form.for_writing(pa.schema(list(columns.items())), WRITING)
    with pytest.raises(ConfigurationError, match=r"format='raw'\): a value is one column of binary; give value="):
        RawFormat().for_reading(pa.schema([("a", pa.string())]), READING)


def records(*pairs: tuple[bytes | None, bytes | None]) -> Records:
    """Records with these keys and values."""
    columns = {"key": [key for key, _ in pairs], "value": [value for _, value in pairs]}
    return Records(
        "t", 0, np.arange(len(pairs)), {name: pa.array(column, pa.binary()) for name, column in columns.items()}
    )


def test_keys_have_a_format_of_their_own() -> None:
    """A key of several columns is a struct, and a missing key is null. A bad key makes its record bad."""
    form = record_format(("t",), {"n": int}, {"user": str}, "csv", "json", None, (), ("offset",), False)
    pairs = [(b'{"user":"a"}', b"1"), (None, b"2"), (b'{"user":"c"}', b"x"), (b"{", b"4"), (b'{"user":"e"}', None)]
    batch, letters = RecordReader(form, "side").rows(records(*pairs))
    assert batch is not None
    assert batch.schema == form.schema
    assert batch.to_pylist() == [
        {"n": 1, "kafka_key": {"user": "a"}, "kafka_offset": 0},
        {"n": 2, "kafka_key": None, "kafka_offset": 1},
        {"n": None, "kafka_key": {"user": "e"}, "kafka_offset": 4},
    ]
    assert letters is not None
    assert letters.column("offset").to_pylist() == [2, 3]
    assert letters.column("error")[1].as_py() == "the key: the JSON object does not end"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"key": "json"}, r"key='json'\): give 'bytes' or 'string', or a schema"),
        ({"key": "bytes", "key_format": "avro"}, "has no key_format="),
        ({"key_format": "json"}, r"from_kafka\(format='json'\): give the columns, key="),
        ({"key": {"a": int}, "key_format": "raw"}, "a key is one column of binary"),
        ({"value": "string", "format": "csv"}, "does not apply to format='csv'"),
        ({"format": "debezium"}, "needs the columns of the table"),
        (
            {"format": "debezium", "value": {"a": int}, "keys": ("a",), "key": {"a": int}},
            "key= does not apply to change data",
        ),
        ({"format": "upsert", "value": {"a": int}}, "needs keys="),
        ({"keys": ("a",), "value": {"a": int}}, "is for format='debezium' and 'upsert'"),
        ({"registry": "http://host"}, "does not apply to format='json'"),
        ({"registry": "http://host", "format": JsonFormat()}, "give the registry to the format, as in"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(settings: dict[str, Any], reason: str) -> None:
    """When the stream is made."""
    defaults = {"value": "bytes", "key": None, "format": "json", "key_format": None, "registry": None, "keys": ()}
    with pytest.raises(ConfigurationError, match=reason):
        record_format(("t",), metadata=(), by_record=False, **(defaults | settings))
