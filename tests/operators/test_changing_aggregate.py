"""`ChangingAggregate`: what it emits comes to the aggregates of the rows that are there, whatever was taken back."""

from __future__ import annotations

import tempfile
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from change_view import ChangeView
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import opened, run
from ranking_harness import Running

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.changing_aggregate import ChangingAggregate
from tidegate.operators.aggregates.multisets import kept_values
from tidegate.operators.changes import CHANGE
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError

_ROWS = pa.schema([("k", pa.string()), ("v", pa.int64()), ("d", pa.decimal128(5, 1)), ("c", pa.bool_())])
_SCHEMA = _ROWS.append(pa.field(CHANGE, pa.string()))
_AGGREGATES = {
    "n": tg.count(),
    "values": tg.count("v"),
    "total": tg.sum("v"),
    "mean": tg.mean("v"),
    "exact": tg.sum("d"),
    "trues": tg.count().where("c"),
    "some": tg.sum("v").where("c"),
    "spread": tg.var_pop("v"),
    "least": tg.min("v"),
    "most": tg.max("d").where("c"),
    "every": tg.bool_and("c"),
    "distinct": tg.count_distinct("v"),
}

_STEP = st.tuples(st.sampled_from(["a", "b", None]), st.none() | st.integers(-5, 5), st.booleans(), st.booleans())
_RESTART = st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "incremental", "rocksdb"]))


def _expected(rows: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    """The aggregates of rows, in plain Python."""
    found = []
    for key in {row[0] for row in rows}:
        of_key = [row for row in rows.elements() if row[0] == key]
        values = [row[1] for row in of_key if row[1] is not None]
        some = [row[1] for row in of_key if row[1] is not None and row[3]]
        mean = sum(values) / len(values) if values else None
        spread = None if mean is None else round(sum((v - mean) ** 2 for v in values) / len(values), 6)
        exact = [row[2] for row in of_key if row[2] is not None]
        found.append(
            (
                key,
                len(of_key),
                len(values),
                sum(values) if values else None,
                mean,
                sum(exact) if exact else None,
                sum(row[3] for row in of_key),
                sum(some) if some else None,
                spread,
                min(values, default=None),
                max((row[2] for row in of_key if row[2] is not None and row[3]), default=None),
                all(row[3] for row in of_key),
                len(set(values)),
            )
        )
    return Counter(found)


def _rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "spread": row["spread"] if row["spread"] is None else round(row["spread"], 6)} for row in rows]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(_STEP, min_size=1, max_size=8) | _RESTART, max_size=10))
def test_results_are_those_of_the_rows_that_are_there(steps: list[Any]) -> None:
    """Rows come, and some are taken back, through restores: after each batch the view is that of a plain model."""
    there: Counter[tuple[Any, ...]] = Counter()
    view, what = ChangeView(), kept_values(_AGGREGATES, _SCHEMA)
    with tempfile.TemporaryDirectory() as directory:
        running = Running(lambda: ChangingAggregate(("k",), what, retracts=True), directory)
        for step in steps:
            if isinstance(step, tuple):
                running.restart(*step)
                continue
            changes = []
            for key, value, condition, back in step:
                row = (key, value, None if value is None else Decimal(value) / 2, condition)
                if back:  # take one back that is there, of the same key if there is one
                    of_key = sorted((r for r in there if r[0] == key), key=repr)
                    if not of_key:
                        continue
                    row = of_key[0]
                there[row] += -1 if back else 1
                there += Counter()
                kind = ("-U" if value else "-D") if back else ("+U" if value else "+I")
                changes.append(dict(zip(_SCHEMA.names, (*row, kind), strict=True)))
            if changes:
                view.apply(_rounded(running.process(pa.RecordBatch.from_pylist(changes, _SCHEMA))))
                assert view.rows == _expected(there)
        running.close()


def _batch(*rows: tuple[str, int, str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"k": k, "v": v, "d": None, "c": True, CHANGE: kind} for k, v, kind in rows], _SCHEMA
    )


def _totals(emit: Any = "changes") -> ChangingAggregate:
    return ChangingAggregate(("k",), {"n": tg.count(), "t": tg.sum("v")}, emit, retracts=True)


