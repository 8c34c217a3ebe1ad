"""A traced function gives what it gives row by row: the same rows, types and errors, or it is not traced."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import opened, run

from tidegate.operators.functions.batch_functions import FilterRows, Map
from tidegate.operators.functions.trace import trace_filter, trace_map
from tidegate.operators.functions.traceable_code import UntraceableError
from tidegate.operators.operator import Operator
from tidegate.protocol.failures import OperatorError

_SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ("j", pa.int32()),
        ("f", pa.float64()),
        ("g", pa.float32()),
        ("b", pa.bool_()),
        ("s", pa.string()),
    ]
)
_LIMIT, _RATE, _WORD = 3, 0.5, "ab"


def _changed(row: dict[str, Any]) -> dict[str, Any]:
    row["i"] = row["i"] - 1
    return row


_MAPS: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda row: {"x": row["i"] + row["j"], "y": row["i"] * row["j"] - 7, "z": -row["i"]},
    lambda row: {"x": row["i"] // row["j"], "y": row["i"] % row["j"], "z": row["i"] / row["j"]},
    lambda row: {"x": row["i"] // 3, "y": row["i"] % -3, "z": 1 / row["f"], "m": 7 % row["j"]},
    lambda row: {"x": row["f"] * row["g"] + row["i"], "y": abs(row["f"]), "z": abs(row["i"]), "n": -row["f"]},
    lambda row: {**row, "x": row["f"] - row["j"]},
    lambda row: {"x": row["s"] + "!", "y": "<" + row["s"], "z": row["s"] < _WORD, "w": row["s"] == row["s"]},
    lambda row: {"x": row["i"] if row["f"] > _RATE else row["j"], "y": 1 if row["b"] else 2},
    lambda row: {"x": row["i"] == row["f"], "y": row["i"] < row["j"], "z": row["f"] != row["g"], "w": row["g"] >= 1},
    lambda row: {"x": row["b"] & (row["i"] > 0), "y": row["b"] + row["i"], "z": row["b"] or row["i"] > 1},
    lambda row: {"x": not row["s"], "y": "yes" if row["i"] else "no", "z": row["s"].startswith("a")},
    lambda row: {"x": 1, "y": 2.5, "z": "w", "k": row["i"]},
    lambda row: dict(row, x=row.get("i", 0) * 2),
    lambda row: {"x": 0 < row["i"] < _LIMIT, "y": row["s"] in ("a", "ab"), "z": row["b"] == (row["j"] > 0)},
    lambda row: {"x": row["i"] if row["i"] is not None else -1, "y": row["j"]},
    _changed,
]
_FILTERS: list[Callable[[dict[str, Any]], object]] = [
    lambda row: row["i"] > _LIMIT and row["f"] < 1.0,
    lambda row: row["b"] or row["s"] != "a",
    lambda row: row["i"],
    lambda row: row["f"],
    lambda row: row["s"],
    lambda row: row["b"],
    lambda row: row["i"] % 2 == 0 and not row["b"],
    lambda row: row["s"].endswith("b") or row["g"] / row["j"] > 0.25,
    lambda row: -5 <= row["j"] <= 5,
]

_SMALL = st.integers(-6, 6)
_INTS = _SMALL | st.sampled_from([2**63 - 1, -(2**63), 2**53, 2**53 + 1, -(2**53) - 1, 2**31])
_FLOATS = st.sampled_from([0.0, -0.0, 0.5, 1.0, -2.25, 1e300, float(2**53), math.inf, -math.inf, math.nan])
_STRINGS = st.sampled_from(["", "a", "ab", "b", "ü", "\U0001f600", "\uffff"])


@st.composite
def batches(draw: st.DrawFn) -> list[pa.RecordBatch]:
    """Batches of one schema: tame ones, and some with nulls and values at the edges."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        rows, wild = draw(st.integers(1, 6)), draw(st.booleans())
        ints, floats = (_INTS, _FLOATS) if wild else (st.integers(1, 9), st.sampled_from([0.5, 1.0, 2.0, -2.25]))
        narrow = st.integers(-(2**31), 2**31 - 1) | _SMALL if wild else st.integers(-9, -1)
        kinds: dict[str, st.SearchStrategy[Any]] = {
            "i": ints,
            "j": narrow,
            "f": floats,
            "g": st.sampled_from([0.0, 0.5, -1.5, math.inf, math.nan]) if wild else st.sampled_from([0.5, 2.0]),
            "b": st.booleans(),
            "s": _STRINGS,
        }
        nulls = draw(st.sets(st.sampled_from(sorted(kinds)), max_size=2)) if wild else set()
        columns = {
            name: draw(st.lists(st.none() | kind if name in nulls else kind, min_size=rows, max_size=rows))
            for name, kind in kinds.items()
        }
        made.append(pa.RecordBatch.from_pydict(columns, schema=_SCHEMA).slice(draw(st.integers(0, rows - 1))))
    return made


