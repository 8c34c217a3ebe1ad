"""Conditions on one column share a table of its values, and go on after restores as if nothing had happened."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import Subtasks, opened, run

from tidegate.operators.ranking.distinct_rows import VIEWS_MAX, DistinctViews
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError

KEYS = ("k", "x")
FLAGS = {"all": None, "low": "lo", "odd": "od"}
_TYPES = {"k": pa.int64(), "x": pa.string(), "lo": pa.bool_(), "od": pa.bool_()}
_SEEN = "seen under [None]"
_CONDITION = st.none() | st.booleans()
_ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.none() | st.sampled_from(["", "a", "b"]), _CONDITION, _CONDITION), max_size=8
)


def _batch(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [pa.array([row[place] for row in rows], data_type) for place, data_type in enumerate(_TYPES.values())]
    return pa.record_batch(columns, list(_TYPES))


@settings(max_examples=60, deadline=None)
@given(st.lists(_ROWS, max_size=5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.booleans())
def test_each_value_is_the_first_once_under_each_condition(
    parts: list[list[tuple[Any, ...]]], before: int, after: int, cut_at: int, without: bool
) -> None:
    """Each mark is true for one row of each value of each key for which its condition is true, at any parallelism."""
    flags = {flag: condition for flag, condition in FLAGS.items() if condition is not None or not without}
    make = partial(DistinctViews, KEYS, flags)
    batches = [_batch(part) for part in parts if part]
    first = Subtasks(make, KEYS, before)
    first.process(batches[:cut_at])
    second = Subtasks(make, KEYS, after, restored=first.snapshot())
    second.process(batches[cut_at:])
    second.finish()
    found = [row for batch in (*first.emitted, *second.emitted) for row in batch.to_pylist()]
    came = [row for part in parts for row in part]
    assert sorted(repr(tuple(row[name] for name in _TYPES)) for row in found) == sorted(map(repr, came))
    for flag, condition in flags.items():
        counts = [(k, x) for k, x, lo, od in came if x is not None and {None: True, "lo": lo, "od": od}[condition]]
        marked = [(row["k"], row["x"]) for row in found if row[flag]]
        assert sorted(marked) == sorted(set(counts))
        assert all(condition is None or row[condition] for row in found if row[flag])


def test_one_row_a_value_is_kept() -> None:
    """State has each value once, with a bit for each condition; values of which nothing is counted leave none."""
    subtasks = Subtasks(partial(DistinctViews, KEYS, {"low": "lo", "odd": "od"}), KEYS, 1)
    subtasks.process([_batch([(1, "a", True, False), (1, None, True, True), (1, "b", False, None)])])
    subtasks.process([_batch([(1, "a", True, True), (1, "c", False, True)])])
    stored = [row for table in subtasks.snapshot() for row in table.rows.to_pylist()]
    seen = "_tidegate_seen under ['lo', 'od']"
    assert sorted(stored, key=str) == [{"k": 1, "x": "a", seen: 3}, {"k": 1, "x": "c", seen: 2}]


@pytest.mark.parametrize("flags", [{"odd": "od", "low": "lo"}, {"odd": "od"}, {"low": "lo", "new": None, "odd": "od"}])
def test_bits_of_other_conditions_are_refused(flags: dict[str, str | None]) -> None:
    """Also in another order: a condition would go on with what another one has met."""
    subtasks = Subtasks(partial(DistinctViews, KEYS, {"low": "lo", "odd": "od"}), KEYS, 1)
    subtasks.process([_batch([(1, "a", True, False)])])
    with pytest.raises(IncompatibleStateError, match=r"has the aggregates \[\] of .*seen under"):
        Subtasks(partial(DistinctViews, KEYS, flags), KEYS, 1, restored=subtasks.snapshot())


def test_columns_that_nobody_reads_do_not_pass() -> None:
    """What is dropped is not emitted, and its name is free for a mark."""
    made = partial(DistinctViews, KEYS, {"lo": "lo"}, frozenset(("x", "lo")))
    (out,) = run(opened(made()), [_batch([(1, "a", True, None)])])
    assert out.to_pylist() == [{"k": 1, "od": None, "lo": True}]
    assert out.schema.equals(made().output_schema(_batch([]).schema))


def test_the_last_bit_is_one_like_others() -> None:
    """As many conditions as there are bits."""
    flags: dict[str, str | None] = {f"flag{number}": None for number in range(VIEWS_MAX)}
    (first, second) = run(opened(DistinctViews(("x",), flags)), [pa.record_batch({"x": [1, 1]})] * 2)
    assert all(first.column(flag).to_pylist() == [True, False] for flag in flags)
    assert not any(any(second.column(flag).to_pylist()) for flag in flags)


def test_what_does_not_fit_is_refused() -> None:
    """A mark that is called as a column, and a condition that is none, with the reason."""
    schema = _batch([]).schema
    with pytest.raises(ConfigurationError, match="there is a column 'k' already"):
        DistinctViews(KEYS, {"k": None}).output_schema(schema)
    with pytest.raises(ConfigurationError, match="the condition is string"):
        DistinctViews(("k", "od"), {"f": "x"}).output_schema(schema)
    with pytest.raises(ConfigurationError, match="no column 'y'"):
        DistinctViews(KEYS, {"f": "y"}).output_schema(schema)


def test_a_key_may_be_called_as_the_bits() -> None:
    """The state has another name for them then."""
    (out,) = run(opened(DistinctViews((_SEEN,), {"f": None})), [pa.record_batch({_SEEN: [1, 1]})])
    assert out.column("f").to_pylist() == [True, False]
