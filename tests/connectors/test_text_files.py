"""Files of text as a source: values, options and dead letters, wherever blocks end and whatever compresses them."""

from __future__ import annotations

import bz2
import csv
import datetime as dt
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from source_contract import check_source

from tidegate.connectors.bad_rows import BadRows
from tidegate.connectors.files import text_rows
from tidegate.connectors.files.open_file import UnreadableFileError
from tidegate.connectors.files.patterns import FilePattern
from tidegate.connectors.files.source import FileForm, FolderSource, source_of_files
from tidegate.connectors.files.text_rows import ADVICE_MAX
from tidegate.connectors.source import Source, SourceSplit
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import unmarked

BLOCKS = (7, 64, 4 * 2**20)
XS = pa.schema([("x", pa.int64()), ("s", pa.string())])

Letter = tuple[bytes, int | None, int | None, str]


def source(path: Path, schema: pa.Schema | None = None, **more: object) -> Source:
    """The files of a folder."""
    return source_of_files(f"{path}/*", schema=schema, **more)  # type: ignore[arg-type]


def rows_of(found: Source, rows_max: int = 1_000) -> tuple[list[dict[str, object]], list[Letter]]:
    """The rows and the dead letters of all files; both must come from any position."""
    reader, rows, letters = found.reader(), list[dict[str, object]](), list[Letter]()
    for split in found.splits():
        offset, at_end = 0, False
        while not at_end:
            result = reader.read(split, offset, rows_max)
            bad = [] if result.bad is None else result.bad.to_pylist()
            good = [] if result.batch is None else result.batch.to_pylist()
            assert result.next_offset == offset + len(good) + len(bad)
            rows += good
            letters += [(row["raw"], row["line"], row["offset"], row["error"]) for row in bad]
            offset, at_end = result.next_offset, result.at_end
    return rows, letters


def in_all_blocks(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Source], blocks: tuple[int, ...] = BLOCKS
) -> tuple[list[dict[str, object]], list[Letter]]:
    """Rows and dead letters, which are the same for blocks and reads of any size."""
    found = []
    for block in blocks:
        monkeypatch.setattr(text_rows, "BLOCK_BYTES", block)
        found += [rows_of(make(), rows_max) for rows_max in (1, 3, 1_000)]
    assert all(each == found[0] for each in found)
    return found[0]