def _outcome(operator: Operator, inputs: list[pa.RecordBatch]) -> list[Any]:
    """What comes out, batch by batch, up to the first error. NaN and the sign of zero count."""
    found: list[Any] = []
    opened(operator)
    for batch in inputs:
        try:
            out = run(operator, [batch], finish=False)
        except OperatorError as error:
            return [*found, str(error)]
        found.append([(each.schema, repr(each.to_pylist())) for each in out])
    return found


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(_MAPS), batches())
def test_a_traced_map_gives_what_the_function_gives(
    function: Callable[[dict[str, Any]], dict[str, Any]], inputs: list[pa.RecordBatch]
) -> None:
    """The same rows and types, batch by batch, and the same errors, at all edges."""
    assert _outcome(Map(function, None, False), inputs) == _outcome(Map(function), inputs)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(_FILTERS), batches())
def test_a_traced_filter_keeps_what_the_function_keeps(
    function: Callable[[dict[str, Any]], object], inputs: list[pa.RecordBatch]
) -> None:
    """The same, of conditions."""
    assert _outcome(FilterRows(function, False), inputs) == _outcome(FilterRows(function), inputs)


@pytest.mark.parametrize("function", _MAPS)
def test_these_maps_are_traced(function: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """So the comparison above is not one of a function with itself."""
    trace = trace_map(function, _SCHEMA, None)
    tame = {"i": [1, 2], "j": [-3, -4], "f": [0.5, 2.0], "g": [0.5, 2.0], "b": [True, False], "s": ["a", "b"]}
    assert trace.computed(pa.RecordBatch.from_pydict(tame, schema=_SCHEMA)) is not None


@pytest.mark.parametrize("function", _FILTERS)
def test_these_filters_are_traced(function: Callable[[dict[str, Any]], object]) -> None:
    """As above."""
    assert trace_filter(function, _SCHEMA).notes is not None


_SEEN: list[Any] = []


def _remembers(row: dict[str, Any]) -> dict[str, Any]:
    _SEEN.append(row["i"])
    return row


def _loops(row: dict[str, Any]) -> dict[str, Any]:
    total = 0
    for _ in range(3):
        total += row["i"]
    return {"x": total}


def _catches(row: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"x": 1 / row["i"]}
    except ZeroDivisionError:
        return {"x": 0.0}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_remembers, "calls append|type list"),
        (_loops, "range|FOR_ITER|GET_ITER"),
        (_catches, "handles errors"),
        (lambda row: {"x": f"{row['i']}"}, "FORMAT_(VALUE|SIMPLE)"),
        (lambda row: {"x": "%s" % row["i"]}, "as text"),  # noqa: UP031
        (lambda row: {"x": row["s"].upper()}, "upper"),
        (lambda row: {"x": [row["i"]]}, "BUILD_LIST"),
        (lambda row: {"x": row["nothing"]}, "KeyError"),
        (lambda row: {"x": row["i"] + row["s"]}, "value that is not a number"),
        (lambda row: {"x": row["f"] % 2}, "remainder of a float"),
        (lambda row: {"x": row["i"] if row["b"] else row["f"]}, "same columns and types"),
        (lambda row: {"x": None}, "NoneType"),
        (lambda row: {row["s"]: 1}, "unhashable"),
        (lambda row: {"x": len(row["s"])}, "'len'"),
        (lambda row: row["i"], "a dict"),
        (print, "not a plain function"),
    ],
)
def test_what_could_differ_is_not_traced(function: Any, reason: str) -> None:
    """Functions that remember, loop, catch, or compute what polars computes differently are called with each row."""
    with pytest.raises(UntraceableError, match=reason):
        trace_map(function, _SCHEMA, None)
    assert _SEEN == []


def test_what_a_function_finds_outside_may_change() -> None:
    """Then it is called with each row: its trace would go on with what it found before."""
    factor = 2

    def scaled(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": row["i"] * factor}

    operator = opened(Map(scaled))
    batch = pa.record_batch({"i": [1, 2]})
    assert run(operator, [batch])[0].to_pylist() == [{"x": 2}, {"x": 4}]
    factor = 3
    assert run(operator, [batch])[0].to_pylist() == [{"x": 3}, {"x": 6}]


def test_the_log_says_once_what_came_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """A note for each operator, and none where it is switched off."""
    batch = pa.record_batch({"i": [1, 2]})
    with caplog.at_level(logging.INFO, "tidegate"):
        run(opened(Map(lambda row: {"x": row["i"] + 1})), [batch, batch])
        run(opened(Map(lambda row: {"x": str(row["i"])})), [batch, batch])
        run(opened(Map(lambda row: {"x": row["i"] + 1}, None, False)), [batch])
    first, second = (record.getMessage() for record in caplog.records)
    assert "computes its function as expressions: x = " in first
    assert "calls its function with each row, because the function uses 'str', an object of type type" in second


def test_a_given_schema_decides_about_types() -> None:
    """Integers become narrower if they fit; other types than the function's are left to the rows."""
    schema = pa.schema([("x", pa.int8())])
    operator = opened(Map(lambda row: {"x": row["i"] + 100}, schema))
    assert pa.int8() == run(operator, [pa.record_batch({"i": [1, 27]})])[0].schema.field("x").type
    with pytest.raises(OperatorError, match="'x'"):
        run(operator, [pa.record_batch({"i": [28]})])
    with pytest.raises(UntraceableError, match="schema= has"):
        trace_map(lambda row: {"x": row["i"]}, _SCHEMA, pa.schema([("x", pa.float64())]))