def test_a_key_that_is_taken_back_does_not_hide_the_others() -> None:
    """A batch in which one key has nothing but a retraction changes the other keys too (FLINK-35661)."""
    operator = opened(_totals())
    run(operator, [_batch(("a", 1, "+I"), ("b", 2, "+I"))], finish=False)
    (out,) = run(operator, [_batch(("a", 1, "-D"), ("b", 3, "+I"), ("c", 4, "+I"))], finish=False)
    assert [(row["k"], row["t"], row[CHANGE]) for row in out.to_pylist()] == [
        ("a", 1, "-D"), ("b", 2, "-U"), ("b", 5, "+U"), ("c", 4, "+I"),
    ]  # fmt: skip


def test_a_key_without_rows_is_forgotten() -> None:
    """Its state goes, and what comes later is new; a key that comes and goes in a batch is never told."""
    operator = opened(_totals())
    run(operator, [_batch(("a", 1, "+I"), ("b", 1, "+I"), ("b", 1, "-D"))], finish=False)
    (gone,) = run(operator, [_batch(("a", 1, "-D"), ("c", 9, "+I"), ("c", 9, "-D"))], finish=False)
    assert gone.column(CHANGE).to_pylist() == ["-D"]
    (again,) = run(operator, [_batch(("a", 7, "+U"))], finish=False)
    assert again.to_pylist() == [{"k": "a", "n": 1, "t": 7, CHANGE: "+I"}]


def test_what_has_not_changed_is_not_told() -> None:
    """A batch that changes no result gives nothing."""
    operator = opened(ChangingAggregate(("k",), {"best": tg.max("v")}))
    rows = _batch(("a", 5, "+I")).drop_columns([CHANGE])
    assert len(run(operator, [rows, rows], finish=False)) == 1


@pytest.mark.parametrize(
    ("given", "other"),
    [
        (pa.array([[1, None]], pa.list_(pa.time64("ns"))), pa.array([[2, None]], pa.list_(pa.time64("ns")))),
        (pa.array([{"a": 1, "b": None}]), pa.array([{"a": 2, "b": None}])),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), pa.array([[]], pa.map_(pa.string(), pa.int64()))),
        (pa.array([0.5], pa.float16()), pa.array([1.5], pa.float16())),
        (pa.array([pa.MonthDayNano([1, 2, 3])]), pa.array([pa.MonthDayNano([1, 2, 4])])),
    ],
    ids=lambda values: str(values.type),
)
def test_changes_of_values_of_any_type_are_told(given: pa.Array, other: pa.Array) -> None:
    """Also where no kernel compares them: to the nanosecond, to null and from it, and each key for itself."""
    operator = opened(ChangingAggregate(("k",), {"v": tg.last("v", ignore_nulls=False)}))
    null = pa.nulls(1, given.type)

    def told(a: pa.Array, b: pa.Array) -> list[tuple[str, str]]:
        batch = pa.RecordBatch.from_arrays([pa.array(["a", "b"]), pa.concat_arrays([a, b])], ["k", "v"])
        found = [row for out in run(operator, [batch], finish=False) for row in out.select(["k", CHANGE]).to_pylist()]
        return [(row["k"], row[CHANGE]) for row in found]

    assert told(given, null) == [("a", "+I"), ("b", "+I")]
    assert told(given, null) == []
    assert told(other, null) == [("a", "-U"), ("a", "+U")]
    assert told(other, given) == [("b", "-U"), ("b", "+U")]
    assert told(null, given) == [("a", "-U"), ("a", "+U")]


