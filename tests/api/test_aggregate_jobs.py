"""Aggregates of jobs: expressions where a column may stand, distinct values, and aggregates over everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import expression_program
import polars as pl
import pyarrow as pa
import pytest
from aggregate_model import same_rows
from local_jobs import NO_RESTART, local
from programs import nodes_of
from user_functions import Product

import tidegate as tg

_ROWS = [
    {"k": n % 3, "x": None if n % 7 == 0 else n % 5, "p": n / 4, "s": ["a", "b", None][n % 3 if n % 2 else 0]}
    for n in range(40)
]
_TABLE = pa.Table.from_pylist(_ROWS, pa.schema({"k": pa.int64(), "x": pa.int64(), "p": pa.float64(), "s": pa.string()}))
_FRAME = pl.DataFrame(_TABLE)


def _batches() -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = _TABLE.to_batches(max_chunksize=7)
    return batches


def _result(stream: tg.Stream, env: tg.StreamEnvironment) -> list[dict[str, Any]]:
    """What a stream gives; without checkpoints."""
    collected = stream.collect()
    assert env.execute("test job", restart=NO_RESTART).wait("4min") == "finished"
    found: list[dict[str, Any]] = collected.to_arrow().to_pylist()
    return found


@pytest.mark.slow
def test_expressions_stand_where_columns_may() -> None:
    """As keys, as columns, in conditions; equal ones are computed once, in one step before the exchange."""
    env = local()
    twice = pl.col("p") * 2
    stream = env.from_batches(_batches()).key_by((pl.col("k") % 2).alias("odd"))
    totals = stream.aggregate(
        total=tg.sum(twice),
        most=tg.max(twice),
        big=tg.count().where(twice > 10),
        plain=tg.count().where(pl.col("x").is_null()),
        newest=tg.last("x", by=pl.col("p") + 1),
        emit="final",
    )
    (inputs,) = [node for node in nodes_of(env) if node.name == "aggregate inputs"]
    assert inputs.schema is not None
    assert len(inputs.schema) == 6  # the key, x, and four expressions
    expected = _FRAME.group_by((pl.col("k") % 2).alias("odd")).agg(
        total=twice.sum(),
        most=twice.max(),
        big=(twice > 10).sum().cast(pl.Int64),
        plain=pl.col("x").is_null().sum().cast(pl.Int64),
        newest=pl.col("x").sort_by("p").last(),
    )
    assert same_rows(_result(totals, env), expected.to_dicts(), "odd")


@pytest.mark.slow
def test_expressions_and_values_of_any_width_in_a_job(tmp_path: Path) -> None:
    """The program that also runs in the simulator and on Ray, with checkpoints."""
    with local() as env:
        table = expression_program.totals(env, str(tmp_path / "out"))
        config = tg.CheckpointConfig(interval="20ms", storage=str(tmp_path / "checkpoints"))
        assert env.execute("totals", checkpoints=config).wait("4min") == "finished"
    assert expression_program.written(table) == expression_program.expected()


def test_a_key_takes_the_place_of_its_column() -> None:
    """As in `with_columns`; an aggregate that would read the key for the column is refused."""
    env = local()
    stream = env.from_batches(_batches()).key_by(pl.col("k") % 2)
    for aggregate in (tg.sum("k"), tg.count().where(pl.col("k") > 0)):
        with pytest.raises(tg.ConfigurationError, match="would read the key with which key_by has replaced"):
            stream.aggregate(n=aggregate)
    expected = _FRAME.group_by(pl.col("k") % 2).agg(n=pl.len().cast(pl.Int64))
    assert same_rows(_result(stream.aggregate(n=tg.count(), emit="final"), env), expected.to_dicts(), "k")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [40, 0])
def test_values_of_any_width_over_everything(rows: int) -> None:
    """Of expressions, in two stages: each subtask makes a row of its batch. Where no row has come, a list is empty."""
    env = local()
    stream = env.from_batches(_batches()).filter(pl.col("k") < (3 if rows else 0))
    totals = stream.aggregate(
        least=tg.min(pl.col("s") + "!"),
        texts=tg.collect_list("s", limit=100).where(pl.col("x") > 1),
        product=tg.udaf(Product(), pl.col("k") + 1),
        emit="final",
    )
    (found,) = _result(totals, env)
    kept = _FRAME.head(rows)
    expected = kept.filter((pl.col("x") > 1) & pl.col("s").is_not_null())["s"].sort().to_list()
    assert sorted(found["texts"]) == expected
    assert found["product"] == Product().of_rows([{"i": k + 1} for k in kept["k"]])
    assert found["least"] == ("a!" if rows else None)


def test_columns_are_named_by_keywords() -> None:
    """In `select` and `with_columns`, as polars does."""
    env = local()
    stream = env.from_batches(_batches()).with_columns(y=pl.col("p") + 1).select("k", z=pl.col("y") * 2, w="x")
    expected = _FRAME.select("k", z=(pl.col("p") + 1) * 2, w="x")
    found = _result(stream, env)
    assert sorted(map(repr, expected.to_dicts())) == sorted(map(repr, found))


@pytest.mark.parametrize(
    ("aggregate", "said"),
    [
        (tg.sum(pl.col("no") + 1), r"n=sum\(.*cannot be computed.*no"),
        (tg.sum(pl.col("s") + "x"), r"column '.*' is (large_)?string; sum takes"),
        (tg.count().where(pl.col("x") + 1), r"the condition is int64"),
        (tg.sum(pl.col("x").cum_sum()), r"looks at more than one row"),
        (tg.sum(pl.col("x", "k")), r"it must make one"),
        (5, r"n= is int; give an aggregate, such as tg.count"),
    ],
)
def test_expressions_that_cannot_be_are_refused_in_the_call(aggregate: Any, said: str) -> None:
    """Before anything runs, with the aggregate's name."""
    stream = local().from_batches(_batches())
    for call in (stream.key_by("k").aggregate, stream.aggregate):
        with pytest.raises(tg.ConfigurationError, match=said):
            call(n=aggregate)


