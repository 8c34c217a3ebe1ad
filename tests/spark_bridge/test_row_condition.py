"""The filter of a DataFrame as Arrow evaluates it: with SQL's three values, and Spark's order of floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.connectors.pushed_filters import ColumnTest
from tidegate.spark_bridge.dataframes.files_in_place import RowCondition, column_tests, compared, mask_of
from tidegate.storage.codec import decode, encode

Value = float | int | None
REALS = [-math.inf, -1.5, -0.0, 0.0, 1.5, math.nan, math.inf]
ROWS = st.lists(
    st.tuples(st.none() | st.integers(-3, 3), st.none() | st.sampled_from(REALS)),
    max_size=8,
)
SCHEMA = pa.schema([("n", pa.int64()), ("x", pa.float64())])
# Spark's order: NaN is equal to itself and greater than anything.
ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: bool(a == b),
    "<": lambda a, b: not math.isnan(a) and bool(a < b),
    "<=": lambda a, b: not math.isnan(a) and bool(a <= b),
    ">": lambda a, b: math.isnan(a) or bool(a > b),
    ">=": lambda a, b: math.isnan(a) or bool(a >= b),
}


CONSTANTS = [value for value in REALS if not math.isnan(value)]


def leaves() -> st.SearchStrategy[RowCondition]:
    """Comparisons of both columns."""
    of_n = st.builds(lambda test, value: compared(test, "n", pa.array([value])), comparisons(), st.integers(-3, 3))
    of_x = st.builds(
        lambda test, value: compared(test, "x", pa.array([value])), comparisons(), st.sampled_from(CONSTANTS)
    )
    chosen = st.lists(st.integers(-3, 3), min_size=1, max_size=3).map(lambda v: compared("in", "n", pa.array(v)))
    real = st.lists(st.sampled_from(CONSTANTS), min_size=1, max_size=3).map(lambda v: compared("in", "x", pa.array(v)))
    nulls = st.sampled_from(["n", "x"]).map(lambda name: RowCondition("is_null", (), name))
    return of_n | of_x | chosen | real | nulls


def comparisons() -> st.SearchStrategy[str]:
    """Comparisons with one constant."""
    return st.sampled_from([*ORDER, "<=>"])


CONDITIONS = st.recursive(
    leaves(),
    lambda parts: (
        st.builds(lambda kind, a, b: RowCondition(kind, (a, b)), st.sampled_from(["and", "or"]), parts, parts)
        | parts.map(lambda part: RowCondition("not", (part,)))
    ),
    max_leaves=5,
)


def expected(condition: RowCondition, row: dict[str, Value]) -> bool | None:
    """What SQL says."""
    parts = [expected(part, row) for part in condition.parts]
    match condition.test:
        case "and":
            return False if False in parts else None if None in parts else True
        case "or":
            return True if True in parts else None if None in parts else False
        case "not":
            return None if parts[0] is None else not parts[0]
    value = row[condition.column]
    if condition.test == "is_null":
        return value is None
    assert condition.constants is not None
    constants = condition.constants.column(0).to_pylist()
    if condition.test == "<=>":
        return value is not None and value == constants[0]
    if value is None:
        return None
    return value in constants if condition.test == "in" else ORDER[condition.test](value, constants[0])


@given(ROWS, CONDITIONS)
def test_rows_are_kept_as_sql_says(rows: list[tuple[Value, Value]], condition: RowCondition) -> None:
    """Also after the condition was written down and read again."""
    batch = pa.record_batch(
        [pa.array(column, f.type) for column, f in zip(columns(rows), SCHEMA, strict=True)], schema=SCHEMA
    )
    wanted = [expected(condition, row) for row in batch.to_pylist()]
    assert mask_of(decode(encode(condition)), batch).to_pylist() == wanted


def columns(rows: list[tuple[Value, Value]]) -> tuple[list[Value], list[Value]]:
    """The values of both columns."""
    return [n for n, _ in rows], [x for _, x in rows]


@pytest.mark.parametrize(("test", "kept"), [(">", True), (">=", True), ("<", False), ("<=", False), ("=", False)])
def test_nan_is_greater_than_any_number(test: str, kept: bool) -> None:
    """To Spark; Arrow compares it with nothing."""
    batch = pa.record_batch([pa.array([1], pa.int64()), pa.array([math.nan])], schema=SCHEMA)
    assert mask_of(compared(test, "x", pa.array([math.inf])), batch).to_pylist() == [kept]


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        (compared(">", "n", pa.array([1])), [("n", ">")]),
        (compared("<=>", "n", pa.array([1])), [("n", "==")]),
        (compared("in", "n", pa.array([1, 2])), [("n", "is_in")]),
        (RowCondition("is_null", (), "n"), [("n", "is_null")]),
        (RowCondition("not", (RowCondition("is_null", (), "n"),)), [("n", "is_not_null")]),
        (RowCondition("not", (compared("=", "n", pa.array([1])),)), []),
        (RowCondition("or", (compared("=", "n", pa.array([1])),) * 2), []),
        (
            RowCondition("and", (compared("<", "n", pa.array([1])), compared(">", "x", pa.array([0.0])))),
            [("n", "<"), ("x", ">")],
        ),
    ],
)
def test_row_groups_are_judged_by_what_must_hold(condition: RowCondition, found: list[tuple[str, str]]) -> None:
    """What is joined by "and"; what is under "or" and "not" says nothing of a row group."""
    tests: tuple[ColumnTest, ...] = column_tests(condition)
    assert [(test.column, test.test) for test in tests] == found
