"""Stable partition of rows by subtask, and the gathering of rows into memory of their own."""

from __future__ import annotations

import datetime as dt
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import by_group_reference, partition_reference

from tidegate.state.kernels.partition import gather, partition, placed, places_by_group, subtask_table
from tidegate.storage.state.key_groups import key_group_range


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=60),
    st.sampled_from([1, 2, 7, 100, 128, 32768]),
    st.integers(1, 9),
)
def test_partition_equals_reference(hashes: list[int], max_parallelism: int, parallelism: int) -> None:
    """Every row goes to the owner of its key group, in order, for powers of two and others."""
    parallelism = min(parallelism, max_parallelism)
    values = np.array(hashes, dtype=np.uint64)
    result = partition(values, subtask_table(max_parallelism, parallelism), parallelism)
    expected = partition_reference(values, max_parallelism, parallelism)
    assert [result.rows[result.bounds[t] : result.bounds[t + 1]].tolist() for t in range(parallelism)] == [
        rows.tolist() for rows in expected
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9) | st.integers(32_760, 32_767) | st.just(65_535), min_size=1, max_size=60))
def test_rows_by_group_equal_reference(groups: list[int]) -> None:
    """Every row of every group, in order; groups between that have no rows too."""
    places = places_by_group(np.array(groups, dtype=np.uint16))

    first, rows = by_group_reference(groups)
    assert places.first == first
    assert [places.rows()[start:stop].tolist() for start, stop in pairwise(places.bounds)] == rows
    assert places.places[places.rows()].tolist() == list(range(len(groups)))


@pytest.mark.parametrize(("max_parallelism", "parallelism"), [(128, 1), (128, 3), (10, 10), (5, 4)])
def test_table_agrees_with_key_group_ranges(max_parallelism: int, parallelism: int) -> None:
    """Routing and restoring agree on who owns a key group."""
    table = subtask_table(max_parallelism, parallelism)
    for subtask in range(parallelism):
        owned = key_group_range(subtask, max_parallelism, parallelism)
        assert np.flatnonzero(table == subtask).tolist() == list(owned)


def _of_all_types() -> pa.RecordBatch:
    return pa.record_batch(
        {
            "i8": pa.array([1, 2, 3, 4, 5], pa.int8()),
            "i64": [1, 2, 3, 4, 5],
            "f32": pa.array([0.5, 1.5, -0.0, float("inf"), 2.0], pa.float32()),
            "nulls": pa.array([1, None, 3, None, 5]),
            "text": ["a", None, "ccc", "", "e"],
            "bool": [True, False, None, True, False],
            "date": [dt.date(2020, 1, d) for d in range(1, 6)],
            "time": pa.array([dt.datetime(2020, 1, d) for d in range(1, 6)], pa.timestamp("ns", "UTC")),
            "list": [[1], [], None, [4, 4], [5]],
        }
    )


@pytest.mark.parametrize("times", [1, 3_000])
def test_gather_equals_take_for_all_types(times: int) -> None:
    """Gathered rows, few or many, equal Arrow's take, types and nulls included, also from a slice."""
    batch = _of_all_types()
    for source in (batch, batch.slice(1)):
        rows = np.tile(np.array([3, 0, 2], dtype=np.int32), times)
        result = gather(source, rows)
        result.validate(full=True)
        assert result.schema.equals(source.schema)
        assert result.equals(source.take(pa.array(rows)))


def test_placed_rows_equal_a_stable_sort_for_all_types() -> None:
    """Rows of several batches, slices among them, come together by group and in order: types and nulls included."""
    batch = _of_all_types()
    parts = [batch.slice(1, 3), batch, batch.slice(4)]
    groups = np.array([7, 3, 7, 3, 9, 7, 3, 5, 3], dtype=np.uint16)

    result = placed(parts, places_by_group(groups))

    result.validate(full=True)
    expected = pa.concat_batches(parts).take(pa.array(np.argsort(groups, kind="stable")))
    assert result.equals(expected)


def test_gathered_batch_owns_its_memory() -> None:
    """A few rows of a large batch need a few rows' memory, so that a message never drags its parent along."""
    batch = pa.record_batch({"k": np.arange(100_000), "s": pa.array(["text"] * 100_000)})
    result = gather(batch, np.arange(10, dtype=np.int32))
    assert result.get_total_buffer_size() < 1000
