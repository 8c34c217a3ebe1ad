"""Operators around functions: what they emit, what they refuse, and what their errors say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import cloudpickle
import polars as pl
import pyarrow as pa
import pytest
from operator_harness import context, opened, run

from tidegate.operators.functions import batch_functions as stateless
from tidegate.operators.functions.batch_functions import Explode, FilterRows, FlatMap, Map, MapBatches
from tidegate.protocol.failures import OperatorError

_BATCH = pa.record_batch({"x": [1, 2, 3], "s": ["a", None, "c"]})


@pytest.mark.parametrize(
    "fn",
    [
        lambda batch: batch,
        lambda batch: pa.Table.from_batches([batch.slice(0, 1), batch.slice(1)]),
        lambda batch: pl.from_arrow(batch),
    ],
)
def test_map_batches_takes_batches_tables_and_frames(fn: Any) -> None:
    """The same rows in the same schema, whichever library the function likes."""
    assert run(opened(MapBatches(fn)), [_BATCH]) == [_BATCH]


@pytest.mark.parametrize("fn", [lambda _: None, lambda b: b.slice(0, 0), lambda b: pl.from_arrow(b).clear()])
def test_map_batches_drops_empty_results(fn: Any) -> None:
    """Nothing is emitted for None and for no rows."""
    assert run(opened(MapBatches(fn)), [_BATCH]) == []


def test_map_batches_casts_to_the_given_schema() -> None:
    """With schema= results are cast and columns brought into order."""
    schema = pa.schema({"s": pa.large_string(), "x": pa.int16()})
    (out,) = run(opened(MapBatches(lambda b: b, schema)), [_BATCH])
    assert out.schema.equals(schema)
    assert out.to_pydict() == {"s": ["a", None, "c"], "x": [1, 2, 3]}


def test_frames_keep_the_types_of_their_input() -> None:
    """What polars would turn into its own types comes back as it went in; new text is plain string."""
    batch = pa.record_batch(
        {
            "seconds": pa.array([1], pa.timestamp("s")),
            "large": pa.array(["a"], pa.large_string()),
            "dict": pa.array(["a"]).dictionary_encode(),
            "list": pa.array([["a"]]),
            "struct": pa.array([{"s": "a"}]),
            "binary": pa.array([b"a"]),
        }
    )
    (out,) = run(opened(MapBatches(lambda b: pl.from_arrow(b).with_columns(new=pl.lit("z")))), [batch])
    assert out.schema.equals(batch.schema.append(pa.field("new", pa.string())))
    assert out.to_pylist() == [batch.to_pylist()[0] | {"new": "z"}]


def test_map_makes_a_row_of_each_row() -> None:
    """The schema is that of the first output; a column that a row lacks is null."""
    operator = opened(Map(lambda row: {"y": row["x"] * 2} if row["x"] == 1 else {"y": row["x"], "z": "z"}))
    (out,) = run(operator, [_BATCH])
    assert out.schema.equals(pa.schema({"y": pa.int64(), "z": pa.string()}))
    assert out.to_pydict() == {"y": [2, 2, 3], "z": [None, "z", "z"]}


def test_flat_map_makes_any_number_of_rows() -> None:
    """No row, one or several; a generator will do; batches of output are bounded."""
    operator = opened(FlatMap(lambda row: ({"n": i} for i in range(row["x"] - 1))))
    (out,) = run(operator, [_BATCH])
    assert out.to_pydict() == {"n": [0, 0, 1]}
    assert run(opened(FlatMap(lambda _: [])), [_BATCH]) == []


def test_flat_map_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that explodes gives several batches, and none is larger than the limit."""
    monkeypatch.setattr(stateless, "OUTPUT_ROWS_MAX", 4)
    emitted = run(opened(FlatMap(lambda row: [{"n": 1}] * 5 if row["x"] == 1 else [])), [_BATCH])
    assert [batch.num_rows for batch in emitted] == [4, 1]


