"""`RowCalls`: a function of the user inside a polars expression.

Tasks import this module, and need no sqlglot for it. Rules:

- A function of rows is called with the values of each row, None for null, in the types that all functions of the user
  get. A function of columns is called with a polars Series for each argument, all of one length.
- Its result is checked like a result of `map`: a value that the declared type cannot hold is an error.
- It is a part of a larger expression, so it is called for every row of a batch, whichever branch of a CASE needs it.
- polars turns an exception into a new one that has only its text. So the exception and its row are stored here, and
  polars gets a number for them (`call_failed`).
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
    """Calls `function` for a polars expression: with whole columns (`columns`), or with the values of each row."""

    def __init__(self, name: str, function: Callable[..., Any], returns: pa.DataType, columns: bool) -> None:
        self._name = name
        self._function = function
        self._returns = returns
        self._columns = columns

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with cloudpickle, also where polars pickles, because the function may be defined in a notebook."""
        parts = (self._name, self._function, self._returns, self._columns)
        return _loaded, (cloudpickle.dumps(parts),)

    def __call__(self, inputs: Sequence[pl.Series]) -> pl.Series:
        """Returns the results for all inputs except the last, which only carries the name."""
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
        """Returns the error for the first result that the declared type cannot represent."""
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
