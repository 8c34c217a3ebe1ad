"""Distinct values, and aggregates over everything, go on after restores as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from aggregate_cases import AGGREGATES, SCHEMA, batch_of, expected, result_of, rows
from aggregate_model import same_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import Subtasks, opened, run

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.changing_aggregate import KEY, GlobalAggregate, PartialAggregate
from tidegate.operators.ranking.distinct_rows import DistinctRows
from tidegate.storage.errors import ConfigurationError

_ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.none() | st.sampled_from(["", "a", "b", "c"]), st.integers()), max_size=8
)


def _batch(found: list[tuple[Any, ...]]) -> pa.RecordBatch:
    types = {"k": pa.int64(), "x": pa.string(), "rest": pa.string()}
    columns = [[row[0] for row in found], [row[1] for row in found], [str(row[2]) for row in found]]
    return pa.record_batch([pa.array(c, t) for c, t in zip(columns, types.values(), strict=True)], list(types))


@settings(max_examples=60, deadline=None)
@given(st.lists(_ROWS, max_size=5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_each_value_is_the_first_once(parts: list[list[tuple[Any, ...]]], before: int, after: int, cut_at: int) -> None:
    """All rows pass as they came, with a flag that is true once for each value of each key, and never for a null."""
    keys = ("k", "x")
    batches = [_batch(part) for part in parts if part]
    first = Subtasks(lambda: DistinctRows(keys, "new"), keys, before)
    first.process(batches[:cut_at])
    second = Subtasks(lambda: DistinctRows(keys, "new"), keys, after, restored=first.snapshot())
    second.process(batches[cut_at:])
    second.finish()
    found = [row for batch in (*first.emitted, *second.emitted) for row in batch.to_pylist()]
    came = sorted(repr((row["k"], row["x"], row["rest"])) for row in found)
    assert came == sorted(repr((k, x, str(rest))) for part in parts for k, x, rest in part)
    flagged = sorted((row["k"], row["x"]) for row in found if row["new"])
    assert flagged == sorted({(k, x) for part in parts for k, x, _ in part if x is not None})


def test_the_first_row_of_a_batch_is_the_first() -> None:
    """Of several rows of a value in a batch the first has the flag."""
    batch = _batch([(1, "a", 0), (1, "a", 1), (2, "a", 2), (1, None, 3)])
    (out,) = run(opened(DistinctRows(("k", "x"), "new")), [batch])
    assert out.column("new").to_pylist() == [True, False, True, False]
    assert out.schema.equals(DistinctRows(("k", "x"), "new").output_schema(batch.schema))


def test_state_of_a_value_never_changes() -> None:
    """State has a value once, as it was when it came first, and nulls never."""
    keys = ("k", "x")
    subtasks = Subtasks(lambda: DistinctRows(keys, "new"), keys, 1)
    subtasks.process([_batch([(1, None, 0)]), _batch([(1, "a", 0), (1, "a", 1), (1, None, 2)])])
    subtasks.process([_batch([(1, "b", 3), (1, "a", 4), (1, None, 5)])])
    stored = [row for table in subtasks.snapshot() for row in table.rows.to_pylist()]
    assert sorted(stored, key=str) == [{"k": 1, "x": "a", "_tidegate_rows": 1}, {"k": 1, "x": "b", "_tidegate_rows": 1}]
    flagged = [(row["x"], row["rest"]) for batch in subtasks.emitted for row in batch.to_pylist() if row["new"]]
    assert flagged == [("a", "0"), ("b", "3")]


def test_names_that_are_taken() -> None:
    """A key may be called as a column of the state; a flag that is there already is refused."""
    (out,) = run(opened(DistinctRows(("rows",), "new")), [pa.record_batch({"rows": [1, 1]})])
    assert out.column("new").to_pylist() == [True, False]
    with pytest.raises(ConfigurationError, match="there is a column 'k' already"):
        DistinctRows(("k",), "k").output_schema(pa.schema({"k": pa.int64()}))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(rows(), max_size=6), st.integers(1, 3), st.integers(0, 5))
def test_everything_equals_plain_python(parts: list[list[dict[str, Any]]], width: int, cut_at: int) -> None:
    """Batches that several subtasks have made rows of, merged by one that was restored in the midst."""
    one_key = [[{**row, "k": 0} for row in part] for part in parts if part]
    partial = [opened(PartialAggregate(AGGREGATES)) for _ in range(width)]
    made = [run(partial[n % width], [batch_of(part)]) for n, part in enumerate(one_key)]
    assert all(len(batches) == 1 and batches[0].num_rows == 1 for batches in made)
    merged_rows = [batches[0] for batches in made]

    def make() -> GlobalAggregate:
        return GlobalAggregate(AGGREGATES, "final", GlobalAggregate(AGGREGATES).output_schema(parts_schema))

    parts_schema = PartialAggregate(AGGREGATES).output_schema(SCHEMA)
    keys = (KEY,)
    first = Subtasks(make, keys, 1)
    first.process(merged_rows[:cut_at])
    second = Subtasks(make, keys, 1, restored=first.snapshot())
    second.process(merged_rows[cut_at:])
    second.finish()
    found = [{"k": 0, **row} for batch in second.emitted for row in batch.to_pylist()]
    if one_key:
        assert same_rows(found, expected([row for part in one_key for row in part]), "k")
    else:
        assert found == [{"k": 0, **{name: result_of(aggregate, []) for name, aggregate in AGGREGATES.items()}}]


def test_the_key_of_everything_clashes_with_nothing() -> None:
    """An aggregate may be called as the key of the state."""
    what = {"everything": tg.count()}
    (part,) = run(opened(PartialAggregate(what)), [pa.record_batch({"k": [1, 2]})])
    assert run(opened(GlobalAggregate(what, "final")), [part])[0].to_pylist() == [{"everything": 2}]
    with pytest.raises(ConfigurationError, match="are not the accumulators"):
        GlobalAggregate(what).output_schema(pa.schema({"a": pa.int8(), "b": pa.int64()}))
