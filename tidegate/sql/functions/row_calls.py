"""`RowCalls` calls a function of the user inside a polars expression.

Tasks import this module, so it does not import sqlglot. Rules:

- A function of rows is called once for each row, with its values as Python objects and None for null. A function of
  columns is called with a polars Series for each argument, all of the same length.
- Its result is checked like a result of `map`: a value that the declared type cannot hold is an error.
- The call is part of a larger expression, so the function is called for every row of a batch, also for rows that take
  another branch of a CASE.
- polars replaces an exception by a new one with only its text. The original exception and its row are therefore stored
  under a number, and polars gets an exception with this number (`call_failed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import polars as pl
import pyarrow as pa

from tidegate.operators.operator_errors import call_failed, is_failure
from tidegate.operators.row_values import InexactValueError, column_of, exact_array, python_values


class RowCalls:
    """Calls `function` for a polars expression: with whole columns if `columns` is True, else with the values of each
    row.

    `returns` is the result type.
    """

    def __init__(self, name: str, function: Callable[..., Any], returns: pa.DataType, columns: bool) -> None:
        self._name = name
        self._function = function
        self._returns = returns
        self._columns = columns

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles this object by cloudpickle, because the function may be defined in a notebook and polars uses plain
        pickle.
        """
        parts = (self._name, self._function, self._returns, self._columns)
        return _loaded, (cloudpickle.dumps(parts),)

    def __call__(self, inputs: Sequence[pl.Series]) -> pl.Series:
        """Returns the results of the function for polars. The last input is ignored, because it only contributes the
        name of the expression.
        """
        given = inputs[:-1]
        lengths = [len(each) for each in given]
        rows = 0 if 0 in lengths else max(lengths)
        given = (
            [each if len(each) == rows else each.head(rows).new_from_index(0, rows) for each in given] if rows else []
        )
        if not rows:
            return pl.Series(pa.array([], self._returns))
        results = self._of_columns(given, rows) if self._columns else self._of_rows(given, rows)
        made = pl.from_arrow(results)
        assert isinstance(made, pl.Series), "one column"
        return made

    def _of_columns(self, given: Sequence[pl.Series], rows: int) -> pa.Array:
        try:
            made = column_of(self._function(*given), self._returns)
            if len(made) != rows:
                raise ValueError(
                    f"{self._name} returned {len(made)} values for {rows} rows; return one value for each row"
                )
        except BaseException as error:
            if not is_failure(error):
                raise
            raise call_failed(error, None) from error
        return made

    def _of_rows(self, given: Sequence[pl.Series], rows: int) -> pa.Array:
        results: list[Any] = []
        try:
            for values in zip(*(python_values(each.to_arrow()) for each in given), strict=True):
                results.append(self._function(*values))  # noqa: PERF401 (the number of results is the row that failed)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise call_failed(error, len(results)) from error
        try:
            return exact_array(results, self._returns, complete=True)
        except (InexactValueError, pa.ArrowException, OverflowError) as error:
            raise self._misfit(results, error) from error

    def _misfit(self, results: Sequence[Any], error: Exception) -> Exception:
        """Returns the error to raise for the first result that the declared type cannot represent."""
        for row, result in enumerate(results):
            try:
                exact_array([result], self._returns, complete=True)
            except (InexactValueError, pa.ArrowException, OverflowError) as refusal:
                return call_failed(
                    ValueError(f"{self._name} returned a value that its type cannot hold: {refusal}"), row
                )
        return call_failed(error, None)


def _loaded(parts: bytes) -> RowCalls:
    return RowCalls(*cloudpickle.loads(parts))
