"""With emit="each" a row gives the result of the rows of its key up to it, wherever batches are cut."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from aggregate_cases import AGGREGATES, SCHEMA, batch_of, result_of, rows
from aggregate_model import same
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import opened, run
from ranking_harness import Running

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates import aggregate_function
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction
from tidegate.operators.aggregates.aggregate_state import combined_rows
from tidegate.operators.aggregates.expiring_aggregate import ExpiringAggregate
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.protocol.failures import OperatorError

Row = dict[str, Any]
_RESTARTS = st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "incremental", "rocksdb", "crowded"]))
_EXACT = {
    "sum": tg.sum("x"),
    "mean": tg.mean("x").where("w"),
    "spread": tg.stddev_samp("x"),
    "least": tg.min("x").where("w"),
    "greatest": tg.max("x"),
    "list": tg.collect_list("x", limit=4),
}
_FLOATS = pa.schema({"k": pa.int64(), "x": pa.float64(), "w": pa.bool_()})
_TTL = 20
_TIMED = pa.schema({"k": pa.string(), "t": pa.int64(), "x": pa.int64(), "s": pa.string()})
_OF_LIVES = {
    "n": tg.count(),
    "total": tg.sum("x"),
    "least": tg.min("s"),
    "newest": tg.last("s"),
    "every": tg.collect_list("x", limit=3),
}


def _make() -> KeyedAggregate:
    return KeyedAggregate(("k",), AGGREGATES, "each")


def _by_key(found: Sequence[Row]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in found:
        groups.setdefault(row["k"], []).append(row)
    return groups


def _so_far(found: Sequence[Row]) -> dict[Any, list[Row]]:
    """What each row must give, in plain Python, in the order of the rows of its key."""
    return {
        key: [
            {"k": key, **{name: result_of(aggregate, of_key[: n + 1]) for name, aggregate in AGGREGATES.items()}}
            for n in range(len(of_key))
        ]
        for key, of_key in _by_key(found).items()
    }


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(rows() | _RESTARTS, max_size=7))
def test_all_kinds_equal_plain_python(steps: list[Any]) -> None:
    """Of all types, with nulls and NaN and conditions; state goes on at another parallelism and in another backend."""
    given_rows = [row for step in steps if isinstance(step, list) for row in step]
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        running = Running(_make, folder)
        for step in steps:
            if isinstance(step, tuple):
                running.restart(*step)
            elif step:
                found += running.process(batch_of(step))
        running.close()
    expected = _so_far(given_rows)
    of_keys = _by_key(found)
    assert of_keys.keys() == expected.keys()
    for key, results in of_keys.items():
        for result, wanted in zip(results, expected[key], strict=True):
            differing = {name: (result[name], wanted[name]) for name in wanted if not same(result[name], wanted[name])}
            assert not differing


def test_results_have_the_declared_types_and_the_order_of_the_rows() -> None:
    """Rows of all keys come out as they came in."""
    values = dict.fromkeys(SCHEMA.names)
    batch = batch_of([{**values, "k": key, "i": n} for n, key in enumerate([2, 1, 2, 3, 1])])
    (out,) = run(opened(_make()), [batch])
    assert out.schema.equals(_make().output_schema(SCHEMA))
    assert out.column("k").to_pylist() == [2, 1, 2, 3, 1]
    assert out.column("n").to_pylist() == [1, 1, 2, 1, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.none() | st.floats(allow_infinity=False), st.none() | st.booleans()),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.integers(1, 19), max_size=4),
)
def test_cuts_change_no_bit(found: list[tuple[Any, ...]], cuts: list[int]) -> None:
    """Sums of floats are added in the order of the rows, so that not even their rounding depends on batches."""
    batch = pa.RecordBatch.from_pylist([dict(zip(_FLOATS.names, row, strict=True)) for row in found], _FLOATS)
    bounds = [0, *sorted({cut for cut in cuts if cut < len(found)}), len(found)]
    texts = []
    for parts in (bounds, list(range(len(found) + 1))):
        operator = opened(KeyedAggregate(("k",), _EXACT, "each"))
        batches = [batch.slice(start, stop - start) for start, stop in pairwise(parts)]
        texts.append([str(row) for out in run(operator, batches) for row in out.to_pylist()])
    assert texts[0] == texts[1]


def test_the_state_is_that_of_updates() -> None:
    """So a program may change from one to the other."""
    batch = pa.record_batch({"k": ["a", "b", "a"], "x": [1, 2, 4]})
    found = []
    for emit in ("update", "each"):
        operator = opened(KeyedAggregate(("k",), {"n": tg.count(), "total": tg.sum("x")}, emit))
        run(operator, [batch], finish=False)
        assert operator.keyed_backend is not None
        found.append(operator.keyed_backend.stored_schema("aggregate"))
        (out,) = run(operator, [batch.slice(0, 1)], finish=False)
        assert out.to_pylist() == [{"k": "a", "n": 3, "total": 6}]
    assert found[0] == found[1]


def test_a_sum_that_overflows_on_its_way_is_an_error() -> None:
    """Also if it comes back within the batch: the result of the row between is not known."""
    batch = pa.record_batch({"k": [1, 1, 1], "x": [2**63 - 1, 1, -5]})
    with pytest.raises(OperatorError, match="the sum of column 'x' does not fit into int64"):
        run(opened(KeyedAggregate(("k",), {"total": tg.sum("x")}, "each")), [batch])


class _Calls(BatchAggregateFunction):
    """Remembers the groups of each call. Its results are how many rows came, and the last value."""

    state = pa.schema({"rows": pa.int64(), "last": pa.string()})
    output = pa.string()
    initial: ClassVar = {"rows": 0}

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.results = 0

    def accumulate(self, state: Any, groups: Any, *columns: Any) -> Any:
        assert groups.tolist() == list(range(len(state)))
        self.calls.append(columns[0].to_pylist())
        return {"rows": state["rows"].to_numpy() + 1, "last": columns[0]}

    def merge(self, state: Any, groups: Any, other: Any) -> Any:
        raise AssertionError("nothing is merged")

    def result(self, state: Any) -> Any:
        self.results += 1
        return [f"{row['rows']} {row['last']}" for row in state.to_pylist()]


def test_a_function_is_called_once_for_each_row_of_the_largest_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call has the second rows of all keys that have one. Small states give their results in one call."""
    batch = pa.record_batch({"k": [1, 2, 1, 1, 3, 2], "s": list("abcdef"), "w": [True, True, False, True, True, True]})
    function = _Calls()
    what = {"a": tg.udaf(function, "s").where("w")}
    operator = opened(KeyedAggregate(("k",), what, "each"))
    (out,) = run(operator, [batch], finish=False)
    assert out.column("a").to_pylist() == ["1 a", "1 b", "1 a", "2 d", "1 e", "2 f"]
    assert (function.calls, function.results) == ([["a", "b", "e"], ["d", "f"]], 1)
    monkeypatch.setattr(aggregate_function, "_WAITING_BYTES_MAX", 1)
    (out,) = run(operator, [batch], finish=False)
    assert out.column("a").to_pylist() == ["3 a", "3 b", "3 a", "4 d", "2 e", "4 f"]
    assert function.results == 3
    nothing = pa.record_batch({"k": [3, 9], "s": ["x", "y"], "w": [False, False]})
    (out,) = run(operator, [nothing], finish=False)
    assert out.column("a").to_pylist() == ["2 e", "0 None"]


