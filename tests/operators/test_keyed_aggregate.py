"""Keyed aggregates equal grouping all input at once, whatever the schema, the batches, the parallelism and restores."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import CUT, Subtasks, context, opened, run

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import AggregateKind
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.protocol.failures import OperatorError
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.errors import ConfigurationError, CorruptionError, IncompatibleStateError
from tidegate.storage.state.snapshot import StateTable

_KEYS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int32(): st.integers(-4, 4),
    pa.int64(): st.integers(-4, 4),
    pa.string(): st.sampled_from(["", "a", "b", "ü" * 20]),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(dt.date(2020, 1, 1), dt.date(2020, 1, 5)),
}
_VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.uint32(): st.integers(0, 2**32 - 1),
    pa.int64(): st.integers(-(2**50), 2**50),
    pa.float32(): st.integers(-1000, 1000).map(float),
    pa.float64(): st.integers(-(2**40), 2**40).map(lambda n: n / 4),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[str, ...], list[pa.RecordBatch]]:
    """Key columns, and batches with nulls and slices that have them, a column `x` of any number type and a date."""
    key_types = draw(st.lists(st.sampled_from(list(_KEYS)), min_size=1, max_size=2))
    value_type = draw(st.sampled_from(list(_VALUES)))
    nulls = draw(st.booleans())
    fields = {f"k{i}": (t, _KEYS[t]) for i, t in enumerate(key_types)}
    fields["x"] = (value_type, _VALUES[value_type])
    fields["day"] = (pa.timestamp("us"), st.datetimes(dt.datetime(2000, 1, 1), dt.datetime(2030, 1, 1)))
    batches = []
    for _ in range(draw(st.integers(0, 5))):
        rows = draw(st.integers(0, 10))
        columns = {
            name: pa.array(
                draw(st.lists(st.none() | values if nulls else values, min_size=rows, max_size=rows)), type=t
            )
            for name, (t, values) in fields.items()
        }
        batches.append(pa.record_batch(columns).slice(draw(st.integers(0, rows))))
    return tuple(f"k{i}" for i in range(len(key_types))), batches


_AGGREGATES: dict[str, Aggregate] = {
    "n": tg.count(),
    "values": tg.count("x"),
    "total": tg.sum("x"),
    "least": tg.min("x"),
    "most": tg.max("x"),
    "average": tg.mean("x"),
    "first_day": tg.min("day"),
    "last_day": tg.max("day"),
}


def _expected(keys: tuple[str, ...], batches: list[pa.RecordBatch]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The same aggregates in plain Python."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for batch in batches:
        for row in batch.to_pylist():
            groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return {key: _of(rows) for key, rows in groups.items()}


def _of(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    values = [row["x"] for row in rows if row["x"] is not None]
    days = [row["day"] for row in rows if row["day"] is not None]
    return {
        "n": len(rows),
        "values": len(values),
        "total": sum(values) if values else None,
        "least": min(values, default=None),
        "most": max(values, default=None),
        "average": sum(values) / len(values) if values else None,
        "first_day": min(days, default=None),
        "last_day": max(days, default=None),
    }


def _by_key(keys: tuple[str, ...], batches: list[pa.RecordBatch]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The last row of each key that was emitted."""
    result = {}
    for batch in batches:
        for row in batch.to_pylist():
            key = tuple(row.pop(name) for name in keys)
            result[key] = row
    return result