def test_rows_that_nobody_reads_any_more_are_no_failure_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the operator has failed: the end of the rows in their middle blames nobody."""
    monkeypatch.setattr(stateless, "OUTPUT_ROWS_MAX", 1)

    def failing(_: pa.RecordBatch) -> None:
        raise ValueError("downstream")

    with pytest.raises(ValueError, match=r"^downstream$"):
        opened(FlatMap(lambda row: [row, row])).process(_BATCH, failing)


@pytest.mark.parametrize("outer", [False, True])
def test_explode_leaves_out_what_lies_under_a_null(outer: bool) -> None:
    """A null list may have elements in memory. They belong to no row, at the beginning of a slice as well."""
    lists = pa.ListArray.from_arrays([0, 2, 4, 6, 6], pa.array(range(6)), mask=pa.array([False, True, False, False]))
    batch = pa.record_batch({"n": range(4), "xs": lists})
    kept = [{"n": 1, "xs": None}] if outer else []
    rest = [*kept, {"n": 2, "xs": 4}, {"n": 2, "xs": 5}, *([{"n": 3, "xs": None}] if outer else [])]
    for start, expected in ((0, [{"n": 0, "xs": 0}, {"n": 0, "xs": 1}, *rest]), (1, rest)):
        (emitted,) = run(opened(Explode("xs", outer)), [batch.slice(start)])
        assert emitted.to_pylist() == expected


def test_filter_rows() -> None:
    """Rows for which the function is true stay, with the schema untouched; nothing is emitted when none does."""
    assert run(opened(FilterRows(lambda row: row["s"] is not None)), [_BATCH]) == [_BATCH.take(pa.array([0, 2]))]
    assert run(opened(FilterRows(lambda row: row["x"] > 5)), [_BATCH]) == []


def test_null_columns_find_their_type_later() -> None:
    """A column that was all null takes the type of its first values, and nulls of no type fit into any column."""
    operator = opened(Map(lambda row: row))
    batches = [pa.record_batch({"x": pa.array([value])}) for value in (None, "text", None)]
    types = [batch.schema.field("x").type for batch in run(operator, batches)]
    assert types == [pa.null(), pa.string(), pa.string()]
    operator = opened(MapBatches(lambda batch: batch))
    assert [batch.schema.field("x").type for batch in run(operator, batches)] == types


@pytest.mark.parametrize("make", [lambda: Map(lambda row: row), lambda: MapBatches(lambda batch: batch)])
@pytest.mark.parametrize(
    ("later", "said"),
    [
        (pa.record_batch({"x": ["text"], "s": ["a"]}), r"column 'x' was int64 before.*(string|'text').*schema="),
        (pa.record_batch({"x": [1]}), r"missing: 's'.*schema="),
        (pa.record_batch({"x": [1], "s": ["a"], "new": [1]}), r"new: 'new'.*schema="),
    ],
)
def test_a_schema_that_changes_is_an_error(make: Any, later: pa.RecordBatch, said: str) -> None:
    """The error names the column, both types, and what to pass; only absent keys of a row are null."""
    operator = opened(make())
    run(operator, [_BATCH])
    if isinstance(operator, Map) and later.schema.names == ["x"]:
        assert run(operator, [later])[0].to_pylist() == [{"x": 1, "s": None}]
    else:
        with pytest.raises(OperatorError, match=said):
            run(operator, [later])


def test_given_schema_makes_rows_typed() -> None:
    """With schema= types do not depend on the first batch, and unknown columns are refused."""
    schema = pa.schema({"x": pa.float64(), "when": pa.date32()})
    operator = opened(Map(lambda row: {"x": row["x"], "when": None}, schema))
    (out,) = run(operator, [_BATCH])
    assert out.schema.equals(schema)
    with pytest.raises(OperatorError, match="new: 's'"):
        run(opened(Map(lambda row: row, schema)), [_BATCH])


def test_failing_function_is_blamed_with_its_row() -> None:
    """The error names operator, subtask and row, and chains what the function raised."""
    operator = Map(lambda row: {"y": 1 // (row["x"] - 2)})
    operator.open(context(1, 3), ())
    with pytest.raises(OperatorError) as caught:
        run(operator, [_BATCH])
    for part in ("'op'", "'op-uid'", "subtask 2 of 3", "ZeroDivisionError", "row 1 of the batch", "'x': 2"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("make", [Map, FilterRows, FlatMap])
def test_stop_iteration_ends_no_batch(make: Any) -> None:
    """A function that raises it for a row has failed; the rows after that one are not left out."""
    with pytest.raises(OperatorError, match=r"StopIteration.*row 1 of the batch"):
        run(opened(make(lambda row: next(iter([[row] if make is FlatMap else row] * (2 - row["x"]))))), [_BATCH])


def test_failing_batch_function_is_blamed_with_the_first_row() -> None:
    """As above for a function over batches; a long row is cut short."""
    batch = pa.record_batch({"x": ["long" * 1000]})
    with pytest.raises(OperatorError, match=r"KeyError: 'missing'.*first row of the batch") as caught:
        run(opened(MapBatches(lambda b: {}["missing"])), [batch])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("fn", "schema", "row"),
    [
        (lambda row: {"x": row["x"] if row["x"] != 2 else "no"}, pa.schema([("x", pa.int64())]), 1),
        (lambda row: {"x": 0.5 if row["x"] == 3 else row["x"]}, pa.schema([("x", pa.int64())]), 2),
        (lambda row: {"x": row["x"]} if row["x"] < 3 else {}, pa.schema([("x", pa.int64())]), 2),
        (lambda row: {"x": row["s"]}, pa.schema([pa.field("x", pa.string(), nullable=False)]), 1),
        (lambda row: {"x": row["x"] / 2}, pa.schema([("x", pa.int64())]), 0),
        (lambda row: {"x": row["x"] + 254}, pa.schema([("x", pa.uint8())]), 1),
    ],
)
@pytest.mark.parametrize("traced", [True, False])
def test_a_result_that_does_not_fit_is_blamed_on_its_row(fn: Any, schema: pa.Schema, row: int, traced: bool) -> None:
    """The error shows the row that the function was called with, and not the first one of its batch."""
    shown = re.escape(str(_BATCH.to_pylist()[row]))
    with pytest.raises(OperatorError, match=rf"row {row} of the batch: .{shown}"):
        run(opened(Map(fn, schema, traced=traced)), [_BATCH])


def test_the_number_of_a_row_counts_from_the_start_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is computed in parts."""
    monkeypatch.setattr(stateless, "OUTPUT_ROWS_MAX", 2)
    with pytest.raises(OperatorError, match=r"row 2 of the batch: .\{'x': 3"):
        run(opened(Map(lambda row: {"x": "no" if row["x"] == 3 else 1}, pa.schema([("x", pa.int64())]))), [_BATCH])