def _lives(found: Sequence[Row], clock: Sequence[int] | None = None) -> list[Row]:
    """Results of rows by event time, or by the time that the clock shows with each, in plain Python."""
    lives: dict[Any, tuple[int, list[Row]]] = {}
    results = []
    for n, row in enumerate(found):
        time = row["t"] if clock is None else clock[n]
        moment, life = lives.get(row["k"], (time, []))
        if time - moment >= _TTL:
            moment, life = time, []
        life = [*life, row]
        lives[row["k"]] = (max(moment, time), life)
        numbers = [each["x"] for each in life if each["x"] is not None]
        texts = [each["s"] for each in life if each["s"] is not None]
        results.append(
            {
                "k": row["k"],
                "n": len(life),
                "total": sum(numbers) if numbers else None,
                "least": min(texts, default=None),
                "newest": row["s"],
                "every": numbers[:3],
            }
        )
    return results


_TIMED_ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.integers(0, 90),
        st.none() | st.integers(0, 9),
        st.none() | st.sampled_from(["x", "yy", ""]),
    ),
    max_size=10,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(_TIMED_ROWS | _RESTARTS, max_size=7), st.booleans())
def test_keys_that_are_forgotten_begin_anew_within_a_batch(steps: list[Any], by_clock: bool) -> None:
    """In event time several times in one batch: each row has the results of its own life of the key."""

    def made() -> ExpiringAggregate:
        return ExpiringAggregate(("k",), _OF_LIVES, _TTL, None if by_clock else "t", emit="each")

    every: list[Row] = []
    clock: list[int] = []
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        running, now = Running(made, folder), 0
        for step in steps:
            if isinstance(step, tuple):
                running.restart(*step)
            elif step:
                now += 7
                for operator in running.operators:
                    operator.context.time.now_ms = now
                batch = pa.RecordBatch.from_pylist([dict(zip(_TIMED.names, r, strict=True)) for r in step], _TIMED)
                found += running.process(batch)
                every += batch.to_pylist()
                clock += [now] * batch.num_rows
        running.close()
    assert _by_key(found) == _by_key(_lives(every, clock if by_clock else None))