@settings(max_examples=25)
@given(cases(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_union_of_subtasks_equals_plain_grouping(
    case: tuple[tuple[str, ...], list[pa.RecordBatch]], before: int, after: int, cut_at: int
) -> None:
    """Final results after a restore at another parallelism are those of one pass over all rows, each key once."""
    keys, batches = case

    def make() -> KeyedAggregate:
        return KeyedAggregate(keys, _AGGREGATES, "final")

    first = Subtasks(make, keys, before)
    first.process(batches[:cut_at])
    tables = first.snapshot()
    assert sum(t.rows.num_rows for t in tables) == len(_expected(keys, batches[:cut_at]))
    second = Subtasks(make, keys, after, restored=tables)
    again = second.snapshot()
    assert sum(t.rows.num_rows for t in again) == sum(t.rows.num_rows for t in tables)
    second.process(batches[cut_at:])
    second.finish()
    assert sum(b.num_rows for b in second.emitted) == len(_expected(keys, batches))
    assert _by_key(keys, second.emitted) == _expected(keys, batches)
    if batches:
        schema = make().output_schema(batches[0].schema)
        assert all(b.schema.equals(schema) for b in second.emitted)


@settings(max_examples=60)
@given(cases())
def test_updates_are_the_values_so_far(case: tuple[tuple[str, ...], list[pa.RecordBatch]]) -> None:
    """Each batch gives one row per distinct key in it, in order of appearance, with the values after that batch."""
    keys, batches = case
    operator = opened(KeyedAggregate(keys, _AGGREGATES, "update"))
    for number, batch in enumerate(batches, start=1):
        emitted = run(operator, [batch], finish=False)
        so_far = _expected(keys, batches[:number])
        rows = [row for out in emitted for row in out.to_pylist()]
        assert [tuple(row[key] for key in keys) for row in rows] == list(_expected(keys, [batch]))
        assert all(
            row == dict(zip(keys, key, strict=True)) | so_far[key]
            for row in rows
            for key in [tuple(row[k] for k in keys)]
        )


def test_update_mode_emits_nothing_at_the_end() -> None:
    """Running updates have said all there is to say."""
    operator = opened(KeyedAggregate(("k",), {"n": tg.count()}))
    assert len(run(operator, [pa.record_batch({"k": [1, 1]})])) == 1


def test_final_batches_are_bounded() -> None:
    """Many keys are emitted in batches of at most 65,536 rows, in order of first appearance."""
    batch = pa.record_batch({"k": range(150_000)})
    emitted = run(opened(KeyedAggregate(("k",), {"n": tg.count()}, "final")), [batch])
    assert max(b.num_rows for b in emitted) <= 65_536
    assert pa.Table.from_batches(emitted)["k"].to_pylist() == list(range(150_000))


def test_snapshot_does_not_see_later_batches() -> None:
    """A frozen state stays as it was while the operator goes on, through new keys and new values."""
    operator = opened(KeyedAggregate(("k",), {"n": tg.count(), "s": tg.sum("x")}))
    run(operator, [pa.record_batch({"k": [1, 2], "x": pa.array([1, None], pa.int64())})], finish=False)
    snapshot = operator.snapshot(CUT)
    assert snapshot is not None
    (frozen,) = snapshot.states
    run(operator, [pa.record_batch({"k": [1, 2, *range(3, 3000)], "x": [5] * 2999})], finish=False)
    rows = sorted(tables_of(frozen)[0].rows.to_pylist(), key=lambda row: row["k"])
    assert rows == [{"k": 1, "n": 1, "s": 1}, {"k": 2, "n": 1, "s": None}]


def test_stored_table_is_typed_and_sorted_by_key_group() -> None:
    """A checkpoint holds key columns in their types and accumulators by name; prefix sums say where groups are."""
    operator = opened(KeyedAggregate(("k",), {"mean": tg.mean("x"), "day": tg.min("d")}))
    day = dt.date(2020, 2, 2)
    run(operator, [pa.record_batch({"k": [f"key-{i}" for i in range(50)], "x": [1.5] * 50, "d": [day] * 50})], False)
    snapshot = operator.snapshot(CUT)
    assert snapshot is not None
    (table,) = snapshot.states[0].chunks()
    fields = [
        ("k", pa.string()),
        ("_tidegate_mean.sum", pa.float64()),
        ("_tidegate_mean.count", pa.int64()),
        ("day", pa.date32()),
    ]
    assert table.rows.schema.equals(pa.schema(fields))
    assert (table.group_rows[0], table.group_rows[-1]) == (0, 50)
    groups = (hash_columns(table.rows, ["k"]) % 16).tolist()
    assert groups == sorted(groups)
    assert all(
        groups[start:stop] == [g] * (stop - start)
        for g, (start, stop) in enumerate(itertools.pairwise(table.group_rows), table.first_group)
    )


def test_empty_state_restores_to_empty_state() -> None:
    """Without a batch there is no state; with restored state and no batch, the state is stored again as it was."""
    operator = opened(KeyedAggregate(("k",), {"n": tg.count()}))
    snapshot = operator.snapshot(CUT)
    assert snapshot is not None
    assert snapshot.states == ()
    assert run(operator, []) == []


@pytest.mark.parametrize("data_type", [pa.float16(), pa.float32(), pa.float64()])
def test_nan_and_zero_keys(data_type: pa.DataType) -> None:
    """All NaN are one key, 0.0 and -0.0 are one key and shown as 0.0, and null is another."""
    batch = pa.record_batch({"k": pa.array([math.nan, -0.0, None, 0.0, -math.nan, None], data_type)})
    (out,) = run(opened(KeyedAggregate(("k",), {"n": tg.count()}, "final")), [batch])
    assert out.schema.field("k").type == data_type
    assert repr(out.to_pydict()) == repr({"k": [math.nan, 0.0, None], "n": [2, 2, 2]})


def test_dictionary_columns_are_decoded() -> None:
    """Dictionary-encoded keys and values work, and dictionaries may differ from batch to batch."""
    batches = [
        pa.record_batch({"k": pa.array(k).dictionary_encode(), "x": pa.array(x).dictionary_encode()})
        for k, x in ((["a", "b"], [1, 2]), (["b", None, "b"], [5, 7, None]))
    ]
    operator = opened(KeyedAggregate(("k",), {"s": tg.sum("x"), "m": tg.max("x"), "c": tg.count("x")}, "final"))
    out = pa.Table.from_batches(run(operator, batches))
    assert out.to_pydict() == {"k": ["a", "b", None], "s": [1, 7, 7], "m": [1, 5, 7], "c": [1, 2, 1]}


def test_integer_overflow_is_an_error() -> None:
    """A sum beyond int64 fails with the column's name; it never wraps around."""
    operator = opened(KeyedAggregate(("k",), {"s": tg.sum("x")}))
    with pytest.raises(OperatorError, match="column 'x' does not fit into int64"):
        run(operator, [pa.record_batch({"k": [1, 1], "x": [2**62, 2**62]})])
    operator = opened(KeyedAggregate(("k",), {"s": tg.sum("x")}))
    with pytest.raises(OperatorError, match="subtask 1 of 1"):
        run(operator, [pa.record_batch({"k": [1], "x": pa.array([2**64 - 1], pa.uint64())})])


def test_mean_of_integers_is_exact_to_the_last_division() -> None:
    """Large integers are summed as integers: floats would have lost the ones."""
    values = [2**53, 1, 1, 1, 1, -(2**53)]
    (out,) = run(
        opened(KeyedAggregate(("k",), {"m": tg.mean("x")}, "final")), [pa.record_batch({"k": [0] * 6, "x": values})]
    )
    assert out.column("m").to_pylist() == [4 / 6]


@pytest.mark.parametrize(
    ("aggregate", "said"),
    [
        (tg.sum("text"), r"sum\('text'\): column 'text' is string"),
        (tg.mean("day"), r"mean\('day'\): column 'day' is date32"),
        (tg.min("texts"), r"min\('texts'\): column 'texts' is list"),
        (tg.max("missing"), r"there is no column 'missing'"),
        (tg.count("missing"), r"there is no column 'missing'"),
        (tg.sum("nothing"), r"has the type null"),
    ],
)
def test_wrong_columns_are_found_before_data_flows(aggregate: Aggregate, said: str) -> None:
    """`validate` names the aggregate, the column and its type; so does the first batch when nobody has asked."""
    texts = pa.list_(pa.string())
    types = {"k": pa.int64(), "text": pa.string(), "texts": texts, "day": pa.date32(), "nothing": pa.null()}
    schema = pa.schema(types)
    operator = KeyedAggregate(("k",), {"a": aggregate})
    with pytest.raises(ConfigurationError, match=said):
        operator.validate(schema)
    batch = pa.RecordBatch.from_pylist([{"k": 1, "text": "a", "day": dt.date(2020, 1, 1)}], schema)
    with pytest.raises(OperatorError, match=said):
        run(opened(operator), [batch])


@pytest.mark.parametrize(
    ("keys", "what", "said"),
    [
        ((), {"n": tg.count()}, "at least one key"),
        (("k",), {}, "at least one aggregate"),
        (("k",), {"k": tg.count()}, "used twice"),
        (("k", "k"), {"n": tg.count()}, "used twice"),
    ],
)
def test_wrong_arguments(keys: tuple[str, ...], what: dict[str, Aggregate], said: str) -> None:
    """Arguments that contradict each other are refused when the operator is made."""
    with pytest.raises(ConfigurationError, match=said):
        KeyedAggregate(keys, what)


def test_aggregates_need_columns() -> None:
    """Only count may go without a column."""
    with pytest.raises(ConfigurationError, match="sum needs a column"):
        Aggregate(AggregateKind.SUM)


def test_a_column_that_changes_its_type_is_refused() -> None:
    """Keys of two types would be two keys; the error shows both layouts, also after a restore."""
    ints = pa.record_batch({"k": [1]})
    texts = pa.record_batch({"k": ["1"]})
    operator = opened(KeyedAggregate(("k",), {"n": tg.count()}))
    run(operator, [ints])
    with pytest.raises(OperatorError, match=r"k: int64.*k: string"):
        run(operator, [texts])
    snapshot = operator.snapshot(CUT)
    assert snapshot is not None
    restored = opened(
        KeyedAggregate(("k",), {"n": tg.count()}), [table for s in snapshot.states for table in tables_of(s)]
    )
    with pytest.raises(OperatorError, match=r"k: int64.*k: string"):
        run(restored, [texts])


def _stored(batch: pa.RecordBatch, **what: Aggregate) -> StateTable:
    operator = opened(KeyedAggregate(("k",), what))
    run(operator, [batch])
    snapshot = operator.snapshot(CUT)
    assert snapshot is not None
    (table,) = tables_of(snapshot.states[0])
    return table


def test_state_of_another_aggregate_is_refused() -> None:
    """State that the program no longer keeps is an error that names the columns, not silently dropped."""
    table = _stored(pa.record_batch({"k": [1], "x": [1]}), n=tg.count(), s=tg.sum("x"))
    with pytest.raises(IncompatibleStateError, match=r"has the aggregates \['n'\] of \['n'\]"):
        opened(KeyedAggregate(("k",), {"n": tg.count()}), [table])


def test_overlapping_tables_are_refused() -> None:
    """A key that two tables hold would be counted twice: it is an error."""
    table = _stored(pa.record_batch({"k": [1, 2]}), n=tg.count())
    with pytest.raises(CorruptionError, match="holds a key twice"):
        opened(KeyedAggregate(("k",), {"n": tg.count()}), [table, table])


def test_keys_of_another_subtask_are_refused() -> None:
    """Rows that were routed wrongly, or state that was cut wrongly, are found before they can be lost."""
    batch = pa.record_batch({"k": range(100)})
    operator = KeyedAggregate(("k",), {"n": tg.count()})
    operator.open(context(0, 2), ())
    with pytest.raises(OperatorError, match="must be partitioned by"):
        run(operator, [batch])
    operator = KeyedAggregate(("k",), {"n": tg.count()})
    with pytest.raises(OperatorError, match="belongs to subtask"):
        operator.open(context(0, 2), [_stored(batch, n=tg.count())])
