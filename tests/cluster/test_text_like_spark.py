"""CSV and JSON beside Spark's own readers: the same files, schemas and options, compared row by row.

Where tidegate differs on purpose, the two answers stand here, and the reason in `docs/sources.md`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from story import WAIT_S

from tidegate.connectors.files.source import source_of_files

pytestmark = pytest.mark.slow

Rows = list[Any]
BAD = "bad"
"""A value that a reader refuses; at the end of rows, that it refuses some of the file."""
_TYPES = {
    "string": pa.string(),
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "decimal(5,2)": pa.decimal128(5, 2),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "binary": pa.binary(),
    "array<date>": pa.list_(pa.date32()),
    "array<struct<t:timestamp_ntz>>": pa.list_(pa.struct([("t", pa.timestamp("us"))])),
    "struct<a:binary>": pa.struct([("a", pa.binary())]),
    "array<bigint>": pa.list_(pa.int64()),
    "struct<a:bigint,b:string>": pa.struct([("a", pa.int64()), ("b", pa.string())]),
}


@dataclass(frozen=True)
class Case:
    """A file that both read. `ours` and `spark`: the rows where they differ on purpose."""

    name: str
    data: bytes
    options: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[tuple[str, str]] = (("x", "bigint"), ("s", "string"))
    format: str = "csv"
    more: Mapping[str, str] = field(default_factory=dict)
    """Options that Spark needs and tidegate does not have."""
    ours: Rows | None = None
    spark: Rows | None = None


VALUES: dict[str, dict[str, list[str]]] = {
    "csv": {
        "string": ["a", "NA", "null", "NaN", " a ", "\t", "a\\b", "ü", "True", "'a'", "-"],
        "tinyint": ["127", "128", "-128", "-129"],
        "int": ["2147483647", "2147483648", "-2147483648"],
        "bigint": [
            "7", "+7", "-0", "007", " 7", "7 ", "7.0", "1e3", "0x1", "9223372036854775807", "9223372036854775808",
            "1_000", "-", "NA", "7L",
        ],
        "float": ["1.5", "3.4028235e38", "3.5e38", "1e-50", "0.1", "16777217"],
        "double": [
            "1.5", ".5", "5.", "+1.5", "-0.0", "1e3", "1E-3", " 1.5", "1.5 ", "NaN", "nan", "NAN",
            "Inf", "-Inf", "+Inf",
            "inf", "INF", "Infinity", "-Infinity", "infinity", "1e400", "1e-400", "1d", "1f",
            "0x1p3", "0x10", "NA", "1e",
            "0.1", "9007199254740993",
        ],
        "boolean": ["true", "TRUE", "True", "tRuE", "false", "FALSE", " true", "1", "0", "t", "yes", "y", "T"],
        "decimal(5,2)": ["1.5", "-1.55", "1.555", "999.99", "1000", "1e2", "+1", ".5", "1.", " 1", "NaN", "1.550"],
        "date": [
            "2020-02-29", "2021-02-29", "1582-10-04", "1582-10-10", "1582-10-15", "0001-01-01",
            "9999-12-31", "1500-02-29",
            "2020-1-2", "2020", "2020-01", "01/02/2020", " 2020-01-02", "2020-01-02 ", "2020-01-02 00:00:00",
            "2020-01-02T03:04:05", "10000-01-01", "20200102", "0000-01-01", "-0001-01-01", "+2020-01-02",
        ],
        "timestamp": [
            "2020-01-02 03:04:05", "2020-01-02T03:04:05", "2020-01-02T03:04:05Z", "2020-01-02 03:04:05+01:00",
            "2020-01-02 03:04:05+0100", "2020-01-02 03:04:05+01", "2020-01-02 03:04:05-23:30", "2020-01-02",
            "2020-01-02 03:04", "2020-01-02 03", "2020-01-02 03:04:05.1", "2020-01-02 03:04:05.123456",
            "2020-01-02 03:04:05.1234567", "2020-01-02 24:00:00", "2020-01-02 03:04:60", "1582-10-10 00:00:00",
            "1500-02-29 00:00:00", "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "1883-11-18 12:00:00",
            "2020-01-02 03:04:05 Europe/Berlin", "2020-01-02 03:04:05 UTC", " 2020-01-02 03:04:05", "2020-01-02 3:4:5",
            "2020", "1577934245", "2020-01-02 03:04Z",
        ],
        "timestamp_ntz": [
            "2020-01-02 03:04:05", "2020-01-02T03:04:05.123456", "2020-01-02T03:04:05Z", "2020-01-02 03:04:05+01:00",
            "1582-10-10 00:00:00", "0001-01-01 00:00:00", "2020-01-02", "2020-01-02 03:04:05.1234567",
        ],
    },
    "json": {
        "string": [
            '"a"', '""', '"NA"', "null", '"\\u00fc"', '"ü"', '"\\ud83d\\ude00"', '"a\\nb"',
            '" a "', '"\\/"', "1", "1.50",
            "true", '{"a": 1}', "[1]", "'a'",
        ],
        "tinyint": ["127", "128", "-129"],
        "int": ["2147483647", "2147483648"],
        "bigint": [
            "7", "-7", "-0", "+7", "007", "7.0", "7.5", "1e3", '"7"', '""', "true", "null", "9223372036854775807",
            "9223372036854775808", "[7]", "NaN",
        ],
        "float": ["1.5", "3.4028235e38", "3.5e38", "1e-50", "0.1", "16777217"],
        "double": [
            "1.5", "7", ".5", "5.", "1e3", "1E-3", "NaN", "Infinity", "-Infinity", '"NaN"', '"Infinity"', '"1.5"', '""',
            "1e400", "1e-400", "true", "null", "0.1", "9007199254740993", "-0.0", "-INF",
        ],
        "boolean": ["true", "false", "null", "True", '"true"', "1", "0"],
        "decimal(5,2)": ["1.5", "-1.55", "1.555", "999.99", "1000", "1e2", '"1.5"', "1.550", "null", "true"],
        "date": [
            '"2020-02-29"', '"2021-02-29"', '"1582-10-10"', '"0001-01-01"', '"9999-12-31"', '"2020-1-2"', '""', "null",
            '"2020-01-02T03:04:05"', "18000",
        ],
        "timestamp": [
            '"2020-01-02 03:04:05"', '"2020-01-02T03:04:05Z"', '"2020-01-02T03:04:05.123456Z"',
            '"2020-01-02 03:04:05+01:00"', '"2020-01-02"', '"1582-10-10 00:00:00"',
            '"0001-01-01 00:00:00"', '""', "null",
            '"2020-01-02 24:00:00"', "1577934245", "1577934245.5", '"2020-01-02 03:04:05.1234567"', '"x"',
        ],
        "timestamp_ntz": [
            '"2020-01-02 03:04:05"', '"2020-01-02T03:04:05.123456"', '"2020-01-02T03:04:05Z"',
            '"2020-01-02 03:04:05+01:00"', '"1582-10-10 00:00:00"', '"2020-01-02"', "1577934245",
        ],
        "binary": ['"YQ=="', '"a b"', '""', '"YQ"', "null"],
        "array<date>": ["[]", '["2020-02-29", null]', '["2020-02-30"]', "null"],
        "array<struct<t:timestamp_ntz>>": [
            '[{"t": "2020-01-02 03:04:05"}, null, {}]', '[{"t": "2020-01-02T03:04:05Z"}]',
        ],
        "struct<a:binary>": ['{"a": "YQ=="}', '{"a": "?"}', "{}", "null"],
        "array<bigint>": ["[]", "[1, null, 2]", "null", "1", '["1"]', "[1.5]"],
        "struct<a:bigint,b:string>": [
            '{"a": 1, "b": "x"}', "{}", '{"b": "x", "c": [1]}', "null", '{"a": "1"}', "[]", '"x"', '{"A": 1}',
        ],
    },
}  # fmt: skip
"""The texts of single values, by format and Spark's type."""