def test_keys_that_cannot_be_are_refused_in_the_call() -> None:
    """Several columns, other rows, and no column at all."""
    stream = local().from_batches(_batches())
    for key, said in ((pl.all(), "one column"), (pl.col("x").shift(1), "more than one row"), (3, "not int")):
        with pytest.raises(tg.ConfigurationError, match=said):
            stream.key_by(key)  # type: ignore[arg-type]


@pytest.mark.slow
def test_distinct_values_are_counted() -> None:
    """Beside other aggregates, of several columns, with a condition, of the key itself; nulls are no values."""
    env = local()
    totals = (
        env.from_batches(_batches())
        .key_by("k")
        .aggregate(
            n=tg.count(),
            values=tg.count_distinct("x"),
            texts=tg.count_distinct("s"),
            big=tg.count_distinct(pl.col("x") * 2).where(pl.col("p") > 5),
            key=tg.count_distinct("k"),
            emit="final",
            uid="totals",
        )
    )
    expected = _FRAME.group_by("k").agg(
        n=pl.len().cast(pl.Int64),
        values=pl.col("x").drop_nulls().n_unique().cast(pl.Int64),
        texts=pl.col("s").drop_nulls().n_unique().cast(pl.Int64),
        big=pl.col("x").filter(pl.col("p") > 5).drop_nulls().n_unique().cast(pl.Int64),
        key=pl.lit(1, pl.Int64).first(),
    )
    assert same_rows(_result(totals, env), expected.to_dicts(), "k")


@pytest.mark.parametrize("known", [True, False], ids=["known columns", "unknown columns"])
def test_everything_is_aggregated_in_two_stages(known: bool) -> None:
    """Each batch becomes one row before the exchange, and one subtask merges them."""
    env = local()
    stream = env.from_batches(_batches())
    if not known:
        stream = stream.map_batches(lambda batch: batch)
    total = stream.aggregate(
        n=tg.count(),
        total=tg.sum(pl.col("p") * 2),
        mean=tg.mean("x"),
        spread=tg.stddev_samp("p"),
        values=tg.count_distinct("x"),
        big=tg.max("p").where(pl.col("k") == 1),
        emit="final",
    )
    assert [node.parallelism for node in nodes_of(env)][-1] == 1
    x, p = pl.col("x"), pl.col("p")
    expected = _FRAME.select(
        n=pl.len().cast(pl.Int64),
        total=(p * 2).sum(),
        mean=x.mean(),
        spread=p.std(),
        values=x.drop_nulls().n_unique().cast(pl.Int64),
        big=p.filter(pl.col("k") == 1).max(),
    )
    if not known:
        total = total.map_batches(lambda batch: batch, schema=expected.to_arrow().schema)
    assert same_rows(_result(total, env), expected.to_dicts(), "n")


def test_everything_of_nothing_is_a_row() -> None:
    """As in SQL: counts are 0, and the rest is null."""
    env = local()
    nothing = env.from_batches(_batches()).filter(pl.col("p") < 0)
    total = nothing.aggregate(n=tg.count(), total=tg.sum("x"), values=tg.count_distinct("s"), emit="final")
    assert _result(total, env) == [{"n": 0, "total": None, "values": 0}]


def test_updates_over_everything_are_the_values_so_far() -> None:
    """One row after each batch, in order, also behind a step with another parallelism."""
    env = local()
    updates = env.from_batches(_batches()).aggregate(n=tg.count(), uid="all")
    with pytest.raises(tg.ConfigurationError, match=r"rebalance.* cannot follow 'aggregate' \(uid 'all'\)"):
        updates.rebalance()
    with pytest.raises(tg.ConfigurationError, match="in 2 subtasks rows would overtake each other"):
        updates.with_columns(twice=pl.col("n") * 2, parallelism=2)
    totals = updates.with_columns(twice=pl.col("n") * 2)
    found = _result(totals, env)
    assert [row["n"] for row in found] == sorted(row["n"] for row in found)
    assert found[-1] == {"n": 40, "twice": 80}


def test_a_time_to_live_is_refused_where_keys_would_be_missed() -> None:
    """Without event time, where results could not be taken back, or behind changes."""
    keyed = local().from_batches(_batches()).key_by("k")
    timed = local().from_batches(_batches(), timestamp="x").key_by("k")
    changing = keyed.aggregate(n=tg.count(), emit="changes").key_by("n")
    for call, said in (
        (lambda: keyed.aggregate(n=tg.count(), ttl="1h"), "the stream has none: call assign_timestamps"),
        (lambda: timed.aggregate(n=tg.count(), ttl="1h", emit="changes"), 'ttl= needs emit="update"'),
        (lambda: timed.aggregate(n=tg.count(), ttl="1h", emit="final"), 'ttl= needs emit="update"'),
        (
            lambda: changing.aggregate(n=tg.count(), ttl="1h", ttl_time="processing"),
            "ttl= is not supported behind changes",
        ),
        (lambda: keyed.aggregate(n=tg.count(), ttl="1h", ttl_time="wall"), '"event" or "processing", not \'wall\''),
    ):
        with pytest.raises(tg.ConfigurationError, match=said):
            call()
    assert timed.aggregate(n=tg.count(), ttl="1h")._changelog is not None
