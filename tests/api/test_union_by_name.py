"""`union(by_name=True)`: columns are matched by their names, types become as wide as all need, or it is refused."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import finish, local, rows

import tidegate as tg

FIRST = pa.table({"k": pa.array(["a", "b"]), "n": pa.array([1, None], pa.int32()), "t": pa.array([10, 20], pa.int64())})
SECOND = pa.table({"n": pa.array([2**40], pa.int64()), "k": pa.array(["c"]), "t": pa.array([30], pa.int64())})
THIRD = pa.table({"k": pa.array(["d"]).dictionary_encode(), "extra": pa.array([0.5])})


@pytest.mark.slow
def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    """In any order, wider where one is, null where one is missing; event time stays where all streams have it."""
    with local() as env:
        first, second = env.from_batches(FIRST, timestamp="t"), env.from_batches(SECOND, timestamp="t")
        both = first.union(second, by_name=True)
        assert both.timestamp == "t"
        assert both.schema == pa.schema({"k": pa.string(), "n": pa.int64(), "t": pa.int64()})
        everything = both.union(env.from_batches(THIRD), by_name=True, allow_missing=True)
        counted = everything.key_by("k").aggregate(n=tg.sum("n"), extra=tg.max("extra"), emit="final").collect()
        pairs = both.collect()
        finish(env, tmp_path)
    assert rows(pairs.to_arrow()) == [("a", 1, 10), ("b", None, 20), ("c", 2**40, 30)]
    assert rows(counted.to_arrow()) == [("a", 1, None), ("b", None, None), ("c", 2**40, None), ("d", None, 0.5)]


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (pa.int8(), pa.uint8(), pa.int16()),
        (pa.uint32(), pa.int32(), pa.int64()),
        (pa.float32(), pa.int32(), pa.float64()),
        (pa.decimal128(5, 2), pa.decimal128(9, 4), pa.decimal128(9, 4)),
        (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.null(), pa.date32(), pa.date32()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.int64(), pa.float64(), None),
        (pa.int64(), pa.uint64(), None),
        (pa.string(), pa.int64(), None),
        (pa.timestamp("s", "UTC"), pa.timestamp("s"), None),
    ],
)
def test_a_type_has_all_values_of_both_or_it_is_refused(
    one: pa.DataType, other: pa.DataType, wanted: pa.DataType | None
) -> None:
    """Whichever comes first; a type that would round, or lose a time zone, is refused with both types."""
    with local() as env:
        for types in ((one, other), (other, one)):
            first, second = (env.from_batches(pa.table({"x": pa.array([], t)})) for t in types)
            if wanted is None:
                with pytest.raises(tg.ConfigurationError, match=r"'x' is .* in one stream and .* in another"):
                    first.union(second, by_name=True)
            else:
                assert first.union(second, by_name=True).schema == pa.schema({"x": wanted})


@pytest.mark.parametrize("around", [lambda x: x, lambda x: [x], lambda x: {"in": x}], ids=["plain", "list", "struct"])
def test_fields_of_structs_are_matched_by_name(tmp_path: Path, around: Callable[[Any], Any]) -> None:
    """In any order and wider where one is; a field that one stream lacks is null, or refused without allow_missing."""
    some = [pa.table({"x": pa.array([around({"a": 1, "b": "x"})])})]
    some.append(pa.table({"x": pa.array([around({"b": "y", "a": 2})])}))
    more = pa.table({"x": pa.array([around({"c": 0.5, "a": 3})])})
    with local() as env:
        first, second, third = (env.from_batches(table) for table in (*some, more))
        alike = first.union(second, by_name=True).collect()
        for streams in ((first, third), (third, first)):
            with pytest.raises(tg.ConfigurationError, match="with allow_missing=True a field that a struct lacks"):
                streams[0].union(streams[1], by_name=True)
        both = first.union(third, by_name=True, allow_missing=True).collect()
        turned = third.union(first, by_name=True, allow_missing=True).collect()
        finish(env, tmp_path)
    expected = [around({"a": 1, "b": "x", "c": None}), around({"a": 3, "b": None, "c": 0.5})]
    for found in both, turned:
        rows_found = found.to_arrow()["x"].to_pylist()
        assert sorted(rows_found, key=lambda row: "3" in str(row)) == expected
    assert sorted(alike.to_arrow()["x"].to_pylist(), key=str) == [row["x"] for t in some for row in t.to_pylist()]


def test_what_cannot_be_united_is_told(tmp_path: Path) -> None:
    """A missing column, unknown columns, and a time that the finer unit does not have."""
    with local() as env:
        first, third = env.from_batches(FIRST), env.from_batches(THIRD)
        with pytest.raises(tg.ConfigurationError, match=r"stream 1 has no column 'extra'.*allow_missing=True"):
            first.union(third, by_name=True)
        with pytest.raises(tg.ConfigurationError, match="needs by_name=True"):
            first.union(third, allow_missing=True)
        with pytest.raises(tg.ConfigurationError, match="columns of stream 2 are not known before"):
            first.union(third.map(lambda row: row, traced=False), by_name=True)
        far = pa.table({"t": pa.array([dt.datetime(9000, 1, 1)], pa.timestamp("s"))})
        near = pa.table({"t": pa.array([0], pa.timestamp("ns"))})
        env.from_batches(far).union(env.from_batches(near), by_name=True).collect()
        with pytest.raises(tg.JobFailedError, match=r"'union'.*out of bounds"):
            finish(env, tmp_path)