SPARK_ALONE: dict[tuple[str, str, str], object] = {
    ("csv", "float", "3.5e38"): math.inf,
    ("csv", "double", "1e400"): math.inf,
    ("csv", "double", "1d"): 1.0,
    ("csv", "double", "1f"): 1.0,
    ("csv", "double", "0x1p3"): 8.0,
    ("csv", "decimal(5,2)", "1.555"): "1.56",
    ("csv", "date", "2020-1-2"): 18263,
    ("csv", "date", "2020"): 18262,
    ("csv", "date", "2020-01"): 18262,
    ("csv", "date", "2020-01-02 00:00:00"): 18263,
    ("csv", "date", "2020-01-02T03:04:05"): 18263,
    ("csv", "date", "10000-01-01"): 2932897,
    ("csv", "date", "-0001-01-01"): -719893,
    ("csv", "date", "+2020-01-02"): 18263,
    ("csv", "timestamp", "2020-01-02 03:04:05.1234567"): 1577934245123456,
    ("csv", "timestamp", "2020-01-02 03:04:05 Europe/Berlin"): 1577930645000000,
    ("csv", "timestamp", "2020-01-02 03:04:05 UTC"): 1577934245000000,
    ("csv", "timestamp", "2020-01-02 3:4:5"): 1577934245000000,
    ("csv", "timestamp", "2020"): 1577836800000000,
    ("csv", "timestamp_ntz", "2020-01-02 03:04:05.1234567"): 1577934245123456,
    ("json", "string", "1"): "1",
    ("json", "string", "1.50"): "1.5",
    ("json", "string", "true"): "true",
    ("json", "string", '{"a": 1}'): '{"a":1}',
    ("json", "string", "[1]"): "[1]",
    ("json", "string", "'a'"): "a",
    ("json", "tinyint", "128"): -128,
    ("json", "float", "3.5e38"): math.inf,
    ("json", "double", '"NaN"'): math.nan,
    ("json", "double", '"Infinity"'): math.inf,
    ("json", "double", "1e400"): math.inf,
    ("json", "double", "-INF"): -math.inf,
    ("json", "decimal(5,2)", "1.555"): "1.56",
    ("json", "date", '"2020-1-2"'): 18263,
    ("json", "date", '"2020-01-02T03:04:05"'): 18263,
    ("json", "timestamp", "1577934245"): 1577934245000000,
    ("json", "timestamp", '"2020-01-02 03:04:05.1234567"'): 1577934245123456,
}
"""By format, type and text: the values that Spark makes of what tidegate refuses. It would lose something, or guess."""