@pytest.mark.parametrize(("kind", "data_type"), [("sum", pa.int64()), ("sum", pa.duration("ns")), ("mean", pa.int64())])
def test_the_least_integer_is_taken_back(kind: str, data_type: pa.DataType) -> None:
    """Its negative is none, but what is left is one: beside other rows, nulls, and rows that do not count."""
    least = -(2**63)
    rows = pa.schema({"k": pa.int64(), "v": data_type, "c": pa.bool_(), CHANGE: pa.string()})
    operator = opened(ChangingAggregate(("k",), {"x": getattr(tg, kind)("v").where("c")}, retracts=True))

    def result(*changes: tuple[int | None, bool, str]) -> int:
        values = pa.array([value for value, _, _ in changes], pa.int64()).view(data_type)
        counts, kinds = (pa.array([change[at] for change in changes]) for at in (1, 2))
        batch = pa.RecordBatch.from_arrays([pa.array([1] * len(changes)), values, counts, kinds], schema=rows)
        out = run(operator, [batch], finish=False)[-1]
        found: int = out.column("x").cast(pa.int64())[out.num_rows - 1].as_py()
        return found

    assert result((least, True, "+I"), (least, False, "+I"), (None, True, "+I")) == least
    assert result((3, True, "+I")) == (least + 3 if kind == "sum" else least // 2)
    assert result((least, False, "-D"), (least, True, "-D"), (None, True, "-D")) == 3


def test_final_results_are_those_of_what_is_left() -> None:
    """Behind changes, too, with no word of rows that were taken back."""
    found = run(opened(_totals("final")), [_batch(("a", 1, "+I"), ("b", 2, "+I")), _batch(("a", 1, "-D"))])
    assert [out.to_pylist() for out in found] == [[{"k": "b", "n": 1, "t": 2}]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [(("a", 1, "-D"), "retracted that never came"), (("a", 1, "?"), r"has .'\?'. in the column 'row_kind'")],
)
def test_changes_that_contradict_themselves_are_an_error(row: tuple[str, int, str], reason: str) -> None:
    """A retraction of nothing, and a kind that there is not."""
    with pytest.raises(OperatorError, match=reason):
        run(opened(_totals()), [_batch(row)])


@pytest.mark.parametrize(
    ("aggregate", "advice"),
    [(tg.max("v"), "top_n"), (tg.first("v"), "top_n"), (tg.bool_or("c"), "where"), (tg.count_distinct("v"), "key_by")],
)
def test_what_cannot_be_taken_back_is_refused(aggregate: tg.Aggregate, advice: str) -> None:
    """With what to do instead."""
    with pytest.raises(ConfigurationError, match=f"cannot follow changes.*{advice}"):
        ChangingAggregate(("k",), {"x": aggregate}, retracts=True)


@pytest.mark.parametrize(
    ("data_type", "advice"),
    [(pa.float16(), "cast it to float32"), (pa.list_(pa.int64()), "plain"), (pa.month_day_nano_interval(), "plain")],
)
def test_values_without_an_order_are_refused(data_type: pa.DataType, advice: str) -> None:
    """While the program is made: the job could not keep them."""
    with pytest.raises(ConfigurationError, match=f"column 'v' is .* cannot be compared.*{advice}"):
        kept_values({"a": tg.count_distinct("v")}, pa.schema({"v": data_type}))


@pytest.mark.parametrize("kind", ["min", "max", "count_distinct"])
@pytest.mark.parametrize("data_type", [pa.float64(), pa.large_string(), pa.timestamp("s"), pa.decimal128(9, 2)])
def test_values_are_kept_of_any_type(kind: str, data_type: pa.DataType) -> None:
    """All NaN are one value, the greatest; what is taken back as often as it came is gone."""
    given: dict[str, list[Any]] = {
        "double": [0.5, float("nan"), 7.0, -0.0, 0.0],
        "large_string": ["b", "zz", "z", "a", "a"],
        "timestamp[s]": [5, 900, 800, 1, 1],
        "decimal128(9, 2)": [Decimal("2.5"), Decimal("9.25"), Decimal("9.1"), Decimal("-1"), Decimal("-1")],
    }
    values = pa.array(given[str(data_type)], data_type)
    schema = pa.schema({"k": pa.int64(), "v": data_type, CHANGE: pa.string()})
    what = kept_values({"a": getattr(tg, kind)("v")}, schema)
    operator = opened(ChangingAggregate(("k",), what, retracts=True))

    def result(rows: list[tuple[int, str]]) -> Any:
        columns = [pa.array([1] * len(rows)), values.take(pa.array([row for row, _ in rows]))]
        batch = pa.RecordBatch.from_arrays([*columns, pa.array([kind for _, kind in rows])], schema=schema)
        (out,) = run(operator, [batch], finish=False)
        return out.column("a")[out.num_rows - 1].as_py()

    known = [value.as_py() for value in values]
    first = result([(row, "+I") for row in range(5)])
    second = result([(1, "-D"), (3, "-D"), (4, "-D")])
    expected = {"min": (known[3], known[0]), "max": (known[1], known[2]), "count_distinct": (4, 2)}[kind]
    assert repr((first, second)) == repr(expected)


def test_a_value_that_never_came_is_an_error() -> None:
    """Also where its key has other rows."""
    what = kept_values({"a": tg.min("v")}, _SCHEMA)
    operator = opened(ChangingAggregate(("k",), what, retracts=True))
    run(operator, [_batch(("a", 1, "+I"), ("a", 2, "+I"))], finish=False)
    with pytest.raises(OperatorError, match="a value was retracted that never came"):
        run(operator, [_batch(("a", 3, "-D"))])
    with pytest.raises(ConfigurationError, match="the types of columns must be known"):
        kept_values({"a": tg.min("v")}, None)