def read(
    tmp_path: Path, data: bytes, schema: pa.Schema | None, name: str = "a.csv", **more: object
) -> list[dict[str, object]]:
    """The rows of one file."""
    (tmp_path / name).write_bytes(data)
    return rows_of(source(tmp_path, schema, **more))[0]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)], ids=["plain", "gz", "bz2"]
)
def test_line_breaks_in_quoted_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    """Wherever a block ends; and positions mean the same."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator=end)
    expected = [{"x": x, "s": f'Main "Street" {x}{end}House, B' + "é" * (x % 5)} for x in range(40)]
    writer.writerows([["x", "s"], *([row["x"], row["s"]] for row in expected)])
    (tmp_path / f"a.csv{suffix}").write_bytes(compress(target.getvalue().encode()))
    rows, letters = in_all_blocks(monkeypatch, lambda: source(tmp_path, XS))
    assert (rows, letters) == (expected, [])
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 64)
    assert check_source(source(tmp_path, XS)) == expected


def test_empty_values_of_csv_are_null(tmp_path: Path) -> None:
    """A value that is not there; `NA` is the code of Namibia, and a quoted empty value is an empty string."""
    schema = pa.schema([("country", pa.string()), ("name", pa.string()), ("x", pa.float64())])
    data = b'country,name,x\nNA,"",1.5\nnull,,NaN\nn/a,"NULL",""\n'
    rows = read(tmp_path, data, schema)
    assert [(row["country"], row["name"]) for row in rows] == [("NA", ""), ("null", None), ("n/a", "NULL")]
    assert repr([row["x"] for row in rows]) == "[1.5, nan, None]"
    options = {"nullValue": "NA", "emptyValue": "-", "nanValue": "NULL", "POSITIVEINF": "big"}
    rows = read(tmp_path, b'country,name,x\n"NA","",NULL\nn/a,NA,big\n,x,-Inf\n', schema, options=options)
    assert repr([list(row.values()) for row in rows]) == "[[None, '-', nan], ['n/a', None, inf], [None, 'x', -inf]]"


def test_json_values_of_every_type(tmp_path: Path) -> None:
    """Blanks around what is no string do not count."""
    schema = pa.schema(
        [
            ("i", pa.int8()),
            ("u", pa.uint64()),
            ("f", pa.float32()),
            ("b", pa.bool_()),
            ("d", pa.date32()),
            ("t", pa.timestamp("us")),
            ("z", pa.timestamp("ms", "Europe/Berlin")),
            ("h", pa.time64("us")),
            ("m", pa.decimal128(10, 2)),
            ("y", pa.binary()),
            ("c", pa.dictionary(pa.int32(), pa.string())),
        ]
    )
    line = b"+7, 18446744073709551615 ,.5,TRUE,2020-02-29,2020-01-02 03:04:05.000006,2020-01-02T03:04:05Z,"
    line += b"01:02:03,-1.5,a,b\n"
    (row,) = read(tmp_path, ",".join(schema.names).encode() + b"\n" + line, schema)
    assert row == {
        "i": 7,
        "u": 2**64 - 1,
        "f": 0.5,
        "b": True,
        "d": dt.date(2020, 2, 29),
        "t": dt.datetime(2020, 1, 2, 3, 4, 5, 6),
        "z": dt.datetime(2020, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
        "h": dt.time(1, 2, 3),
        "m": Decimal("-1.50"),
        "y": b"a",
        "c": "b",
    }


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (pa.int64(), "1.0"),
        (pa.int64(), "0x1"),
        (pa.int8(), "128"),
        (pa.int64(), "1,000"),
        (pa.float64(), "1,5"),
        (pa.bool_(), "yes"),
        (pa.bool_(), "1"),
        (pa.float64(), "nan"),
        (pa.float64(), "+Inf"),
        (pa.date32(), "2020-02-30"),
        (pa.timestamp("s"), "2020-01-02T03:04:05.5"),
        (pa.timestamp("us"), "2020-01-02T03:04:05Z"),
        (pa.decimal128(10, 2), "1.555"),
        (pa.decimal128(5, 2), "12345"),
        (pa.float32(), "-1e39"),
        (pa.float64(), "1e400"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_with_its_place(tmp_path: Path, wanted: pa.DataType, value: str) -> None:
    """File, line, byte, column and value. Nothing is cut to fit."""
    data = f'x;s\n\n"1";"a\nb"\n{value};"c"\n'.encode()
    schema = pa.schema([("x", wanted)])
    with pytest.raises(UnreadableFileError) as caught:
        read(tmp_path, data.replace(b'"1"', b'""'), schema, options={"sep": ";"})
    assert re.search(r"a\.csv cannot be read: line 5 \(byte 14\): column 'x': .'", str(caught.value))
    assert f"{value!r} is not a value of type {wanted}" in unmarked(str(caught.value))


def test_names_and_positions_of_columns(tmp_path: Path) -> None:
    """With a header by name; without one by position, as `_c0` if nothing names them."""
    assert read(tmp_path, b"s,x\na,1\n", XS) == [{"x": 1, "s": "a"}]
    assert read(tmp_path, b"1,a\n", XS, options={"header": "false"}) == [{"x": 1, "s": "a"}]
    assert read(tmp_path, b"1,a\n", None, options={"header": False}) == [{"_c0": 1, "_c1": "a"}]
    projected = source(tmp_path, XS, options={"header": False}).projected(["s"])  # type: ignore[attr-defined]
    assert rows_of(projected)[0] == [{"s": "a"}]
    with pytest.raises(UnreadableFileError, match=r"has no column 's'; it has \['x'\]"):
        read(tmp_path, b"x\n1\n", XS)
    with pytest.raises(UnreadableFileError, match=r"has two columns 'x'"):
        read(tmp_path, b"x,s,x\n1,a,2\n", XS)


def test_csv_without_a_schema_infers_types(tmp_path: Path) -> None:
    """The first of integer, boolean, date, time, timestamp, float and string that takes all values."""
    data = b"a,b,c,d,e,f,g\n1,true,2020-01-01,2020-01-01 01:00:00,1.5,NA,\n,false,,2020-01-01,2,1,\n"
    schema = read_schema(tmp_path, data)
    assert [str(field.type) for field in schema] == [
        "int64", "bool", "date32[day]", "timestamp[s]", "double", "string", "string",
    ]  # fmt: skip


def test_json_without_a_schema_is_inferred_from_its_valid_lines(tmp_path: Path) -> None:
    """A line that is no JSON is a bad row, and not the end. A column of two types needs a schema."""
    data = b'{"a": 1}\n{"a": tru}\n{"a": 2, "b": "x"}\n'
    (tmp_path / "a.json").write_bytes(data)
    found = source(tmp_path, bad_rows="skip")
    assert found.schema == pa.schema([("a", pa.int64()), ("b", pa.string())])
    assert rows_of(found)[0] == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    (tmp_path / "a.json").write_bytes(b'{"a": tru}\n' + data.replace(b"2", b'"2"'))
    with pytest.raises(ConfigurationError, match="column 'a' has values of two types, number to string; give schema="):
        source(tmp_path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"{'a': 1}", "Missing a name for object member"),
        (b'{"a": 1,}', "Missing a name for object member"),
        (b'{"a": 1, "a": 2}', "line 3: "),
        (b'{"a": [1, "x"]}', "changed from number to string"),
        (b'{"a": 01}', "line 3: "),
        (b"1", "the row is not a JSON object"),
        (b'{"a": "\xe9"}', "the encoding of the file"),
    ],
)
def test_json_without_a_valid_line_is_refused_with_the_reason(tmp_path: Path, row: bytes, reason: str) -> None:
    """Not as a file without columns, which it is not. Its first wrong line is named."""
    (tmp_path / "a.json").write_bytes(b"\r\n\n" + row + b"\n" + row + b"\n")
    with pytest.raises(ConfigurationError, match=r"no line is a valid JSON object \(line 3: .*; give schema=") as found:
        source(tmp_path, bad_rows="skip")
    assert reason in str(found.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"n": 1.0}', "column 'n': 1.0 is not a value of type int64"),
        ('{"n": "1"}', "column 'n': a JSON string is not a value of type int64"),
        ('{"n": 300, "l": [{"t": 300}]}', "column 'l.[].t': 300 is not a value of type int8"),
        ('{"l": [{"t": true}]}', "column 'l.[].t': a JSON boolean is not a value of type int8"),
        ('{"l": {"t": 1}}', "column 'l': a JSON object is not a value of type list<item: struct<t: int8>>"),
        ('{"d": 0.123}', "column 'd': 0.123 is not a value of type decimal128(5, 2)"),
        ('{"at": 5}', "column 'at': a JSON number is not a value of type timestamp[us]"),
    ],
)
def test_values_of_json_that_do_not_fit_name_their_columns(tmp_path: Path, row: str, reason: str) -> None:
    """With their types. Arrow speaks of a column that changes its type."""
    items = pa.list_(pa.struct({"t": pa.int8()}))
    schema = pa.schema({"n": pa.int64(), "l": items, "d": pa.decimal128(5, 2), "at": pa.timestamp("us")})
    (tmp_path / "a.json").write_text(row + "\n")
    _, letters = rows_of(source(tmp_path, schema, bad_rows="side"))
    assert [unmarked(error) for _, _, _, error in letters] == [reason]


@pytest.mark.slow
@pytest.mark.parametrize("levels", [100, 3_000])
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, levels: int) -> None:
    """Arrow reads it, and its streams cannot hold it."""
    (tmp_path / "a.json").write_text('{"a": ' + "[" * levels + "]" * levels + "}\n")
    with pytest.raises(
        ConfigurationError, match=rf"'a' is nested {levels + 1:,} levels deep, and a column may have 60"
    ):
        source(tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_whole_numbers_beyond_int64_keep_their_digits(tmp_path: Path, suffix: str) -> None:
    """Without a schema they are decimals, as for Spark; beside a fraction, or beyond 38 digits, floats."""
    for number, (values, kind) in enumerate(
        [
            (["9223372036854775808", "-1"], pa.decimal128(38, 0)),
            (["9" * 38, "1"], pa.decimal128(38, 0)),
            (["9223372036854775808", "1.5"], pa.float64()),
            (["1e20", "1"], pa.float64()),
            (["9" * 39, "1"], pa.float64()),
        ]
    ):
        lines = ["a", *values] if suffix == "csv" else [f'{{"a": {value}}}' for value in values]
        folder = tmp_path / str(number)
        folder.mkdir()
        assert read_schema(folder, "\n".join(lines).encode(), f"a.{suffix}").types == [kind]
        exact = Decimal if pa.types.is_decimal(kind) else float
        assert [row["a"] for row in rows_of(source(folder))[0]] == [exact(value) for value in values]


def test_times_with_a_zone_of_json_without_a_schema(tmp_path: Path) -> None:
    """They get a type that takes their rows, also within lists of structs."""
    data = b'{"t": "2020-01-02T03:04:05Z", "l": [{"t": "2020-01-02T03:04:05+02:00"}], "n": "2020-01-02 03:04:05"}\n'
    zoned = pa.timestamp("ns", "UTC")
    schema = read_schema(tmp_path, data, "a.json")
    assert schema.types == [zoned, pa.list_(pa.struct([("t", zoned)])), pa.timestamp("s")]
    (row,), _ = rows_of(source(tmp_path))
    three = dt.datetime(2020, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    assert row == {"t": three, "l": [{"t": three - dt.timedelta(hours=2)}], "n": three.replace(tzinfo=None)}


def read_schema(tmp_path: Path, data: bytes, name: str = "a.csv") -> pa.Schema:
    """What the columns of a file are taken for."""
    (tmp_path / name).write_bytes(data)
    return source(tmp_path).schema


@pytest.mark.parametrize(
    ("options", "data", "expected"),
    [
        ({"sep": "\t"}, b"x\ts\n1\ta,b\n", [{"x": 1, "s": "a,b"}]),
        ({"delimiter": "|", "quote": "'"}, b"x|s\n1|'a|''b'\n", [{"x": 1, "s": "a|'b"}]),
        ({}, b'x,s\n1,"a \\"b\\" ""c"" \\\\ \\n"\n', [{"x": 1, "s": 'a "b" "c" \\ \\n'}]),
        ({"escape": ""}, b'x,s\n1,"C:\\"\n', [{"x": 1, "s": "C:\\"}]),
        ({"comment": "#"}, b"#old\nx,s\n#1,a\n2,b\n", [{"x": 2, "s": "b"}]),
        ({"encoding": "ISO-8859-1"}, "x,s\n1,München\n".encode("latin-1"), [{"x": 1, "s": "München"}]),
        ({"encoding": "UTF-16"}, "x,s\n1,München\n".encode("utf-16"), [{"x": 1, "s": "München"}]),
        ({"encoding": "UTF-16LE"}, "\ufeffx,s\n1,München\n".encode("utf-16-le"), [{"x": 1, "s": "München"}]),
        ({}, "\ufeffx,s\n1,a\n".encode(), [{"x": 1, "s": "a"}]),
        ({"ignoreLeadingWhiteSpace": True}, b"x,s\n1,  a \n", [{"x": 1, "s": "a "}]),
        ({"ignoreTrailingWhiteSpace": "TRUE"}, b"x,s\n1,  a \n", [{"x": 1, "s": "  a"}]),
        (
            {"ignoreLeadingWhiteSpace": True},
            b'x, s\n 1, " a, b"\n2,  \n',
            [{"x": 1, "s": " a, b"}, {"x": 2, "s": None}],
        ),
        ({"emptyValue": "-", "nullValue": "-"}, b'x,s\n1,""\n2,-\n', [{"x": 1, "s": None}, {"x": 2, "s": None}]),
    ],
)
def test_options_of_spark(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Mapping[str, object],
    data: bytes,
    expected: list[dict[str, object]],
) -> None:
    """By Spark's names, in any case."""
    (tmp_path / "a.csv").write_bytes(data)
    assert in_all_blocks(monkeypatch, lambda: source(tmp_path, XS, options=options)) == (expected, [])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seperator": ";"}, r"csv has no option 'seperator'; give one of sep, quote"),
        ({"sep": "||"}, "sep='||' is not valid; give one ASCII character"),
        ({"header": "yes"}, "header='yes' is not valid; give true or false"),
        ({"encoding": "latin-99"}, "encoding='latin-99' is not valid; give the name of an encoding"),
        ({"sep": '"'}, "sep and quote are both"),
        ({"timestampFormat": "yyyy"}, "csv has no option 'timestampFormat'"),
    ],
)
def test_text_options_refuse_wrong_values(tmp_path: Path, options: Mapping[str, object], named: str) -> None:
    """When the stream is made, with what they may be."""
    with pytest.raises(ConfigurationError, match=re.escape(named) if "|" in named else named):
        read(tmp_path, b"x,s\n", XS, options=options)