TIDEGATE_ALONE: dict[tuple[str, str, str], object] = {
    ("csv", "bigint", " 7"): 7,
    ("csv", "bigint", "7 "): 7,
    ("csv", "boolean", " true"): True,
    ("csv", "decimal(5,2)", " 1"): "1.00",
    ("csv", "timestamp", "2020-01-02 03:04:05-23:30"): 1578018845000000,
    ("csv", "timestamp", "2020-01-02 03:04Z"): 1577934240000000,
}
"""The values that tidegate makes of what Spark refuses."""

_HEADER = {"header": "true"}
_MULTI = {"header": "true", "multiLine": "true"}
_ONE_LINE = {"header": "true", "multiLine": "false"}
_STRINGS = (("a", "string"), ("b", "string"))

CASES: list[Case] = [
    Case("defaults", b"x,s\n1,a\n", ours=[[1, "a"]], spark=[[1, "a"], BAD]),
    Case("header", b"x,s\n1,a\n2,b\n", _HEADER),
    Case("header false", b"1,a\n2,b\n", {"header": "false"}),
    Case("header alone", b"x,s\n", _HEADER),
    Case("header without line break", b"x,s", _HEADER),
    Case("empty file", b"", _HEADER),
    Case("last row without line break", b"x,s\n1,a\n2,b", _HEADER),
    Case("names in another order", b"s,x\na,1\n", _HEADER, ours=[[1, "a"]], spark=[BAD]),
    Case("names in another case", b"X,S\n1,a\n", _HEADER, ours=[BAD], spark=[[1, "a"]]),
    Case("blanks in names", b"x, s\n1,a\n", _HEADER, ours=[BAD], spark=[[1, "a"]]),
    Case("names in quotes", b'"x","s"\n1,a\n', _HEADER),
    Case("return and line feed", b"x,s\r\n1,a\r\n2,b\r\n", _HEADER),
    Case("returns", b"x,s\r1,a\r2,b\r", _HEADER),
    Case("mixed line ends", b"x,s\n1,a\r\n2,b\r3,c\n", _HEADER),
    Case("blank lines", b"x,s\n\n1,a\n  \n\n2,b\n\n", _HEADER),
    Case("blank lines before the header", b"\n\nx,s\n1,a\n", _HEADER),
    Case("byte-order mark", b"\xef\xbb\xbfx,s\n1,a\n", _HEADER),
    Case("byte-order mark without header", b"\xef\xbb\xbf1,a\n", {"header": "false"}),
    Case("latin-1", "x,s\n1,Grüße\n".encode("latin-1"), {**_HEADER, "encoding": "ISO-8859-1"}),
    Case("charset", "x,s\n1,Grüße\n".encode("latin-1"), {**_HEADER, "charset": "ISO-8859-1"}),
    Case("windows-1252", "x,s\n1,5 € „a“\n".encode("cp1252"), {**_HEADER, "encoding": "windows-1252"}),
    Case("UTF-16", "x,s\n1,Grüße\n2,b\n".encode("utf-16"), {**_MULTI, "encoding": "UTF-16"}),
    Case(
        "latin-1 read as UTF-8",
        "x,s\n1,Grüße\n2,b\n".encode("latin-1"),
        _HEADER,
        ours=[[2, "b"], BAD],
        spark=[[1, "Gr��e"], [2, "b"]],
    ),
    Case("fewer values", b"x,s\n1\n2,b\n", _HEADER),
    Case("more values", b"x,s\n1,a,c\n2,b\n", _HEADER),
    Case("separator at the end", b"x,s\n1,a,\n2,b\n", _HEADER),
    Case("more columns in the file", b"x,s,z\n1,a,c\n2,b,d\n", _HEADER, ours=[[1, "a"], [2, "b"]], spark=[BAD]),
    Case("fewer columns in the file", b"x\n1\n", _HEADER),
    Case("sep ;", b"x;s\n1;a,b\n", {**_HEADER, "sep": ";"}),
    Case("delimiter tab", b"x\ts\n1\ta b\n", {**_HEADER, "delimiter": "\t"}),
    Case("sep as \\t", b"x\ts\n1\ta b\n", {**_HEADER, "sep": "\\t"}),
    Case("sep blank", b'x s\n1 "a b"\n', {**_HEADER, "sep": " "}),
    Case("separators in quotes", b'x,s\n1,"a,b"\n2,",,"\n', _HEADER),
    Case("quotes within plain values", b'x,s\n1,a"b\n2,a"b"c\n3,a""b\n', _HEADER),
    Case("blank before a quote", b'x,s\n1, "a"\n', _HEADER),
    Case("blank behind a quote", b'x,s\n1,"a" \n', _HEADER),
    Case("text behind a quote", b'x,s\n1,"a"b\n2,c\n', _HEADER, ours=[[2, "c"], BAD], spark=[[1, '"a"b'], [2, "c"]]),
    Case("number in quotes", b'x,s\n"1",a\n', _HEADER),
    Case("escaped quote", b'x,s\n1,"a\\"b"\n', _HEADER),
    Case("escaped quote and separator", b'x,s\n1,"a\\",b"\n', _HEADER),
    Case("escaped escape", b'x,s\n1,"a\\\\"\n2,"a\\\\b"\n', _HEADER),
    Case("escape before anything else", b'x,s\n1,"a\\nb"\n', _HEADER),
    Case("escape in plain values", b'x,s\n1,a\\\\b\n2,a\\"b\n', _HEADER),
    Case("doubled quotes", b'x,s\n1,"a""b"\n', _HEADER, ours=[[1, 'a"b']], spark=[[1, '"a""b"']]),
    Case("doubled quotes, escape is quote", b'x,s\n1,"a""b"\n2,"""a"""\n3,"a"",""b"\n', {**_HEADER, "escape": '"'}),
    Case("backslash, escape is quote", b'x,s\n1,"a\\"\n2,"C:\\a"\n', {**_HEADER, "escape": '"'}),
    Case("escape /", b'x,s\n1,"a/"b"\n2,"a\\b"\n', {**_HEADER, "escape": "/"}),
    Case("quote '", b"x,s\n1,'a,b'\n2,\"c\"\n", {**_HEADER, "quote": "'"}),
    Case("no quote", b'x,s\n1,"a"\n2,"\n', {**_HEADER, "quote": ""}),
    Case("line feed in quotes", b'x,s\n1,"a\nb"\n2,c\n', _MULTI),
    Case(
        "return and line feed in quotes",
        b'x,s\r\n1,"a\r\nb"\r\n2,c\r\n',
        _MULTI,
        ours=[[1, "a\r\nb"], [2, "c"]],
        spark=[[1, "a\nb"], [2, "c"]],
    ),
    Case(
        "line feed in quotes, one line",
        b'x,s\n1,"a\nb"\n2,c\n',
        _ONE_LINE,
        ours=[[2, "c"], BAD],
        spark=[[1, "a"], [2, "c"], BAD],
    ),
    Case("blank line in quotes", b'x,s\n1,"a\n\nb"\n2,c\n', _MULTI),
    Case("unclosed quote", b'x,s\n1,a\n2,"b\n', _HEADER, ours=[[1, "a"], BAD], spark=[[1, "a"], [2, "b"]]),
    Case("unclosed quote, one line", b'x,s\n1,"a\n2,b\n', _ONE_LINE, ours=[[2, "b"], BAD], spark=[[1, "a"], [2, "b"]]),
    Case(
        "quoted and plain empty",
        b'a,b\n"",\n,""\nx,y\n',
        _HEADER,
        _STRINGS,
        ours=[["", None], [None, ""], ["x", "y"]],
        spark=[[None, None], [None, None], ["x", "y"]],
    ),
    Case("quoted and plain empty numbers", b'x,s\n,a\n"",b\n', _HEADER),
    Case("nullValue", b"a,b\nNA,x\n,NA\nNA ,na\n", {**_HEADER, "nullValue": "NA"}, _STRINGS),
    Case("nullValue in quotes", b'a,b\n"NA",x\n', {**_HEADER, "nullValue": "NA"}, _STRINGS),
    Case("nullValue and quoted empty", b'a,b\n"",NA\n,x\n', {**_HEADER, "nullValue": "NA"}, _STRINGS),
    Case("nullValue of numbers", b"x,s\nNA,a\n-,b\n1,c\n", {**_HEADER, "nullValue": "NA"}),
    Case("nullValue -1", b"x,s\n-1,-1\n1,c\n", {**_HEADER, "nullValue": "-1"}),
    Case("emptyValue", b'a,b\n"",x\n,""\n', {**_HEADER, "emptyValue": "-"}, _STRINGS),
    Case("emptyValue and nullValue", b'a,b\n"",NA\n,x\n', {**_HEADER, "emptyValue": "-", "nullValue": "NA"}, _STRINGS),
    Case("emptyValue is nullValue", b'a,b\n"",NA\nx,y\n', {**_HEADER, "emptyValue": "NA", "nullValue": "NA"}, _STRINGS),
    Case("nanValue", b"x\n-\nNaN\n1.5\n", {**_HEADER, "nanValue": "-"}, (("x", "double"),)),
    Case("nanValue of float", b"x\n-\nNaN\n1.5\n", {**_HEADER, "nanValue": "-"}, (("x", "float"),)),
    Case("nanValue in a string", b"x\nNaN\n-\n", {**_HEADER, "nanValue": "-"}, (("x", "string"),)),
    Case("positiveInf", b"x\nbig\nInf\nInfinity\n", {**_HEADER, "positiveInf": "big"}, (("x", "double"),)),
    Case("negativeInf", b"x\nsmall\n-Inf\n-Infinity\n", {**_HEADER, "negativeInf": "small"}, (("x", "double"),)),
    Case("comment", b"#1\nx,s\n1,a\n#2,b\n3,#c\n4,d#\n", {**_HEADER, "comment": "#"}),
    Case("blank before a comment", b"a,b\n1,a\n #2,b\n", {**_HEADER, "comment": "#"}, _STRINGS),
    Case("comment in quotes", b'x,s\n1,"a\n#b"\n', {**_MULTI, "comment": "#"}),
    Case("quoted comment character", b'a,b\n"#x",y\n', {**_HEADER, "comment": "#"}, _STRINGS),
    Case("blanks around strings", b"a,b\n x , y \n", _HEADER, _STRINGS),
    Case(
        "ignoreLeadingWhiteSpace", b'a,b\n x ,\ty \n "z",  \n', {**_HEADER, "ignoreLeadingWhiteSpace": "true"}, _STRINGS
    ),
    Case(
        "ignoreTrailingWhiteSpace",
        b'a,b\n x , y\t\n"z" ,  \n',
        {**_HEADER, "ignoreTrailingWhiteSpace": "true"},
        _STRINGS,
    ),
    Case(
        "blanks in quotes that are ignored",
        b'a,b\n" x "," "\n',
        {**_HEADER, "ignoreLeadingWhiteSpace": "true", "ignoreTrailingWhiteSpace": "true"},
        _STRINGS,
    ),
    Case("blanks alone", b"a,b\n , \n  ,x\n", _HEADER, _STRINGS),
    Case("null byte", b"x,s\n1,a\x00b\n2,\x00\n", _HEADER),
    Case("JSON objects", b'{"x": 1, "s": "a"}\n{"s": "b", "x": 2}\n', format="json"),
    Case("JSON without a member", b'{"x": 1}\n{}\n{"z": 1}\n{"x": null, "s": null}\n', format="json"),
    Case("JSON with more members", b'{"x": 1, "z": {"s": "b"}, "s": "a"}\n', format="json"),
    Case("JSON names in another case", b'{"X": 1, "S": "a"}\n', format="json"),
    Case(
        "JSON member twice",
        b'{"x": 1, "x": 2}\n{"x": 3}\n',
        format="json",
        ours=[[3, None], BAD],
        spark=[[2, None], [3, None]],
    ),
    Case("JSON blank lines", b'\n{"x": 1}\n  \n\n{"x": 2}', format="json"),
    Case("JSON return and line feed", b'{"x": 1}\r\n{"x": 2}\r\n', format="json"),
    Case("JSON returns", b'{"x": 1}\r{"x": 2}\r', format="json"),
    Case("JSON byte-order mark", b'\xef\xbb\xbf{"x": 1}\n', format="json"),
    Case("JSON blanks around", b' \t{ "x" : 1 } \n', format="json"),
    Case(
        "JSON latin-1",
        '{"x": 1, "s": "Grüße"}\n'.encode("latin-1"),
        {"encoding": "ISO-8859-1"},
        format="json",
        more={"lineSep": "\n"},
    ),
    Case("JSON latin-1 read as UTF-8", '{"x": 1, "s": "ü"}\n{"x": 2}\n'.encode("latin-1"), format="json"),
    Case(
        "JSON two objects in a line",
        b'{"x": 1}{"x": 2}\n{"x": 3}\n',
        format="json",
        ours=[[3, None], BAD],
        spark=[[1, None], [3, None]],
    ),
    Case(
        "JSON text behind",
        b'{"x": 1} a\n{"x": 3}\n',
        format="json",
        ours=[[3, None], BAD],
        spark=[[1, None], [3, None]],
    ),
    Case(
        "JSON array of objects",
        b'[{"x": 1}, {"x": 2}]\n{"x": 3}\n',
        format="json",
        ours=[[3, None], BAD],
        spark=[[1, None], [2, None], [3, None]],
    ),
    Case("JSON empty array", b'[]\n{"x": 3}\n', format="json", ours=[[3, None], BAD], spark=[[3, None]]),
    Case("JSON null", b'null\n{"x": 3}\n', format="json"),
    Case("JSON number", b'1\n{"x": 3}\n', format="json"),
    Case("JSON unclosed object", b'{"x": 1\n{"x": 3}\n', format="json"),
    Case("JSON unclosed string", b'{"s": "a\n{"x": 3}\n', format="json"),
    Case("JSON tab in a string", b'{"s": "a\tb"}\n{"x": 3}\n', format="json"),
    Case("JSON comment", b'{"x": /* a */ 1}\n{"x": 3}\n', format="json"),
    Case(
        "JSON single quotes",
        b"{'x': 1}\n{\"x\": 3}\n",
        format="json",
        ours=[[3, None], BAD],
        spark=[[1, None], [3, None]],
    ),
    Case("JSON names without quotes", b'{x: 1}\n{"x": 3}\n', format="json"),
    Case("JSON comma at the end", b'{"x": 1,}\n{"x": 3}\n', format="json"),
    Case(
        "JSON surrogate alone",
        b'{"s": "\\ud83d"}\n{"x": 3}\n',
        format="json",
        ours=[[3, None], BAD],
        spark=[[None, "?"], [3, None]],
    ),
    Case("JSON null byte", b'{"s": "a\\u0000b"}\n', format="json"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], list[Any], str]]:
    """For each case the rows of tidegate, those of Spark, and Spark's error. A reader that refuses ends with BAD."""
    folder = tmp_path_factory.mktemp("text")
    cases = [*CASES, *(_case_of_values(kind, wanted) for kind in VALUES for wanted in VALUES[kind])]
    asked = []
    for number, case in enumerate(cases):
        (folder / f"{number}").mkdir()
        path = folder / f"{number}" / f"a.{case.format}"
        path.write_bytes(case.data)
        asked.append(
            {
                "name": case.name,
                "format": case.format,
                "path": str(path),
                "options": dict(case.options) | dict(case.more),
                "columns": list(case.columns),
            }
        )
    file = folder / "cases.json"
    file.write_text(json.dumps(asked))
    program = [sys.executable, str(Path(__file__).with_name("text_spark_program.py")), str(file)]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=WAIT_S, check=False, env={**os.environ, "TZ": "UTC"}
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    spark = json.loads(file.with_name("cases.json.out").read_text())
    return {
        case.name: (
            _our_rows(case, folder / f"{number}"),
            spark[case.name]["rows"] + [BAD] * spark[case.name]["fails"],
            spark[case.name].get("error", ""),
        )
        for number, case in enumerate(cases)
    }


