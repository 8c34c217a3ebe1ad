"""Behind an aggregate that emits updates: an upsert by the same keys, or nothing that takes old versions for rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import finish, local, rows
from passing_functions import Passes, PassesBoth

import tidegate as tg

DATA = pa.table({"user": ["a", "a", "b", "a"], "x": [1, 3, 4, 2]})
SCHEMA = pa.schema([("user", pa.string()), ("best", pa.int64())])


def maxima(env: tg.StreamEnvironment, **options: Any) -> tg.Stream:
    """The greatest value of each user, so far."""
    return env.from_batches(DATA, splits=1).key_by("user").aggregate(best=tg.max("x"), uid="maxima", **options)


REFUSED: dict[str, Callable[[tg.Stream, str], object]] = {
    "aggregate": lambda s, _: s.key_by("user").aggregate(n=tg.sum("best"), name="sums"),
    "final aggregate": lambda s, _: s.key_by("best").aggregate(n=tg.count(), emit="final", name="sums"),
    "behind a step": lambda s, _: (
        s.with_columns(pl.lit(1).alias("one")).key_by("one").aggregate(n=tg.sum("best"), name="sums")
    ),
    "process": lambda s, _: s.process(Passes(), name="sums"),
    "keyed process": lambda s, _: s.key_by("user").process(Passes(), name="sums"),
    "connect": lambda s, _: s.key_by("user").connect(s.key_by("user")).process(PassesBoth(), name="sums"),
    "flat_map": lambda s, _: s.flat_map(lambda row: [row], name="sums"),
    "filter by a function": lambda s, _: s.filter(lambda row: row["best"] > 1, name="sums"),
    "filter": lambda s, _: s.filter(pl.col("best") > 1, name="sums"),
    "filter by all": lambda s, _: s.filter(pl.all_horizontal(pl.all().is_not_null()), name="sums"),
    "select without the key": lambda s, _: s.select("best", name="sums"),
    "another key": lambda s, _: s.with_columns(pl.col("user").str.to_uppercase(), name="sums"),
    "map without the key": lambda s, _: s.map(lambda row: row, schema=SCHEMA.remove(0), name="sums"),
    "append": lambda s, url: s.to_table(url, name="sums"),
    "other keys": lambda s, url: s.to_table(url, mode="upsert", keys=["best"], name="sums"),
    "more keys": lambda s, url: s.to_table(url, mode="upsert", keys=["user", "best"], name="sums"),
    "key under its old name": lambda s, url: s.select(pl.col("user").alias("u"), pl.col("best").alias("user")).to_table(
        url, mode="upsert", keys=["user"], name="sums"
    ),
}


@pytest.mark.parametrize("follow", REFUSED.values(), ids=REFUSED.keys())
def test_what_would_count_old_versions_is_refused(tmp_path: Path, follow: Callable[[tg.Stream, str], object]) -> None:
    """While the program is made, with the names of both operators and what to do; behind emit="final" it is welcome."""
    with local() as env:
        with pytest.raises(tg.ConfigurationError) as caught:
            follow(maxima(env), str(tmp_path / "t"))
        for part in ("'sums'", "'maxima'", 'emit="final"', 'mode="upsert", keys=['):
            assert part in str(caught.value)
    with local() as env:
        follow(maxima(env, emit="final"), str(tmp_path / "t"))


def test_union_rebalance_and_broadcast_are_refused() -> None:
    """They would mix versions, or let them overtake each other."""
    with local() as env:
        updates, plain = maxima(env), env.from_batches(DATA.rename_columns(["user", "best"]))
        for make in (
            lambda: updates.union(plain),
            lambda: plain.union(updates),
            updates.rebalance,
            updates.broadcast,
        ):
            with pytest.raises(tg.ConfigurationError, match="'maxima'"):
                make()


def test_a_sum_of_maxima_is_right(tmp_path: Path) -> None:
    """The aggregate of an aggregate that speaks once."""
    with local() as env:
        total = maxima(env, emit="final").with_columns(pl.lit(1).alias("all"))
        found = total.key_by("all").aggregate(total=tg.sum("best"), emit="final").collect()
        finish(env, tmp_path)
    assert found.to_arrow().column("total").to_pylist() == [7]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_steps_that_keep_the_keys_may_come_between(tmp_path: Path, parallelism: int) -> None:
    """Rename, compute, filter by the keys, map; an upsert by the keys follows, at any parallelism, in order."""
    data = pa.table({"user": [n % 20 for n in range(600)], "x": range(600)})
    schema = pa.schema([("who", pa.int64()), ("best", pa.int64())])
    with local(2) as env:
        updates = env.from_batches(data).key_by("user").aggregate(best=tg.max("x"))
        out = (
            updates.with_columns((pl.col("best") + 1).alias("next"), parallelism=parallelism)
            .filter(pl.col("user") != 3, parallelism=2)
            .select(pl.col("user").alias("who"), pl.col("next").alias("best"), parallelism=parallelism)
            .map(lambda row: row, schema=schema)
            .map_batches(lambda batch: batch, schema=schema)
            .to_table(str(tmp_path / "out"), mode="upsert", keys=["who"])
        )
        versions = updates.collect()
        finish(env, tmp_path / "checkpoints")
    assert rows(out.to_arrow()) == sorted(((user, 581 + user) for user in range(20) if user != 3), key=repr)
    assert versions.to_arrow().num_rows >= 20


@pytest.mark.parametrize(
    ("step", "column"),
    [
        (lambda s: s.select(pl.col("ts").alias("at"), "x"), "at"),
        (lambda s: s.select("x", "ts", pl.col("ts").alias("at")), "ts"),
        (lambda s: s.select(pl.col("x").alias("ts"), pl.col("ts").alias("at")), "at"),
        (lambda s: s.select(pl.all().name.suffix("_in")), "ts_in"),
        (lambda s: s.select(pl.all()), "ts"),
        (lambda s: s.with_columns(pl.col("ts").alias("at")), "ts"),
        (lambda s: s.with_columns(pl.col("x") + 1), "ts"),
        (lambda s: s.filter(pl.col("x") > 1).select(pl.col("ts").alias("at")), "at"),
        (lambda s: s.map_batches(lambda b: b).select(pl.col("ts").alias("at")), "at"),
    ],
)
def test_event_time_goes_on_under_the_name_of_its_column(step: Callable[[tg.Stream], tg.Stream], column: str) -> None:
    """A column that is renamed takes event time along."""
    with local() as env:
        stream = env.from_batches(pa.table({"ts": [1, 2], "x": [1, 2]}), timestamp="ts")
        assert step(stream).timestamp == column


def test_rows_have_their_timestamp_after_a_rename(tmp_path: Path) -> None:
    """A process function sees it."""

    class Times(tg.ProcessFunction):
        def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Any:
            yield {"t": context.timestamp}

    with local() as env:
        stream = env.from_batches(pa.table({"ts": [5, 7]}), timestamp="ts").select(pl.col("ts").alias("at"))
        out = stream.process(Times(), schema=pa.schema([("t", pa.int64())])).collect()
        finish(env, tmp_path)
    assert rows(out.to_arrow()) == [(5,), (7,)]


def test_dropping_event_time_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Once, by the step that does it."""
    with local() as env, caplog.at_level(logging.WARNING, "tidegate"):
        stream = env.from_batches(pa.table({"ts": [5, 7], "x": [1, 2]}), timestamp="ts").select("x", uid="cut")
        assert stream.timestamp is None
    assert [record.getMessage() for record in caplog.records if "'cut'" in record.getMessage()]