def test_decimals_that_arrow_would_wrap_around(tmp_path: Path) -> None:
    """They are bad rows, and numbers beside them, however they are written, keep their values."""
    for kind, bad, good in (
        (pa.decimal128(38, 0), "9" * 39, "0" * 30 + "1" * 38),
        (pa.decimal128(38, 0), "9.9e38", "1e37"),
        (pa.decimal128(38, 38), "7439150008063608377835337406", "0.5"),
        (pa.decimal64(18, 0), "9" * 38, "9" * 18),
        (pa.decimal32(9, 9), "95", "0.000000001"),
        (pa.decimal32(7, 0), "8.3e-9", "12.50e1"),
    ):
        (tmp_path / "a.csv").write_text(f"x\n{good}\n{bad}\n{good}\n")
        rows, letters = rows_of(source(tmp_path, pa.schema([("x", kind)]), bad_rows="side"))
        assert rows == [{"x": Decimal(good)}] * 2
        assert [letter[1] for letter in letters] == [3]


def test_types_that_text_cannot_hold(tmp_path: Path) -> None:
    """Named when the stream is made."""
    with pytest.raises(ConfigurationError, match=r"column 'l' is list<.*, which text cannot hold"):
        read(tmp_path, b"l\n", pa.schema([("l", pa.list_(pa.int64()))]))
    (tmp_path / "a.csv").unlink()
    with pytest.raises(ConfigurationError, match=r"column 'm' is map<.*, which is not read from JSON"):
        read(tmp_path, b"{}", pa.schema([("m", pa.map_(pa.string(), pa.int64()))]), "a.json")


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("b.csv.gz", gzip.compress(b"", mtime=0), []),
        ("b.csv.gz", b"", []),
        ("b.json.gz", gzip.compress(b"", mtime=0), []),
        ("b.json", b"\n \n\r\n", []),
        ("b.json", b"\xef\xbb\xbf", []),
        ("b.csv", b"x,s", []),
        ("b.csv", b"\n\n", []),
        ("b.csv", b"x,s\n1,a", [{"x": 1, "s": "a"}]),
        ("b.json", b'\xef\xbb\xbf{"x":1,"s":"a"}', [{"x": 1, "s": "a"}]),
        ("b.csv.gz", gzip.compress(b"x,s\n1,", mtime=0) + gzip.compress(b"a\n", mtime=0), [{"x": 1, "s": "a"}]),
    ],
)
def test_files_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, expected: list[dict[str, object]]
) -> None:
    """Nothing at all, compressed or not, blank lines, a header that no line break ends."""
    (tmp_path / name).write_bytes(data)
    assert in_all_blocks(monkeypatch, lambda: source(tmp_path, XS)) == (expected, [])