def _case_of_values(kind: str, wanted: str) -> Case:
    """A file with a row for each text of a type, numbered."""
    texts = VALUES[kind][wanted]
    if kind == "csv":
        lines = ["id;v", *(f"{number};{text}" for number, text in enumerate(texts))]
        options = {"header": "true", "sep": ";"}
    else:
        lines, options = [f'{{"id": {number}, "v": {text}}}' for number, text in enumerate(texts)], {}
    data = "".join(f"{line}\n" for line in lines).encode()
    return Case(f"{kind} {wanted}", data, options, (("id", "int"), ("v", wanted)), kind)


def _our_rows(case: Case, folder: Path) -> list[Any]:
    """The rows that tidegate keeps with `bad_rows="skip"`, in the plain values of the other program."""
    schema = pa.schema([(name, _TYPES[kind]) for name, kind in case.columns])
    options = dict(case.options) if case.format == "csv" or case.options else None
    source = source_of_files(f"{folder}/*", kind=case.format, schema=schema, options=options, bad_rows="skip")
    reader, rows, bad = source.reader(), list[Any](), 0
    for split in source.splits():
        offset, at_end = 0, False
        while not at_end:
            result = reader.read(split, offset, 1_000)
            bad += 0 if result.bad is None else result.bad.num_rows
            if result.batch is not None:
                columns = [_plain(column) for column in result.batch.columns]
                rows += [list(row) for row in zip(*columns, strict=True)]
            offset, at_end = result.next_offset, result.at_end
    return rows + [BAD] * (bad > 0)


