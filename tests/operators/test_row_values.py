"""Rows that functions return become Arrow columns, and no value changes on the way."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_harness import opened, run
from process_harness import Driven

from tidegate.operators.functions.batch_functions import FlatMap, Map, MapBatches
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.row_values import InexactValueError, exact_array
from tidegate.operators.state.keyed_state import ValueState
from tidegate.operators.state.state_types import StateType
from tidegate.protocol.failures import OperatorError

_NAIVE = dt.datetime(2020, 1, 2, 3, 4, 5, 678901)
_AWARE = _NAIVE.replace(tzinfo=dt.UTC)
_BATCH = pa.record_batch({"n": [0, 1]})
_PAIR = pa.struct([("a", pa.int64()), ("b", pa.int64())])

REFUSED: list[tuple[Any, pa.DataType]] = [
    (1.7, pa.int64()),
    (-0.5, pa.uint8()),
    (Decimal("1.25"), pa.int64()),
    (np.float64(1.7), pa.int64()),
    (math.nan, pa.int64()),
    (math.inf, pa.int32()),
    (True, pa.int64()),
    (1, pa.bool_()),
    ("1", pa.int64()),
    (1, pa.string()),
    (b"a", pa.string()),
    ("a", pa.binary()),
    ("\ud800", pa.string()),
    (2**31, pa.int32()),
    (-1, pa.uint64()),
    (2**64, pa.int64()),
    (2**53 + 1, pa.float64()),
    (1e300, pa.float32()),
    (1e6, pa.float16()),
    (Decimal("1.25"), pa.decimal128(5, 1)),
    (1.5, pa.decimal128(5, 1)),
    (_NAIVE, pa.date32()),
    (dt.datetime(2020, 1, 2), pa.date32()),
    (_NAIVE, pa.date64()),
    (_NAIVE, pa.timestamp("s")),
    (_NAIVE, pa.timestamp("ms")),
    (_AWARE, pa.timestamp("us")),
    (_NAIVE, pa.timestamp("us", "UTC")),
    (1.5, pa.timestamp("ms")),
    (1.5, pa.date32()),
    (dt.datetime(2500, 1, 1), pa.timestamp("ns")),
    (_NAIVE.time(), pa.time32("s")),
    (_NAIVE.time(), pa.time32("ms")),
    (_AWARE.timetz(), pa.time64("us")),
    (dt.timedelta(microseconds=1), pa.duration("ms")),
    ([1.7], pa.list_(pa.int64())),
    (np.array([1.5, 2.0]), pa.list_(pa.int64())),
    ({1, 2}, pa.list_(pa.int64())),
    ([1, 2, 3], pa.list_(pa.int64(), 2)),
    ([None], pa.list_(pa.field("item", pa.int64(), nullable=False))),
    ({"a": 1, "b": 2}, pa.struct([("a", pa.int64())])),
    ({"a": {"b": 1.7}}, pa.struct([("a", pa.struct([("b", pa.int64())]))])),
    ({}, pa.struct([pa.field("a", pa.int64(), nullable=False)])),
    ({"a": 1.7}, pa.map_(pa.string(), pa.int64())),
    ({1.5: 1}, pa.map_(pa.int64(), pa.int64())),
    (1.7, pa.dictionary(pa.int8(), pa.int64())),
]

TAKEN: list[tuple[Any, pa.DataType]] = [
    (1, pa.int64()),
    (1.0, pa.int64()),
    (Decimal(1), pa.int64()),
    (np.int64(3), pa.int32()),
    (np.bool_(True), pa.bool_()),
    (2**53, pa.float64()),
    (math.nan, pa.float32()),
    (math.inf, pa.float32()),
    (0.5, pa.float16()),
    (Decimal("1.2500"), pa.decimal128(5, 2)),
    (1, pa.decimal128(5, 2)),
    (dt.date(2020, 1, 2), pa.date32()),
    (dt.date(2020, 1, 2), pa.date64()),
    (_NAIVE, pa.timestamp("us")),
    (_NAIVE, pa.timestamp("ns")),
    (_NAIVE.replace(microsecond=678_000), pa.timestamp("ms")),
    (_AWARE.astimezone(dt.timezone(dt.timedelta(hours=5))), pa.timestamp("us", "Europe/Berlin")),
    (_NAIVE.time(), pa.time64("us")),
    (dt.timedelta(milliseconds=-3), pa.duration("ms")),
    ("日本", pa.string_view()),
    (b"\xff", pa.binary(1)),
    ({"a": [{"b": 1.0}, None]}, pa.struct([("a", pa.list_(pa.struct([("b", pa.int64())])))])),
    ("a", pa.dictionary(pa.int8(), pa.string())),
    (None, pa.int64()),
]


@pytest.mark.parametrize(("value", "data_type"), REFUSED, ids=str)
@pytest.mark.parametrize("kind", ["map", "flat_map", "process"])
def test_a_value_that_would_be_cut_is_refused(kind: str, value: Any, data_type: pa.DataType) -> None:
    """Whatever function returns it, the error names operator, column and value; a row before it does no harm."""
    schema = pa.schema([("first", pa.int64()), ("x", data_type)])
    rows = [{"first": 0, "x": None}, {"first": 1, "x": value}]

    class Process(ProcessFunction):
        def process(self, row: dict[str, Any], context: Any) -> Any:
            return [rows[row["n"]]]

    def go() -> object:
        if kind == "process":
            return Driven(Process(), keys=((),), schema=schema).batch(_BATCH)
        made = Map(lambda row: rows[row["n"]], schema) if kind == "map" else FlatMap(lambda r: [rows[r["n"]]], schema)
        return run(opened(made), [_BATCH])

    with pytest.raises(OperatorError) as caught:
        go()
    said = str(caught.value)
    assert "uid 'op-uid'" in said
    assert "column 'x'" in said
    assert shown_within(value) in said, said


def shown_within(value: Any) -> str:
    """How the part of a value that does not fit stands in an error."""
    for part in ("1.7", "1.5", "None"):
        if isinstance(value, list | dict | np.ndarray) and part in str(value):
            return part
    return ascii(value) if isinstance(value, str) else "None" if value == {} else repr(value)


@pytest.mark.parametrize(("value", "data_type"), TAKEN, ids=str)
def test_a_value_that_fits_comes_back_equal(value: Any, data_type: pa.DataType) -> None:
    """With others of its kind and nulls, also within a list."""
    (taken,) = exact_array([value], data_type).to_pylist()
    assert taken == value or (value != value and taken != taken)
    assert exact_array([[value, None], None], pa.list_(data_type)).to_pylist()[1] is None


def test_whole_numbers_are_moments_in_the_unit_of_the_column() -> None:
    """As Arrow takes them."""
    assert exact_array([1000, None], pa.timestamp("ms")).to_pylist() == [dt.datetime(1970, 1, 1, 0, 0, 1), None]


def test_floats_are_rounded_in_a_column_of_less_precision() -> None:
    """That is what float32 is for."""
    assert exact_array([1.1, np.float64(1.1)], pa.float32()).to_pylist() == [float(np.float32(1.1))] * 2


@pytest.mark.parametrize(
    "values", [[_NAIVE, _AWARE], [dt.date(2020, 1, 2), _NAIVE], [b"a", "a"], [["x"], {"x"}], [_AWARE.timetz()]], ids=str
)
def test_nothing_is_cut_where_the_first_rows_fix_the_type(values: list[Any]) -> None:
    """Without schema= Arrow finds a type, to which not every value need fit."""
    batch = pa.record_batch({"n": range(len(values))})
    with pytest.raises(OperatorError, match=r"column 'x': .*pass schema="):
        run(opened(Map(lambda row: {"x": values[row["n"]]})), [batch])


def test_a_null_in_a_column_without_nulls_is_refused() -> None:
    """By map and map_batches alike."""
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    for operator in (
        Map(lambda row: {"x": None}, schema),
        MapBatches(lambda b: pa.record_batch({"x": pa.nulls(2)}), schema),
    ):
        with pytest.raises(OperatorError, match="column 'x' cannot be null"):
            run(opened(operator), [_BATCH])


@pytest.mark.parametrize(
    ("column", "data_type"),
    [
        (pa.array([1.7]), pa.int64()),
        (pa.array([1.7]), pa.bool_()),
        (pa.array([1.25]), pa.decimal128(5, 1)),
        (pa.array([1e300]), pa.float32()),
        (pa.array([_NAIVE]), pa.date32()),
        (pa.array([_NAIVE]), pa.timestamp("s")),
        (pa.array([{"a": 1, "b": 2}]), pa.struct([("a", pa.int64())])),
        (pa.array([[{"a": 1, "b": 2}]]), pa.list_(pa.struct([("a", pa.int64())]))),
        (pa.array([{"a": 1}]), pa.struct([("a", pa.int64()), ("b", pa.int64())])),
        (pa.array([[7]]), pa.list_(pa.bool_())),
        (pa.array(["007"]), pa.int64()),
        (pa.array(["2020-01-01"]), pa.date32()),
        (pa.array([7]), pa.string()),
        (pa.array([True]), pa.int64()),
        (pa.array([7], pa.duration("ms")), pa.int64()),
        (pa.array([Decimal("0.1234567890123456789")]), pa.float64()),
        (pa.array([_NAIVE], pa.timestamp("us", "Asia/Tokyo")), pa.timestamp("us")),
    ],
    ids=lambda value: str(value.to_pylist()) if isinstance(value, pa.Array) else str(value),
)
def test_batches_are_not_cut_either(column: pa.Array, data_type: pa.DataType) -> None:
    """A cast to schema= that would lose something is refused; one that does not is made."""
    with pytest.raises(OperatorError, match="column 'x'"):
        run(opened(MapBatches(lambda _: pa.record_batch({"x": column}), pa.schema([("x", data_type)]))), [_BATCH])
    whole = pa.record_batch({"x": pa.array([dt.datetime(2020, 1, 2)])})
    (out,) = run(opened(MapBatches(lambda _: whole, pa.schema([("x", pa.date32())]))), [_BATCH])
    assert out.to_pylist() == [{"x": dt.date(2020, 1, 2)}]


@pytest.mark.parametrize(
    ("column", "data_type"),
    [
        (pa.array([1, None]), pa.float32()),
        (pa.array([0.1, math.inf]), pa.float32()),
        (pa.array([[0.1]]), pa.list_(pa.float32())),
        (pa.array([1.0, 2.0]), pa.int8()),
        (pa.array([Decimal("1.50")]), pa.decimal128(3, 1)),
        (pa.array([1000]), pa.timestamp("ms")),
        (pa.array([_NAIVE], pa.timestamp("us", "Asia/Tokyo")), pa.timestamp("us", "UTC")),
        (pa.array(["a"]).dictionary_encode(), pa.string()),
        (pa.array(["a"]), pa.dictionary(pa.int32(), pa.string())),
        (pa.nulls(2), pa.struct([("a", pa.int64())])),
        (pa.array([{"b": 1, "a": "x"}]), pa.struct([("a", pa.large_string()), ("b", pa.int8())])),
    ],
    ids=lambda value: str(value.to_pylist()) if isinstance(value, pa.Array) else str(value),
)
def test_columns_of_batches_are_cast_where_nothing_is_lost(column: pa.Array, data_type: pa.DataType) -> None:
    """To the type that schema= gives, which float32 may round."""
    schema = pa.schema([("x", data_type)])
    (out,) = run(opened(MapBatches(lambda _: pa.record_batch({"x": column}), schema)), [_BATCH])
    assert out.schema == schema
    assert out["x"].to_pylist() == column.cast(data_type, safe=False).to_pylist()


@pytest.mark.parametrize(
    ("value", "data_type"),
    [
        ({"a": 1}, _PAIR),
        ({}, _PAIR),
        ([{"a": 1, "b": 2}, {"b": 2}], pa.list_(_PAIR)),
        ({"k": {"a": 1}}, pa.map_(pa.string(), _PAIR)),
        ({"in": {"a": 1}}, pa.struct([("in", _PAIR)])),
    ],
    ids=str,
)
def test_a_field_that_a_function_forgets_is_refused(value: Any, data_type: pa.DataType) -> None:
    """At any depth, as a column is; None stands for a null. Without schema= it is null, as nothing was promised."""
    with pytest.raises(OperatorError, match=r"column 'x': .* it lacks '[ab]'"):
        run(opened(Map(lambda row: {"x": value}, pa.schema([("x", data_type)]))), [_BATCH])
    (out,) = run(opened(Map(lambda row: {"x": {"a": 1} if row["n"] else {"b": 2}})), [_BATCH])
    assert out["x"].to_pylist() == [{"a": None, "b": 2}, {"a": 1, "b": None}]


@pytest.mark.parametrize(
    ("value", "data_type"),
    [(v, t) for v, t in REFUSED if not (isinstance(v, bool) or pa.types.is_dictionary(t))],
    ids=str,
)
def test_state_refuses_what_rows_refuse(value: Any, data_type: pa.DataType) -> None:
    """One helper for both; the error names the state."""
    with pytest.raises(TypeError, match="state 'x' keeps"):
        StateType("x", data_type).taken(value)


def test_a_string_that_is_no_text_is_refused_where_state_gets_it() -> None:
    """Not when a checkpoint writes it down: the error names operator, state and the row with its key."""

    class Keeps(ProcessFunction):
        def open(self, context: ProcessContext) -> None:
            self.last = context.state(ValueState("last", str))

        def process(self, row: dict[str, Any], context: ProcessContext) -> None:
            self.last.update("日本" if row["k"] == 1 else "\udc80")

    driven = Driven(Keeps())
    driven.rows({"k": 1})
    with pytest.raises(OperatorError) as caught:
        driven.rows({"k": 2})
    for part in ("uid 'op-uid'", "state 'last'", r"'\udc80'", "{'k': 2}"):
        assert part in str(caught.value)


_LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers()),
    (pa.uint8(), st.integers(-5, 300)),
    (pa.float64(), st.floats()),
    (pa.string(), st.text(st.characters(codec=None), max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.bool_(), st.booleans()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("s"), st.datetimes().map(lambda moment: moment.replace(microsecond=0))),
    (pa.timestamp("ms", "UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    (pa.duration("ms"), st.timedeltas()),
    (pa.time32("ms"), st.times()),
    (pa.decimal128(10, 3), st.decimals(allow_nan=False, allow_infinity=False, places=4)),
]
_TYPES = st.recursive(
    st.sampled_from([leaf for leaf, _ in _LEAVES]),
    lambda inner: st.one_of(inner.map(pa.list_), inner.map(lambda t: pa.struct([("a", t), ("b", pa.int64())]))),
    max_leaves=3,
)
_ANY = st.one_of(st.none(), *(values for _, values in _LEAVES))
_VALUES = st.recursive(
    _ANY, lambda inner: st.lists(inner, max_size=3) | st.fixed_dictionaries({}, optional={"a": inner, "b": _ANY})
)


@given(data=st.data(), data_type=_TYPES)
def test_whatever_is_taken_comes_back_equal(data: st.DataObject, data_type: pa.DataType) -> None:
    """Values that fit the type, and any others: they are refused, or come back as they were."""
    values = data.draw(st.lists(_fitting(data_type) | _VALUES, min_size=1, max_size=4))
    try:
        taken = exact_array(values, data_type).to_pylist()
    except InexactValueError:
        return
    for value, back in zip(values, taken, strict=True):
        assert _same(value, back, data_type), (value, back, data_type)


def _fitting(data_type: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_list(data_type):
        return st.none() | st.lists(_fitting(data_type.value_type), max_size=3)
    if pa.types.is_struct(data_type):
        return st.fixed_dictionaries({field.name: _fitting(field.type) for field in data_type})
    return st.none() | next(values for leaf, values in _LEAVES if leaf == data_type)


def _same(value: Any, back: Any, data_type: pa.DataType) -> bool:
    if value is None or back is None:
        return value is back
    if pa.types.is_list(data_type):
        return len(value) == len(back) and all(
            _same(v, b, data_type.value_type) for v, b in zip(value, back, strict=True)
        )
    if pa.types.is_struct(data_type):
        return set(value) <= set(back) and all(_same(value.get(f.name), back[f.name], f.type) for f in data_type)
    if pa.types.is_temporal(data_type) and type(value) is int:
        return bool(
            pa.array([back], data_type).view(pa.int64() if data_type.bit_width == 64 else pa.int32())[0].as_py()
            == value
        )
    return bool(value == back) or (value != value and back != back)


@pytest.mark.parametrize(
    "column_of_times",
    [
        lambda times: times,
        lambda times: times.dictionary_encode(),
        lambda times: pa.StructArray.from_arrays([times], ["at"]),
        lambda times: pa.ListArray.from_arrays([0, 1, 2], times),
        lambda times: pa.FixedSizeListArray.from_arrays(times, 1),
        lambda times: pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), times),
    ],
)
def test_a_time_finer_than_those_of_python_is_refused_and_not_cut(column_of_times: Any) -> None:
    """Arrow would leave the nanoseconds out. Whole microseconds pass, and so does what a slice has left out."""
    whole, finer = (column_of_times(pa.array([1_000, last], pa.time64("ns"))) for last in (2_000, 2_001))
    for column in (whole, finer.slice(0, 1)):
        batch = pa.record_batch({"x": column})
        (out,) = run(opened(Map(lambda row: row, batch.schema)), [batch])
        assert out.to_pylist() == batch.to_pylist()
    with pytest.raises(OperatorError, match=r"column 'x' has a time of day that is finer"):
        run(opened(Map(lambda row: row)), [pa.record_batch({"x": finer})])
