"""Streams of changes: what may follow them is right at any parallelism and through restores; the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from change_view import ChangeView
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening, rows
from passing_functions import Passes

import tidegate as tg

BIDS = pa.table(
    {
        "auction": [n * n % 29 for n in range(400)],
        "price": [n * 37 % 101 for n in range(400)],
    }
)
KINDS = pa.schema([("auction", pa.int64()), ("best", pa.int64()), ("row_kind", pa.string())])


def _best(env: tg.StreamEnvironment, splits: int = 3, **options: Any) -> tg.Stream:
    """The highest bid of each auction, so far."""
    bids = env.from_batches(BIDS, splits=splits, uid="bids")
    return bids.key_by("auction").aggregate(best=tg.max("price"), emit="changes", uid="best", **options)


def _reference() -> pl.DataFrame:
    frame = pl.from_arrow(BIDS)
    assert isinstance(frame, pl.DataFrame)
    return frame.group_by("auction").agg(pl.col("price").max().alias("best"))


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [1, 3])
def test_an_aggregate_of_an_aggregate_is_right(tmp_path: Path, parallelism: int) -> None:
    """Means by class of the highest bids, computed, filtered and renamed on the way, as polars has them."""
    low = pl.col("best") < 95
    with local(parallelism) as env:
        classes = _best(env).with_columns(group=pl.col("auction") % 4).filter(low).select("group", price="best")
        made = classes.key_by("group").aggregate(
            mean=tg.mean("price"), twice=tg.sum(pl.col("price") * 2), n=tg.count(), emit="changes"
        )
        table = made.to_table(str(tmp_path / "t"), mode="upsert", keys=["group"])
        changes, final = made.collect(), classes.key_by("group").aggregate(n=tg.count(), emit="final").collect()
        finish(env, tmp_path / "checkpoints")
    expected = _reference().filter(low).group_by(group=pl.col("auction") % 4).agg(
        mean=pl.col("best").mean(), twice=pl.col("best").sum() * 2, n=pl.len().cast(pl.Int64)
    )  # fmt: skip
    assert rows(table.to_arrow()) == rows(expected)
    assert rows(final.to_arrow()) == rows(expected.select("group", "n"))
    view = ChangeView()
    view.apply(changes.to_arrow().to_pylist())
    assert sorted(map(repr, view.rows.elements())) == sorted(map(repr, expected.rows()))


@pytest.mark.parametrize("parallelism", [1, 3])
def test_aggregates_of_everything_are_one_row_that_changes(tmp_path: Path, parallelism: int) -> None:
    """Of rows and of changes: what comes next takes back what was said before, and what is left is as polars has it."""
    what = {"n": tg.count(), "twice": tg.sum(pl.col("price") * 2), "top": tg.max("price")}
    with local(parallelism) as env:
        bids = env.from_batches(BIDS, splits=3).aggregate(**what, emit="changes", name="bids")
        assert bids.schema is not None
        assert bids.schema.names == ["n", "twice", "top", "row_kind"]
        best = _best(env).select("auction", price="best").aggregate(**what, emit="changes", uid="all")
        found = (bids.collect(), best.collect())
        table = best.to_table(str(tmp_path / "t"), mode="upsert", keys=["top"])
        finish(env, tmp_path / "checkpoints")
    prices = (pl.DataFrame(pl.from_arrow(BIDS))["price"], _reference()["best"])
    for changes, price in zip(found, prices, strict=True):
        view = ChangeView()
        for change in changes.to_arrow().to_pylist():
            view.apply([change])
            assert view.rows.total() <= 1, "a row came before the one that it replaces was taken back"
        assert [*view.rows] == [(len(price), price.sum() * 2, price.max())]
    assert table.to_arrow().num_rows == 1
    with pytest.raises(tg.ConfigurationError, match='emit="changes"'):
        _best(local()).aggregate(n=tg.count(), emit="final")
    with pytest.raises(tg.ConfigurationError, match="not 'soon'"):
        local().from_batches(BIDS).aggregate(n=tg.count(), emit="soon")  # type: ignore[arg-type]


def test_a_table_loses_what_is_taken_back(tmp_path: Path) -> None:
    """Rows that a filter does not let pass any more are gone, also from compacted files, and do come back.

    Checkpoints between three rounds over all keys, so that the table commits what each of them comes to.
    """
    keys, even = 5, pl.col("k") % 2 == 0
    step = (
        pl.when(pl.col("x") < keys)
        .then(1)
        .when(pl.col("x") < 2 * keys)
        .then(even * 10)
        .otherwise(even * -pl.col("k") * 5)
    )
    with opening(GatedSource(3 * keys, gates=(keys, 2 * keys))) as source, local() as env:
        steps = env.from_source(source, uid="steps").select("k", step=step.cast(pl.Int64))
        sums = steps.key_by("k").aggregate(total=tg.sum("step"), emit="changes", uid="sums")
        low = sums.filter(pl.col("total") < 5)
        table = low.to_table(str(tmp_path / "t"), mode="upsert", keys=["k"])
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        for gate in (keys, 2 * keys):
            source.await_gate(gate)
            job.trigger_checkpoint()
            source.open_gate(gate)
        assert job.wait("4min") == "finished"
    rounds = [{0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, {1: 1, 3: 1}, {1: 1, 2: 1, 3: 1, 4: -9}]
    commits = [commit.number for commit in table.history()]
    for number, expected in zip(commits, rounds, strict=True):
        assert rows(table.to_arrow(as_of=number)) == sorted(expected.items())
    table.compact()
    assert rows(table.to_polars()) == sorted(rounds[-1].items())


@pytest.mark.slow
def test_changes_of_several_streams_are_changes(tmp_path: Path) -> None:
    """What one of them takes back is a row of its own, also where another one has an equal row."""
    with local() as env:
        best = _best(env)
        both = best.union(best.with_columns(best=pl.col("best") // 2))
        counts = both.filter(pl.col("best") > 20).key_by("best").aggregate(n=tg.count(), emit="changes")
        table = counts.to_table(str(tmp_path / "t"), mode="upsert", keys=["best"])
        finish(env, tmp_path / "checkpoints")
    one = pl.DataFrame(_reference())
    every = pl.concat([one, one.with_columns(best=pl.col("best") // 2)])
    expected = every.filter(pl.col("best") > 20).group_by("best").agg(n=pl.len().cast(pl.Int64))
    assert rows(table.to_arrow()) == rows(expected)


@pytest.mark.slow
def test_extremes_follow_what_is_taken_back(tmp_path: Path) -> None:
    """Of a running aggregate, and of an expression: when the least value goes, the next greater one is there."""
    tens = (pl.col("best") // 10).alias("ten")
    with local() as env:
        groups = _best(env).key_by(tens)
        found = groups.aggregate(
            least=tg.min("best"),
            most=tg.max(pl.col("auction") * 2),
            bests=tg.count_distinct("best"),
            odd=tg.bool_or(pl.col("auction") % 2 == 1),
            emit="changes",
        )
        table = found.to_table(str(tmp_path / "t"), mode="upsert", keys=["ten"])
        finish(env, tmp_path / "checkpoints")
    expected = (
        pl.DataFrame(_reference())
        .group_by(tens)
        .agg(
            least=pl.col("best").min(),
            most=(pl.col("auction") * 2).max(),
            bests=pl.col("best").n_unique().cast(pl.Int64),
            odd=(pl.col("auction") % 2 == 1).any(),
        )
    )
    assert rows(table.to_arrow()) == rows(expected)


REFUSED: dict[str, Callable[[tg.Stream, str], object]] = {
    "updates": lambda s, _: s.key_by("best").aggregate(n=tg.count(), name="step"),
    "a first row": lambda s, _: s.key_by("best").aggregate(n=tg.first("auction"), emit="changes", name="step"),
    "a list": lambda s, _: s.key_by("best").aggregate(n=tg.collect_list("auction", limit=9), emit="changes"),
    "a column that is none": lambda s, _: s.key_by("best").aggregate(n=tg.min("no"), emit="changes", name="'best'"),
    "all rows": lambda s, _: s.aggregate(n=tg.count(), emit="final", name="step"),
    "process": lambda s, _: s.key_by("auction").process(Passes(), name="step"),
    "a filter by kind": lambda s, _: s.filter(pl.col("row_kind") == "+I", name="step"),
    "a filter by a function": lambda s, _: s.filter(lambda row: True, name="step"),
    "another kind": lambda s, _: s.with_columns(row_kind=pl.lit("+I")),
    "a function that drops kinds": lambda s, _: s.map(lambda row: row, schema=KINDS.remove(2), name="step"),
    "deduplicate": lambda s, _: s.key_by("auction").deduplicate(name="step"),
    "append": lambda s, url: s.to_table(url, name="step"),
    "an upsert by other columns": lambda s, url: s.to_table(url, mode="upsert", keys=["best"], name="step"),
    "an upsert without keys": lambda s, url: s.select("best").to_table(url, mode="upsert", keys=["best"], name="step"),
    "an order": lambda s, url: s.to_table(url, mode="upsert", keys=["auction"], order_by="best", name="step"),
    "fewer subtasks without keys": lambda s, _: s.select("best").with_columns(pl.lit(1), parallelism=1, name="step"),
    "a union of other subtasks": lambda s, _: s.union(s.with_columns(pl.col("best") + 1, parallelism=1)),
    "a table of a union": lambda s, url: s.union(s).to_table(url, mode="upsert", keys=["auction"], name="step"),
    "rebalance": lambda s, _: s.rebalance(),
    "as_changes": lambda s, _: s.as_changes(["auction"]),
}


@pytest.mark.parametrize("follow", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_take_changes_is_refused(tmp_path: Path, follow: Callable[[tg.Stream, str], object]) -> None:
    """While the program is made; the error names the step that emits changes, or the aggregate."""
    with local() as env, pytest.raises(tg.ConfigurationError, match=r"'best'|cannot follow changes"):
        follow(_best(env), str(tmp_path / "t"))


Steps = Callable[[tg.StreamEnvironment, str], object]
RECORD = pa.table({"auction": [1, 2], "best": [3, 4], "row_kind": ["+I", "+I"]})


def _record(env: tg.StreamEnvironment) -> tg.Stream:
    return env.from_batches(RECORD, splits=1).as_changes(["auction"])


def _plain(env: tg.StreamEnvironment) -> tg.Stream:
    return env.from_batches(BIDS.slice(0, 9), splits=1)


NEED_EACH_CHANGE_ONCE: dict[str, tuple[Steps, str]] = {
    "an aggregate": (lambda env, _: _best(env).key_by("best").aggregate(n=tg.count(), emit="final", uid="on"), "best"),
    "a join, left": (lambda env, _: _best(env).join(_plain(env), on="auction", uid="on"), "best"),
    "a join, right": (lambda env, _: _plain(env).join(_best(env), on="auction", uid="on"), "best"),
    "a table": (
        lambda env, url: _best(env).filter(pl.col("best") < 9).to_table(url, mode="upsert", keys=["auction"], uid="on"),
        "best",
    ),
    "a count of a record": (
        lambda env, _: _record(env).key_by("best").aggregate(n=tg.count(), emit="changes", uid="on"),
        "as_changes",
    ),
}


@pytest.mark.parametrize(("make", "maker"), NEED_EACH_CHANGE_ONCE.values(), ids=NEED_EACH_CHANGE_ONCE.keys())
def test_changes_that_may_come_twice_are_refused(tmp_path: Path, make: Steps, maker: str) -> None:
    """At submission, with the step, who makes the changes, the setting, and what to do."""
    with local() as env:
        make(env, str(tmp_path / "t"))
        said = rf"\(uid 'on'\) retracts rows of .*{maker}.* mode \(\S+\) is 'at_least_once'.*\"exactly_once\""
        with pytest.raises(tg.ConfigurationError, match=said):
            finish(env, tmp_path / "checkpoints", settings={"mode": "at_least_once"})
    assert not (tmp_path / "t").exists()


def test_changes_that_nobody_calculates_with_may_come_twice(tmp_path: Path) -> None:
    """Plain rows that are joined and ranked, changes that are collected, and a table of what was recorded."""
    with local() as env:
        _best(env).collect()
        _plain(env).join(_plain(env), on="auction", how="full").collect()
        _plain(env).key_by("auction").top_n(1, by="price").collect()
        table = _record(env).to_table(str(tmp_path / "t"), mode="upsert", keys=["auction"])
        finish(env, tmp_path / "checkpoints", settings={"mode": "at_least_once"})
    assert rows(table.to_arrow()) == rows(RECORD.drop_columns(["row_kind"]))


def test_functions_that_keep_the_kind_may_follow(tmp_path: Path) -> None:
    """`map_batches` and `map` with a schema that has it; the keys follow to other names."""
    with local() as env:
        best = _best(env).map_batches(lambda batch: batch, schema=KINDS).map(lambda row: row, schema=KINDS)
        table = best.select("best", a="auction").to_table(str(tmp_path / "t"), mode="upsert", keys=["a"])
        finish(env, tmp_path / "checkpoints")
    assert rows(table.to_arrow()) == rows(_reference().select("best", a="auction"))


def test_recorded_changes_are_taken_for_what_they_are(tmp_path: Path) -> None:
    """Of a database, say: rows that were deleted are in no count. What is no record of changes is refused."""
    table = pa.table({"id": [1, 2, 1, 1], "t": ["a", "a", "a", "b"], "row_kind": ["+I", "+I", "-U", "+U"]})
    with local() as env:
        changes = env.from_batches(table, splits=1).as_changes(["id"])
        found = changes.key_by("t").aggregate(n=tg.count(), emit="final").collect()
        finish(env, tmp_path)
    assert rows(found.to_arrow()) == [("a", 1), ("b", 1)]
    with local() as env:
        for wrong, keys, reason in (
            (table, ["x"], "no column 'x'"),
            (table, ["row_kind"], "at least one key column"),
            (table.drop_columns(["row_kind"]), ["id"], "no column 'row_kind'"),
            (table.set_column(2, "row_kind", pa.array([1, 1, 1, 1])), ["id"], "is int64"),
        ):
            with pytest.raises(tg.ConfigurationError, match=reason):
                env.from_batches(wrong).as_changes(keys)


@pytest.mark.parametrize("partition_by", [[], ["k"]])
def test_a_table_keeps_the_greatest_by_a_column(tmp_path: Path, partition_by: list[str]) -> None:
    """Whatever came last, in one file and across files; of equal ones the last; NaN is greater than any number."""
    nan = float("nan")
    data = pa.table(
        {
            "k": [1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 1],
            "t": [5.0, 9.0, 7.0, None, 1.0, nan, 8.0, 9.0, 3.0, 3.0, 8.0],
            "n": range(11),
        }
    )
    with local(2, rows_max=2) as env:
        stream = env.from_batches(data, splits=1)
        options = {"mode": "upsert", "keys": ["k"], "order_by": "t", "partition_by": partition_by}
        table = stream.to_table(str(tmp_path / "t"), **options)
        finish(env, tmp_path / "checkpoints")
    for _ in range(2):
        assert sorted(table.to_polars().select("k", "n").rows()) == [(1, 1), (2, 4), (3, 5), (4, 9)]
        table.compact()
    with local() as env, pytest.raises(tg.TableError, match="order_by='t'"):
        env.from_batches(data).to_table("memory://x", order_by="t")
    with local() as env, pytest.raises(tg.TableError, match="order_by column 'x'"):
        env.from_batches(data).to_table("memory://x", mode="upsert", keys=["k"], order_by="x")