def test_rows_behind_the_watermark_give_nothing() -> None:
    """They are dropped and counted, as with updates."""
    operator = opened(ExpiringAggregate(("k",), {"n": tg.count()}, _TTL, "t", emit="each"))
    list(operator.advance_watermark(100, lambda batch: None))
    rows_of_time = pa.record_batch({"k": ["a", "a", "a"], "t": [80, 81, 99]})
    (out,) = run(operator, [rows_of_time], finish=False)
    assert out.to_pylist() == [{"k": "a", "n": 1}, {"k": "a", "n": 2}]


def test_a_life_that_goes_on_keeps_its_values_when_the_first_null_comes() -> None:
    """In a batch in which another key begins anew."""
    operator = opened(ExpiringAggregate(("k",), {"total": tg.sum("x")}, _TTL, "t", emit="each"))
    first = pa.record_batch({"k": ["a", "b"], "t": [0, 0], "x": [5, 7]})
    second = pa.record_batch({"k": ["a", "b", "b"], "t": [1, 90, 91], "x": pa.array([None, None, 2], pa.int64())})
    outs = run(operator, [first, second], finish=False)
    assert [row["total"] for out in outs for row in out.to_pylist()] == [5, 7, 5, None, 2]


def test_a_batch_may_have_many_lives_of_one_key() -> None:
    """Each of its rows begins anew."""
    times = np.arange(5_000) * _TTL
    operator = opened(ExpiringAggregate(("k",), _OF_LIVES, _TTL, "t", emit="each"))
    batch = pa.record_batch({"k": ["a"] * len(times), "t": times, "x": times, "s": pa.nulls(len(times), pa.string())})
    (out,) = run(operator, [batch], finish=False)
    assert out.column("total").to_pylist() == times.tolist()
    assert set(out.column("n").to_pylist()) == {1}


def test_rows_that_were_combined_for_another_mode_are_refused() -> None:
    """Results after each of them are not known."""
    combined = combined_rows(pa.record_batch({"k": ["a"]}), {"n": pa.array([3], pa.int64())}, pa.array([3], pa.int64()))
    with pytest.raises(OperatorError, match=r"rows in flight that were combined for another emit=.*from a savepoint"):
        run(opened(KeyedAggregate(("k",), {"n": tg.count()}, "each")), [combined])
