"""Distinct values of one column under several conditions: one exchange a column."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import config, finish, local, numbers, rows
from programs import nodes_of

import tidegate as tg


def _distinct(values: pl.Expr) -> pl.Expr:
    return values.drop_nulls().n_unique().cast(pl.Int64)


@pytest.mark.slow
def test_each_column_is_exchanged_once(tmp_path: Path) -> None:
    """Two columns, nine conditions, two exchanges."""
    table = numbers(400)
    x, y = tg.count_distinct("x"), tg.count_distinct(pl.col("y") * 10 // 1)
    counted = {f"x{at}": x.where(pl.col("y") < at / 4) for at in range(4)}
    counted |= {f"y{at}": y.where(pl.col("x") > 20 * at) for at in range(4)} | {"x": x}
    with local() as env:
        stream = env.from_batches(table)
        figures = stream.key_by("k").aggregate(emit="final", uid="figures", last=tg.max("x"), **counted)
        collected = figures.filter(pl.col("k") >= 0).collect()
        graph = env.plan("plan", checkpoints=config(tmp_path / "plan")).context.graph
        job = finish(env, tmp_path / "run")
    assert job is not None
    uids = [info.uid for info in graph.operator_infos()]
    assert [uid for uid in uids if "values" in uid] == ["figures-values-0", "figures-values-1"]
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    tens = pl.col("y") * 10 // 1
    expected = frame.group_by("k").agg(
        last=pl.col("x").max(),
        **{f"x{at}": _distinct(pl.col("x").filter(pl.col("y") < at / 4)) for at in range(4)},
        **{f"y{at}": _distinct(tens.filter(pl.col("x") > 20 * at)) for at in range(4)},
        x=_distinct(pl.col("x")),
    )
    assert rows(collected.to_arrow()) == rows(expected)


def test_a_condition_may_be_called_as_a_mark(tmp_path: Path) -> None:
    """A mark takes another name than a column that is read."""
    x, y = tg.count_distinct("x"), tg.count_distinct("y")
    figures = {"x": x, "first x": x.where("first x"), "y": y, "first y": y.where("first x")}
    table = pa.table({"k": [1, 1, 1], "x": [1, 2, 3], "y": [1, 1, 2], "first x": [True, True, None]})
    with local() as env:
        collected = env.from_batches(table).key_by("k").aggregate(emit="final", **figures).collect()
        finish(env, tmp_path / "run")
    assert collected.to_arrow().to_pylist() == [{"k": 1, "x": 3, "first x": 2, "y": 2, "first y": 1}]


def test_columns_of_expressions_are_called_by_their_structure() -> None:
    """State is keyed by them, so their names do not depend on how polars displays an expression."""
    with local() as env:
        counted = (
            env.from_batches(numbers(10))
            .key_by("k")
            .aggregate(
                a=tg.count_distinct(pl.col("x") % 7), b=tg.count_distinct("x").where(pl.col("y") > 3), emit="final"
            )
        )
        nodes = nodes_of(counted)
    assert [node.uid for node in nodes if "distinct" in node.uid] == ["aggregate distinct-2", "aggregate distinct-3"]
    marks = nodes[2].schema
    assert marks is not None
    assert marks.names == ["k", "(x Modulus 7)", "when((y Gt 3)).then(x).otherwise(null)", "first (x Modulus 7)"]
