"""What aggregates of windows read: expressions where columns may stand, and values with nulls among them."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import finish, local

import tidegate as tg


@pytest.mark.parametrize("rows_max", [1, 4])
def test_values_stay_when_the_first_null_comes(tmp_path: Path, rows_max: int) -> None:
    """A window that is put together of several parts keeps those before the null, and has null where all are."""
    rows = pa.table({"k": ["a", "b", "a", "b"], "t": [1, 2, 11, 12], "x": pa.array([5, None, None, None], pa.int64())})
    with local(1, rows_max=rows_max) as env:
        keyed = env.from_batches(rows, splits=1, timestamp="t").key_by("k")
        what = {"total": tg.sum("x"), "least": tg.min("x")}
        sliding = keyed.window(tg.Sliding(20, 10)).aggregate(**what, emit="update", name="sliding")
        table = sliding.to_table(tmp_path / "t", mode="upsert", keys=["k", "window_start", "window_end"])
        others = [
            keyed.window(spec).aggregate(**what, name=str(n)).collect()
            for n, spec in enumerate((tg.Count(2), tg.Session(20)))
        ]
        finish(env, tmp_path / "chk")
    of_both = [row for row in table.to_arrow().to_pylist() if row["window_start"] == 0]
    for found in (of_both, *(other.to_arrow().to_pylist() for other in others)):
        assert sorted((row["k"], row["total"], row["least"]) for row in found) == [("a", 5, 5), ("b", None, None)]


def test_expressions_stand_where_columns_may(tmp_path: Path) -> None:
    """As keys, values and conditions. Late rows leave as they came; what a key replaces is not read by mistake."""
    rows = pa.table({"k": [1, 2, 3, 1], "t": [5, 6, 50, 7], "x": [1, 2, 4, 8], "t * 2": ["a", "b", "c", "late"]})
    with local(1, rows_max=1) as env:
        stream = env.from_batches(rows, splits=1).assign_timestamps("t")
        keyed = stream.key_by((pl.col("k") % 2).alias("odd"))
        sums = keyed.window(tg.Tumbling(10)).aggregate(
            twice=tg.sum(pl.col("x") * 2), times=tg.max(pl.col("t") * 2), n=tg.count().where(pl.col("x") > 1), uid="w"
        )
        assert sums.schema is not None
        assert sums.schema.names == ["odd", "window_start", "window_end", "twice", "times", "n"]
        late, kept = sums.late_rows().collect(), sums.collect()
        replaced = stream.key_by(pl.col("x") % 2).window(tg.Tumbling(10))
        with pytest.raises(tg.ConfigurationError, match=r"give the key another name"):
            replaced.aggregate(total=tg.sum("x"))
        with pytest.raises(tg.ConfigurationError, match=r"n=sum.*cannot be computed"):
            stream.window(tg.Tumbling(10)).aggregate(n=tg.sum(pl.col("none") * 2))
        finish(env, tmp_path)
    found = [tuple(row.values()) for row in kept.to_arrow().sort_by("odd").to_pylist()]
    assert late.to_arrow().to_pylist() == [{"k": 1, "t": 7, "x": 8, "t * 2": "late", "odd": 1}]
    assert found == [(0, 0, 10, 4, 12, 1), (1, 0, 10, 2, 10, 0), (1, 50, 60, 8, 100, 1)]