def _plain(column: pa.Array) -> list[Any]:
    if pa.types.is_date(column.type):
        return list(column.cast(pa.int32()).to_pylist())
    if pa.types.is_timestamp(column.type):
        return list(column.cast(pa.int64()).to_pylist())
    values = column.to_pylist()
    if pa.types.is_decimal(column.type):
        return [None if value is None else str(value) for value in values]
    if pa.types.is_binary(column.type):
        return [None if value is None else value.hex().upper() for value in values]
    return [_plain_value(value) for value in values]


def _plain_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain_value(each) for each in value]
    if isinstance(value, bytes):
        return value.hex().upper()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@pytest.mark.parametrize(
    ("kind", "wanted", "text"),
    [(kind, wanted, text) for kind, types in VALUES.items() for wanted, texts in types.items() for text in texts],
)
def test_a_value_is_that_of_spark(
    answers: dict[str, tuple[list[Any], list[Any], str]], kind: str, wanted: str, text: str
) -> None:
    """The same value, or a bad row for both, but for the differences that are listed."""
    number = VALUES[kind][wanted].index(text)
    ours, spark, error = answers[f"{kind} {wanted}"]
    found = tuple(next((row[1] for row in rows if row[0] == number), BAD) for rows in (ours, spark))
    place = kind, wanted, text
    expected = (found[1], found[1])
    if place in SPARK_ALONE:
        expected = (BAD, SPARK_ALONE[place])
    elif place in TIDEGATE_ALONE:
        expected = (TIDEGATE_ALONE[place], BAD)
    assert repr(found) == repr(expected), error


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_is_read_as_spark_reads_it(answers: dict[str, tuple[list[Any], list[Any], str]], case: Case) -> None:
    """Contents and options: the same rows, and the same refusals, but for the listed differences."""
    ours, spark, error = answers[case.name]
    # By their text, because NaN is not equal to itself.
    assert repr(spark) == repr(spark if case.spark is None else case.spark), error
    assert repr(ours) == repr(spark if case.ours is None else case.ours), error
