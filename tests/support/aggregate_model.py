"""What aggregates are, in plain Python: tests compare operators to it. Nothing is fast, nothing is shared with them."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

Row = Mapping[str, Any]

EXACT = decimal.Context(prec=80)


def model(kind: str, rows: Sequence[Row], column: str | None, by: str | None, ignore_nulls: bool = False) -> Any:
    """The result of an aggregate over rows in the order of their arrival."""
    if kind == "count":
        return len(rows) if column is None else len(_values(rows, column))
    assert column is not None
    if kind in ("first", "last", "arg_min", "arg_max"):
        return _chosen(kind, [row for row in rows if not ignore_nulls or row[column] is not None], column, by)
    values = _values(rows, column)
    if not values:
        return None
    match kind:
        case "sum":
            return EXACT.create_decimal(sum(values)) if isinstance(values[0], Decimal) else sum(values)
        case "mean":
            return _mean(values)
        case "min" | "bool_and":
            return min(values, key=nan_last)
        case "max" | "bool_or":
            return max(values, key=nan_last)
    return _spread(kind, [float(value) for value in values])


def nan_last(value: Any) -> tuple[bool, Any]:
    """Orders values with NaN as the greatest number."""
    return (True, 0) if value != value else (False, value)


def same(found: Any, expected: Any) -> bool:
    """Whether results are equal; of floats up to rounding, and NaN is NaN."""
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9) or (found != found and expected != expected)
    return type(found) is type(expected) and bool(found == expected)


def same_rows(found: Iterable[Row], expected: Iterable[Row], key: str) -> bool:
    """Whether two lists have the same rows, in any order; `key` tells which are to be compared."""
    one, other = ({row[key]: row for row in rows} for rows in (found, expected))
    return one.keys() == other.keys() and all(
        row.keys() == other[name].keys() and all(same(value, other[name][c]) for c, value in row.items())
        for name, row in one.items()
    )


def _values(rows: Sequence[Row], column: str) -> list[Any]:
    return [row[column] for row in rows if row[column] is not None]


def _mean(values: list[Any]) -> Any:
    if not isinstance(values[0], Decimal):
        return sum(values) / len(values)
    digits = -int(values[0].as_tuple().exponent) + 4
    total = EXACT.create_decimal(0)
    for value in values:
        total = EXACT.add(total, value)
    mean = EXACT.divide(total, Decimal(len(values)))
    return mean.quantize(Decimal(1).scaleb(-digits), rounding=decimal.ROUND_HALF_UP, context=EXACT)


def _spread(kind: str, values: list[float]) -> float | None:
    lacking = 0 if kind.endswith("_pop") else 1
    if len(values) <= lacking:
        return None
    mean = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - lacking)
    return math.sqrt(variance) if kind.startswith("stddev") else variance


def _chosen(kind: str, rows: list[Row], column: str, by: str | None) -> Any:
    if by is not None:
        rows = [row for row in rows if row[by] is not None]
    if not rows:
        return None
    if by is None:
        return rows[0 if kind == "first" else -1][column]
    ranks = [nan_last(row[by]) for row in rows]
    best = max(ranks) if kind in ("last", "arg_max") else min(ranks)
    places = [place for place, rank in enumerate(ranks) if rank == best]
    return rows[places[-1 if kind == "last" else 0]][column]
