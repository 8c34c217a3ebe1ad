"""`RowCondition`: the filter of a DataFrame, as Arrow evaluates it with Spark's results.

`plan.py` makes it of Spark's expressions; readers evaluate it for each batch. Rules:

- It has SQL's three values. A row is kept where it is true, and dropped where it is false or null.
- A comparison has a column on its left and constants of the column's type on its right. None of them is null or NaN.
- For Spark NaN is greater than any number, and for Arrow it is neither greater nor less.
- For Spark 0.0 equals -0.0 in every comparison. Arrow's `is_in` tells them apart.
- What can be said of whole row groups, `column_tests` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.pushed_filters import ColumnTest
from tidegate.storage.codec import wire

_COMPARISONS = {"=": pc.equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_AS_TESTS = {"=": "==", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "in": "is_in"}
_CONSTANTS = "constants"


@wire
@dataclass(frozen=True, slots=True)
class RowCondition:
    """One node: `and`, `or` and `not` have parts; `is_null`, and comparisons, have a column."""

    test: str
    parts: tuple[RowCondition, ...] = ()
    column: str = ""
    constants: pa.RecordBatch | None = None
    """One column with what is compared with: a row, or several for `in`."""

    @property
    def columns(self) -> set[str]:
        """All columns that it looks at."""
        return ({self.column} if self.column else set()).union(*(part.columns for part in self.parts))


def compared(test: str, column: str, constants: pa.Array) -> RowCondition:
    """A comparison of a column: `=`, `<`, `<=`, `>`, `>=`, `<=>` or `in`."""
    return RowCondition(test, (), column, pa.record_batch([constants], [_CONSTANTS]))


def mask_of(condition: RowCondition, batch: pa.RecordBatch) -> pa.Array:
    """For each row true, false or null."""
    match condition.test:
        case "and" | "or":
            first, second = (mask_of(part, batch) for part in condition.parts)
            return pc.and_kleene(first, second) if condition.test == "and" else pc.or_kleene(first, second)
        case "not":
            return pc.invert(mask_of(condition.parts[0], batch))
        case "is_null":
            return pc.is_null(batch.column(condition.column))
    return _compared(condition, batch.column(condition.column))


def conjuncts(condition: RowCondition | None) -> list[RowCondition]:
    """What must hold together."""
    if condition is None:
        return []
    if condition.test == "and":
        return [each for part in condition.parts for each in conjuncts(part)]
    return [condition]


def column_tests(condition: RowCondition | None) -> tuple[ColumnTest, ...]:
    """Tests of columns that hold for every row which is kept. There may be rows for which they hold as well."""
    found = (_test_of(each) for each in conjuncts(condition))
    return tuple(test for test in found if test is not None)


def _compared(condition: RowCondition, values: pa.Array) -> pa.Array:
    assert condition.constants is not None
    constants = condition.constants.column(0)
    if condition.test == "in":
        found = pc.is_in(_without_negative_zero(values), _without_negative_zero(constants))
        return pc.if_else(pc.is_valid(values), found, pa.scalar(None, pa.bool_()))
    if condition.test == "<=>":
        return pc.fill_null(pc.equal(values, constants[0]), False)
    found = _COMPARISONS[condition.test](values, constants[0])
    if condition.test in (">", ">=") and pa.types.is_floating(values.type):
        found = pc.or_kleene(found, pc.is_nan(values))
    return found


def _without_negative_zero(values: pa.Array) -> pa.Array:
    return pc.add(values, pa.scalar(0.0, values.type)) if pa.types.is_floating(values.type) else values


def _test_of(condition: RowCondition) -> ColumnTest | None:
    match condition.test, condition.parts:
        case "is_null", _:
            return ColumnTest(condition.column, "is_null")
        case "not", (RowCondition(test="is_null", column=column),):
            return ColumnTest(column, "is_not_null")
    test = _AS_TESTS.get("=" if condition.test == "<=>" else condition.test)
    if test is None or condition.constants is None:
        return None
    # A DataFrame without filters need not load polars.
    import polars as pl

    values = pl.Series(pl.from_arrow(condition.constants.column(0)))
    constant = pl.lit(values.implode()) if test == "is_in" else pl.lit(values).first()
    return ColumnTest(condition.column, test, constant.meta.serialize())
