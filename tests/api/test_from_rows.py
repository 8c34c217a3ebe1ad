"""Programs take rows, frames and schemas as people have them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from local_jobs import local

import tidegate as tg
from tidegate.storage.user_values import OPEN


class Pair(NamedTuple):
    k: str
    n: int


class Word(TypedDict):
    word: str
    n: int


@dataclasses.dataclass
class Counted:
    word: str
    parts: list[Pair]


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([{"k": "a", "n": 1}, {"k": "b"}], {}, [{"k": "a", "n": 1}, {"k": "b", "n": None}]),
        ([("a", 1)], {"columns": ["k", "n"]}, [{"k": "a", "n": 1}]),
        ([Pair("a", 1)], {}, [{"k": "a", "n": 1}]),
        (["x", "y"], {}, [{"value": "x"}, {"value": "y"}]),
        ([("a", 1)], {"schema": {"k": str, "n": float}}, [{"k": "a", "n": 1.0}]),
        ([], {"schema": Word}, []),
        (range(2), {}, [{"value": 0}, {"value": 1}]),
        ([{"t": pd.NaT}, {"t": pd.Timestamp(2020, 1, 1)}], {}, [{"t": None}, {"t": dt.datetime(2020, 1, 1)}]),
        ([{"t": pd.NaT, "n": pd.NA}], {"schema": {"t": dt.date, "n": int}}, [{"t": None, "n": None}]),
    ],
)
def test_rows_of_any_kind(rows: Any, options: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    """Dicts, tuples with names, single values, with and without a schema."""
    with local() as env:
        found = env.from_rows(rows, **options).collect()
        env.execute().wait()
        assert found.to_arrow().to_pylist() == expected


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([("a", 1)], {}, r"row 0 is a tuple; name its values with columns="),
        ([("a",)], {"columns": ["k", "n"]}, r"row 0 has 1 values, but the columns are \['k', 'n'\]"),
        ([], {}, "without rows give the columns"),
        ([{"k": None}], {}, "column 'k' is null in every row"),
        (
            [{"k": 1}, {"k": "a"}],
            {},
            r"^from_rows: row 1: column 'k': a value of type str .*\(int\); return",
        ),
        ([{"k": object()}], {}, "^from_rows: row 0: column 'k': a value of type object has no type of a.*; convert it"),
        ([{"k": 1}, {"k": [2, {"x": 1j}]}], {}, "^from_rows: row 1: column 'k': a value of type complex"),
        ([{"k": 2**70}], {}, "row 0: column 'k': an integer does not fit into 64 bits; give the column a decimal"),
        ([{"k": {1: 2}}], {}, "row 0: column 'k': a dict has keys that are not strings; give the column the type of"),
        ([{"k": "a"}, {"k": 5}], {"schema": {"k": str}}, "row 1: column 'k': string cannot hold 5"),
        ([{"k": 1.5}], {"schema": {"k": int}}, "column 'k'.*1.5"),
        ([{"k": 1}], {"schema": Word}, r"missing|new"),
        ("abc", {}, "a list of rows, not str"),
        ({"k": 1}, {}, "a list of rows, not dict"),
        ([object()], {}, "row 0 is a object"),
        ([{1: 2}], {}, "a row has the key 1; column names must be strings"),
        ([{"k": (x for x in "ab")}], {}, "row 0 has a value that cannot be in a column"),
        ([{"k": np.datetime64("2020-01-01")}], {}, "column 'k': a value of type datetime64 has no type"),
        ([{"k": True}], {"schema": {"k": float}}, "column 'k': double cannot hold.*True"),
        ([{"k": 1.5}, {"k": True}], {}, "column 'k': double cannot hold.*True"),
        ([{"a\0b": 1}], {}, "null character in its name"),
    ],
)
def test_rows_without_common_columns_are_refused(rows: Any, options: dict[str, Any], words: str) -> None:
    """The error names the row or the column. It has the value, without the marks that withhold it from logs."""
    with local() as env, pytest.raises(tg.ConfigurationError, match=words) as refused:
        env.from_rows(rows, **options)
    assert OPEN not in str(refused.value)


def test_values_that_are_nested_too_deeply_are_refused() -> None:
    """Arrow would fail when their rows are sent: with "Max recursion depth reached", or without a word of columns."""
    values: list[Any] = [1]
    for _ in range(100):
        values = [values]
    with local() as env, pytest.raises(tg.ConfigurationError, match="'k' is nested 102 levels deep, and a column may"):
        env.from_rows([{"k": values}])


def test_a_pandas_frame_is_taken() -> None:
    """NaN and NaT are nulls; an index with a name would be lost, so it is refused."""
    frame = pd.DataFrame({"k": ["a", "b", "c"], "x": [1.5, None, 2.0]})
    with local() as env:
        found = env.from_batches([frame[frame.k != "c"], frame[frame.k == "c"]]).collect()
        env.execute().wait()
        assert found.to_arrow().to_pydict() == {"k": ["a", "b", "c"], "x": [1.5, None, 2.0]}
        with pytest.raises(tg.ConfigurationError, match=r"index \['k'\].*reset_index"):
            env.from_batches(frame.set_index("k"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, 5)], "date32.* cannot hold"),
        (
            [dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)],
            "it has a time zone, and the column has none",
        ),
        (
            [dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.datetime(2020, 1, 1)],
            "it has no time zone, and the column has one",
        ),
        ([[dt.datetime(2020, 1, 1)], [dt.datetime(2020, 1, 1, tzinfo=dt.UTC)]], "it has a time zone"),
        ([dt.time(1, tzinfo=dt.UTC)], "it has a time zone"),
        ([pd.Timestamp("2020-01-01 00:00:00.000000001")], "it would become"),
        ([b"x", "y"], "it would become"),
        ([{1, 2}], "it is neither a list nor a tuple"),
        ([2**63], "does not fit into Arrow"),
        (["\ud800"], "does not fit into Arrow"),
    ],
)
def test_objects_of_pandas_that_arrow_would_change_are_refused(values: list[Any], words: str) -> None:
    """Arrow cuts off times of dates, zones and nanoseconds where a column has objects of several kinds."""
    frame = pd.DataFrame({"k": pd.Series([None, *values, float("nan")], dtype=object)})
    with local() as env, pytest.raises(tg.ConfigurationError, match=words) as refused:
        env.from_batches(frame)
    assert OPEN not in str(refused.value)


def test_batches_of_other_columns_are_refused_by_their_names() -> None:
    """With types, which may be all that differs."""
    with local() as env, pytest.raises(tg.ConfigurationError, match=r"lacks \['k: int64'\] and has \['k: string'\]"):
        env.from_batches([pa.table({"k": [1]}), pa.table({"k": ["a"]})])


def test_data_that_does_not_keep_to_its_schema_is_refused() -> None:
    """Bytes that are not UTF-8 in strings, nulls in a column without, two columns of one name."""
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")]
    )
    nulls = pa.table([pa.nulls(1, pa.int64())], schema=pa.schema([pa.field("k", pa.int64(), nullable=False)]))
    for data in (pa.table({"k": text}), pa.table({"k": pa.ListArray.from_arrays([0, 1], text)}), nulls):
        with local() as env, pytest.raises(tg.ConfigurationError, match="does not match its own schema"):
            env.from_batches(data)
    with local() as env, pytest.raises(tg.ConfigurationError, match="does not fit into Arrow"):
        env.from_batches(pd.DataFrame([[1, 2]], columns=["k", "k"]))


def test_columns_are_known_without_a_schema() -> None:
    """A traced lambda knows them, an annotated function names them, and both may return dataclass objects."""

    def words(row: Any) -> Iterator[Word]:
        for word in row["text"].split():
            yield {"word": word, "n": row["n"]}

    def counted(row: Any) -> Counted:
        return Counted(row["word"], [Pair(row["word"], row["n"])])

    at = pa.array([dt.datetime(2020, 1, 1)], pa.timestamp("us", "UTC"))
    with local() as env:
        stream = env.from_batches(pa.table({"text": ["a b"], "n": [3], "at": at, "l": [[1]]}))
        traced = stream.map(lambda row: {"text": row["text"], "m": row["n"] * 2, "when": row["at"], "l": row["l"]})
        assert traced.schema is not None
        assert traced.schema.types == [pa.string(), pa.int64(), at.type, pa.list_(pa.int64())]
        found = traced.collect(uid="traced"), stream.flat_map(words).map(counted).collect(uid="annotated")
        env.execute().wait()
        assert found[0].to_arrow().to_pylist() == [
            {"text": "a b", "m": 6, "when": dt.datetime(2020, 1, 1, tzinfo=dt.UTC), "l": [1]}
        ]
        assert found[1].to_arrow().to_pylist() == [
            {"word": "a", "parts": [{"k": "a", "n": 3}]},
            {"word": "b", "parts": [{"k": "b", "n": 3}]},
        ]


def test_the_error_of_a_missing_schema_shows_one_that_fits() -> None:
    """It is what the function makes of the first row that gets there, and it can be pasted."""

    def split(row: Any) -> Any:
        return [{"word": word, "n": row["n"], "at": dt.datetime(2020, 1, 1)} for word in row["text"].split()]

    with local() as env:
        words = env.from_rows([("", 1), ("a b", 2)], columns=["text", "n"]).flat_map(split).filter(pl.col("n") > 0)
        fitting = r'Give schema= to .flat_map.: schema=\{"word": str, "n": int, "at": datetime\}, which fits'
        with pytest.raises(tg.ConfigurationError, match="collect: the columns of the stream.*" + fitting):
            words.collect()
        failing = env.from_rows([1]).map(lambda row: {"x": 1 // (row["value"] - 1)}, traced=False)
        with pytest.raises(tg.ConfigurationError, match=r"Give schema= to 'map': schema=\{\.\.\.\}"):
            failing.collect()
