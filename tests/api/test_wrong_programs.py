"""Slips of programs: each is told where it is made, with what was wrong and what to do, before anything runs."""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from local_jobs import finish, local, rows
from passing_functions import Passes, PassesBoth

import tidegate as tg

ROWS = pa.table({"k": ["a", "b"], "k2": [1, 2], "t": [1, 2], "x": [1.0, 2.0], "b": [True, False]})
_ONE, _HUNDRED = decimal.Decimal("1.00"), decimal.Decimal("1E+2")
LACKED = (
    pa.array([_ONE, None], pa.decimal256(50, 2)),
    pa.array([_ONE, None], pa.decimal32(5, 2)),
    pa.array([_ONE, None], pa.decimal64(12, 2)),
    pa.array([{"d": _ONE}, None], pa.struct({"d": pa.decimal32(5, 2)})),
    pa.array([[_ONE], None], pa.list_(pa.decimal64(12, 2))),
    pa.array([[1], None], pa.list_view(pa.int64())),
)
"""Columns of types that polars has not, and Parquet has."""

Stream = Any
"""What a slip gets is wrong on purpose, also for a checker of types."""


def timed(env: tg.StreamEnvironment) -> Stream:
    """A stream with event time."""
    return env.from_batches(ROWS, timestamp="t", splits=1)


