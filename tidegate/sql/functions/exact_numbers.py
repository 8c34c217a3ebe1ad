"""Calculations with numbers that polars expressions round, or cannot hold on the way to their result.

Tasks import this module, so it does not import sqlglot. Inputs of one value, which literals are, count for every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation

import numpy as np
import polars as pl
import pyarrow as pa

_CONTEXT = Context(prec=120, rounding=ROUND_HALF_UP)
"""Quotients of decimals with 38 digits are rounded once, to the digits of their type."""


def float_remainders(columns: Sequence[pl.Series]) -> pl.Series:
    """Returns the exact remainders of two columns of floats, with the signs of the dividends, as `fmod` of C does.

    (`%` of polars multiplies a rounded quotient: 1.5 % 0.1 would be 0, and 2.5 % Infinity NaN.)
    """
    x, y = columns[0], columns[1]
    missing = x.is_null().to_numpy() | y.is_null().to_numpy()
    with np.errstate(invalid="ignore"):
        found = np.fmod(x.to_numpy(), y.to_numpy())
    return pl.Series(x.name, pa.array(found, mask=missing), dtype=x.dtype)


def decimal_quotients(columns: Sequence[pl.Series], precision: int, scale: int) -> pl.Series:
    """Returns a column of quotients, and calculates the missing ones from the dividends and divisors.

    A quotient is missing where a dividend or divisor has too many digits for the decimals of polars. A quotient that
    does not fit `precision` and `scale` stays null.
    """
    found, x, y = columns[:3]
    lengths = {len(each) for each in columns[:3]} - {1}
    rows = lengths.pop() if lengths else 1
    found, x, y = (each if len(each) == rows else each.new_from_index(0, rows) for each in (found, x, y))
    missing = found.is_null() & x.is_not_null() & y.is_not_null()
    if not missing.any():
        return found
    values = found.to_list()
    for row in missing.arg_true().to_list():
        values[row] = _quotient(Decimal(x[row]), Decimal(y[row]), precision, scale)
    return pl.Series(found.name, values, dtype=pl.Decimal(precision, scale))


def _quotient(x: Decimal, y: Decimal, precision: int, scale: int) -> Decimal | None:
    try:
        found = _CONTEXT.quantize(_CONTEXT.divide(x, y), Decimal(1).scaleb(-scale))
    except InvalidOperation:
        return None
    return found if len(found.as_tuple().digits) <= precision else None
