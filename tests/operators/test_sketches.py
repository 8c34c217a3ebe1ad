"""Approximate aggregates: as near as they say, merged or not, and the same bytes for the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from frozen_tables import tables_of
from operator_harness import opened, run
from window_harness import Windows

from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.changing_aggregate import ChangingAggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.aggregates.sketches import approx_count_distinct, approx_quantile
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Sliding
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable

_WHAT = {"n": approx_count_distinct("x"), "q": approx_quantile("x", [0.0, 0.5, 0.99])}


def _batches(batch_rows: int) -> list[pa.RecordBatch]:
    """20,000 rows of two keys: the odd has 5,000 distinct values, the even has 500."""
    rng = np.random.default_rng(7)
    keys = np.arange(20_000) % 2
    values = np.where(keys == 1, rng.integers(0, 5_000, 20_000), rng.integers(0, 500, 20_000)).astype(float)
    table = pa.table({"k": keys, "t": np.arange(20_000), "x": values})
    return table.to_batches(max_chunksize=batch_rows)


def _stored(operator: KeyedAggregate) -> list[StateTable]:
    snapshot = operator.snapshot(Cut(CheckpointId(1), canonical=True))
    return [table for state in snapshot.states for table in tables_of(state)]


def _check(row: dict[str, Any], values: np.ndarray[Any, Any]) -> None:
    """Within five standard errors, and a rank within 3 % (0.5 % near the edge)."""
    distinct = len(np.unique(values))
    assert abs(row["n"] - distinct) <= 5 * 0.0163 * distinct
    assert row["q"][0] == values.min()
    for quantile, found, slack in ((0.5, row["q"][1], 0.03), (0.99, row["q"][2], 0.005)):
        assert np.quantile(values, quantile - slack) - 1 <= found <= np.quantile(values, quantile + slack) + 1


@pytest.mark.slow
def test_they_are_as_near_as_they_say() -> None:
    """In batches of any size, before and after a restore; what is restored goes on to the same bytes."""
    stored = []
    for batch_rows, cut in ((20_000, None), (700, None), (700, 9)):
        operator = opened(KeyedAggregate(("k",), _WHAT, "final"))
        batches = _batches(batch_rows)
        if cut is not None:
            run(operator, batches[:cut], finish=False)
            operator, batches = opened(KeyedAggregate(("k",), _WHAT, "final"), _stored(operator)), batches[cut:]
        rows = [row for batch in run(operator, batches) for row in batch.to_pylist()]
        stored.append([table.rows.to_pylist() for table in _stored(operator)])
        (every,) = _batches(20_000)
        for row in rows:
            _check(row, every["x"].to_numpy()[every["k"].to_numpy() == row["k"]])
        assert len(rows) == 2
    assert stored[1] == stored[2]


@pytest.mark.slow
def test_slices_of_windows_are_merged() -> None:
    """A sliding window is made of sketches of slices, and is as near as one that has all the rows."""
    windows = Windows(lambda: SlicedWindows(("k",), Sliding(4_000, 1_000), _WHAT, "t"))
    for batch in _batches(900):
        windows.process(batch)
    windows.watermark(MAX_WATERMARK_MS)
    (every,) = _batches(20_000)
    keys, times, values = (every[name].to_numpy() for name in ("k", "t", "x"))
    whole = [row for row in windows.rows if row["window_start"] >= 0 and row["window_end"] <= 20_000]
    assert len(whole) == 2 * 17
    for row in whole:
        _check(row, values[(keys == row["k"]) & (times >= row["window_start"]) & (times < row["window_end"])])
    windows.close()


def _one(aggregate: Aggregate, values: list[Any], data_type: pa.DataType) -> Any:
    batch = pa.record_batch({"k": [1] * len(values), "x": pa.array(values, data_type)})
    (out,) = run(opened(KeyedAggregate(("k",), {"a": aggregate}, "final")), [batch])
    assert out.schema.field("a").type == aggregate.output_type(batch.schema)
    return out["a"][0].as_py()


def test_few_values_are_counted_exactly() -> None:
    """Of types that may be keys: nulls are none, all NaN are one value, and so are 0.0 and -0.0."""
    assert _one(approx_count_distinct("x"), ["a", None, "b", "a"], pa.string()) == 2
    assert _one(approx_count_distinct("x"), [0.0, -0.0, float("nan"), -float("nan"), None], pa.float64()) == 2
    assert _one(approx_count_distinct("x"), [None], pa.int64()) == 0
    assert _one(approx_quantile("x", 0.5), [3, None, 1, 2], pa.int8()) == 2.0
    assert _one(approx_quantile("x", 0.5), [None, float("nan")], pa.float64()) is None
    assert _one(approx_quantile("x", [0, 1]), [2.5, float("nan"), 1.5], pa.float64()) == [1.5, 2.5]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: approx_quantile("x", 1.1), "quantiles from 0 to 1, not 1.1"),
        (lambda: approx_quantile("x", []), "quantiles from 0 to 1"),
        (lambda: approx_quantile("x", 0.5, accuracy=2), "accuracy of 10 to 10000, not 2"),
        (lambda: approx_count_distinct("x", precision=30), "precision of 4 to 21, not 30"),
        (lambda: approx_quantile("x", 0.5).state_fields("a", pa.schema({"x": pa.string()})), "the column is string"),
        (
            lambda: approx_count_distinct("x").state_fields("a", pa.schema({"x": pa.list_(pa.int8())})),
            "they have no hash",
        ),
        (
            lambda: ChangingAggregate(("k",), {"a": approx_count_distinct("x")}, retracts=True),
            r"udaf\(approx_count_distinct, 'x'\) cannot follow changes",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    """When the program is made."""
    with pytest.raises(ConfigurationError, match=said):
        make()
