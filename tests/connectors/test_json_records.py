"""Records that are JSON objects: each is judged by itself, whatever is decoded with it."""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_arrays import block

from tidegate.connectors.formats.json_decoder import JsonDecoder
from tidegate.storage.errors import ConfigurationError

DECODER = JsonDecoder(pa.schema([("x", pa.int64()), ("f", pa.float32())]))


def x_of(record: bytes) -> int | None:
    """The column x of a record that is one object. ValueError if it is not."""
    found = json.loads(record)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found.get("x")


def check(records: list[bytes]) -> None:
    """Compare the rows and the numbers of bad records with those of Python's parser."""
    rows, bad = [], set()
    for number, record in enumerate(records):
        try:
            rows.append(x_of(record))
        except ValueError:
            bad.add(number)
    found = DECODER.records(block(records))
    assert (found.batch["x"].to_pylist(), set(found.bad)) == (rows, bad)


@pytest.mark.parametrize(
    "records",
    [
        # As many rows as records, together.
        [b'{"x":1}{"x":2}', b'{"x":3', b"}"],
        [b'{"x":1}{"x":2}', b""],
        [b'{"s":"}', b'{"}', b'{"x":1}{"x":2}'],
        [b'{"s":{}', b'{"t":1}}', b'{"x":1}{"x":2}'],
        [b'{"x":1}\n{"x":2}', b" "],
        [b'{"x":1}\0}', b'{"x":2}', b'{"x":3}'],
        [b'{"x":1}{"x":2}', b'{"x":3}\0}', b'{"x":4}'],
        [b'{"x":1}\n{"x":2}', b'{"x":3}\0}', b'{"x":4}'],
        [b'{"x":1}', b'{"x":2}', b'{"x":3}'],
        [b"{}"],
        [b"}{", b"{}"],
        [],
    ],
)
def test_records_that_only_look_right_together(records: list[bytes]) -> None:
    """A record that has two objects does not make up for one that has none."""
    check(records)


@pytest.mark.parametrize("control", list(range(32)))
@pytest.mark.parametrize("place", [0, 7, 31])
def test_a_control_character_in_a_string_is_refused(control: int, place: int) -> None:
    """At the begin of a string or behind it, and the records beside it are read."""
    text = b"a" * place + bytes([control]) + b"b" * (31 - place)
    found = DECODER.records(block([b'{"x":1}', b'{"s":"' + text + b'"}', b'{"x":2}']))
    assert (found.batch["x"].to_pylist(), list(found.bad)) == ([1, 2], [1])


def test_a_field_of_a_struct_that_may_not_be_null_is_refused() -> None:
    """Where the whole struct is missing Arrow would find a null in it. Items of lists may be so."""
    inner = pa.field("y", pa.int64(), nullable=False)
    with pytest.raises(ConfigurationError, match=r"column 'o' is struct<y: int64 not null>, .* may not be null"):
        JsonDecoder(pa.schema([("x", pa.int64()), ("o", pa.struct([inner]))]))
    found = JsonDecoder(pa.schema([("l", pa.list_(inner))])).records(block([b'{"l":[1]}', b'{"l":[null]}', b"{}"]))
    assert (found.batch["l"].to_pylist(), list(found.bad)) == ([[1], None], [1])


def test_bytes_that_are_not_utf8_are_refused() -> None:
    """In records that are in order otherwise, also where the bytes of two would make a character."""
    found = DECODER.records(block([b'{"x":1,"s":"\xc3"}', b'{"x":2,"s":"\xa4"}', '{"x":3,"s":"ä"}'.encode()]))
    assert (found.batch["x"].to_pylist(), list(found.bad)) == ([3], [0, 1])


def test_a_number_that_no_float_holds_is_refused() -> None:
    """In a record that is in order otherwise."""
    found = DECODER.records(block([b'{"x":1,"f":1e39}', b'{"x":2,"f":1}', b'{"x":3}']))
    assert (found.batch.to_pylist(), list(found.bad)) == ([{"x": 2, "f": 1.0}, {"x": 3, "f": None}], [0])
    assert "too great for column 'f'" in found.bad[0]


_OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "x": st.integers(-9, 9) | st.none(),
        "s": st.text(alphabet='a}{"\n\\', max_size=5),
        "o": st.sampled_from([{}, {"s": {}}, [{}, {}]]),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    objects=st.lists(_OBJECTS, min_size=1, max_size=4),
    between=st.lists(st.sampled_from(["", "\n", " "]), min_size=4, max_size=4),
    cuts=st.lists(st.integers(0, 120), max_size=4, unique=True),
    at_braces=st.booleans(),
)
def test_objects_that_are_cut_anywhere(
    objects: list[dict[str, object]], between: list[str], cuts: list[int], at_braces: bool
) -> None:
    """Also only where a record ends with a brace and the next one begins with one."""
    text = "".join(json.dumps(each) + gap for each, gap in zip(objects, between, strict=False)).strip()
    if at_braces:
        cuts = [cut for cut in range(1, len(text)) if text[cut - 1 : cut + 1] == "}{" and cut % 4 != len(cuts)]
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    check([text[begin:end].encode() for begin, end in pairwise(bounds)])


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (pa.decimal128(38, 0), "9" * 39),
        (pa.decimal128(38, 0), "9.9e38"),
        (pa.decimal128(38, 38), "7439150008063608377835337406"),
        (pa.decimal64(18, 0), "9" * 38),
        (pa.decimal32(9, 9), "95"),
        (pa.decimal32(7, 0), "8.3e-9"),
    ],
)
def test_a_decimal_that_arrow_would_wrap_around_is_refused(kind: pa.DataType, number: str) -> None:
    """Plain, as a string, and within lists of structs, between records whose numbers fit."""
    for wanted, form in (
        (kind, '{"x": %s}'),
        (kind, '{"x": "%s"}'),
        (pa.list_(pa.struct([("y", kind)])), '{"x": [{"y": null}, {"y": %s}]}'),
    ):
        decoder = JsonDecoder(pa.schema([("x", wanted)]))
        found = decoder.records(block([(form % text).encode() for text in ("0", number, "0")]))
        assert set(found.bad) == {1}
        assert len(found.batch) == 2


@pytest.mark.parametrize("number", ["1" * 38, "-1e37", "12.50e1"])
def test_a_decimal_that_fits_is_read(number: str) -> None:
    """Also where digits or an exponent make it look as if it did not."""
    found = JsonDecoder(pa.schema([("x", pa.decimal128(38, 0))])).records(block([f'{{"x": {number}}}'.encode()]))
    assert found.batch["x"].to_pylist() == [Decimal(number)]