SLIPS: dict[str, tuple[Callable[[Any, Stream], object], str]] = {
    "event time of a number": (
        lambda env, s: s.assign_timestamps(3),
        "takes the name of a column or",
    ),
    "event time of a wrong type": (
        lambda env, s: s.assign_timestamps(pl.col("k") + "!"),
        "of type string cannot be event time",
    ),
    "event time without a column": (
        lambda env, s: s.assign_timestamps(pl.col("zz") * 2),
        r'"zz"; there are \(k:',
    ),
    "event time of all columns": (lambda env, s: s.assign_timestamps(pl.all()), "one column"),
    "punctuated by no boolean": (lambda env, s: s.assign_timestamps("t", punctuated_by=pl.col("x")), "it must be bool"),
    "a group that is none": (lambda env, s: s.assign_timestamps("t", alignment="g"), r"is a tg\.WatermarkAlignment"),
    "partitions by an expression": (
        lambda env, s: s.to_table("out", partition_by=[pl.col("t") // 2]),
        r"partition_by= takes names of columns, and .* compute it before, in with_columns",
    ),
    "partitions of Delta": (
        lambda env, s: s.to_delta("out", partition_by=[pl.col("t") // 2]),
        "takes names",
    ),
    "keys by an expression": (
        lambda env, s: s.to_table("out", mode="upsert", keys=[pl.col("t") // 2]),
        "keys= takes names of columns",
    ),
    "an order by an expression": (
        lambda env, s: s.to_table("out", mode="upsert", keys=["k"], order_by=-pl.col("t")),
        "order_by= takes names of columns",
    ),
    "a mode that there is not": (lambda env, s: s.to_table("out", mode="replace"), '"append" or "upsert", not'),
    "a column of ours": (lambda env, s: s.with_columns(_tidegate_x=pl.col("x")), "'_tidegate_' are tidegate's own"),
    "a key of ours": (lambda env, s: s.map(dict).key_by("_tidegate_slice"), "'_tidegate_' are tidegate's own"),
    "an aggregate of ours": (lambda env, s: s.key_by("k").aggregate(_tidegate_x=tg.count()), "tidegate's own"),
    "a side output of ours": (
        lambda env, s: s.process(
            Passes(), side_outputs=[tg.OutputTag("bad", pa.schema({"_tidegate_deleted": pa.bool_()}))]
        ),
        "side output 'bad'.*tidegate's own",
    ),
    "columns twice": (
        lambda env, s: env.from_batches(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])),
        r"columns \['a'\] occur twice",
    ),
    "no such column": (lambda env, s: s.filter(pl.col("zz") > 1), r'^filter: .*"zz"; there are \(k: string, k2'),
    "no such column in select": (
        lambda env, s: s.select("zz", name="mine"),
        r'^mine: unable to find column "zz";',
    ),
    "a type that does not fit": (
        lambda env, s: s.with_columns(y=pl.col("k") * 2),
        "^with_columns: .*explicit cast",
    ),
    "a condition that is none": (
        lambda env, s: s.filter(pl.col("x")),
        r"^filter: the condition .* is Float64, and not boolean; compare it",
    ),
    "no condition": (lambda env, s: s.filter("x > 1"), "filter takes a function of a row.*or a polars expression"),
    "no function of rows": (lambda env, s: s.map(None), "map takes a function of a row, a dict, not None"),
    "no function of many rows": (lambda env, s: s.flat_map(3), "flat_map takes a function of a row"),
    "no function of batches": (lambda env, s: s.map_batches(3), "map_batches takes a function of a batch"),
    "a parallelism in words": (
        lambda env, s: s.map(dict, parallelism="2"),
        "parallelism='2': give a whole number of at least 1",
    ),
    "a parallelism of part": (
        lambda env, s: s.map(dict, parallelism=2.5),
        "parallelism=2.5: give a whole number of at least 1",
    ),
    "a union with nothing": (lambda env, s: s.union(None), "union takes another stream, not NoneType"),
    "a union with keys": (lambda env, s: s.union(s.key_by("k")), "not KeyedStream; give the stream .* before key_by"),
    "a connection with nothing": (lambda env, s: s.connect(None), "connect takes another stream"),
    "a connection by numbers": (lambda env, s: s.connect(s).key_by("k", 3), "connect: key_by takes the name"),
    "a join with keys": (lambda env, s: s.join(s.key_by("k"), on="k"), "join takes another stream, not KeyedStream"),
    "a join without its column": (lambda env, s: s.join(s, on=[("k", "zz")]), "the right stream has no column 'zz'"),
    "a join with no suffix": (
        lambda env, s: s.join(s, on="k", window=tg.Tumbling(1), suffix=None),
        "suffix=None: pass the text to append",
    ),
    "three bounds": (lambda env, s: s.interval_join(s, on="k", between=(1, 2, 3)), "the first and the last moment"),
    "one bound": (lambda env, s: s.interval_join(s, on="k", between="5min"), "the first and the last moment"),
    "bounds in words": (
        lambda env, s: s.interval_join(s, on="k", between=("a", "b")),
        "interval_join: between: cannot read 'a'",
    ),
    "versions by a number": (lambda env, s: s.join_asof(s, on="k", by=3), "by= takes the name of a column"),
    "no rows of a table": (
        lambda env, s: s.lookup_join(pa.table({"k": ["a"]}), on="k", max_rows=0),
        "max_rows=0: it must be at least 1",
    ),
    "a rank that is no name": (
        lambda env, s: s.key_by("k").top_n(3, by="x", rank=3),
        "give a column name",
    ),
    "splits in words": (lambda env, s: env.from_batches(ROWS, splits="2"), "splits='2'"),
    "no source": (lambda env, s: env.from_source(None), "None has no schema, splits, reader"),
    "no files": (lambda env, s: env.from_files(None), "give a path or a pattern"),
    "a rate in words": (lambda env, s: env.from_rate("x"), "rows_per_second='x': give a positive number"),
    "rows in words": (lambda env, s: env.from_rate(1, rows="x"), "give whole numbers"),
    "an environment of a stream": (
        lambda env, s: tg.StreamEnvironment.local(s),
        "give a whole number of at least 1",
    ),
    "checkpoints in words": (lambda env, s: env.execute("x", checkpoints="1s"), r"give tg\.CheckpointConfig\(interval"),
    "restarts in words": (lambda env, s: env.execute("x", restart="never"), r"give tg\.RestartStrategy\.fixed_delay"),
    "timers without keys": (
        lambda env, s: s.connect(s).process(PassesBoth(), fire_at_end=True),
        "without key_by there are no timers",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_told(name: str) -> None:
    """In words of the program."""
    slip, words = SLIPS[name]
    with local(1) as env, pytest.raises(tg.ConfigurationError, match=words):
        slip(env, timed(env))


_IN_NO_FILE = (
    pa.array([_HUNDRED, None], pa.decimal128(5, -2)),
    pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
)


@pytest.mark.parametrize("column", [*LACKED, *_IN_NO_FILE], ids=lambda column: str(column.type))
def test_what_polars_cannot_hold_passes_and_is_not_read(column: pa.Array) -> None:
    """Expressions over other columns leave it alone, one over it is refused."""
    with local(1) as env:
        stream = env.from_batches(pa.table({"d": column, "t": [1, 2]}))
        kept = stream.with_columns(y=pl.col("t") * 2).select("y", e="d")
        assert kept.schema == pa.schema({"y": pa.int64(), "e": column.type})
        for refused in (
            lambda: stream.filter(pl.col("d") > 0),
            lambda: stream.with_columns(z=pl.col("d") * 2),
            lambda: stream.select(pl.all() + 1),
        ):
            with pytest.raises(
                tg.ConfigurationError, match=f"'d' is {re.escape(str(column.type))}, which no expression"
            ):
                refused()


@pytest.mark.parametrize(
    "column", [*_IN_NO_FILE, pa.array([{}, None], pa.struct([]))], ids=lambda column: str(column.type)
)
def test_what_files_cannot_hold_is_refused_before_a_job(column: pa.Array) -> None:
    """Of a table, and of rows that are collected; other sinks may take it."""
    words = rf"column 'd' is {re.escape(str(column.type))}, which the table's Parquet files cannot hold; cast it"
    with local(1) as env:
        stream = env.from_batches(pa.table({"t": [1, 2], "d": column}))
        slips: list[Callable[[], object]] = [
            lambda: stream.to_table("out"),
            lambda: stream.to_delta("out"),
            lambda: stream.collect(),
        ]
        for slip in slips:
            with pytest.raises(tg.TableError, match=words):
                slip()
        stream.select("t").to_table("out")


_RUNS = pc.run_end_encode(pa.array(["a", "a"]))
_UNION = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])


@pytest.mark.parametrize(
    ("column", "advice"),
    [
        (_RUNS, "run_end_decode"),
        (_UNION, "a struct"),
        (pa.StructArray.from_arrays([_RUNS], ["r"]), "run_end_decode"),
        (pa.ListArray.from_arrays([0, 1, 2], _UNION), "a struct"),
    ],
)
def test_columns_without_single_rows_are_refused(column: pa.Array, advice: str) -> None:
    """Of data, and of what a function is said to return."""
    words = rf"column 'd' is {re.escape(str(column.type))}, and Arrow cannot take single rows of this type; .*{advice}"
    with local(1) as env:
        with pytest.raises(tg.ConfigurationError, match=words):
            env.from_batches(pa.table({"d": column}))
        with pytest.raises(tg.ConfigurationError, match=words):
            timed(env).map_batches(lambda batch: batch, schema=pa.schema({"d": column.type}))


@pytest.mark.parametrize("column", LACKED, ids=lambda column: str(column.type))
def test_what_polars_cannot_hold_comes_out(tmp_path: Path, column: pa.Array) -> None:
    """Behind steps that do not read it."""
    with local(1) as env:
        stream = env.from_batches(pa.table({"d": column, "t": [1, 2]}), splits=1)
        found = stream.with_columns(y=pl.col("t") * 2).filter(pl.col("y") > 2).select("y", e="d").collect()
        finish(env, tmp_path)
    assert found.to_arrow().to_pylist() == [{"y": 4, "e": column[1].as_py()}]


def test_event_time_of_an_expression(tmp_path: Path) -> None:
    """A source takes one as well; it adds a column, or takes the place of one."""
    with local(1) as env:
        seconds = env.from_batches(ROWS, splits=1, timestamp=(pl.col("t") * 1000).alias("at"))
        assert seconds.timestamp == "at"
        found = seconds.window(tg.Tumbling("1s")).aggregate(n=tg.count()).select("window_end", "n").collect()
        same = env.from_batches(ROWS, splits=1).assign_timestamps(pl.col("t") * 10, punctuated_by=pl.col("x") > 1)
        replaced = same.select("t").collect()
        finish(env, tmp_path)
    assert found.to_arrow()["n"].to_pylist() == [1, 1]
    assert rows(replaced.to_arrow()) == [(10,), (20,)]