def test_lines_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's text format: a column `value`, with the empty lines, whatever ends a line."""
    (tmp_path / "a.txt").write_bytes("to be\r\n\nor nöt\rto be".encode())
    (tmp_path / "b.txt").write_bytes(b"one\r\n")
    rows, _ = in_all_blocks(monkeypatch, lambda: source(tmp_path))
    assert [row["value"] for row in rows] == ["to be", "", "or nöt", "to be", "one"]


def test_a_list_of_paths_is_one_source(tmp_path: Path) -> None:
    """A list of files and patterns of one storage, each file once; hidden folders may be named."""
    for folder in ("x", "y/_z"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("a.csv", "b.csv"):
            (tmp_path / folder / name).write_text(f"s\n{folder}/{name}\n")
    urls = [f"{tmp_path}/y/_z/*.csv", f"{tmp_path}/x/a.csv", f"{tmp_path}/x/[a].csv"]
    rows, _ = rows_of(source_of_files(urls))
    assert [row["s"] for row in rows] == ["x/a.csv", "y/_z/a.csv", "y/_z/b.csv"]
    with pytest.raises(ConfigurationError, match="one storage, not several"):
        source_of_files([f"{tmp_path}/x/a.csv", "memory://elsewhere/a.csv"])


def test_a_name_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    """No checkpoint can hold it."""
    (tmp_path / "a.csv").write_text("x\n1\n")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xfc.csv")).write_text("x\n1\n")
    with pytest.raises(ConfigurationError, match=r"the file b'b\\xfc\.csv' in .* is not UTF-8; rename"):
        source(tmp_path).splits()
    assert len(source_of_files(f"{tmp_path}/a*").splits()) == 1


CSV = b'x,s\r\n1,a\r\ntwo,b\r\n"3","c\r\nc"\r\n4\r\n5,M\xfcn\r\n"6"x,d\r\n\r\n7,"e\r\ne","f"\r\n8,g\r\n9,"h'
NOT_UTF8 = (
    'byte 3 of the row, 0xfc, is not UTF-8; give the encoding of the file, as in options={"encoding": "ISO-8859-1"}'
)
CSV_LETTERS: list[Letter] = [
    (b"two,b", 3, 10, "column 'x': 'two' is not a value of type int64"),
    (b"4", 6, 29, "the row has 1 values, and the header has 2 columns"),
    (b"5,M\xfcn", 7, 32, NOT_UTF8),
    (b'"6"x,d', 8, 39, "text follows the closing quote of a value"),
    (b'7,"e\r\ne","f"', 10, 49, "the row has 3 values, and the header has 2 columns"),
    (b'9,"h', 13, 68, "a quoted value has no closing quote"),
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_dead_letters_of_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """By row, with bytes, line, place and reason; the rows between them come, whatever the size of a block."""
    (tmp_path / f"a.csv{suffix}").write_bytes(gzip.compress(CSV) if suffix else CSV)
    rows, letters = in_all_blocks(monkeypatch, lambda: source(tmp_path, XS, bad_rows="side"))
    assert rows == [{"x": 1, "s": "a"}, {"x": 3, "s": "c\r\nc"}, {"x": 8, "s": "g"}]
    assert letters == CSV_LETTERS
    for raw, _, offset, _ in letters:
        assert offset is not None
        assert CSV[offset : offset + len(raw)] == raw


def test_whether_a_row_is_bad_does_not_depend_on_the_columns_that_are_used(tmp_path: Path) -> None:
    """Also where the program reads none of the values that do not fit."""
    (tmp_path / "a.csv").write_bytes(CSV)
    projected = source(tmp_path, XS, bad_rows="side").projected(["s"])  # type: ignore[attr-defined]
    rows, letters = rows_of(projected)
    assert (rows, letters) == ([{"s": "a"}, {"s": "c\r\nc"}, {"s": "g"}], CSV_LETTERS)


JSON = [
    b'{"x": 1, "s": "a", "z": [1, {"q": 2}]}',
    b"null",
    b'{"x": 2, "s": "M\xfcn"}',
    b' {"s": "b"}\r',
    b'{"x": 3}{"x": 4}',
    b'{"x": 5',
    b'}{"x": 6}',
    b'{"x": 7, "s": "a\tb"}',
    b'{"x": 8.5}',
    b'{"x": "9"}',
    b"",
    b'{"x": 10, "x": 11}',
    b'{"s": "\\u00fc\\n"}',
    b'{"x": 12, "s": tru}',
]


def test_dead_letters_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is an object or a dead letter; no object is made of two lines, and `null` ends no process."""
    data = b"\n".join(JSON)
    (tmp_path / "a.json").write_bytes(data)
    rows, letters = in_all_blocks(monkeypatch, lambda: source(tmp_path, XS, bad_rows="side"))
    assert rows == [{"x": 1, "s": "a"}, {"x": None, "s": "b"}, {"x": None, "s": "ü\n"}]
    assert [line for _, line, _, _ in letters] == [2, 3, 5, 6, 7, 8, 9, 10, 12, 14]
    reasons = [
        "not a JSON object", "is not UTF-8", "text follows the JSON object", "does not end", "not a JSON object",
        "control character", "8.5", "a JSON string is not a value of type int64", "specified twice", "Invalid value",
    ]  # fmt: skip
    for (raw, line, offset, error), reason in zip(letters, reasons, strict=True):
        assert line is not None
        assert offset is not None
        assert raw == JSON[line - 1] == data[offset : offset + len(raw)]
        assert reason in error


@pytest.mark.parametrize("around", [lambda x: x, lambda x: [x], lambda x: {"in": x}], ids=["plain", "list", "struct"])
@pytest.mark.parametrize(
    ("wanted", "value", "fits"),
    [
        (pa.decimal128(5, 2), 12345, 123),
        (pa.decimal128(5, 2), "12345", "1.5"),
        (pa.float32(), -1e39, -1e38),
        (pa.float32(), 1e39, math.inf),
        (pa.float64(), 10**400, -math.inf),
    ],
    ids=["decimal", "text of a decimal", "float32", "float32 beside Infinity", "float64"],
)
def test_a_number_that_is_too_great_is_refused_in_json(
    tmp_path: Path, around: Callable[[object], object], wanted: pa.DataType, value: object, fits: object
) -> None:
    """At any depth: it would be infinite, or a decimal that no reader of a table takes. Infinity itself is a number."""
    sample = pa.array([around(Decimal(1) if pa.types.is_decimal(wanted) else 1.0)])
    types = {pa.types.is_list: pa.list_(wanted), pa.types.is_struct: pa.struct([("in", wanted)])}
    column = next((kind for holds, kind in types.items() if holds(sample.type)), wanted)
    (tmp_path / "a.json").write_text("".join(json.dumps({"x": around(x)}) + "\n" for x in (fits, value, fits)))
    rows, letters = rows_of(source(tmp_path, pa.schema([("x", column)]), bad_rows="skip"))
    assert len(rows) == 2
    assert [line for _, line, *_ in letters] == [2]


def test_dates_and_times_of_json(tmp_path: Path) -> None:
    """Made of strings, as in CSV. A member that may not be missing is an error where it is."""
    schema = pa.schema([("d", pa.date32()), ("h", pa.time32("s")), pa.field("n", pa.int64(), nullable=False)])
    (tmp_path / "a.json").write_text('{"d": "2020-02-29", "h": "01:02:03", "n": 1}\n{"n": null}\n{"d": "x", "n": 2}\n')
    rows, letters = rows_of(source(tmp_path, schema, bad_rows="skip"))
    assert rows == [{"d": dt.date(2020, 2, 29), "h": dt.time(1, 2, 3), "n": 1}]
    assert [error for *_, error in letters] == [
        "column 'n' is not nullable, and has no value",
        "column 'd': 'x' is not a value of type date32[day]",
    ]


@pytest.mark.parametrize(
    ("wanted", "good", "value", "bad"),
    [
        (pa.timestamp("us"), "2020-01-02T03:04:05", dt.datetime(2020, 1, 2, 3, 4, 5), "2020-01-02T03:04:05Z"),
        (pa.timestamp("s", "UTC"), "2020-01-02", dt.datetime(2020, 1, 2, tzinfo=dt.UTC), "2020-01-02T03:04:05.5Z"),
        (pa.date32(), "2020-02-29", dt.date(2020, 2, 29), ""),
        (pa.binary(), "/wA=", b"\xff\x00", "a b"),
        (pa.binary(2), "/wA=", b"\xff\x00", "YQ=="),
    ],
    ids=["naive", "zoned", "date", "bytes", "two bytes"],
)
@pytest.mark.parametrize("around", ["plain", "list", "struct", "list of structs"])
def test_strings_of_json_that_stand_for_values(
    tmp_path: Path, wanted: pa.DataType, good: str, value: object, bad: str, around: str
) -> None:
    """At any depth. A zone is not dropped, a blank date is not null, bytes are Base64. The bad row alone goes."""
    types = {
        "plain": wanted,
        "list": pa.list_(wanted),
        "struct": pa.struct([("in", wanted)]),
        "list of structs": pa.list_(pa.struct([("in", wanted)])),
    }

    def nested(inner: object) -> object:
        within = {"in": inner} if "struct" in around else inner
        return [None, within] if "list" in around else within

    texts = [nested(good), nested(bad), None, nested(None), nested(good)]
    (tmp_path / "a.json").write_text("".join(json.dumps({"x": text}) + "\n" for text in texts))
    rows, letters = rows_of(source(tmp_path, pa.schema([("x", types[around])]), bad_rows="side"))
    assert [row["x"] for row in rows] == [nested(value), None, nested(None), nested(value)]
    ((_, line, _, error),) = letters
    assert line == 2
    assert re.match(r"column 'x[^']*': .* is not a value of type", error)


def test_lines_of_json_that_a_carriage_return_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for Spark, alone or before a line feed; places count each once."""
    (tmp_path / "a.json").write_bytes(b'{"x": 1}\r{"x": 2}\r\n\r\n?\r{"x": 3}')
    rows, letters = in_all_blocks(monkeypatch, lambda: source(tmp_path, XS, bad_rows="side"))
    assert [row["x"] for row in rows] == [1, 2, 3]
    assert [letter[:3] for letter in letters] == [(b"?", 4, 21)]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.csv", lambda rows: b"x,s\n" + b"".join(b'%d,"%s"\n' % (x, s) for x, s in rows)),
        ("a.json", lambda rows: b"".join(json.dumps({"x": x, "s": s.decode()}).encode() + b"\n" for x, s in rows)),
    ],
)
def test_a_row_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[list[tuple[int, bytes]]], bytes]
) -> None:
    """It is left out to its end, line breaks in quotes included, and the setting is named."""
    long = b'a, b ""' * 30 if name.endswith("json") else b'a,\r\n ""b' * 30
    data = make([(1, b"a"), (2, long), (3, b"b"), (4, long * 9), (5, b"c")])
    (tmp_path / name).write_bytes(data)
    rows, letters = in_all_blocks(
        monkeypatch, lambda: source(tmp_path, XS, bad_rows="side", size_max=200), (7, 64, 201, 202, 4 * 2**20)
    )
    assert [row["x"] for row in rows] == [1, 3, 5]
    assert len(letters) == 2
    for raw, _, offset, error in letters:
        assert offset is not None
        assert raw == data[offset : offset + 200]
        assert "more than 200 bytes, the limit that max_row_size sets" in error
    with pytest.raises(UnreadableFileError, match="max_row_size"):
        rows_of(source(tmp_path, XS, size_max=200))
    assert len(rows_of(source(tmp_path, XS, size_max=10_000))[0]) == 5


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_the_rest_of_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: BadRows) -> None:
    """The rows that were whole come, all of them, and one dead letter for what cannot be read."""
    data = b"x,s\n" + b"".join(b"%d,s%d\n" % (x, zlib.crc32(b"%d" % x)) for x in range(3_000))
    packed = gzip.compress(data)[:-1_000]
    whole = zlib.decompressobj(31).decompress(packed)
    (tmp_path / "a.csv.gz").write_bytes(packed)
    if policy == "fail":
        with pytest.raises(UnreadableFileError, match=r"a\.csv\.gz cannot be read: .*[Tt]runcated"):
            rows_of(source(tmp_path, XS))
        return
    rows, letters = in_all_blocks(monkeypatch, lambda: source(tmp_path, XS, bad_rows="skip"), (999, 4 * 2**20))
    end = whole.rfind(b"\n") + 1
    assert len(rows) == whole.count(b"\n") - 1
    ((raw, line, offset, error),) = letters
    assert (raw, line, offset) == (whole[end:], len(rows) + 2, end)
    assert "the rest of the file cannot be read" in error