def test_errors_further_down_are_not_blamed_on_the_function() -> None:
    """What the next operator raises passes through untouched."""

    def failing(_: pa.RecordBatch) -> None:
        raise ValueError("downstream")

    for operator in (MapBatches(lambda b: b), Map(lambda r: r), FilterRows(lambda _: True)):
        with pytest.raises(ValueError, match=r"^downstream$"):
            opened(operator).process(_BATCH, failing)


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (MapBatches(lambda _: 5), "returned int; it must return a pyarrow RecordBatch"),  # type: ignore[arg-type, return-value]
        (Map(lambda _: 5), "a row must be a dict, not int: .*; return a dict"),  # type: ignore[arg-type, return-value]
        (Map(lambda _: None), "not NoneType: .*; to drop rows use filter or flat_map"),  # type: ignore[arg-type, return-value]
        (Map(lambda row: {"y": row["x"] if row["x"] < 2 else "text"}), "'y': a value of type str .*; row 1 of"),
        (FlatMap(lambda _: None), r"iterable of rows, not NoneType; return \[\] for no rows"),  # type: ignore[arg-type, return-value]
        (FlatMap(lambda row: row), "returned one row; return an iterable of rows"),  # type: ignore[arg-type, return-value]
        (FlatMap(lambda _: {}), "returned one row"),  # type: ignore[arg-type, return-value]
        (FlatMap(lambda _: ""), "iterable of rows, not str"),  # type: ignore[arg-type, return-value]
    ],
)
def test_wrong_results_are_named(operator: Any, said: str) -> None:
    """A function that returns something else is told what it should return."""
    with pytest.raises(OperatorError, match=said):
        run(opened(operator), [_BATCH])


@pytest.mark.parametrize("kind", ["batch", "table", "view of the input"])
def test_a_string_that_is_not_utf8_is_refused(kind: str) -> None:
    """Wherever a function has it from: no reader could open a table with it."""
    bytes_ = pa.record_batch({"x": pa.array([b"a", b"\xff"])})

    def viewed(batch: pa.RecordBatch) -> pa.RecordBatch | pa.Table:
        rows = batch if kind == "view of the input" else bytes_
        text = pa.record_batch({"x": rows.column("x").view(pa.string())})
        return pa.Table.from_batches([text]) if kind == "table" else text

    given = bytes_ if kind == "view of the input" else _BATCH
    with pytest.raises(OperatorError, match=r"column 'x' of the result is not valid string: .*UTF"):
        run(opened(MapBatches(viewed)), [given])


def test_operators_travel() -> None:
    """Factories are shipped by cloudpickle; the function goes along."""
    factor = 3

    def rows(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"y": row["x"] * factor}

    operator = cloudpickle.loads(cloudpickle.dumps(FlatMap(rows)))
    assert run(opened(operator), [_BATCH])[0].to_pydict() == {"y": [3, 6, 9]}