def test_places_in_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and places are those of the file."""
    data = "x,s\n1,ü\nü,b\n2,ü\n".encode("utf-16") + b"\x00\xd8"
    (tmp_path / "a.csv").write_bytes(data)
    options = {"encoding": "utf-16"}
    rows, letters = in_all_blocks(monkeypatch, lambda: source(tmp_path, XS, bad_rows="side", options=options))
    assert rows == [{"x": 1, "s": "ü"}, {"x": 2, "s": "ü"}]
    assert [(line, offset) for _, line, offset, _ in letters] == [(3, 18), (5, 34)]
    for raw, _, offset, _ in letters:
        assert offset is not None
        assert data[offset : offset + len(raw)] == raw


@pytest.mark.parametrize(
    ("suffix", "first", "later", "inferred", "wider"),
    [
        ("csv", "1", "1.5", "int64", "schema= with double for"),
        ("csv", "1", "n/a", "int64", "schema= with string for"),
        ("csv", "1", "9223372036854775808", "int64", r"schema= with decimal128\(38, 0\) for"),
        ("csv", "2020-01-01", "2020-01-01 00:00:01", r"date32\[day\]", r"schema= with timestamp\[s\] for"),
        ("csv", "true", "yes", "bool", "schema= with string for"),
        ("json", "1", "1.5", "int64", "schema= with double for"),
        ("json", '"2020-01-01 00:00:00"', '"soon"', r"timestamp\[s\]", "schema= with string for"),
        ("json", "1", '"x"', "int64", "no type fits both values"),
        ("json", "true", "1", "bool", "no type fits both values"),
    ],
)
def test_no_row_is_dropped_for_a_type_that_was_inferred(
    tmp_path: Path, suffix: str, first: str, later: str, inferred: str, wider: str
) -> None:
    """The error has file, line, column and remedy. A row that is bad for another reason is dropped."""
    lines = ["x,s", f"{first},a", "1,2,3"] if suffix == "csv" else [f'{{"x": {first}, "s": "a"}}', "{"]
    (tmp_path / f"1.{suffix}").write_text("\n".join(lines))
    (tmp_path / f"2.{suffix}").write_text(
        f"x,s\n{first},b\n{later},c\n" if suffix == "csv" else f'{{"x": {first}, "s": "b"}}\n\n{{"x": {later}}}\n'
    )
    words = rf"2\.{suffix} .*line 3 .*The type {inferred} of column 'x' was inferred from .*{wider}"
    with pytest.raises(
        UnreadableFileError,
        match=f"(?s){words}.*bad_rows='skip' drops no row for an inferred type, only for one in schema=$",
    ):
        rows_of(source(tmp_path, bad_rows="skip"))
    rows, letters = rows_of(source(tmp_path, bad_rows="side"))
    assert [row["s"] for row in rows] == ["a", "b"]
    assert len(letters) == 2
    assert re.search(f"(?s)The type {inferred} of column 'x' .*{wider}", unmarked(letters[1][3]))
    assert "inferred" not in letters[0][3]
    (tmp_path / f"1.{suffix}").write_text("\n".join(lines[:-1]))
    with pytest.raises(UnreadableFileError, match=f"(?s){words}") as failed:
        rows_of(source(tmp_path))
    assert "bad_rows='skip'" not in str(failed.value)
    assert 'bad_rows="skip"' not in str(failed.value)
    schema = source(tmp_path).schema
    assert [row["s"] for row in rows_of(source(tmp_path, schema, bad_rows="skip"))[0]] == ["a", "b"]


def test_the_first_letters_of_a_block_have_the_advice_about_inferred_types(tmp_path: Path) -> None:
    """It takes ms to find the column, which a file of many bad rows would pay for each of them."""
    (tmp_path / "1.json").write_text('{"x": 1}\n')
    (tmp_path / "2.json").write_text('{"x": "a"}\n' * (ADVICE_MAX + 2))
    _, letters = rows_of(source(tmp_path, bad_rows="side"))
    assert ["was inferred" in unmarked(letter[3]) for letter in letters] == [True] * ADVICE_MAX + [False] * 2


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_folder_that_grows_drops_no_row_for_a_type_that_was_inferred(tmp_path: Path, suffix: str) -> None:
    """A later file has another type."""
    texts = {"csv": ("x\n1\n", "x\nn/a\n"), "json": ('{"x": 1}\n', '{"x": "n/a"}\n')}[suffix]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.{suffix}").write_text(text)
        os.utime(tmp_path / f"{number}.{suffix}", (number, number))

    def folder(pattern: FilePattern, form: FileForm, schema: pa.Schema) -> FolderSource:
        return FolderSource(pattern, form, schema, 1, 10**9, 1)

    reader = (found := source(tmp_path, bad_rows="skip", folder=folder)).reader()
    (split,) = found.splits()
    first = reader.read(split, 0, 10)
    assert first.batch is not None
    with pytest.raises(UnreadableFileError, match=r"line \d .*The type int64 of column 'x' was inferred"):
        reader.read(SourceSplit(split.split_id, first.payload or split.payload), first.next_offset, 10)
